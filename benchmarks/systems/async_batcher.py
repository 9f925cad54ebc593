"""async-batcher: batches on the event loop, the model in a thread of the same process."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from async_batcher.batcher import AsyncBatcher  # type: ignore[import-not-found]

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS = ["async-batcher"]


@asynccontextmanager
async def opened(load: Load, *, max_queue_time: float | None = None) -> AsyncIterator[Process]:
    """Start its task.

    By default it waits 10 ms for more and knows no largest batch. With a `max_queue_time` it waits
    that long, takes batches as large as the load's, and has its own thread for the model.
    """
    infer = MODELS[load.model]().infer

    class Batcher(AsyncBatcher):  # type: ignore[misc]
        def process_batch(self, batch: list[Any]) -> list[Any]:
            return infer(batch)

    with ThreadPoolExecutor(1) as executor:
        settings: dict[str, Any] = {}
        if max_queue_time is not None:
            settings = {
                "max_batch_size": load.max_batch_size,
                "max_queue_time": max_queue_time,
                "executor": executor,
            }
        batcher = Batcher(**settings)
        yield batcher.process
        await batcher.stop(force=True)
