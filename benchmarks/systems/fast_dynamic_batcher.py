"""fast_dynamic_batcher: a worker process behind two `multiprocessing.Queue`s, polled every 1 ms."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fast_dynamic_batcher.dyn_batcher import DynBatcher  # type: ignore[import-not-found]

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS = ["fast_dynamic_batcher", "pydantic"]
# Eight of its largest batches: more threads only take time from each other.
OPEN_LOOP_THREADS = 256


@asynccontextmanager
async def opened(
    load: Load, *, tuned: bool = False, max_delay: float | None = None
) -> AsyncIterator[Process]:
    """Start its process and thread.

    Each call keeps a thread of the loop's default executor, so by default fewer calls than a batch
    holds are ever under way: `tuned` gives every caller a thread, larger batches and a 1 ms wait.
    With a `max_delay` it waits that long for batches as large as the load's.
    """
    if max_delay is not None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(load.callers))
        batcher = DynBatcher(
            MODELS[load.model], max_batch_size=load.max_batch_size, max_delay=max_delay
        )
    elif tuned:
        threads = ThreadPoolExecutor(load.callers or OPEN_LOOP_THREADS)
        asyncio.get_running_loop().set_default_executor(threads)
        batcher = DynBatcher(MODELS[load.model], max_batch_size=32, max_delay=0.001)
    else:
        batcher = DynBatcher(MODELS[load.model])
    try:
        yield batcher.process_batched
    finally:
        batcher.stop()
