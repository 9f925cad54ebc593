"""batched.aio: batches on the event loop, the model in the same process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batched import aio  # type: ignore[import-not-found]

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS = ["batched"]


@asynccontextmanager
async def opened(
    load: Load, *, timeout_ms: float | None = None, on_the_loop: bool = False
) -> AsyncIterator[Process]:
    """Decorate the model; its task starts with the first call and ends with the loop.

    With a `timeout_ms`, batches are as large as the load's too. Of 0, 0.1 and 1 ms, 0.1 costs the
    least CPU at 64 callers; yet uvloop rounds it to nothing, and then an idle batcher spins.
    `on_the_loop` saves the thread and stops the loop while the model runs: for a no-op model only.
    """
    infer = MODELS[load.model]().infer

    async def infer_on_the_loop(inputs: list[str]) -> list[str]:
        return infer(inputs)

    settings = {}
    if timeout_ms is not None:
        settings = {"batch_size": load.max_batch_size, "timeout_ms": timeout_ms}
    yield aio.dynamically(infer_on_the_loop if on_the_loop else infer, **settings)
