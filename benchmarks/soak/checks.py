"""The model of S6, apart from the others, which do not load NumPy. Worker process."""

import collections
import zlib
from typing import Any

import numpy as np

from fast_batcher import InferenceModel

# Inputs that the model keeps: one of each batch that a worker can hold at once, and one more.
KEPT = 3


def checksum(value: Any, start: int = 0) -> int:
    """Compute the CRC of all bytes, and of the type, dtype and shape of each array."""
    if isinstance(value, dict):
        for key, one in value.items():
            start = checksum(one, zlib.crc32(key.encode(), start))
        return start
    if isinstance(value, bytes | bytearray):
        return zlib.crc32(value, start)
    kind = type(value).__name__
    array = value if isinstance(value, np.ndarray) else value.numpy()
    start = zlib.crc32(f"{kind} {array.dtype} {array.shape}".encode(), start)
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, start)


def is_echoed(found: int) -> bool:
    """Whether the model returns the input with this checksum: one in ten."""
    return found % 10 == 0


class Checks(InferenceModel[Any, tuple[int, Any]]):
    """Answers with the input's checksum, and for some inputs with the input itself.

    It keeps one input of each of the last batches and checks it again later: nothing may write
    into memory that a model still views.
    """

    def __init__(self) -> None:
        # Loaded before the worker is ready, so that kills hit work more often than this import.
        import torch  # noqa: F401

        self._kept: collections.deque[tuple[Any, int]] = collections.deque(maxlen=KEPT)

    def infer(self, inputs: list[Any]) -> list[tuple[int, Any]]:
        """Answer each input.

        Raises:
            RuntimeError: An input has changed after its batch.
        """
        sums = [checksum(one) for one in inputs]
        if len(self._kept) == KEPT and checksum(self._kept[0][0]) != self._kept[0][1]:
            raise RuntimeError("an input that was kept has changed")
        self._kept.append((inputs[0], sums[0]))
        return [
            (found, value if is_echoed(found) else None)
            for value, found in zip(inputs, sums, strict=True)
        ]
