"""fast_batcher with a model that decodes pictures, in a stage of its own or in `infer`.

Settings: `model` is a name in `MODELS`.
"""

import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.pictures import SIDE, decode
from benchmarks.scenarios import Load, Process
from fast_batcher import DynBatcher, InferenceModel

DISTRIBUTIONS = ["fast_batcher", "pillow"]
# Seconds that `infer` takes besides decoding: those of the model of `benchmarks.http`.
SECONDS, SECONDS_PER_INPUT = 0.005, 0.0001
# One for each core of the machine that the stored results come from.
THREADS = 2


class Infer(InferenceModel[bytes, int]):
    """Takes its time for a batch, and answers a picture with its height."""

    def infer(self, inputs: list[Any]) -> list[int]:
        """Compute a batch, whose pictures it does not look at."""
        time.sleep(SECONDS + SECONDS_PER_INPUT * len(inputs))
        return [SIDE for _ in inputs]


class Stages(Infer):
    """Decodes in `prepare`."""

    def prepare(self, value: bytes) -> Any:
        """Decode a picture."""
        return decode(value)


class Decoding(Stages):
    """Decodes in `prepare`, and takes no time for a batch."""

    def infer(self, inputs: list[Any]) -> list[int]:
        """Answer each picture with its height."""
        return [len(pixels) for pixels in inputs]


class Inside(Infer):
    """Decodes in `infer`, one picture after the other."""

    def infer(self, inputs: list[Any]) -> list[int]:
        """Decode, then compute."""
        return super().infer([decode(value) for value in inputs])


class InsideThreads(Infer):
    """Decodes in `infer`, in threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS)

    def infer(self, inputs: list[Any]) -> list[int]:
        """Decode, then compute."""
        return super().infer(list(self._threads.map(decode, inputs)))


MODELS = {model.__name__: model for model in (Infer, Stages, Decoding, Inside, InsideThreads)}


@asynccontextmanager
async def opened(load: Load, model: str) -> AsyncIterator[Process]:
    """Start the worker and wait until it is ready."""
    async with DynBatcher(MODELS[model], max_batch_size=load.max_batch_size) as batcher:
        yield batcher.process_batched
