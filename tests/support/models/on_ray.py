"""Models of workers of any kind, and of workers on a Ray cluster."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from fast_batcher import InferenceModel
from models.base import FOR_EVER


class Placed(InferenceModel[Any, Any]):
    """Answers each input with the process that computed it; "die" kills the process."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def infer(self, inputs: list[Any]) -> list[Any]:
        if "die" in inputs:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._seconds)
        return [(value, os.getpid()) for value in inputs]


class Doubles(InferenceModel[Any, Any]):
    """Doubles arrays in place, and returns them."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        for value in inputs:
            np.multiply(value, 2, out=value)
        return inputs


class Complains(InferenceModel[str, str]):
    """Logs each input as a warning, and raises for "bad"."""

    def infer(self, inputs: list[str]) -> list[str]:
        for value in inputs:
            logging.getLogger("models.on_ray").warning("got %s", value)
        if "bad" in inputs:
            raise ValueError("bad input")
        return inputs


class NeedsModule(InferenceModel[Any, Any]):
    """Imports a module that is nowhere."""

    def __init__(self) -> None:
        __import__("module_of_another_machine")

    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class Contract(InferenceModel[Any, Any]):
    """Models for the contract of all workers: see tests/contract/test_workers.py."""

    def __init__(self, notes: str = "", fault: str = "") -> None:
        if fault:
            raise LookupError(fault)
        self._notes = notes

    def prepare(self, value: Any) -> Any:
        return [value]

    def infer(self, inputs: list[Any]) -> list[Any]:
        if ["hang"] in inputs:
            time.sleep(FOR_EVER)
        if ["raise"] in inputs:
            raise KeyError("no such key")
        return [(value, os.getpid()) for (value,) in inputs]

    def close(self) -> None:
        Path(self._notes, "closed").touch()
