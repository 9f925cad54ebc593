"""fast_dynamic_batcher in a FastAPI app. Runs under uvicorn."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fast_dynamic_batcher.dyn_batcher import DynBatcher  # type: ignore[import-not-found]
from fastapi import FastAPI

from benchmarks.http_servers import WAIT, Model
from benchmarks.http_servers.fastapi_app import JOB, add_endpoint

# Each call keeps a thread of the loop's default executor, which has six of them on two cores.
THREADS = 256


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start its process and thread."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    batcher = app.state.batcher = DynBatcher(
        Model, max_batch_size=JOB.max_batch_size, max_delay=WAIT
    )
    yield
    batcher.stop()


async def call(value: Any) -> Any:
    """Wait for the model's answer."""
    return await app.state.batcher.process_batched(value)


app = FastAPI(lifespan=lifespan)
add_endpoint(app, call)
