"""An app with every part of `fast_batcher.fastapi`; tells in the log which processes serve it."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI

from apps.models import Gated, Whereabouts
from fast_batcher import DynBatcher
from fast_batcher.fastapi import (
    combine_lifespans,
    dependency,
    error_responses,
    health_router,
    install_exception_handlers,
)

# The server shows what comes under this name.
logger = logging.getLogger("uvicorn.error")
whereabouts = DynBatcher(Whereabouts)
gated = DynBatcher(Gated)
get_gated = dependency(gated)


@asynccontextmanager
async def announce(_: FastAPI) -> AsyncIterator[None]:
    parent, worker = await whereabouts.process_batched("?")
    logger.info("server %s has worker %s of %s", os.getpid(), worker, parent)
    yield


app = FastAPI(
    lifespan=combine_lifespans(whereabouts.lifespan, gated.lifespan, announce),
    responses=error_responses(),
)
install_exception_handlers(app)
app.include_router(health_router(whereabouts, gated))


@app.get("/pass/{gate}")
async def pass_gate(gate: int, batcher: Annotated[DynBatcher[int, int], Depends(get_gated)]) -> int:
    return await batcher.process_batched(gate)
