"""The servers that `benchmarks.http` compares, one file for each, and what each is given to do.

A server answers `POST /predict`. It runs with the interpreter of its system's environment. Settings
that are not named are the system's defaults.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How long a system that waits for more requests does so, seconds. Less than their defaults, which
# would be most of what a lone request takes.
WAIT = 0.001


@dataclass(frozen=True)
class Job:
    """Configuration of a server, read from its environment."""

    # What the model takes for a batch, and for each of its inputs.
    seconds: float = 0.0
    seconds_per_input: float = 0.0
    max_batch_size: int = 64
    # The body of a request is a float32 array of this shape; without one, JSON with a text.
    shape: tuple[int, ...] = ()
    # The body is a JPEG file, which is decoded to bytes of this shape.
    is_picture: bool = False
    # Seconds that the clients have for an answer; None if any comes in time.
    limit: float | None = None
    # Where the model writes the id of its process.
    pid_file: str = ""
    # Which one, where a file has several servers.
    variant: str = ""

    @classmethod
    def read(cls) -> "Job":
        """Read this server's."""
        return cls(**json.loads(os.environ["HTTP_JOB"]))

    @property
    def capacity(self) -> float:
        """Inputs per second of full batches, one after the other."""
        return self.max_batch_size / (self.seconds + self.seconds_per_input * self.max_batch_size)


class Model:
    """Answers texts with themselves, and arrays with their first number, after the job's time."""

    def __init__(self) -> None:
        self._job = Job.read()
        if self._job.pid_file:
            Path(self._job.pid_file).write_text(str(os.getpid()))

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Answer each input."""
        if self._job.seconds:
            time.sleep(self._job.seconds + self._job.seconds_per_input * len(inputs))
        return [float(one.flat[0]) for one in inputs] if self._job.shape else list(inputs)
