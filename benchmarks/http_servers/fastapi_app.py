"""The endpoint that the servers on FastAPI have in common."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel

from benchmarks.http_servers import Job

JOB = Job.read()
# FastAPI looks for providers of OpenTelemetry at each request, unless a variant ends with "quiet".
OFF = {"tracing": False, "metrics": False, "logs": False}
TELEMETRY: Any = {"telemetry": OFF} if JOB.variant.endswith("quiet") else {}


class Text(BaseModel):
    """A request and its answer."""

    text: str


async def read_pixels(request: Request) -> Any:
    """Read the body as an array."""
    import numpy  # only where it is needed: it takes time and memory

    return numpy.frombuffer(await request.body(), "<f4").reshape(JOB.shape)


def add_endpoint(
    app: FastAPI,
    call: Callable[[Any], Awaitable[Any]],
    read: Callable[[Request], Awaitable[Any]] = read_pixels,
) -> None:
    """Let `call` answer the requests; `read` reads arrays."""
    if JOB.shape:

        @app.post("/predict")
        async def predict_array(pixels: Annotated[Any, Depends(read)]) -> float:
            return float(await call(pixels))

    else:

        @app.post("/predict")
        async def predict(text: Text) -> Text:
            return Text(text=await call(text.text))
