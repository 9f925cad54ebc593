"""The tree of errors, their pickling, and what becomes of an exception that a model raises."""

import dataclasses
import inspect
import io
import json
import os
import pickle
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from fastapi import HTTPException
from models.raising import CodedError, HoldsLockError, TwoArgumentsError

import fast_batcher
from fast_batcher import errors
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    CollationError,
    ConfigurationError,
    DeadlineExceededError,
    InferenceError,
    InputError,
    NotReadyError,
    OutputMismatchError,
    PoisonRequestError,
    QueueFullError,
    RemoteTraceback,
    RequestTooLargeError,
    SessionLostError,
    SlowReaderError,
    TransportError,
    UnsendableValueError,
    WorkerError,
    WorkerLostError,
    WorkerStartupError,
    clear_frames,
    cuda_message,
    forget_frames,
    from_model,
    is_out_of_memory,
)

# What each error is besides, and its place in the tree.
TREE: dict[type[BatcherError], tuple[type[Exception], ...]] = {
    ConfigurationError: (BatcherError, ValueError),
    BatcherClosedError: (BatcherError,),
    NotReadyError: (BatcherError,),
    QueueFullError: (BatcherError,),
    DeadlineExceededError: (BatcherError, TimeoutError),
    RequestTooLargeError: (BatcherError,),
    UnsendableValueError: (BatcherError, TypeError),
    SlowReaderError: (BatcherError,),
    InferenceError: (BatcherError,),
    InputError: (InferenceError,),
    OutputMismatchError: (InferenceError, IndexError),
    CollationError: (InferenceError, ValueError),
    WorkerError: (BatcherError,),
    WorkerStartupError: (WorkerError,),
    WorkerLostError: (WorkerError,),
    SessionLostError: (WorkerError,),
    PoisonRequestError: (WorkerError,),
    TransportError: (WorkerError,),
}
ALL = [BatcherError, *TREE]

REMOTE = "Traceback (most recent call last):\n  model.py, line 3, in infer\nValueError: bad\n"


def again(error: Any) -> Any:
    return pickle.loads(pickle.dumps(error))


# The tree.


def test_the_tree_is_whole() -> None:
    public = [one for name, one in vars(errors).items() if not name.startswith("_")]
    classes = {one for one in public if inspect.isclass(one) and issubclass(one, BatcherError)}
    assert classes == set(ALL)
    assert fast_batcher.DynamicBatchIndexError is OutputMismatchError


@pytest.mark.parametrize("kind", ALL)
def test_the_module_shows_every_error_in_its_drawing(kind: type[BatcherError]) -> None:
    assert errors.__doc__ is not None
    lines = [line.split() for line in errors.__doc__.splitlines()]
    (line,) = (line for line in lines if line and line[0] == kind.__name__)
    also = [base.__name__ for base in kind.__bases__ if not issubclass(base, BatcherError)]
    assert [word.strip("()") for word in line[1:] if word.startswith("(")][:1] == (
        [name for name in also if name != "Exception"]
    )


# Pickling and copying.


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_pickling(kind: type[BatcherError]) -> None:
    copied = again(kind("what went wrong"))
    assert type(copied) is kind
    assert copied.args == ("what went wrong",)
    assert str(copied) == "what went wrong"
    assert str(again(kind())) == ""


# A model's exception.


class OddError(Exception):
    """Its constructor takes what `args` does not hold."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class OwnNewError(ValueError):
    """Cannot be made from its `args`."""

    def __new__(cls, message: str, *, code: int) -> "OwnNewError":
        return super().__new__(cls, message)

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)


class FinalError(Exception):
    """Refuses to be a base."""

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("there is only one")


class NotEvenAnError(Exception):
    """Makes something else of itself."""

    def __new__(cls, *args: Any) -> Any:
        return RuntimeError(*args) if cls is not NotEvenAnError else super().__new__(cls, *args)


class OwnOsError(OSError):
    """A built-in type's child with state of its own."""

    def __init__(self, path: str) -> None:
        super().__init__(5, "device lost", path)
        self.device = "cuda:0"


