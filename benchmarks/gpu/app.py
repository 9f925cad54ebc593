"""An encoder behind FastAPI, batched and one by one; token ids as JSON. Runs in the API process.

GPU_BENCHMARK_ENCODER has the keyword arguments of the batchers as JSON.
"""

import json
import os
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel

from fast_batcher import DynBatcher
from fast_batcher.fastapi import combine_lifespans, install_exception_handlers, status_router

MODEL = "benchmarks.gpu.models:EncoderModel"
OPTIONS = json.loads(os.environ["GPU_BENCHMARK_ENCODER"])
batched: DynBatcher[Any, Any] = DynBatcher(MODEL, name="batched", **OPTIONS)
unbatched: DynBatcher[Any, Any] = DynBatcher(MODEL, name="unbatched", enabled=False, **OPTIONS)

app = FastAPI(lifespan=combine_lifespans(batched.lifespan, unbatched.lifespan))
install_exception_handlers(app)
app.include_router(status_router(batched, unbatched))


class Text(BaseModel):
    """Body of a request."""

    tokens: list[int]


class Score(BaseModel):
    """Body of a response."""

    tokens: int
    score: float


async def _ask(batcher: DynBatcher[Any, Any], body: Text) -> Score:
    _, tokens, score = await batcher.process_batched(np.array(body.tokens, np.int64))
    return Score(tokens=tokens, score=score)


@app.post("/encode")
async def encode(body: Text) -> Score:
    """Encode a text, in one batch with the others that are in flight."""
    return await _ask(batched, body)


@app.post("/encode-unbatched")
async def encode_unbatched(body: Text) -> Score:
    """Encode a text on its own."""
    return await _ask(unbatched, body)
