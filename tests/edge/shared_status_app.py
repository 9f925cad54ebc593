"""A server with a status page that shares a host with other servers on ports of their own."""

import os

from fastapi import FastAPI

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.fastapi import install_exception_handlers, status_router


class Works(InferenceModel[str, str]):
    """Echoes; "raise" raises, and "die" ends the worker."""

    def infer(self, inputs: list[str]) -> list[str]:
        if "die" in inputs:
            os._exit(3)
        if "raise" in inputs:
            raise ValueError("secret words")
        return inputs


batcher: DynBatcher[str, str] = DynBatcher(
    Works, shared="status", idempotent=False, restart_backoff=0.01, num_workers=2
)
app = FastAPI(lifespan=batcher.lifespan)
install_exception_handlers(app)
app.include_router(status_router(batcher, prefix="/inside"))


@app.post("/call/{value}")
async def call(value: str) -> str:
    return await batcher.process_batched(value)
