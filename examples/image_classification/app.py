"""Image classification behind FastAPI: an image in, its class out. Runs in the API process.

An image comes as the bytes of a file, or as the array that the network is given.

Start it with `uvicorn examples.image_classification.app:app`. Settings are environment variables;
see the README beside this file.
"""

import os
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from examples.image_classification.prediction import ARRAY_SHAPE, NotAnImageError, Prediction
from fast_batcher import DynBatcher
from fast_batcher.fastapi import (
    dependency,
    error_responses,
    health_router,
    install_exception_handlers,
    read_array,
    read_body,
    status_router,
)
from fast_batcher.prometheus import instrument, metrics_router

# A photo of 50 megapixels is about as large.
MAX_BYTES = 20 * 2**20

# Bytes of a file, or an array of ARRAY_SHAPE; only the endpoint for arrays loads NumPy.
Classifier = DynBatcher[Any, Prediction]

batcher: Classifier = DynBatcher(
    "examples.image_classification.model:ImageClassifier",
    max_batch_size=int(os.environ.get("MAX_BATCH_SIZE", "16")),
    # A worker for each GPU, or one on the CPU.
    devices="auto",
    # Files have to be decoded and arrays have not: a batch holds one of the two.
    group_by=type,
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
app.include_router(status_router(batcher))
app.include_router(metrics_router())
instrument(batcher)


@app.exception_handler(NotAnImageError)
async def refuse(_: Request, error: NotAnImageError) -> JSONResponse:
    """The model raised it for one request of a batch: a mistake of that client."""
    return JSONResponse({"detail": str(error), "code": "not_an_image"}, 422)


async def read_image(request: Request) -> bytes:
    """The body as it is."""
    return await read_body(request, max_bytes=MAX_BYTES)


async def read_input(request: Request) -> Any:
    """The body as an array, least significant bytes first, where the worker sees it."""
    return await read_array(request, ARRAY_SHAPE, "<f4", into=batcher)


def describe_body(*kinds: str) -> dict[str, Any]:
    """OpenAPI description of a body that FastAPI does not read."""
    content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in kinds}
    return {"requestBody": {"required": True, "content": content}}


REFUSALS: dict[int | str, dict[str, Any]] = {
    413: {"description": "The body has too many bytes."},
    422: {
        "description": "The bytes are no image that can be read, or not as many as an array has."
    },
}
RESPONSES = error_responses(503, 504) | REFUSALS
Batcher = Annotated[Classifier, Depends(dependency(batcher))]


@app.post("/classify", responses=RESPONSES, openapi_extra=describe_body("image/jpeg", "image/png"))
async def classify(image: Annotated[bytes, Depends(read_image)], classifier: Batcher) -> Prediction:
    """Classify a JPEG or PNG file, in one batch with the others that are in flight."""
    return await classifier.process_batched(image)


@app.post(
    "/classify-array",
    responses=RESPONSES,
    openapi_extra=describe_body("application/octet-stream"),
)
async def classify_array(
    array: Annotated[Any, Depends(read_input)], classifier: Batcher
) -> Prediction:
    """Classify an image that is scaled, cut and normalised: float32 numbers, channels first."""
    return await classifier.process_batched(array)


@app.get("/stats")
async def stats() -> dict[str, dict[str, Any]]:
    """Statistics of the batcher."""
    return {batcher.name: asdict(batcher.stats)}
