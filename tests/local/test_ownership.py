"""What the callers of a decorated function share with each other and with the function."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gated_functions import Held
from waits import until

from fast_batcher import dynamically, inference

torch = pytest.importorskip("torch")

MAKERS = [
    pytest.param(lambda values: np.array(values, dtype="f4"), id="array"),
    pytest.param(lambda values: torch.tensor(values), id="tensor"),
]


def in_one_batch(function: Any, items: list[Any]) -> list[Any]:
    """The outputs of these items, each for a caller of its own."""

    async def main() -> list[Any]:
        return await asyncio.gather(*map(function.acall, items))

    return asyncio.run(main())


@pytest.mark.parametrize("make", MAKERS)
def test_callers_may_write_into_rows_of_an_output_that_lie_in_the_same_memory(
    make: Callable[[Any], Any],
) -> None:
    @dynamically
    def constant(items: list[int]) -> Any:
        row = make([1.0, 2.0])
        return row.expand(len(items), 2) if hasattr(row, "expand") else strided(row, len(items))

    with constant:
        first, second = in_one_batch(constant, [1, 2])
    first += 10
    assert second.tolist() == [1, 2]


def strided(row: Any, count: int) -> Any:
    """As `numpy.broadcast_to`, which could not be written into."""
    return np.lib.stride_tricks.as_strided(row, (count, *row.shape), (0, *row.strides))


@pytest.mark.parametrize("make", MAKERS)
def test_callers_may_write_into_rows_of_an_array_that_the_function_keeps(
    make: Callable[[Any], Any],
) -> None:
    table = make([[1.0, 2.0], [3.0, 4.0]])

    @dynamically
    def look_up(items: list[int]) -> Any:
        return table[: len(items)]

    with look_up:
        row = look_up(1)
        row += 10
        assert look_up(1).tolist() == [1, 2]


def test_callers_may_write_into_structured_rows_that_the_function_keeps() -> None:
    table = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])

    @dynamically
    def look_up(items: list[int]) -> Any:
        return table[: len(items)]

    with look_up:
        look_up(1)["a"] = 10
        assert look_up(1)["a"] == 1


def test_a_row_does_not_keep_the_whole_batch_in_memory() -> None:
    @dynamically
    def double(items: list[int]) -> Any:
        return np.outer(items, np.ones(3))

    with double:
        first, _ = in_one_batch(double, [1, 2])
    assert first.base is None
    assert first.tolist() == [1, 1, 1]


class Metres(np.ndarray):
    """A subclass that would be lost in a plain copy."""


@pytest.mark.parametrize(
    "batch",
    [
        np.ones((2, 3)).view(Metres),
        np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]], mask=[[False, True], [False, False]]),
        torch.tensor([[1 + 2j, 3j], [4, 5]]).conj(),
        torch.tensor([[1 + 2j, 3j], [4, 5]]).conj().imag,
    ],
    ids=["subclass", "masked", "conjugate", "negative"],
)
def test_a_row_is_what_indexing_gives(batch: Any) -> None:
    @dynamically
    def constant(items: list[int]) -> Any:
        return batch[: len(items)]

    with constant:
        row = constant(1)
    assert type(row) is type(batch[0])
    assert repr(row) == repr(batch[0])


def test_rows_of_a_tensor_keep_their_gradient() -> None:
    weights = torch.ones(2, requires_grad=True)

    @dynamically
    def weighted(items: list[float]) -> Any:
        return torch.tensor(items)[:, None] * weights

    with weighted:
        weighted(3.0).sum().backward()
    assert weights.grad.tolist() == [3, 3]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("has_features", [False, True])
def test_a_function_may_fill_the_array_again_that_it_has_returned(
    make: Callable[[Any], Any], has_features: bool
) -> None:
    """The loop of the callers comes to the answer of the first batch after the second."""
    buffer = make([[0.0, 0.0]])
    held = Held()

    def fill(value: Any) -> Any:
        held([value])
        buffer[:] = value
        return buffer

    decorate: Any = inference.dynamically if has_features else dynamically
    function: Any = decorate(batch_size=1)(
        lambda batch: fill(float(batch["x"][0] if has_features else batch[0]))
    )

    def call(value: float) -> Any:
        return function.acall({"x": make([value])} if has_features else value)

    async def main() -> list[Any]:
        ended = asyncio.gather(call(1.0), call(2.0))
        await until(lambda: bool(held.batches) and function.stats.queue_size == 1)
        # The loop stands still until both batches have been computed.
        for _ in range(2):
            held.next_batch()
            held.let_on()
        function.shutdown()
        return list(await ended)

    first, second = asyncio.run(main())
    assert (first.ravel().tolist(), second.ravel().tolist()) == ([1, 1], [2, 2])
