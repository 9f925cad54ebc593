"""A model on a GPU that only its PyTorch, a stand-in, has. Worker process."""

import sys
from types import SimpleNamespace
from typing import Any

from fast_batcher import InferenceModel


class OnGpu(InferenceModel[int, int]):
    """Reserves as many bytes as an input says."""

    def __init__(self, reserved: int) -> None:
        self._reserved = reserved
        cuda = SimpleNamespace(
            is_initialized=lambda: self._reserved > 0,
            current_device=lambda: 0,
            device_count=lambda: 1,
            memory_reserved=lambda _: self._reserved,
        )
        torch: Any = SimpleNamespace(cuda=cuda, Tensor=SimpleNamespace)
        sys.modules["torch"] = torch

    def infer(self, inputs: list[int]) -> list[int]:
        self._reserved = max(inputs)
        return inputs
