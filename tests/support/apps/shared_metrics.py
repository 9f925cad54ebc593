"""A server with Prometheus metrics; several, with ports of their own, share one model."""

from fastapi import FastAPI

from fast_batcher import DynBatcher
from fast_batcher.prometheus import instrument, metrics_router

batcher: DynBatcher[None, list[int]] = DynBatcher(
    "models.sharing:Whereabouts",
    name="shared",
    shared="metrics",
    restart_backoff=0.01,
    max_restarts=None,
)
instrument(batcher)
app = FastAPI(lifespan=batcher.lifespan)
app.include_router(metrics_router())


@app.get("/processes")
async def processes() -> list[int]:
    """The host and its worker."""
    return await batcher.process_batched(None)
