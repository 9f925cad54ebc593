"""Large inputs and outputs, and models that keep, change or make them. Worker process."""

import dataclasses
import functools
import hashlib
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from fast_batcher import InferenceModel, stack
from models.base import AtGate, call_at_gate, load_numpy, pass_gate
from models.returning import RefusesPickling


class Digests(InferenceModel[Any, Any]):
    """Answers with the SHA-256 of each input, of b"whereabouts" with its process id."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [os.getpid() if _is(one, b"whereabouts") else digest(one) for one in inputs]


def digest(value: Any) -> str:
    """The SHA-256 of a buffer."""
    return hashlib.sha256(value).hexdigest()


def _is(value: Any, expected: bytes) -> bool:
    return isinstance(value, bytes) and value == expected


class Stacks(InferenceModel[Any, tuple[bool, Any]]):
    """Answers with whether its inputs could be stacked without a copy, and a digest of each."""

    def infer(self, inputs: list[Any]) -> list[tuple[bool, Any]]:
        whole = stack(inputs)
        is_view = whole.data_ptr() == inputs[0].data_ptr() if hasattr(whole, "data_ptr") else None
        if is_view is None:
            is_view = bool(load_numpy().shares_memory(whole, inputs[0]))
        return [(is_view, digest(load_numpy().asarray(row))) for row in whole]


class KeepsInputs(InferenceModel[Any, Any]):
    """Keeps slices of its inputs and answers with the sums of them all, until one is "forget"."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def infer(self, inputs: list[Any]) -> list[Any]:
        for one in inputs:
            if isinstance(one, str):
                self._kept.clear()
            else:
                self._kept.append(one[0:].reshape(1, -1))
        return [[int(kept.sum()) for kept in self._kept] for _ in inputs]


class ForksAndKeeps(AtGate):
    """Forks with its first input, which the child sums up once it is let on; tells the gate."""

    _has_forked = False

    def infer(self, inputs: list[Any]) -> list[Any]:
        if self._has_forked:
            return [int(one.sum()) for one in inputs]
        self._has_forked = True
        # The child is of the system, so that this process need not wait for it.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0:
            pass_gate(self._gate)
            call_at_gate(self._gate, int(inputs[0].sum())).close()
            os._exit(0)
        return ["forked" for _ in inputs]


@dataclasses.dataclass
class Detection:
    """Answers of a model, of many kinds."""

    name: str
    mask: Any
    boxes: list[Any]


def make_large(kind: str, size: int, seed: int) -> Any:
    """Something of about so many bytes, the same for the same seed."""
    np = load_numpy()
    raw = np.random.default_rng(seed).bytes(size)
    return LARGE[kind](np, np.frombuffer(raw, np.uint8).copy())


def _as_tensor(dtype: str) -> Callable[[Any, Any], Any]:
    def make(_: Any, array: Any) -> Any:
        torch = importlib.import_module("torch")
        array = load_numpy().resize(array, max(8, len(array) // 8 * 8))
        return torch.from_numpy(array).view(getattr(torch, dtype))

    return make


def _as_pydantic(_: Any, array: Any) -> Any:
    return pydantic_detection()(name="pydantic", mask=array, boxes=[array[:7], array[7:]])


@functools.cache
def pydantic_detection() -> Any:
    """A class of the edge's library, which most workers do not load."""
    pydantic = importlib.import_module("pydantic")
    made = pydantic.create_model(
        "PydanticDetection",
        __config__=pydantic.ConfigDict(arbitrary_types_allowed=True),
        __module__=__name__,
        name=(str, ...),
        mask=(Any, ...),
        boxes=(list[Any], ...),
    )
    globals()["PydanticDetection"] = made
    return made


LARGE: dict[str, Callable[[Any, Any], Any]] = {
    "array": lambda np, array: array,
    "read-only": lambda np, array: np.frombuffer(array.tobytes(), np.uint8),
    "strided": lambda np, array: array[::2],
    "transposed": lambda np, array: array[: len(array) // 4 * 4].reshape(4, -1).T,
    "float16": lambda np, array: array[: len(array) // 2 * 2].view(np.float16),
    "structured": lambda np, array: array[: len(array) // 8 * 8].view("i4,f4"),
    "objects": lambda np, array: np.array([array, "text", None], dtype=object),
    "bytes": lambda np, array: array.tobytes(),
    "bytearray": lambda np, array: bytearray(array),
    "text": lambda np, array: array.tobytes().hex(),
    "numbers": lambda np, array: array.tolist(),
    "dataclass": lambda np, array: Detection("dataclass", array, [array[:9], array[9:]]),
    "pydantic": _as_pydantic,
    "nested": lambda np, array: {"one": [array, {"two": (array[5:], "three")}], "four": array},
    "tensor": _as_tensor("float32"),
    "bfloat16": _as_tensor("bfloat16"),
}


def fingerprint(value: Any) -> str:
    """The same for values that are the same in type, shape and bytes."""
    found = hashlib.sha256()
    for part in _flatten(value):
        found.update(part)
    return found.hexdigest()


def _flatten(value: Any) -> Iterator[bytes]:  # noqa: C901  flat on purpose
    yield f"<{type(value).__qualname__}>".encode()
    if hasattr(value, "dtype"):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if str(value.dtype) == "object":
            value = value.tolist()
        elif hasattr(value, "detach"):
            yield bytes(value.contiguous().view(importlib.import_module("torch").uint8).numpy())
        else:
            yield value.tobytes()
    if isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif isinstance(value, dict):
        yield from _flatten(list(value.items()))
    elif isinstance(value, list) and value and isinstance(value[0], int):
        yield repr(value).encode()
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flatten(one)
    elif hasattr(value, "boxes"):
        yield from _flatten([value.name, value.mask, value.boxes])
    else:
        yield repr(value).encode() if isinstance(value, str | int | None) else b""


class MakesLarge(InferenceModel[Any, Any]):
    """Answers with what `make_large` makes of its inputs' arguments.

    Of "pid" it answers with its process id, of "unpicklable" with something that is. Others it
    gives back.
    """

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [self._answer(one) for one in inputs]

    def _answer(self, one: Any) -> Any:
        if one == "pid":
            return os.getpid()
        if one == "unpicklable":
            return RefusesPickling(ValueError("not me"))
        return make_large(*one) if isinstance(one, tuple) else one


class GivesViews(InferenceModel[Any, Any]):
    """Answers with views of its inputs: all of it, every other byte, the end."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [(one, one[::2], one[5:]) for one in inputs]
