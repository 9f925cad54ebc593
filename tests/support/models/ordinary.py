"""Well-behaved models: they echo, wait at a gate, warm up, count or print. Worker process."""

import atexit
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fast_batcher import InferenceModel
from models.base import AtGate, Echo, pass_gate

AFFINITY_AT_IMPORT = sorted(os.sched_getaffinity(0))


class Whereabouts(InferenceModel[Any, int]):
    """Answers with its process id."""

    def infer(self, inputs: list[Any]) -> list[int]:
        return [os.getpid() for _ in inputs]


class Timed(InferenceModel[Any, Any]):
    """Echoes; a batch takes a fixed time and a time for each input, seconds."""

    def __init__(self, fixed: float, each: float, *, warm: bool) -> None:
        self._fixed, self._each = fixed, each
        self._examples = [0] if warm else []

    def warmup_inputs(self) -> list[int]:
        return self._examples

    def infer(self, inputs: list[Any]) -> list[Any]:
        time.sleep(self._fixed + self._each * len(inputs))
        return inputs


class Variables(InferenceModel[str, str]):
    """Answers with the values of environment variables."""

    def infer(self, inputs: list[str]) -> list[str]:
        return [os.environ[name] for name in inputs]


class Placed(InferenceModel[Any, tuple[Any, ...]]):
    """Answers with where it is, as its `__init__` has found it."""

    def __init__(self) -> None:
        self._place = (
            self.worker_index,
            os.getpid(),
            self.device,
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            AFFINITY_AT_IMPORT,
            os.environ["OMP_NUM_THREADS"],
        )

    def infer(self, inputs: list[Any]) -> list[tuple[Any, ...]]:
        return [self._place for _ in inputs]


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


class Gated(AtGate):
    """Echoes, but waits at the gate with every batch; its note is the batch."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        pass_gate(self._gate, list(inputs))
        return inputs


class GatedStages(Gated):
    """The same with a stage before it."""

    def prepare(self, value: Any) -> Any:
        return value


class Holds(AtGate):
    """Echoes, and waits at the gate with every batch that has "hold" among its inputs."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        # An array would compare its elements.
        if any(isinstance(one, str) and one == "hold" for one in inputs):
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


class Grows(InferenceModel[int, bytes]):
    """Returns so many bytes per input."""

    def infer(self, inputs: list[int]) -> list[bytes]:
        return [b"x" * count for count in inputs]


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


class Noisy(InferenceModel[int, int]):
    """Prints so many lines of a kilobyte on both streams."""

    def infer(self, inputs: list[int]) -> list[int]:
        for count in inputs:
            for stream in (sys.stdout, sys.stderr):
                stream.write(("noise " * 170 + "\n") * count)
                stream.flush()
        return inputs
