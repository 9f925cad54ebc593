"""Objects that callers share with each other and with a decorated function."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gated_functions import GatedFunction, in_one_batch
from waits import until

from fast_batcher import dynamically, inference

torch = pytest.importorskip("torch")

MAKERS = [
    pytest.param(lambda values: np.array(values, dtype="f4"), id="array"),
    pytest.param(lambda values: torch.tensor(values), id="tensor"),
]


@pytest.mark.parametrize("make", MAKERS)
def test_callers_may_write_into_rows_of_shared_memory(make: Callable[[Any], Any]) -> None:
    @dynamically
    def constant(items: list[int]) -> Any:
        row = make([1.0, 2.0])
        return row.expand(len(items), 2) if hasattr(row, "expand") else strided(row, len(items))

    with constant:
        first, second = in_one_batch(constant, 1, 2)
    first += 10
    assert second.tolist() == [1, 2]


def strided(row: Any, count: int) -> Any:
    """As `numpy.broadcast_to`, which could not be written into."""
    return np.lib.stride_tricks.as_strided(row, (count, *row.shape), (0, *row.strides))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("has_features", [False, True])
def test_function_may_reuse_its_output_array(
    make: Callable[[Any], Any], has_features: bool
) -> None:
    """The loop of the callers comes to the answer of the first batch after the second."""
    buffer = make([[0.0, 0.0]])
    gated = GatedFunction()

    def fill(value: Any) -> Any:
        gated([value])
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
        await until(lambda: bool(gated.batches) and function.stats.queue_size == 1)
        # The loop stands still until both batches have been computed.
        for _ in range(2):
            gated.next_batch()
            gated.let_on()
        function.shutdown()
        return list(await ended)

    first, second = asyncio.run(main())
    assert (first.ravel().tolist(), second.ravel().tolist()) == ([1, 1], [2, 2])
