"""A server with Prometheus metrics and a cache, whose processes share one model."""

import os

from fastapi import FastAPI

from fast_batcher import DynBatcher
from fast_batcher.caching import LRUCache
from fast_batcher.prometheus import instrument, metrics_router

batcher: DynBatcher[int, int] = DynBatcher(
    "models.base:Echo", name="cached", cache=LRUCache(9), shared=True
)
instrument(batcher)
app = FastAPI(lifespan=batcher.lifespan)
app.include_router(metrics_router())


@app.get("/echo/{number}")
async def echo(number: int) -> int:
    """Ask three times at once, and return the process."""
    assert await batcher.process_many([number] * 3) == [number] * 3
    return os.getpid()
