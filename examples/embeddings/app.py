"""Sentence embeddings behind FastAPI, batched and one by one. Runs in the API process.

Start it with `uvicorn examples.embeddings.app:app`. An app of your own needs one batcher; the
second one is here to be compared with.
"""

import logging
import os
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from examples.embeddings.model import DIMENSIONS, MiniLM
from fast_batcher import DynBatcher
from fast_batcher.fastapi import (
    ArrayResponse,
    LimitBody,
    combine_lifespans,
    dependency,
    error_responses,
    health_router,
    install_exception_handlers,
    status_router,
)
from fast_batcher.prometheus import instrument, metrics_router
from fast_batcher.ray import RayWorkers

# The model reads 256 tokens and ignores the rest without a word. A text of this length is read to
# its end: 1000 characters of the sentences beside this file are 223 tokens at most.
MAX_CHARACTERS = 1000

# A text of so many characters of four bytes each, every one escaped, and room for the rest.
MAX_BODY_BYTES = 16_384

# Most sentences in a batch; from outside, so that a load test can try several.
MAX_BATCH_SIZE = int(os.environ.get("MAX_BATCH_SIZE", "32"))

# Whether several server processes share one copy of each model: for `uvicorn --workers 4`.
SHARED = os.environ.get("SHARED", "0") == "1"

# Whether the workers are actors of the Ray cluster of this machine: see docs/ray.md.
WORKERS = RayWorkers() if os.environ.get("RAY", "0") == "1" else None

# The same model, the same thread count, one worker each. Only the batching differs.
batched = DynBatcher(
    MiniLM, max_batch_size=MAX_BATCH_SIZE, name="batched", shared=SHARED, workers=WORKERS
)
unbatched = DynBatcher(
    MiniLM,
    max_batch_size=MAX_BATCH_SIZE,
    enabled=False,
    name="unbatched",
    shared=SHARED,
    workers=WORKERS,
)
batchers = (batched, unbatched)

Embedder = DynBatcher[str, bytes]
Batched = Annotated[Embedder, Depends(dependency(batched))]
Unbatched = Annotated[Embedder, Depends(dependency(unbatched))]


def check_unicode(text: str) -> str:
    """JSON can carry half a surrogate pair, which is no text to a tokenizer."""
    text.encode()  # raises a ValueError, which becomes a 422
    return text


class Text(BaseModel):
    """Body of a request."""

    text: Annotated[
        str,
        StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_CHARACTERS),
        AfterValidator(check_unicode),
    ]


class Embedding(BaseModel):
    """Body of a response."""

    embedding: list[float] = Field(
        description="A vector of unit length: the dot product of two is their similarity.",
        min_length=DIMENSIONS,
        max_length=DIMENSIONS,
    )


app = FastAPI(
    title="Sentence embeddings",
    lifespan=combine_lifespans(*(b.lifespan for b in batchers)),
    max_body_size=MAX_BODY_BYTES,
)
install_exception_handlers(app)
app.add_middleware(LimitBody)
app.include_router(health_router(*batchers))

# What an operator looks at: log records, also of the workers; the page `/batchers`; and `/metrics`.
log = logging.StreamHandler()
log.setFormatter(
    logging.Formatter(
        "%(levelname)s %(name)s [%(model)s %(worker)s] %(message)s",
        defaults={"model": "app", "worker": "-"},  # a record of a worker has its own
    )
)
logging.basicConfig(level=logging.INFO, handlers=[log])
app.include_router(status_router(*batchers))
app.include_router(metrics_router())
for batcher in batchers:
    instrument(batcher)


@app.post("/embed", response_model=Embedding, responses=error_responses(503, 504))
async def embed(body: Text, embedder: Batched) -> ArrayResponse:
    """Embed a text, in one batch with the others that are in flight."""
    return ArrayResponse(await embedder.process_batched(body.text))


@app.post("/embed-unbatched", response_model=Embedding, responses=error_responses(503, 504))
async def embed_unbatched(body: Text, embedder: Unbatched) -> ArrayResponse:
    """Embed a text on its own."""
    return ArrayResponse(await embedder.process_batched(body.text))


@app.get("/stats")
async def stats() -> dict[str, dict[str, Any]]:
    """Statistics of each batcher."""
    return {batcher.name: asdict(batcher.stats) for batcher in batchers}
