"""Models that tests give to batchers: well-behaved ones, and every way not to be. Worker process.

What a model of the second kind does is usually chosen by its inputs, so that one of a batch can be
bad and the others good.
"""

import array
import atexit
import ctypes
import dataclasses
import faulthandler
import fcntl
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from fast_batcher import InferenceModel, stack
from fast_batcher._transport.pipes import PIPE_SIZE

# Wherever a model waits for ever; some hours after the end of the test run is ever enough.
FOR_EVER = 10_000


def call_at_gate(path: str, note: Any = None) -> socket.socket:
    """Tell the test at this `waits.Gate` that we are here; the result ends when it lets us on."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(json.dumps({"pid": os.getpid(), "note": note}).encode() + b"\n")
    return connection


def pass_gate(path: str, note: Any = None) -> None:
    """The same, and wait until it lets us on; a gate that is closed down lets everybody on."""
    try:
        with call_at_gate(path, note) as connection:
            connection.recv(1)
    except (ConnectionError, FileNotFoundError):
        return


class Echo(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class EchoWithArguments(InferenceModel[Any, Any]):
    """Answers with what its constructor was given."""

    def __init__(self, first: Any, *, second: Any) -> None:
        self._arguments = (first, second)

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [self._arguments for _ in inputs]


class Whereabouts(InferenceModel[Any, int]):
    """Answers with its process id."""

    def infer(self, inputs: list[Any]) -> list[int]:
        return [os.getpid() for _ in inputs]


class BatchSize(InferenceModel[Any, int]):
    """Answers with the size of the batch."""

    def infer(self, inputs: list[Any]) -> list[int]:
        return [len(inputs) for _ in inputs]


class Slow(InferenceModel[Any, Any]):
    """Echoes, after so many seconds per input."""

    def __init__(self, seconds_per_input: float) -> None:
        self._seconds_per_input = seconds_per_input

    def infer(self, inputs: list[Any]) -> list[Any]:
        time.sleep(self._seconds_per_input * len(inputs))
        return inputs


class AtGate(InferenceModel[Any, Any]):
    """Base of models that a test gives a gate."""

    def __init__(self, gate: str) -> None:
        self._gate = gate


class Gated(AtGate):
    """Echoes, but waits at the gate with every batch; its note is the batch."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        pass_gate(self._gate, list(inputs))
        return inputs


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


class Holds(AtGate):
    """Echoes, and waits at the gate with every batch that has "hold" among its inputs."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        if "hold" in inputs:
            pass_gate(self._gate, list(inputs))
        return inputs


class GatedOnLoad(Echo):
    """Waits at the gate while it loads."""

    def __init__(self, gate: str) -> None:
        pass_gate(gate)


class Warm(InferenceModel[Any, list[Any]]):
    """Answers with all inputs that it was ever given."""

    def __init__(self, warmup: Sequence[Any]) -> None:
        self._warmup = warmup
        self._seen: list[Any] = []

    def infer(self, inputs: list[Any]) -> list[list[Any]]:
        self._seen += inputs
        return [list(self._seen) for _ in inputs]

    def warmup_inputs(self) -> Sequence[Any]:
        return self._warmup


class ChangesInputs(InferenceModel[Any, Any]):
    """Empties the list that it is given, and returns another."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        outputs = list(inputs)
        inputs.clear()
        return outputs


class Closes(Echo):
    """Writes a line to a file when it is closed."""

    def __init__(self, path: str) -> None:
        self._path = path

    def close(self) -> None:
        with open(self._path, "a") as file:
            file.write("closed\n")


class WritesAtExit(Echo):
    """Writes a line to a file when its interpreter ends, as libraries do that flush or release."""

    def __init__(self, path: str) -> None:
        atexit.register(Path(path).write_text, "ended\n")


# Ends of a worker.


