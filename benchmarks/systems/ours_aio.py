"""fast_batcher's aio decorator: the model in the same process, in a thread or on the event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process
from fast_batcher import aio

DISTRIBUTIONS = ["fast_batcher"]


@asynccontextmanager
async def opened(load: Load, *, on_the_loop: bool = False) -> AsyncIterator[Process]:
    """Decorate the model, with batches as large as the load's.

    `on_the_loop` saves the thread and stops the loop while the model runs: for a no-op model only.
    """
    infer = MODELS[load.model]().infer

    async def infer_on_the_loop(inputs: list[str]) -> list[str]:
        return infer(inputs)

    function = infer_on_the_loop if on_the_loop else infer
    async with aio.dynamically(batch_size=load.max_batch_size)(function) as process:
        yield process
