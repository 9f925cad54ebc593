"""An app with failures, for the log of a server that was started without options."""

import os

from fastapi import FastAPI

from apps.models import BreaksOnLoad
from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.fastapi import combine_lifespans, health_router, install_exception_handlers


class Fails(InferenceModel[str, str]):
    def infer(self, inputs: list[str]) -> list[str]:
        if "die" in inputs:
            os._exit(3)
        if "raise" in inputs:
            raise ValueError("the words of the model")
        return inputs


failing = DynBatcher(Fails, idempotent=False, name="failing")
broken = DynBatcher(BreaksOnLoad, name="broken")
app = FastAPI(lifespan=combine_lifespans(failing.lifespan, broken.lifespan(wait_ready=False)))
install_exception_handlers(app)
app.include_router(health_router(failing, broken))


@app.get("/failing/{what}")
async def fail(what: str) -> str:
    return await failing.process_batched(what)


@app.get("/broken")
async def ask() -> str:
    return await broken.process_batched("anything")