class StrOfItsOwnError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses all attributes that are set, those that Python itself sets included."""

    code: int
    reason: str


def raised(function: Callable[[], Any]) -> Exception:
    """Error of a model that raises by itself."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  whatever it is
        return error
    raise AssertionError("it raises")


ORIGINALS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: raised(lambda: int("x")),
    "KeyError": lambda: raised(lambda: os.environ["MISSING"]),
    "IndexError": lambda: raised(lambda: [][0]),
    "ZeroDivisionError": lambda: raised(lambda: 1 / 0),
    "TypeError": lambda: raised(lambda: None + 1),  # type: ignore[operator]
    "RuntimeError": lambda: RuntimeError("CUDA error: device-side assert triggered"),
    "Exception": lambda: Exception("plain"),
    "MemoryError": lambda: MemoryError("too large"),
    "numpy out of memory": lambda: raised(lambda: np.empty(2**50)),
    "TimeoutError": lambda: TimeoutError("upstream"),
    "FileNotFoundError": lambda: raised(lambda: os.stat("/nowhere/weights.pt")),
    "OSError": lambda: OSError(28, "No space left on device"),
    "OSError of two files": lambda: OSError(18, "Invalid cross-device link", "a", None, "b"),
    "OSError with a text": lambda: OSError("some text"),
    "UnicodeDecodeError": lambda: raised(lambda: b"bad: \xe9!".decode()),
    "UnicodeEncodeError": lambda: raised(lambda: "\ud800".encode()),
    "ModuleNotFoundError": lambda: raised(lambda: __import__("nowhere_at_all")),
    "ImportError": lambda: ImportError("no", name="a", path="b"),
    "UnsupportedOperation": lambda: raised(lambda: io.BytesIO().fileno()),
    "JSONDecodeError": lambda: raised(lambda: json.loads("{")),
    "StopAsyncIteration": lambda: StopAsyncIteration("stop"),
    "AssertionError": lambda: AssertionError(),
    "ExceptionGroup": lambda: ExceptionGroup("many", [ValueError("one"), KeyError("two")]),
    "odd": lambda: OddError(7, reason="odd"),
    "two arguments": lambda: TwoArgumentsError(5, "broken"),
    "coded": lambda: CodedError("coded", 42),
    "lock": lambda: HoldsLockError("holds a lock"),
    "own OSError": lambda: OwnOsError("/dev/nvidia0"),
    "own str": lambda: StrOfItsOwnError(4),
    "slots": lambda: np.exceptions.AxisError(5, 1),
    "frozen": lambda: FrozenError(4, "frozen"),
    "HTTPException": lambda: HTTPException(404, "no such thing", {"x-reason": "none"}),
    "HTTPException by name": lambda: HTTPException(status_code=418, detail={"tea": True}),
    "BatcherError": lambda: QueueFullError("full", retry_after=2.0),
}
originals = pytest.mark.parametrize("make", ORIGINALS.values(), ids=ORIGINALS.keys())
# Those of which a pickle can be made; a caller's program may want to.
PICKLABLE = {name: make for name, make in ORIGINALS.items() if name != "lock"}
picklable = pytest.mark.parametrize("make", PICKLABLE.values(), ids=PICKLABLE.keys())


def state_of(error: Any) -> dict[str, Any]:
    """Attributes of an exception besides its type."""
    builtin = ["errno", "strerror", "filename", "filename2", "start", "end", "reason", "object"]
    builtin += ["encoding", "name", "path", "message", "exceptions"]
    state = {name: getattr(error, name) for name in builtin if hasattr(error, name)}
    mine = {k: v for k, v in vars(error).items() if not k.startswith("__")}
    return {"args": error.args, "text": str(error), **state, **mine}


@originals
def test_error_has_both_types(make: Callable[[], Exception]) -> None:
    original = make()
    state = state_of(original)
    error = from_model(original, "unused", REMOTE)
    assert error is not original
    assert state_of(error) == state
    # A log shows the name that the user knows.
    kind, expected = type(error), type(original)
    assert (kind.__module__, kind.__qualname__) == (expected.__module__, expected.__qualname__)
    assert kind.__doc__ == expected.__doc__
    for caught in (expected, InferenceError, BatcherError, Exception):
        with pytest.raises(caught):
            raise from_model(original, "unused", REMOTE)
    # The original is as it was.
    assert type(original) is expected
    assert original.__cause__ is None


