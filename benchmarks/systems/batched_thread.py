"""batched: batches in a thread of the same process, which also runs the model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import batched  # type: ignore[import-not-found]

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS = ["batched"]


@asynccontextmanager
async def opened(load: Load, *, timeout_ms: float | None = None) -> AsyncIterator[Process]:
    """Decorate the model; its thread starts with the first call.

    With a `timeout_ms`, batches are as large as the load's too.
    """
    settings = {}
    if timeout_ms is not None:
        settings = {"batch_size": load.max_batch_size, "timeout_ms": timeout_ms}
    processor = batched.dynamically(MODELS[load.model]().infer, **settings)
    yield processor.acall
    processor.shutdown()
