"""Models that end their process, hang, or go wrong at a chosen place. Worker process."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from fast_batcher import Done, InferenceModel, SteppedModel
from fast_batcher._transport.channels import BlockingChannel, Kind, pack_header
from models.base import FOR_EVER, call_at_gate
from models.raising import NotAnExceptionError


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


class CrashesAbove(InferenceModel[Any, int]):
    """Is killed by batches of more inputs, as by a system without memory; answers their size."""

    def __init__(self, room: int) -> None:
        self._room = room

    def infer(self, inputs: list[Any]) -> list[int]:
        if len(inputs) > self._room:
            os.kill(os.getpid(), signal.SIGKILL)
        return [len(inputs) for _ in inputs]


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


class SteppedMinefield(SteppedModel[Any, Any]):
    """Gives each stream the chunks 0, 1 and 2, and goes wrong where it is told to.

    The input "left" gets the number of streams that are in the model.
    """

    def __init__(self) -> None:
        faulthandler.disable()
        self._live = 0

    def join(self, inputs: list[Any]) -> list[Any]:
        for one in inputs:
            if isinstance(one, Bomb) and one.where == "join":
                HOWS[one.how]()
        self._live += len(inputs)
        return [[one, 0] for one in inputs]

    def step(self, states: list[Any]) -> list[Any]:
        for state in states:
            state[1] += 1
            if isinstance(state[0], Bomb) and state[0].where == "step" and state[1] == 2:
                (_truncate if state[0].how == "truncate" else HOWS[state[0].how])()
        return [self._give(*state) for state in states]

    def _give(self, value: Any, count: int) -> Any:
        if value == "left":
            return Done([self._live])
        chunk: Any = count - 1
        if isinstance(value, Bomb) and value.where in ("dump result", "load result") and count == 2:
            chunk = value
        return Done(chunk) if count == 3 else chunk

    def leave(self, states: list[Any]) -> None:
        self._live -= len(states)


def _truncate() -> None:
    """Send the parent a part of a frame, and end the process."""
    gc.unfreeze()
    (channel,) = [one for one in gc.get_objects() if type(one) is BlockingChannel]
    channel.send_packed(pack_header(Kind.ITEMS, 100, 0, 0.0) + b"part")
    os._exit(3)