def test_remote_traceback_is_the_cause() -> None:
    original = ValueError("bad")
    original.add_note("input 7")
    error = from_model(original, "unused", REMOTE)
    assert isinstance(error.__cause__, RemoteTraceback)
    shown = "".join(traceback.format_exception(error))
    assert "model.py, line 3, in infer" in shown
    assert shown.rstrip().endswith("ValueError: bad\ninput 7")
    # One that is not ours is not taken for it.
    error.__cause__ = KeyError("other")
    assert again(error).__cause__ is None
    for without in (from_model(original, "unused", ""), from_model(None, "text", "")):
        assert without.__cause__ is None
        assert again(without).__cause__ is None


def test_each_caller_gets_its_own_error() -> None:
    original = ValueError("bad")
    first, second = (from_model(original, "unused", REMOTE) for _ in range(2))
    assert first is not second
    assert first.__cause__ is not second.__cause__
    assert type(first) is type(second)
    one = type("SameError", (ValueError,), {})
    other = type("SameError", (KeyError,), {})
    assert isinstance(from_model(one("a"), "unused", REMOTE), one)
    assert isinstance(from_model(other("a"), "unused", REMOTE), other)


# Where no such class can be built, a plain error says what there was to say.


@pytest.mark.parametrize(
    "original",
    [
        None,
        StopIteration("asyncio would refuse to carry it"),
        OwnNewError("bad", code=3),
        FinalError("bad"),
        NotEvenAnError("bad"),
    ],
    ids=lambda original: type(original).__name__,
)
def test_a_plain_inference_error_has_the_text(original: Exception | None) -> None:
    error = from_model(original, "ValueError: the text", REMOTE)
    assert type(error) is InferenceError
    assert str(error) == "ValueError: the text"
    assert isinstance(error.__cause__, RemoteTraceback)
    assert error.__cause__.args == (REMOTE,)


# Pickling of what a caller got.


@picklable
def test_error_of_caller_survives_pickling(make: Callable[[], Exception]) -> None:
    error = from_model(make(), "unused", REMOTE)
    copied = again(error)
    assert type(copied) is type(error)
    assert comparable(state_of(copied)) == comparable(state_of(error))
    assert type(copied.__cause__) is RemoteTraceback
    assert copied.__cause__.args == (REMOTE,)


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Exceptions inside exceptions have no equality but identity."""
    return {key: repr(value) for key, value in state.items()}


# What the frames of a traceback hold.


class Held:
    """A value that a frame may hold."""


def test_only_finished_frames_are_cleared() -> None:
    held: list[weakref.ref[Held]] = []

    def fail() -> NoReturn:
        value = Held()
        held.append(weakref.ref(value))
        raise MemoryError

    value = Held()
    try:
        fail()
    except MemoryError as error:
        clear_frames(error)
    assert held[0]() is None
    assert isinstance(value, Held)
    clear_frames(MemoryError())  # was never raised, and has none


# Out of memory.


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


class Unshowable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "is_it", "of_cuda"),
    [
        (MemoryError(), True, ""),
        (OutOfMemoryError(), True, ""),
        (RuntimeError("CUDA error: out of memory"), True, "CUDA error: out of memory"),
        (RuntimeError("CUDA error: no device"), False, "CUDA error: no device"),
        # Inputs may say anything.
        (RuntimeError("cannot read 'CUDA out of memory'"), False, ""),
        (ValueError("CUDA out of memory"), False, ""),
        (Unshowable(), False, ""),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, is_it: bool, of_cuda: str) -> None:
    assert (is_out_of_memory(error), cuda_message(error)) == (is_it, of_cuda)


def thrown(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_error_drops_frames_of_causes_and_members() -> None:
    errors = [thrown(ValueError(number)) for number in range(4)]
    group = thrown(ExceptionGroup("all", [errors[0], ExceptionGroup("some", [errors[1]])]))
    group.__cause__, group.__context__ = errors[2:]
    errors[2].__context__ = group
    forget_frames(group)
    assert [error.__traceback__ for error in (group, *errors)] == [None] * 5
