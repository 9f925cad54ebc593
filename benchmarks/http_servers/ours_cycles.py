"""fast_batcher in a FastAPI app that leaves garbage in cycles. Runs under uvicorn.

Variants: "untuned" leaves the garbage collector alone; a number is the threshold of the youngest
generation, with everything frozen that is alive after the start.
"""

import asyncio
import gc
from collections.abc import AsyncIterator

from fastapi import Depends, HTTPException
from pydantic import BaseModel

from benchmarks.http_servers.fastapi_app import JOB
from benchmarks.http_servers.ours import app
from fast_batcher.fastapi import cancel_on_disconnect

if JOB.variant != "untuned":
    gc.set_threshold(int(JOB.variant), *gc.get_threshold()[1:])


class Large(BaseModel):
    """A body that a client sends before it leaves."""

    text: str


async def translate_errors() -> AsyncIterator[None]:
    """Answer an error of the endpoint with 400.

    The exit stack in which FastAPI runs this keeps the new error in a reference cycle, and with it
    the request and its body.
    """
    try:
        yield
    except ValueError as error:
        raise HTTPException(400) from error


@app.post("/cycle", dependencies=[Depends(translate_errors)])
async def leave_cycle(body: Large) -> int:
    """Leave the body in a reference cycle."""
    raise ValueError(len(body.text))


@app.post("/wait", dependencies=[cancel_on_disconnect])
async def wait_for_ever(body: Large) -> int:
    """Wait until the client goes away."""
    await asyncio.get_running_loop().create_future()
    return len(body.text)
