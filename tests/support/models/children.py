"""Models that start processes, or tell about descriptors, signals and streams. Worker process."""

import ctypes
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from fast_batcher import InferenceModel
from fast_batcher._transport.channels import PIPE_SIZE
from models.base import FOR_EVER, AtGate, pass_gate
from models.ordinary import Holds


class TalksNonsense(InferenceModel[bytes, bytes]):
    """Writes its inputs into the channel to the parent, behind the library's back."""

    def infer(self, inputs: list[bytes]) -> list[bytes]:
        for data in inputs:
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
            ["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=self._in_own_session
        )
        self._started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())


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
            "descriptors": sorted(map(_target, os.listdir("/proc/self/fd"))),
            "channel ends": len(_channel_ends()),
            "streams": [_target(str(number)) for number in range(3)],
        }
        return [report for _ in inputs]
