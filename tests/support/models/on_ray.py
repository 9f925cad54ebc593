"""Models of workers on a Ray cluster."""

import logging
import os
import signal
import time
from typing import Any

import numpy as np

from fast_batcher import InferenceModel


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
