"""Models that raise: exceptions of every kind, alone or for a whole batch. Worker process."""

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from hostile_errors import draw_hostile

from fast_batcher import InferenceModel, InputError
from models.base import AtGate, Echo, call_at_gate, pass_gate


class Alarmed(AtGate):
    """Echoes, and is sent three signals from then on; tells the gate of each."""

    _left = 3

    def infer(self, inputs: list[Any]) -> list[Any]:
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        return inputs

    def _ring(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            signal.setitimer(signal.ITIMER_REAL, 0)
        call_at_gate(self._gate).close()


class AlarmedLate(Echo):
    """Is sent a signal when it has answered, whose handler raises what was meant for `infer`."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return inputs

    def _ring(self, *_: object) -> None:
        raise TimeoutError("infer took too long")


class FailsPositions(InferenceModel[str, Any]):
    """Returns an exception at the positions where the input is "bad"."""

    def infer(self, inputs: list[str]) -> list[Any]:
        return [ValueError("this one is bad") if text == "bad" else text for text in inputs]


class TwoArgumentsError(Exception):
    """Cannot be unpickled: its `args` are not what its constructor takes."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class HoldsLockError(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class UnprintableError(Exception):
    """Raises when its text is asked for."""

    def __str__(self) -> str:
        raise ValueError("no text")


class ReduceExitsError(Exception):
    """Ends the interpreter when it is pickled."""

    def __reduce__(self) -> NoReturn:
        sys.exit(7)


class StrExitsError(Exception):
    """Ends the interpreter when its text is asked for."""

    def __str__(self) -> str:
        sys.exit(7)


class NotAnExceptionError(BaseException):
    """Derives from BaseException alone."""


class CodedError(ValueError):
    """Travels well, with an attribute of its own."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message, code)
        self.code = code


class KeptElsewhereError(Exception):
    """Keeps its text where no copy finds it."""

    texts: ClassVar[WeakKeyDictionary[BaseException, str]] = WeakKeyDictionary()

    def __init__(self, text: str) -> None:
        self.texts[self] = text

    def __str__(self) -> str:
        return self.texts[self]


HUGE = 10 * 2**20


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("'x' is not a number"),
    "key": lambda: KeyError("missing"),
    "os": lambda: FileNotFoundError(2, "No such file or directory", "weights.bin"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "coded": lambda: CodedError("coded", 42),
    "two arguments": lambda: TwoArgumentsError(5, "broken"),
    "lock": lambda: HoldsLockError("holds a lock"),
    "elsewhere": lambda: KeptElsewhereError("kept elsewhere"),
    "unprintable": lambda: UnprintableError("never seen"),
    "huge": lambda: ValueError("y" * HUGE),
    "surrogate": lambda: ValueError("lone \ud800 surrogate"),
    "stop iteration": lambda: StopIteration("stop"),
    "stop async iteration": lambda: StopAsyncIteration("stop"),
    "timeout": lambda: TimeoutError("upstream"),
    "group": lambda: ExceptionGroup("many", [ValueError("one"), KeyError("two")]),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt(),
    "generator exit": lambda: GeneratorExit(),
    "base": lambda: NotAnExceptionError("only a base"),
    "reduce exits": lambda: ReduceExitsError("reduced"),
    "str exits": lambda: StrExitsError("told"),
}


class Raises(InferenceModel[str, str]):
    """Raises the exception that an input names; echoes other inputs."""

    def infer(self, inputs: list[str]) -> list[str]:
        for name in inputs:
            if name in EXCEPTIONS:
                raise EXCEPTIONS[name]()
        return inputs


class Says(InferenceModel[str, str]):
    """Raises a RuntimeError that says its first input, unless that is "fine"."""

    def infer(self, inputs: list[str]) -> list[str]:
        if inputs[0] != "fine":
            raise RuntimeError(inputs[0])
        return inputs


class Numbers(InferenceModel[str, int]):
    """Raises a ValueError that shows the input, as Python does."""

    def infer(self, inputs: list[str]) -> list[int]:
        return [int(text) for text in inputs]


class FailsAtGate(AtGate):
    """Waits at the gate, and then fails in the way that its first input names."""

    def infer(self, inputs: list[str]) -> list[Any]:
        pass_gate(self._gate, list(inputs))
        how = inputs[0]
        if how == "raise":
            raise ValueError("the disk is full")
        if how == "exit":
            os._exit(3)
        outputs: dict[str, list[Any]] = {
            "item": [OSError("a broken item")] * len(inputs),
            "large": [bytes(2**21), *[OSError("beside a large one")] * (len(inputs) - 1)],
            "count": [],
            "unpicklable": [threading.Lock()] * len(inputs),
        }
        return outputs.get(how, inputs)


class BrokenAndRaises(InferenceModel[Any, Any]):
    """Always raises."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        raise ValueError("the model is broken")


class FailsTogether(InferenceModel[str, int]):
    """Raises for the whole batch if "bad" is in it; else answers with the calls made so far."""

    def __init__(self) -> None:
        self._calls = 0

    def infer(self, inputs: list[str]) -> list[int]:
        self._calls += 1
        if "bad" in inputs:
            raise ValueError("a bad input")
        return [self._calls for _ in inputs]


class OutOfMemory(InferenceModel[Any, int]):
    """Has memory for so many inputs; answers with the size of the batch."""

    def __init__(self, room: int) -> None:
        self._room = room

    def infer(self, inputs: list[Any]) -> list[int]:
        if len(inputs) > self._room:
            raise MemoryError(f"no memory for {len(inputs)} inputs")
        return [len(inputs) for _ in inputs]


class StreamsInput(InferenceModel[Any, int]):
    """Computes in a generator that outlives running out of memory; answers how often it went on."""

    def __init__(self) -> None:
        self._stream = self._compute()
        self._input: Any = None

    def infer(self, inputs: list[Any]) -> list[int]:
        (self._input,) = inputs
        outcome = next(self._stream)
        if isinstance(outcome, MemoryError):
            raise outcome
        return [outcome]

    def _compute(self) -> Iterator[int | MemoryError]:
        for rounds in itertools.count():
            outcome: int | MemoryError = rounds
            try:
                if self._input == "large":
                    raise MemoryError
            except MemoryError as error:
                outcome = error
            yield outcome


class KeepsErrors(InferenceModel[Any, Any]):
    """Raises errors that it keeps, as something that reports them would."""

    def __init__(self) -> None:
        self._errors: list[ValueError] = []

    def infer(self, inputs: list[Any]) -> list[Any]:
        try:
            raise ValueError(f"{len(inputs)} inputs")
        except ValueError as error:
            self._errors.append(error)
            raise


class RaisesHostile(InferenceModel[str, str]):
    """Raises or returns an exception of `hostile_errors` for inputs as "raise 3"."""

    def infer(self, inputs: list[str]) -> list[Any]:
        outputs = [self._answer(one) for one in inputs]
        for one, output in zip(inputs, outputs, strict=True):
            if one.startswith("raise "):
                raise output
        return outputs

    def _answer(self, value: str) -> Any:
        return draw_hostile(value) if value.startswith(("raise ", "return ")) else value


class FinishesHostile(RaisesHostile):
    """The same in two stages."""

    def finish(self, value: str) -> str:
        return value


class BadText(InputError):
    """An error of the client."""


class Refuses(InferenceModel[str, str]):
    """Refuses "bad", and the whole batch of "worse"."""

    def infer(self, inputs: list[str]) -> list[str | Exception]:
        if "worse" in inputs:
            raise BadText("worse")
        return [BadText("bad") if text == "bad" else text for text in inputs]
