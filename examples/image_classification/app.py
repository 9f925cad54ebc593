"""Image classification behind FastAPI: an image's bytes in, its class out. Runs in the API process.

Start it with `uvicorn examples.image_classification.app:app`. Settings are environment variables;
see the README beside this file.
"""

import os
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from examples.image_classification.prediction import NotAnImageError, Prediction
from fast_batcher import DynBatcher
from fast_batcher.fastapi import (
    dependency,
    error_responses,
    health_router,
    install_exception_handlers,
)

# A photo of 50 megapixels is about as large.
MAX_BYTES = 20 * 2**20

batcher: DynBatcher[bytes, Prediction] = DynBatcher(
    "examples.image_classification.model:ImageClassifier",
    max_batch_size=int(os.environ.get("MAX_BATCH_SIZE", "16")),
    model_kwargs={
        "arch": os.environ.get("RESNET_ARCH", "resnet50"),
        "weights": os.environ.get("RESNET_WEIGHTS"),
        "labels": os.environ.get("RESNET_LABELS"),
        "dtype": os.environ.get("RESNET_DTYPE", "float32"),
    },
)

app = FastAPI(title="Image classification", lifespan=batcher.lifespan)
install_exception_handlers(app)
app.include_router(health_router(batcher))


@app.exception_handler(NotAnImageError)
async def refuse(_: Request, error: NotAnImageError) -> JSONResponse:
    """The model returned it for one request of a batch: a mistake of that client."""
    return JSONResponse({"detail": str(error), "code": "not_an_image"}, 422)


async def read_body(request: Request) -> bytes:
    """The body as it is, read no further than it may be long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"an image may have {MAX_BYTES} bytes")
    return bytes(body)


IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": {"type": "string", "format": "binary"}}
            for kind in ("image/jpeg", "image/png")
        },
    }
}


REFUSALS: dict[int | str, dict[str, Any]] = {
    413: {"description": "The image has too many bytes."},
    422: {"description": "The bytes are no JPEG or PNG image that can be read."},
}


@app.post("/classify", responses=error_responses(503, 504) | REFUSALS, openapi_extra=IMAGE_BODY)
async def classify(
    data: Annotated[bytes, Depends(read_body)],
    classifier: Annotated[DynBatcher[bytes, Prediction], Depends(dependency(batcher))],
) -> Prediction:
    """Classify an image, in one batch with the others that are in flight."""
    return await classifier.process_batched(data)


@app.get("/stats")
async def stats() -> dict[str, dict[str, Any]]:
    """What the batcher has done so far."""
    return {batcher.name: asdict(batcher.stats)}
