"""A server with Prometheus metrics, whose model dies for some inputs and whose callers leave."""

import asyncio
import os
import signal
from contextlib import suppress

from fastapi import FastAPI, Response

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.fastapi import install_exception_handlers
from fast_batcher.prometheus import instrument, metrics_router


class Fragile(InferenceModel[int, int]):
    """Doubles numbers; a negative one kills the worker."""

    def infer(self, inputs: list[int]) -> list[int]:
        if min(inputs) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [2 * number for number in inputs]


batcher: DynBatcher[int, int] = DynBatcher(
    Fragile, max_batch_size=8, num_workers=2, max_restarts=None, restart_backoff=0.01
)
instrument(batcher)
app = FastAPI(lifespan=batcher.lifespan)
app.include_router(metrics_router())
install_exception_handlers(app)


@app.get("/double/{number}")
async def double(number: int, timeout: float | None = None) -> int:
    return await batcher.process_batched(number, timeout=timeout)


@app.get("/leave/{number}", status_code=204)
async def leave(number: int) -> Response:
    """Call the model, and cancel the call before it can have been answered."""
    call = asyncio.create_task(batcher.process_batched(number))
    await asyncio.sleep(0)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    return Response(status_code=204)
