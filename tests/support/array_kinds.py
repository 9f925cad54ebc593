"""Arrays and tensors of every kind, sent to a model and back: a program of its own.

It prints a line for each that came back wrong, and "done" if it has lived to the end. A value that
`pickle` cannot bring back may be a typed error; any other has to come back as it was.
"""

import asyncio
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fast_batcher import BatcherError, DynBatcher, InferenceModel, PoisonRequestError, WorkerError

# Long enough for shared memory, also where a value has a byte for each.
COUNT = 60_000
# Before a value inside of something else: makes that large enough for shared memory.
FILLER = bytearray(300_000)


class ArrayOfOurs(np.ndarray[Any, Any]):
    """A class derived from NumPy's."""


class TensorOfOurs(torch.Tensor):
    """A class derived from PyTorch's."""


def _with_attribute() -> torch.Tensor:
    tensor = torch.arange(COUNT)
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


def _read_only() -> Any:
    array = np.arange(COUNT)
    array.flags.writeable = False
    return array


def _numbers() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32)


def _complex() -> torch.Tensor:
    return torch.complex(_numbers(), _numbers() + 1)


def _per_channel(dtype: torch.dtype) -> torch.Tensor:
    rows = _numbers().reshape(3, -1)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(rows, scales, zeros, 0, dtype)


NUMBERS = """
    bool uint8 int16 uint16 int64 uint64 half bfloat16 double complex32 complex64
    float8_e4m3fn float8_e5m2 float8_e8m0fnu
"""
_FIELDS = [("a", "f8"), ("b", "i4")]

