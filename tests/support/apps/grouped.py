"""An app that tells how many requests its batcher has accepted."""

from fastapi import FastAPI

from apps.models import Gated
from fast_batcher import DynBatcher

batcher = DynBatcher(Gated)
app = FastAPI(lifespan=batcher.lifespan)


@app.get("/pass/{gate}")
async def pass_gate(gate: int) -> int:
    return await batcher.process_batched(gate)


@app.get("/accepted")
async def accepted() -> int:
    return batcher.stats.submitted
