"""An app that limits the bodies it reads, in bytes and in time."""

from fastapi import FastAPI
from pydantic import BaseModel

from apps.models import Echo
from fast_batcher import DynBatcher
from fast_batcher.fastapi import LimitBody, install_exception_handlers

batcher = DynBatcher(Echo)
app = FastAPI(lifespan=batcher.lifespan, max_body_size=100_000)
app.add_middleware(LimitBody, timeout=5.0)
install_exception_handlers(app)


class Body(BaseModel):
    """A text to be measured."""

    text: str


@app.post("/length")
async def length(body: Body) -> int:
    return len(await batcher.process_batched(body.text))
