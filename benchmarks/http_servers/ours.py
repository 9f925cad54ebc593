"""fast_batcher in a FastAPI app, as its documentation has it. Runs under uvicorn.

Variants: ""; "untuned" leaves the garbage collector alone; "json" has a `JsonEndpoint`, as has
"json, quiet", without FastAPI's telemetry; "shared" is for several processes of one server.
"""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.routing import Route

import fast_batcher.fastapi
from benchmarks import http_servers
from benchmarks.http_servers.fastapi_app import JOB, TELEMETRY, Text, add_endpoint
from benchmarks.pictures import decode
from fast_batcher import DynBatcher, InferenceModel


class Model(http_servers.Model, InferenceModel[Any, Any]):
    """The model that all servers have."""


class Pictures(Model):
    """The model for JPEG files, with a stage that decodes them."""

    def prepare(self, value: bytes) -> Any:
        """Decode a file."""
        return decode(value)


async def read_pixels(request: Request) -> Any:
    """Read an array into shared memory, or a file as it is."""
    if JOB.is_picture:
        return await request.body()
    return await fast_batcher.fastapi.read_array(request, JOB.shape, "<f4", into=batcher)


batcher: DynBatcher[Any, Any] = DynBatcher(
    Pictures if JOB.is_picture else Model,
    JOB.max_batch_size,
    max_latency=JOB.limit,
    shared=JOB.variant == "shared",
)
lifespan = partial(batcher.lifespan, freeze_gc=JOB.variant != "untuned")
app = FastAPI(lifespan=lifespan, **TELEMETRY)
fast_batcher.fastapi.install_exception_handlers(app)
if JOB.variant.startswith("json") and not JOB.shape:

    async def predict(body: Text) -> Text:
        """Answer one text."""
        return Text(text=await batcher.process_batched(body.text))

    endpoint = fast_batcher.fastapi.JsonEndpoint(predict)
    app.router.routes.insert(0, Route("/predict", endpoint, methods=["POST"]))
else:
    add_endpoint(app, batcher.process_batched, read_pixels)