class Crashes(InferenceModel[str, str]):
    """Ends its process in the way that an input names; echoes other inputs."""

    def infer(self, inputs: list[str]) -> list[str]:
        for way in inputs:
            if way in CRASHES:
                # The interpreter's own report of a crash would only fill the log of the tests.
                faulthandler.disable()
                CRASHES[way]()
        return inputs


def hang_up() -> None:
    """End as a process whose terminal goes; also where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGHUP)


CRASHES: dict[str, Callable[[], object]] = {
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "hung up": hang_up,
}


class TalksNonsense(InferenceModel[bytes, bytes]):
    """Writes its inputs into the channel to the parent, behind the library's back.

    At "die" it kills itself.
    """

    def infer(self, inputs: list[bytes]) -> list[bytes]:
        for data in inputs:
            if data == b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(_channel(), data)
        return inputs


def _channel_ends() -> list[int]:
    """The ends of our pipes that this process has: those of the usual size are somebody else's."""
    numbers = [int(number) for number in os.listdir("/proc/self/fd")]
    return [
        number
        for number in numbers
        if _target(str(number)).startswith("pipe:")
        and fcntl.fcntl(number, fcntl.F_GETPIPE_SZ) == PIPE_SIZE
    ]


def _channel() -> int:
    """The end to write into."""
    (number,) = [
        number
        for number in _channel_ends()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    ]
    return number


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # the one that listed the directory
        return ""


class Forks(AtGate):
    """Forks a child that sleeps for ever, as a data loader might; tells the gate its pid."""

    def infer(self, inputs: list[Any]) -> list[int]:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        pass_gate(self._gate, child)
        return [child for _ in inputs]


class Terminates(InferenceModel[str, int]):
    """Starts a process in the way that an input names and terminates it; tells how it has ended."""

    def infer(self, inputs: list[str]) -> list[int]:
        return [getattr(self, f"_{way}")() for way in inputs]

    def _fork(self) -> int:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _exec(self) -> int:
        child = subprocess.Popen(["sleep", str(FOR_EVER)])
        child.terminate()
        return child.wait()


class HandlesSigterm(Holds):
    """Echoes; waits at the gate with "hold" in a batch, and when its own handler gets SIGTERM."""

    def __init__(self, gate: str) -> None:
        super().__init__(gate)
        signal.signal(signal.SIGTERM, lambda *_: pass_gate(gate, "SIGTERM"))


class LeavesDescriptors(InferenceModel[Any, tuple[list[str], list[str]]]):
    """Tells which files a program gets that it starts without closing any; and our pipes."""

    def infer(self, inputs: list[Any]) -> list[tuple[list[str], list[str]]]:
        command = ["find", "/proc/self/fd", "-type", "l", "-printf", "%l\\n"]
        done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True)
        pipes = [_target(str(number)) for number in _channel_ends()]
        return [(done.stdout.splitlines(), pipes) for _ in inputs]


class PrintsNatively(InferenceModel[Any, list[int]]):
    """Tells which values each input has, after code that does not know of Python has printed."""

    def infer(self, inputs: list[Any]) -> list[list[int]]:
        library = ctypes.CDLL(None)
        for _ in inputs:
            library.printf(b"%s", b"printed by a library\n" * 100)
            library.fflush(None)
            for number in (1, 2):
                with suppress(OSError):
                    os.write(number, b"written\n" * 100)
        return [sorted(set(one.tolist())) for one in inputs]


class Executes(InferenceModel[Any, list[int]]):
    """Has an executor of forked processes that it never shuts down; answers with their pids."""

    def __init__(self) -> None:
        from concurrent.futures import ProcessPoolExecutor

        self._executor = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))

    def infer(self, inputs: list[Any]) -> list[list[int]]:
        list(self._executor.map(abs, range(8)))
        return [list(self._executor._processes) for _ in inputs]


