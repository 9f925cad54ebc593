"""BentoML's dispatcher, which is its adaptive batching, without its server around it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from bentoml._internal.marshal.dispatcher import CorkDispatcher  # type: ignore[import-not-found]

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS = ["bentoml"]
# What `@bentoml.api(batchable=True)` sets.
DEFAULT_BATCH_SIZE = 100
DEFAULT_LATENCY_MS = 60_000


def _refuse() -> NoReturn:
    raise RuntimeError("process is overloaded")


@asynccontextmanager
async def opened(load: Load, *, max_latency_ms: int | None = None) -> AsyncIterator[Process]:
    """Make what its server makes for each batchable method.

    With a `max_latency_ms`, batches are as large as the load's too; it refuses what would take
    longer.
    """
    infer = MODELS[load.model]().infer
    dispatcher = CorkDispatcher(
        max_latency_in_ms=max_latency_ms or DEFAULT_LATENCY_MS,
        max_batch_size=load.max_batch_size if max_latency_ms else DEFAULT_BATCH_SIZE,
        fallback=_refuse,
        get_batch_size=lambda _: 1,
    )

    def call(inputs: Any) -> list[Any]:
        return infer(list(inputs))

    yield dispatcher(call)
    dispatcher.shutdown()
