"""Models whose outputs are miscounted, of a wrong type or unpicklable. Worker process."""

import array
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

from tables import UNEVEN

from fast_batcher import Collation, InferenceModel, batchable
from models.base import load_numpy


class Returns(InferenceModel[str, Any]):
    """Returns what its first input names."""

    def infer(self, inputs: list[str]) -> Any:
        return OUTPUTS[inputs[0]](inputs)


def _generate(inputs: list[str]) -> Iterator[str]:
    yield from inputs


OUTPUTS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "ndarray": lambda inputs: load_numpy().arange(len(inputs), dtype="float32"),
    "matrix": lambda inputs: load_numpy().ones((len(inputs), 3), dtype="float32"),
    "array": lambda inputs: array.array("i", range(len(inputs))),
    "range": lambda inputs: range(len(inputs)),
    "fewer": lambda inputs: inputs[:-1],
    "more": lambda inputs: [*inputs, "more"],
    "empty": lambda inputs: [],
    "fewer rows": lambda inputs: load_numpy().ones((len(inputs) - 1, 3), dtype="float32"),
    "None": lambda inputs: None,
    "generator": _generate,
    "dict": lambda inputs: dict.fromkeys(range(len(inputs))),
    "set": lambda inputs: set(range(len(inputs))),
    "str": lambda inputs: "x" * len(inputs),
    "bytes": lambda inputs: b"x" * len(inputs),
    "int": lambda inputs: len(inputs),
    "scalar array": lambda inputs: load_numpy().float32(1.0),
}


class RefusesPickling:
    """Raises when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "lambda": lambda: lambda: None,
    "generator": lambda: _generate([]),
    "raises": lambda: RefusesPickling(ValueError("not me")),
    "exits": lambda: RefusesPickling(SystemExit(3)),
}


class TellsArrival:
    """Calls all that listen in the process to which it comes; the worker has no listeners."""

    listeners: ClassVar[list[Callable[[], object]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _tell_arrival, ()


def _tell_arrival() -> TellsArrival:
    for listener in TellsArrival.listeners:
        listener()
    return TellsArrival()


class ReturnsUneven(InferenceModel[str, Any]):
    """Returns what its first input names in `tables.UNEVEN`, or the inputs."""

    def infer(self, inputs: list[str]) -> Any:
        known = UNEVEN.get(inputs[0])
        return inputs if known is None else known[0](len(inputs))


class PreparesUneven(ReturnsUneven):
    def prepare(self, value: str) -> str:
        return value


class FinishesUneven(ReturnsUneven):
    def finish(self, value: str) -> str:
        return value


class MethodReturnsUneven(ReturnsUneven):
    @batchable()
    def method(self, inputs: list[str]) -> Any:
        return self.infer(inputs)


class StacksUneven(InferenceModel[str, Any]):
    """The same of stacked inputs."""

    collation = Collation.stack()

    def infer(self, inputs: list[str]) -> Any:
        known = UNEVEN.get(inputs[0])
        return inputs if known is None else known[0](len(inputs))


class StacksUnevenFeature(StacksUneven):
    """Returns it as one of two features."""

    def infer(self, inputs: list[str]) -> Any:
        return {"good": inputs, "uneven": super().infer(inputs)}