class StartsProcesses(InferenceModel[str, int]):
    """Runs shell commands that print a process id and go on; answers with it."""

    def __init__(self, *, in_own_session: bool = False) -> None:
        self._in_own_session = in_own_session
        self._started: list[Any] = []

    def infer(self, inputs: list[str]) -> list[int]:
        return [self._start(command) for command in inputs]

    def _start(self, command: str) -> int:
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdout=subprocess.PIPE,
            start_new_session=self._in_own_session,
        )
        self._started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())


# Batches that do not come to an end.


class Stuck(InferenceModel[Any, Any]):
    """Tells the gate its batch, and sleeps for ever: "plainly", or in the way that is named."""

    def __init__(self, gate: str, how: str) -> None:
        self._gate = gate
        self._how = how

    def infer(self, inputs: list[Any]) -> list[Any]:
        if self._how == "ignoring SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with call_at_gate(self._gate, list(inputs)):
            if self._how == "holding the GIL":
                ctypes.PyDLL(None).sleep(FOR_EVER)
            time.sleep(FOR_EVER)
        return inputs


# Outputs.


class Returns(InferenceModel[str, Any]):
    """Returns what its first input names."""

    def infer(self, inputs: list[str]) -> Any:
        return OUTPUTS[inputs[0]](inputs)


def _numpy() -> Any:
    # Every worker imports this module, and most need no arrays; importing NumPy takes longer than
    # everything else that a worker does in these tests.
    return importlib.import_module("numpy")


def _generate(inputs: list[str]) -> Iterator[str]:
    yield from inputs


OUTPUTS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "ndarray": lambda inputs: _numpy().arange(len(inputs), dtype="float32"),
    "matrix": lambda inputs: _numpy().ones((len(inputs), 3), dtype="float32"),
    "array": lambda inputs: array.array("i", range(len(inputs))),
    "range": lambda inputs: range(len(inputs)),
    "fewer": lambda inputs: inputs[:-1],
    "more": lambda inputs: [*inputs, "more"],
    "empty": lambda inputs: [],
    "fewer rows": lambda inputs: _numpy().ones((len(inputs) - 1, 3), dtype="float32"),
    "None": lambda inputs: None,
    "generator": _generate,
    "dict": lambda inputs: dict.fromkeys(range(len(inputs))),
    "set": lambda inputs: set(range(len(inputs))),
    "str": lambda inputs: "x" * len(inputs),
    "bytes": lambda inputs: b"x" * len(inputs),
    "int": lambda inputs: len(inputs),
    "scalar array": lambda inputs: _numpy().float32(1.0),
}


class UnpicklableOutputs(InferenceModel[str, Any]):
    """Returns something that cannot be pickled for some inputs, and echoes the others."""

    def infer(self, inputs: list[str]) -> list[Any]:
        return [UNPICKLABLE[text]() if text in UNPICKLABLE else text for text in inputs]


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


class BrokenOnArrival:
    """Pickles well; unpickling raises in the process on the named side, "worker" or "parent"."""

    def __init__(self, side: str, error: BaseException) -> None:
        self._side = side
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._side, self._error)


def _arrive(side: str, error: BaseException) -> BrokenOnArrival:
    is_worker = multiprocessing.parent_process() is not None
    if is_worker == (side == "worker"):
        raise error
    return BrokenOnArrival(side, error)


class BreaksInParent(InferenceModel[str, Any]):
    """Returns something that raises in the parent where the input is "bad" or "exits"."""

    def infer(self, inputs: list[str]) -> list[Any]:
        errors = {"bad": ValueError("broken on arrival"), "exits": SystemExit(3)}
        return [BrokenOnArrival("parent", errors[one]) if one in errors else one for one in inputs]


class FailsPositions(InferenceModel[str, Any]):
    """Returns an exception at the positions where the input is "bad"."""

    def infer(self, inputs: list[str]) -> list[Any]:
        return [ValueError("this one is bad") if text == "bad" else text for text in inputs]


