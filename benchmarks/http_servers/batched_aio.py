"""batched.aio in a FastAPI app: the model in a thread of the app. Runs under uvicorn."""

from batched import aio  # type: ignore[import-not-found]
from fastapi import FastAPI

from benchmarks.http_servers import WAIT, Model
from benchmarks.http_servers.fastapi_app import JOB, add_endpoint

app = FastAPI()
infer = aio.dynamically(Model().infer, batch_size=JOB.max_batch_size, timeout_ms=1000 * WAIT)
add_endpoint(app, infer)
