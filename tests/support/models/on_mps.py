"""Models of workers that share a GPU by MPS. Worker process."""

import os
from pathlib import Path
from typing import Any

from fast_batcher import InferenceModel
from models.base import pass_gate


class Sharer(InferenceModel[Any, Any]):
    """Answers with its place; waits at a gate for "hold", and loses its device for "fault" once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._cores = tuple(sorted(os.sched_getaffinity(0)))

    def infer(self, inputs: list[Any]) -> list[Any]:
        if "hold" in inputs:
            pass_gate(str(self._folder / "gate"))
        if "fault" in inputs and not (self._folder / "failed").exists():
            (self._folder / "failed").touch()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if "always" in inputs:
            raise RuntimeError("CUDA error: device-side assert triggered")
        place = [os.environ[f"CUDA_{name}"] for name in ("VISIBLE_DEVICES", "MPS_PIPE_DIRECTORY")]
        return [(os.getpid(), self.device, *place, self._cores) for _ in inputs]
