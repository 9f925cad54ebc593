"""A model that changes whatever it is given, and what the changes are."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from fast_batcher import Collation, InferenceModel


def scribble(value: Any, seen: set[int] | None = None) -> None:
    """Change all of a value that can be changed, each part once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | dict):
        for part in [*value.values()] if isinstance(value, dict) else [*value]:
            scribble(part, seen)
    if isinstance(value, list):
        value.append(len(value))
    elif isinstance(value, dict):
        value["seen"] = value.get("seen", 0) + 1
    elif isinstance(value, bytearray):
        value[0] = (value[0] + 1) % 256
    elif isinstance(value, np.ndarray):
        value += 1


class Scribbles(InferenceModel[Any, Any]):
    """Changes its inputs, and answers with them and with objects of its own.

    Args:
        warm_up: Length of the array that the warm-up is given.
    """

    def __init__(self, warm_up: int = 0) -> None:
        self._own: Any = {"list": [1, 2], "array": np.zeros(3), "large": np.zeros(40_000)}
        self._warm_up = warm_up
        # What the warm-up has seen, after it was changed.
        self._warm: set[float] = set()

    def warmup_inputs(self) -> list[Any]:
        """One, which has to be repeated."""
        return [("warm-up", np.zeros(self._warm_up))] if self._warm_up else []

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Change them all, and only then fail."""
        for one in inputs:
            scribble(one)
        return [self._answer(one) for one in inputs]

    def _answer(self, one: Any) -> Any:
        if isinstance(one, tuple) and one[0] == "warm-up":
            self._warm.update(one[1].tolist())
        if isinstance(one, str) and one == "warm":
            return sorted(self._warm)
        if isinstance(one, str) and one.startswith("raises"):
            raise ValueError(one)
        if isinstance(one, str) and one.startswith("dies"):
            mark = Path(one.removeprefix("dies "))
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return [one, self._own]


class ScribblesAndDies(InferenceModel[Any, int]):
    """Adds 1 to its inputs in place, and answers with what they are filled with then.

    Args:
        mark: If there is such a file, it removes it and dies before it answers.
    """

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def infer(self, inputs: Any) -> list[int]:
        for one in inputs:
            scribble(one)
        if self._mark.exists():
            self._mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [filling(one) for one in inputs]


class ScribblesOnBatch(ScribblesAndDies):
    """The same, for inputs that are joined to one array."""

    collation = Collation.stack()


def filling(value: Any) -> int:
    """Value of all elements of an array, or of the array in a dict."""
    array = value["array"] if isinstance(value, dict) else value
    assert array.min() == array.max()
    return int(array[0])
