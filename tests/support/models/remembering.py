"""Models with a state for each session."""

import os
import secrets
import signal
import time
from typing import Any, NamedTuple

from fast_batcher import SessionModel
from models.base import pass_gate


class Line(NamedTuple):
    """One call of a session."""

    name: str
    number: int
    # What happens: "" for nothing.
    what: str = ""


class Mixed(AssertionError):
    """A call came to the state of another session, came twice, or came too early."""


class Diary(SessionModel[Line, tuple[str, int, int], list[Line]]):
    """Answers with the number of calls that the session has had, and the size of the batch.

    A call may fail alone ("fail") or with its batch ("raise"), be unanswerable ("lambda"), kill the
    worker ("kill"), or be the first one for which `begin` raises ("begin").
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.begun = self.left = 0

    def begin(self) -> list[Line]:
        self.begun += 1
        return []

    def infer(self, inputs: list[Line], states: list[list[Line]]) -> list[Any]:
        if self._seconds:
            time.sleep(self._seconds)
        found = {line.what for line in inputs}
        if "kill" in found:
            os.kill(os.getpid(), signal.SIGKILL)
        if len({*map(id, states)}) < len(states):
            raise Mixed("a session is twice in a batch")
        for line, state in zip(inputs, states, strict=True):
            if state and (state[-1].name != line.name or state[-1].number >= line.number):
                raise Mixed(f"{line} after {state[-1]}")
            state.append(line)
        if "raise" in found:
            raise RuntimeError("all of them")
        return [
            self._answer(line, len(state), len(inputs))
            for line, state in zip(inputs, states, strict=True)
        ]

    def _answer(self, line: Line, count: int, size: int) -> Any:
        others = {
            "fail": ValueError("not this one"),
            "lambda": lambda: 0,
            "states": (line.name, self.begun, self.left),
        }
        return others.get(line.what, (line.name, count, size))

    def leave(self, states: list[list[Line]]) -> None:
        self.left += len(states)


class Unwilling(Diary):
    """Refuses the first session."""

    def begin(self) -> list[Line]:
        if not super().begin() and self.begun == 1:
            raise ValueError("not the first")
        return []


class Held(Diary):
    """Waits at a gate before a batch that fails, or has a call that says "gate"."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self._gate = gate

    def infer(self, inputs: list[Line], states: list[list[Line]]) -> list[Any]:
        if not {"gate", "raise"}.isdisjoint(line.what for line in inputs):
            pass_gate(self._gate)
        return super().infer(inputs, states)


class Framed(SessionModel[Any, list[float], list[Any]]):
    """Keeps the frames of each session."""

    def begin(self) -> list[Any]:
        return []

    def infer(self, inputs: list[Any], states: list[list[Any]]) -> list[list[float]]:
        for frame, state in zip(inputs, states, strict=True):
            state.append(frame)
        return [[float(frame[-1]) for frame in state] for state in states]


class Counted(SessionModel[str, int, str]):
    """Writes a line to a file when a state begins, and when it is left."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _write(self, what: str, states: list[str]) -> None:
        with open(self._path, "a") as file:
            file.writelines(f"{what} {state}\n" for state in states)

    def begin(self) -> str:
        state = secrets.token_hex(8)
        self._write("begun", [state])
        return state

    def infer(self, inputs: list[str], states: list[str]) -> list[int]:
        if "raise" in inputs:
            raise RuntimeError("all of them")
        return [0] * len(inputs)

    def leave(self, states: list[str]) -> None:
        self._write("left", states)
