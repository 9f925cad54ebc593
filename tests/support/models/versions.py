"""Models with arguments that a reload replaces."""

import os
import signal
import time
from pathlib import Path

from fast_batcher import InferenceModel


class Versioned(InferenceModel[object, tuple[str, int]]):
    """Answers with its version and its process, after some time.

    Versions that begin with "bad" do not load, and "deadly" kills the process that loads it.
    """

    def __init__(self, version: str = "first", seconds: float = 0.0, killed: str = "") -> None:
        if version.startswith("bad"):
            raise ValueError(f"no weights for {version}")
        if version == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if version.startswith("takes "):  # a file that the next one does not find
            Path(version.removeprefix("takes ")).unlink()
        if version.startswith("waits "):  # for a file, at most a minute
            path = Path(version.removeprefix("waits "))
            end = time.monotonic() + 60
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.01)
        self._answer = version, os.getpid()
        self._seconds = seconds

    def infer(self, inputs: list[object]) -> list[tuple[str, int]]:
        time.sleep(self._seconds)
        return [self._answer for _ in inputs]
