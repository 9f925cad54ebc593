"""An app whose readiness ends with SIGTERM; tells in the log when it does."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from fastapi import FastAPI

from apps.models import Gated
from fast_batcher import DynBatcher
from fast_batcher.fastapi import combine_lifespans, health_router, install_exception_handlers

batcher = DynBatcher(Gated)


@asynccontextmanager
async def show_moves(_: FastAPI) -> AsyncIterator[None]:
    moves = logging.getLogger("fast_batcher")
    moves.addHandler(logging.StreamHandler())
    moves.setLevel(logging.INFO)
    yield


own = batcher.lifespan(drain_on_sigterm=True, lame_duck=float(os.environ.get("LAME_DUCK", "0")))
app = FastAPI(lifespan=combine_lifespans(show_moves, own))
install_exception_handlers(app)
app.include_router(health_router(batcher))


@app.get("/pass/{gate}")
async def pass_gate(gate: int) -> int:
    return await batcher.process_batched(gate)


@app.get("/readiness-after")
async def readiness_after() -> int:
    """The status of `/readyz` once it is not ready, for one who came before.

    Uvicorn closes the connections that have no request under way a moment after the signal.
    """
    logging.getLogger("fast_batcher").info("asked")
    while batcher.is_ready:
        await asyncio.sleep(0)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return (await client.get("/readyz")).status_code
