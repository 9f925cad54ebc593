"""fast_batcher's thread decorator: the model in a thread of the same process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process
from fast_batcher import dynamically

DISTRIBUTIONS = ["fast_batcher"]


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Decorate the model, with batches as large as the load's."""
    infer = MODELS[load.model]().infer
    with dynamically(batch_size=load.max_batch_size)(infer) as process:
        yield process.acall
