"""Endpoints that read their bodies themselves."""

import asyncio
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException

from apps.models import Gated
from fast_batcher import DynBatcher
from fast_batcher.fastapi import (
    cancel_on_disconnect,
    install_exception_handlers,
    read_array,
    read_body,
)

MAX_BYTES = 1_000_000
SHAPE = (3, 100, 200)

batcher = DynBatcher(Gated)
app = FastAPI(lifespan=batcher.lifespan)
install_exception_handlers(app)
# Statuses of what was refused, in their order.
refused: asyncio.Queue[int] = asyncio.Queue()


async def read(request: Request) -> bytes:
    try:
        return await read_body(request, max_bytes=MAX_BYTES)
    except HTTPException as error:
        refused.put_nowait(error.status_code)
        raise


async def read_pixels(request: Request) -> Any:
    try:
        return await read_array(request, SHAPE, "<f4", max_bytes=MAX_BYTES)
    except HTTPException as error:
        refused.put_nowait(error.status_code)
        raise


@app.post("/bytes")
async def count_bytes(body: Annotated[bytes, Depends(read)]) -> int:
    return len(body)


@app.post("/array")
async def sum_up(pixels: Annotated[Any, Depends(read_pixels)]) -> float:
    return float(np.sum(pixels, dtype=np.float64))


@app.post("/pass", dependencies=[Depends(read), cancel_on_disconnect])
async def pass_gate(body: Annotated[bytes, Depends(read)]) -> int:
    return await batcher.process_batched(int(body))


@app.get("/refused")
async def next_refused() -> int:
    return await refused.get()


@app.get("/stats")
async def stats() -> dict[str, int]:
    return {name: getattr(batcher.stats, name) for name in ("running", "cancelled", "completed")}
