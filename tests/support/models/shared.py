"""Models of the contract of sessions: they tell of their batch, or fail as web code does."""

import logging
import os
import signal
from typing import Any

from fast_batcher import InferenceModel
from models.base import AtGate, pass_gate
from models.loading import NeedsFile


class Batches(InferenceModel[Any, list[Any]]):
    """Answers with the whole batch; waits at the gate with "hold" in it."""

    def __init__(self, gate: str = "") -> None:
        self._gate = gate

    def infer(self, inputs: list[Any]) -> list[list[Any]]:
        if "hold" in inputs:
            pass_gate(self._gate, list(inputs))
        return [list(inputs) for _ in inputs]


class Web(InferenceModel[str, str]):
    """Raises an HTTPException with the status that the first input names; logs it, too."""

    def infer(self, inputs: list[str]) -> list[str]:
        from fastapi import HTTPException

        logging.getLogger("models.web").warning("status %s", inputs[0])
        raise HTTPException(int(inputs[0]), "no such thing", {"X-Reason": "test"})


class DiesInBatch(InferenceModel[Any, Any]):
    """Dies whenever "poison" is in a batch; echoes other inputs."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        if "poison" in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


class SumsAtGate(AtGate):
    """Tells the gate the sums of its arrays, waits there, and answers with the sums then."""

    def infer(self, inputs: list[Any]) -> list[int]:
        pass_gate(self._gate, [int(one.sum()) for one in inputs])
        return [int(one.sum()) for one in inputs]


class PlacesAtGate(AtGate):
    """Waits at the gate, and answers with the sum of each array and if it came in shared memory."""

    def infer(self, inputs: list[Any]) -> list[tuple[int, bool]]:
        pass_gate(self._gate)
        # The bytes of an array that came through a pipe are in a bytearray.
        return [(int(one.sum()), not isinstance(_find_owner(one), bytearray)) for one in inputs]


def _find_owner(value: Any) -> Any:
    """Find the object that has the memory of a view."""
    while True:
        below = getattr(value, "base", None)
        if below is None:
            below = getattr(value, "obj", None)
        if below is None:
            return value
        value = below


class Chatty(InferenceModel[Any, Any]):
    """Echoes, and logs a long record for each input."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        for _ in inputs:
            logging.getLogger("models.chatty").warning("x" * 50_000)
        return inputs


class NeedsFileAndDies(DiesInBatch, NeedsFile):
    """Loads only if there is such a file; dies whenever "poison" is in a batch."""
