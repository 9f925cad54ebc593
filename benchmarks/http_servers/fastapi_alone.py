"""FastAPI without a batcher, which the others are compared with. Runs under uvicorn.

Variants: "" awaits nothing; "future" awaits a future that its own loop settles; "tuned" does so
with the garbage collector as ours sets it; "thread" calls the model in a thread; "quiet" is without
FastAPI's telemetry.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from benchmarks.http_servers import Model
from benchmarks.http_servers.fastapi_app import JOB, TELEMETRY, add_endpoint
from fast_batcher import _process

model = Model()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Freeze what is alive, if that is the variant."""
    if JOB.variant == "tuned":
        _process.freeze_for_good()
    yield


async def call(value: Any) -> Any:
    """Answer what the model answers."""
    if JOB.variant == "thread":
        return (await run_in_threadpool(model.infer, [value]))[0]
    if JOB.variant in ("future", "tuned"):
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future
    return model.infer([value])[0]


app = FastAPI(lifespan=lifespan, **TELEMETRY)
add_endpoint(app, call)