class Grows(InferenceModel[int, bytes]):
    """Returns so many bytes per input."""

    def infer(self, inputs: list[int]) -> list[bytes]:
        return [b"x" * count for count in inputs]


class Lengths(InferenceModel[bytes, int]):
    """Returns the length of each input."""

    def infer(self, inputs: list[bytes]) -> list[int]:
        return [len(data) for data in inputs]


# Exceptions.


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


HUGE = 10 * 2**20

EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("'x' is not a number"),
    "key": lambda: KeyError("missing"),
    "os": lambda: FileNotFoundError(2, "No such file or directory", "weights.bin"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "coded": lambda: CodedError("coded", 42),
    "two arguments": lambda: TwoArgumentsError(5, "broken"),
    "lock": lambda: HoldsLockError("holds a lock"),
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


class HangsIfTold(InferenceModel[str, str]):
    """Ignores SIGTERM, and hangs at "hang"; all but the first wait at the gate while they load."""

    def __init__(self, gate: str, path: str) -> None:
        self._gate = gate
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass_gate(gate, "loading")

    def infer(self, inputs: list[str]) -> list[str]:
        if "hang" in inputs:
            call_at_gate(self._gate, "hanging").close()
            time.sleep(FOR_EVER)
        return inputs


class Numbers(InferenceModel[str, int]):
    """Raises a ValueError that shows the input, as Python does."""

    def infer(self, inputs: list[str]) -> list[int]:
        return [int(text) for text in inputs]


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


class CrashesAbove(InferenceModel[Any, int]):
    """Is killed by batches of more inputs, as by a system without memory; answers their size."""

    def __init__(self, room: int) -> None:
        self._room = room

    def infer(self, inputs: list[Any]) -> list[int]:
        if len(inputs) > self._room:
            os.kill(os.getpid(), signal.SIGKILL)
        return [len(inputs) for _ in inputs]


class Reuses(InferenceModel[int, bytearray]):
    """Answers all with one buffer, and writes over it and its inputs afterwards."""

    def __init__(self) -> None:
        self._buffer = bytearray(8)

    def infer(self, inputs: list[int]) -> list[bytearray]:
        self._buffer[:] = bytes([inputs[0]]) * 8
        inputs[0] = 0
        return [self._buffer for _ in inputs]


class Leaks(InferenceModel[Any, int]):
    """Keeps so many more bytes with each batch; answers with its process id."""

    def __init__(self, bytes_per_batch: int) -> None:
        self._bytes_per_batch = bytes_per_batch
        self._kept: list[bytes] = []

    def infer(self, inputs: list[Any]) -> list[int]:
        self._kept.append(os.urandom(self._bytes_per_batch))
        return [os.getpid() for _ in inputs]


# Every place and every way.


def _boom() -> NoReturn:
    raise ValueError("boom")


def _big_boom() -> NoReturn:
    raise NotAnExceptionError("boom")


HOWS: dict[str, Callable[[], object]] = {
    "raise": _boom,
    "BaseException": _big_boom,
    "crash": os.abort,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(FOR_EVER),
}


class Bomb:
    """Goes wrong in this way when it comes to this place."""

    def __init__(self, where: str, how: str) -> None:
        self.where = where
        self.how = how

    def __reduce__(self) -> tuple[Any, ...]:
        is_worker = multiprocessing.parent_process() is not None
        if self.where == ("dump result" if is_worker else "dump task"):
            HOWS[self.how]()
        return _unpack_bomb, (self.where, self.how)


def _unpack_bomb(where: str, how: str) -> Bomb:
    is_worker = multiprocessing.parent_process() is not None
    if where == ("load task" if is_worker else "load result"):
        faulthandler.disable()
        HOWS[how]()
    return Bomb(where, how)


class Minefield(InferenceModel[Any, Any]):
    """Echoes, and goes wrong where it is told to."""

    def __init__(self, where: str = "", how: str = "") -> None:
        self._where = where
        self._how = how
        faulthandler.disable()
        if where == "load":
            HOWS[how]()

    def infer(self, inputs: list[Any]) -> list[Any]:
        for one in inputs:
            if isinstance(one, Bomb) and one.where == "infer":
                HOWS[one.how]()
        return inputs

    def close(self) -> None:
        if self._where == "close":
            HOWS[self._how]()


# Loading.


class RaisesOnLoad(Echo):
    def __init__(self) -> None:
        raise FileNotFoundError("no weights at /models/tiny.bin")


class ExitsOnLoad(Echo):
    """Ends its process while it loads."""

    def __init__(self, way: str) -> None:
        CRASHES[way]()


class SystemExitOnLoad(Echo):
    def __init__(self) -> None:
        sys.exit(3)


class NeverLoads(Echo):
    """Tells the gate, and goes on loading whatever the gate does."""

    def __init__(self, gate: str) -> None:
        with call_at_gate(gate):
            time.sleep(FOR_EVER)


class LoadsOnce(Echo):
    """The first of several to load never comes to an end; the others raise."""

    def __init__(self, path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        time.sleep(FOR_EVER)


class LoadsAgain(Whereabouts):
    """Loads, then fails to load twice, then loads again. Counts in a file."""

    def __init__(self, path: str) -> None:
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            attempt = len(file.read())
        if attempt in (2, 3):
            raise FileNotFoundError(f"attempt {attempt}")


class NeedsFile(Echo):
    """Loads if its file exists."""

    def __init__(self, path: str) -> None:
        os.stat(path)


class NeedsArguments(Echo):
    def __init__(self, path: str) -> None:
        self._path = path


class RaisesTypeError(Echo):
    def __init__(self, _: str) -> None:
        raise TypeError("the words of the model")


class WarmsUpBadly(Echo):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs[:-1]

    def warmup_inputs(self) -> Sequence[Any]:
        return [1, 2]


class RaisesOnWarmUp(Echo):
    def infer(self, inputs: list[Any]) -> list[Any]:
        raise ValueError("too cold")

    def warmup_inputs(self) -> Sequence[Any]:
        return [1]


# Not models, or models that only the worker can refuse: they are named by strings.


class AsyncInfer:
    async def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class GeneratorInfer:
    def infer(self, inputs: list[Any]) -> Iterator[Any]:
        yield from inputs


class NoInfer:
    pass


class Namespace:
    """Holds a class that is reached through it."""

    class Inner(Echo):
        pass


class DuckModel:
    """Has `infer`, and does not derive from `InferenceModel`."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [("quack", one) for one in inputs]


# Reports.


class Reports(InferenceModel[str, dict[str, Any]]):
    """Tells about the process that it is in."""

    def infer(self, inputs: list[str]) -> list[dict[str, Any]]:
        report = {
            "environment": dict(os.environ),
            "signals": {
                number.name: str(signal.getsignal(number))
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)
            },
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "modules": sorted(sys.modules),
            "daemon": multiprocessing.current_process().daemon,
            "start method": multiprocessing.get_start_method(allow_none=True),
            "name": multiprocessing.current_process().name,
            "descriptors": sorted(map(_target, os.listdir("/proc/self/fd"))),
            "channel ends": len(_channel_ends()),
            "streams": [_target(str(number)) for number in range(3)],
        }
        return [report for _ in inputs]


class Noisy(InferenceModel[int, int]):
    """Prints so many lines of a kilobyte on both streams."""

    def infer(self, inputs: list[int]) -> list[int]:
        for count in inputs:
            for stream in (sys.stdout, sys.stderr):
                stream.write(("noise " * 170 + "\n") * count)
                stream.flush()
        return inputs


# Large inputs.


class Digests(InferenceModel[Any, Any]):
    """Answers with the SHA-256 of each input, of b"whereabouts" with its process id.

    Of ("killed", input) it dies, of ("raise", input) it raises.
    """

    def infer(self, inputs: list[Any]) -> list[Any]:
        for one in inputs:
            if isinstance(one, tuple) and one[0] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(one, tuple):
                raise ValueError(one[0])  # noqa: TRY004  it is what it was asked for
        return [os.getpid() if _is(one, b"whereabouts") else digest(one) for one in inputs]


def digest(value: Any) -> str:
    """The SHA-256 of a buffer."""
    return hashlib.sha256(value).hexdigest()


def _is(value: Any, expected: bytes) -> bool:
    return isinstance(value, bytes) and value == expected


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


class WritesInputs(InferenceModel[Any, Any]):
    """Adds one to every array, in place."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        for one in inputs:
            one += 1
        return inputs


class Stacks(InferenceModel[Any, tuple[bool, Any]]):
    """Answers with whether its inputs could be stacked without a copy, and a digest of each."""

    def infer(self, inputs: list[Any]) -> list[tuple[bool, Any]]:
        whole = stack(inputs)
        is_view = whole.data_ptr() == inputs[0].data_ptr() if hasattr(whole, "data_ptr") else None
        if is_view is None:
            is_view = bool(_numpy().shares_memory(whole, inputs[0]))
        return [(is_view, digest(_numpy().asarray(row))) for row in whole]


class WritesAndRaises(WritesInputs):
    """Adds one to every array, in place, and raises unless there is one only."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        outputs = super().infer(inputs)
        if len(inputs) > 1:
            raise ValueError("too many")
        return outputs


class WritesAndDies(WritesInputs):
    """Adds one to every array, in place, and dies unless the file is there, which it makes."""

    def __init__(self, path: str) -> None:
        self._path = path

    def infer(self, inputs: list[Any]) -> list[Any]:
        outputs = super().infer(inputs)
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
        return outputs


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


# Large outputs.


@dataclasses.dataclass
class Detection:
    """What a model may answer with: a little of everything."""

    name: str
    mask: Any
    boxes: list[Any]


def make_large(kind: str, size: int, seed: int) -> Any:
    """Something of about so many bytes, the same for the same seed."""
    np = _numpy()
    raw = np.random.default_rng(seed).bytes(size)
    return LARGE[kind](np, np.frombuffer(raw, np.uint8).copy())


def _as_tensor(dtype: str) -> Callable[[Any, Any], Any]:
    def make(_: Any, array: Any) -> Any:
        torch = importlib.import_module("torch")
        array = _numpy().resize(array, max(8, len(array) // 8 * 8))
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

    Of "pid" it answers with its process id, of "killed" it dies, of an error with that, of
    "unpicklable" with something that is. Others it gives back.
    """

    def infer(self, inputs: list[Any]) -> list[Any]:
        if "killed" in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        return [self._answer(one) for one in inputs]

    def _answer(self, one: Any) -> Any:
        if one == "pid":
            return os.getpid()
        if one == "unpicklable":
            return RefusesPickling(ValueError("not me"))
        return make_large(*one) if isinstance(one, tuple) else one


class Miscounts(MakesLarge):
    """Leaves one large output less than it has, as no worker of ours does."""

    def __init__(self) -> None:
        posting = importlib.import_module("fast_batcher._worker.replies").ReplyEncoder
        pack = posting.pack

        def pack_fewer(self: Any, outputs: list[Any], failures: Any) -> Any:
            return pack(self, outputs[:1], failures)

        posting.pack = pack_fewer


class GivesViews(InferenceModel[Any, Any]):
    """Answers with views of its inputs: all of it, every other byte, the end."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        return [(one, one[::2], one[5:]) for one in inputs]


class AnswersStacked(InferenceModel[Any, Any]):
    """Answers with one array, or tensor, of all that it is given."""

    def infer(self, inputs: list[Any]) -> Any:
        if hasattr(inputs[0], "detach"):
            return importlib.import_module("torch").stack(inputs)
        return _numpy().stack(inputs)
