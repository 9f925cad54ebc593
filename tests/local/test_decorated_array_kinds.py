"""Kinds of arrays and tensors through the `inference` decorators: the value, or a typed error."""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from fast_batcher import BatcherError, aio, inference

torch = pytest.importorskip("torch")


class Metres(np.ndarray):
    """A subclass whose meaning would be lost in a plain array."""


class Named(torch.Tensor):  # type: ignore[name-defined, misc]  # not installed everywhere
    """The same of a tensor."""


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they go with a later PyTorch
        return torch.quantize_per_tensor(torch.rand(2, 3), 0.1, 0, torch.quint8)


def nested(layout: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def compressed() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a beta
        return torch.eye(2).to_sparse_csr()


# Two rows each, of three numbers where there are axes.
REFUSED: dict[str, Callable[[], Any]] = {
    "quantized": quantized,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": compressed,
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "tensor subclass": lambda: torch.ones(2, 3).as_subclass(Named),
    "array subclass": lambda: np.ones((2, 3)).view(Metres),
    "masked": lambda: np.ma.masked_array(np.ones((2, 3)), mask=np.eye(2, 3, dtype=bool)),
    "record": lambda: np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "objects": lambda: np.array([{1}, {2}], dtype=object),
    "structured objects": lambda: np.array([(1, {1}), (3, {2})], [("a", "i4"), ("b", "O")]),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "conjugate": lambda: torch.tensor([[1 + 2j, 3j, 0], [4, 5, 6]]).conj(),
    "negative": lambda: torch.tensor([[1 + 2j, 3j, 0], [4, 5, 6]]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "gradient": lambda: 2 * torch.ones(2, 3, requires_grad=True),
    "expanded": lambda: torch.arange(3).expand(2, 3),
    "bfloat16": lambda: torch.ones(2, 3, dtype=torch.bfloat16),
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "inference": torch.inference_mode()(lambda: torch.ones(2, 3)),
    "empty": lambda: torch.ones(2, 0),
    "broadcast": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "reversed": lambda: np.arange(6).reshape(2, 3)[::-1, ::-1],
    "overlapping": lambda: np.lib.stride_tricks.sliding_window_view(np.arange(4), 3),
    "other byte order": lambda: np.arange(6, dtype=">i4").reshape(2, 3),
    "long": lambda: np.ones((2, 3), np.longdouble),
    "structured": lambda: np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")]),
    "days": lambda: np.array(["2020-01-01", "NaT"], "M8[D]"),
    "milliseconds": lambda: np.array([1, 2], "m8[ms]"),
    "void": lambda: np.array([b"abc", b"def"], "V3"),
}


Call = Callable[[Any], Any]
Both = Callable[..., list[Call]]


@pytest.fixture
def both() -> Iterator[Both]:
    """Makes a function batched in a thread and on a loop; each is called with one feature."""
    with ExitStack() as stack:

        def decorate(function: Call, **settings: Any) -> list[Call]:
            @aio.inference.dynamically(**settings)
            async def on_loop(features: Any) -> Any:
                return function(features)

            in_thread = stack.enter_context(inference.dynamically(**settings)(function))
            return [lambda x: in_thread({"x": x}), lambda x: asyncio.run(on_loop({"x": x}))]

        yield decorate


def seen(value: Any) -> tuple[Any, ...]:
    """Expected value: everything except the gradient and the memory layout."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.tolist()
    return np.ndarray, value.dtype, value.shape, repr(value.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_unjoinable_values_are_rejected_in_both_directions(
    make: Callable[[], Any], both: Both
) -> None:
    value = make()
    calls = [(call, value) for call in both(lambda features: features["x"])]
    calls += [(call, [value, value]) for call in both(lambda features: features["x"])]
    calls += [(call, np.ones(2)) for call in both(lambda _: [value, value], outputs="rows")]
    calls += [(call, np.ones(2)) for call in both(lambda _: value)]
    calls += [(call, np.ones(2)) for call in both(lambda _: [value, value], outputs="auto")]
    for call, feature in calls:
        with pytest.raises(BatcherError):
            call(feature)


@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_values_and_dtypes_survive_in_both_directions(make: Callable[[], Any], both: Both) -> None:
    value, arrived = make(), []

    def echo(features: Any) -> Any:
        arrived.append(seen(features["x"]))
        return features["x"]

    for call in (*both(echo), *both(lambda _: value), *both(lambda _: list(value), outputs="rows")):
        output = call(value)
        assert type(output) in (np.ndarray, torch.Tensor)
        assert seen(output) == seen(value)
    assert arrived == [seen(value)] * 2