KINDS: dict[str, Callable[[], Any]] = {
    **{
        f"array of {code}": lambda code=code: np.arange(COUNT).astype(code)  # type: ignore[misc]
        for code in ("?", "i1", "u2", ">i4", "f2", "f4", ">f8", "g", "c8", "G", "U7", "S7", "O")
    },
    "array of dates": lambda: np.arange(COUNT).astype("M8[s]"),
    "array of differences of dates": lambda: np.arange(COUNT).astype("m8[D]"),
    "array of raw bytes": lambda: np.zeros(COUNT, "V9"),
    "array of text of any length": lambda: np.array(["a", "long " * 99] * 9000, "T"),
    "array of records": lambda: np.zeros(COUNT, _FIELDS),
    "array of aligned records": lambda: np.zeros(COUNT, np.dtype(_FIELDS, align=True)),
    "array of records with objects": lambda: np.zeros(9000, [("a", "O"), ("b", "i4")]),
    "array of arrays": lambda: np.zeros(COUNT, ("f4", (3,))),
    "array with metadata": lambda: np.zeros(COUNT, np.dtype("f4", metadata={"unit": "m"})),
    "array in the order of Fortran": lambda: np.asfortranarray(np.arange(COUNT).reshape(3, -1)),
    "array backwards": lambda: np.arange(COUNT)[::-1],
    "part of an array": lambda: np.arange(2 * COUNT).reshape(-1, 2)[:, 1],
    "array that repeats itself": lambda: np.broadcast_to(np.arange(1000), (300, 1000)),
    "read-only array": _read_only,
    "empty array": lambda: np.zeros((0, 3)),
    "array without axes": lambda: np.array(1.5),
    "masked array": lambda: np.ma.masked_equal(np.arange(COUNT), 3),
    "matrix": lambda: np.arange(COUNT).reshape(3, -1).view(np.matrix),
    "record array": lambda: np.zeros(COUNT, _FIELDS).view(np.recarray),
    "array of a derived class": lambda: np.arange(COUNT).view(ArrayOfOurs),
    **{
        f"tensor of {name}": lambda name=name: _numbers().to(getattr(torch, name))  # type: ignore[misc]
        for name in NUMBERS.split()
    },
    **{
        f"tensor of {name}": lambda name=name: torch.zeros(  # type: ignore[misc]
            COUNT, dtype=torch.uint8
        ).view(getattr(torch, name))
        for name in ("bits8", "uint4", "float4_e2m1fn_x2")
    },
    **{
        f"tensor of {dtype}": lambda dtype=dtype: torch.quantize_per_tensor(  # type: ignore[misc]
            _numbers(), 0.5, 3, dtype
        )
        for dtype in (torch.qint8, torch.quint8, torch.qint32)
    },
    "tensor quantized per channel": lambda: _per_channel(torch.qint8),
    "sparse tensor": lambda: _numbers().to_sparse(),
    "sparse tensor of rows": lambda: _numbers().reshape(3, -1).to_sparse_csr(),
    "nested tensor": lambda: torch.nested.nested_tensor([_numbers(), _numbers()]),
    "jagged tensor": lambda: torch.nested.nested_tensor(
        [_numbers(), _numbers()[:9]], layout=torch.jagged
    ),
    "tensor without values": lambda: torch.zeros(COUNT, device="meta"),
    "tensor of oneDNN": lambda: _numbers().to_mkldnn(),
    "conjugated tensor": lambda: _complex().conj(),
    "negated tensor": lambda: _complex().conj().imag,
    "tensor of no more than zeros": lambda: torch._efficientzerotensor(COUNT),
    "tensor with a gradient": lambda: _numbers().requires_grad_(),
    "tensor that was computed": lambda: _numbers().requires_grad_() * 2,
    "parameter": lambda: torch.nn.Parameter(_numbers()),
    "tensor of a derived class": lambda: _numbers().as_subclass(TensorOfOurs),
    "tensor with an attribute": _with_attribute,
    "transposed tensor": lambda: _numbers().reshape(3, -1).T,
    "part of a tensor": lambda: _numbers()[COUNT // 4 :],
    "tensor with channels last": lambda: (
        _numbers().reshape(1, 3, 100, -1).to(memory_format=torch.channels_last)
    ),
    "tensor that repeats itself": lambda: torch.arange(1000).expand(300, 1000),
    "tensor without axes": lambda: torch.tensor(1.5),
    "empty tensor": lambda: torch.zeros(0, 3),
}


class Kinds(InferenceModel[Any, Any]):
    """Answers a name with the value of that name, and anything else with itself."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Make what is named."""
        return [KINDS[one]() if isinstance(one, str) else one for one in inputs]


def describe(value: Any) -> Any:
    """Comparable form of a value."""
    if isinstance(value, dict):
        return {key: describe(one) for key, one in value.items()}
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    assert isinstance(value, np.ndarray)
    mask = np.ma.getmaskarray(value).tobytes() if isinstance(value, np.ma.MaskedArray) else None
    plain = np.asarray(value)
    # Long doubles have bytes that mean nothing.
    has_bytes = not value.dtype.hasobject and value.dtype.char not in "gG"
    content = plain.tobytes() if has_bytes else plain.tolist()
    metadata = None if value.dtype.metadata is None else dict(value.dtype.metadata)
    return type(value), value.dtype, metadata, value.shape, mask, content


def _describe_tensor(tensor: torch.Tensor) -> Any:
    # Outputs of plain tensors leave `requires_grad`.
    kind = type(tensor), tensor.dtype, str(tensor.layout), tensor.device
    about: Any = *kind, tensor.is_nested, getattr(tensor, "note", None)
    if tensor.is_nested:
        return about, [describe(one) for one in tensor.unbind()]
    about = *about, tuple(tensor.shape)
    if tensor.device.type == "meta":
        return about
    if tensor.is_quantized:
        return about, str(tensor.qscheme()), tensor.dequantize().numpy().tobytes()
    plain = tensor.detach()
    is_dense = plain.layout is torch.strided
    plain = plain.as_subclass(torch.Tensor) if is_dense else plain.to_dense()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    return about, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def say(text: str) -> None:
    """Print it."""
    sys.stdout.write(f"{text}\n")


def can_be_pickled(make: Callable[[], Any]) -> bool:
    """Whether Python and PyTorch themselves bring it back."""
    try:
        pickle.loads(pickle.dumps(make(), pickle.HIGHEST_PROTOCOL))
    except Exception:  # noqa: BLE001  of any type: those are PyTorch's
        return False
    return True


async def check(batcher: DynBatcher[Any, Any], name: str, value: Any, make: Any) -> None:
    """Send one, and say if it does not come back as it should."""
    try:
        got = await batcher.process_batched(value)
    except (WorkerError, PoisonRequestError) as error:
        say(f"{name}: it has ended a worker: {error!r}")
    except BatcherError as error:
        if can_be_pickled(make):
            say(f"{name}: {error!r:.500}")
    else:
        if describe(got) != describe(make()):
            say(f"{name}: {describe(got)!r:.300}, and not {describe(make())!r:.300}")


async def main() -> None:
    """Every kind: as an input that comes back, inside a dict, and made by the model."""
    sizes = {"pipe": 0, "shared": 512 * 2**20}
    async with DynBatcher(Kinds, max_shared_bytes=sizes[sys.argv[1]]) as batcher:
        # From then on large values are looked at.
        for large in (np.zeros(COUNT), torch.zeros(COUNT)):
            await batcher.process_batched(large)
        for name, make in KINDS.items():
            try:
                value = make()
            except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
                say(f"{name}: cannot be made: {error!r}")
                continue
            await check(batcher, name, value, make)
            inside = {"filler": FILLER, "one": value}
            await check(batcher, f"{name}, in a dict", inside, lambda: {**inside, "one": make()})  # noqa: B023
            await check(batcher, f"{name}, made by the model", name, make)
        if batcher.stats.restarts:
            say(f"{batcher.stats.restarts} restarts")
    say("done")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main())
