"""Two models in a chain behind FastAPI: a picture in, its objects out. Runs in the API process.

The detector finds the objects, the classifier names them; another endpoint uses the classifier
alone. Start it with `uvicorn examples.pipeline.app:app`. Settings are environment variables; see
the README beside this file.
"""

import os
from dataclasses import asdict
from time import monotonic
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from examples.pipeline.classifier import Classifier
from examples.pipeline.detector import Box, Detector
from examples.pipeline.pictures import NotAPictureError, Picture, decode
from fast_batcher import DynBatcher
from fast_batcher.fastapi import (
    cancel_on_disconnect,
    combine_lifespans,
    dependency,
    error_responses,
    health_router,
    install_exception_handlers,
    read_body,
    request_timeout,
    status_router,
)

# Seconds that a request may take in both models together; a client can ask for fewer.
BUDGET = float(os.environ.get("BUDGET", "5"))

# Each model has batches, a queue and workers of its own.
detector = DynBatcher(
    Detector,
    max_batch_size=8,
    num_workers=int(os.environ.get("DETECTOR_WORKERS", "1")),
    timeout=BUDGET,
    name="detector",
)
classifier = DynBatcher(
    Classifier,
    max_batch_size=64,
    num_workers=int(os.environ.get("CLASSIFIER_WORKERS", "1")),
    timeout=BUDGET,
    name="classifier",
)
batchers = (detector, classifier)

app = FastAPI(
    title="Objects of a picture",
    lifespan=combine_lifespans(*(batcher.lifespan for batcher in batchers)),
)
install_exception_handlers(app)
app.include_router(health_router(*batchers))
app.include_router(status_router(*batchers))

# Variables, so that a test can replace the batchers.
get_detector = dependency(detector)
get_classifier = dependency(classifier)


async def read_file(request: Request) -> bytes:
    """Return the body as it is."""
    return await read_body(request)


def read_picture(file: Annotated[bytes, Depends(read_file)]) -> Picture:
    """Decode the body. FastAPI runs a `def` in a thread: decoding does not block the event loop."""
    try:
        return decode(file)
    except NotAPictureError as error:
        raise HTTPException(422, str(error)) from None


def remaining(deadline: float) -> float:
    """Return the seconds left, as a `timeout`: above 0 even if the deadline has passed."""
    return max(deadline - monotonic(), 1e-9)


class Found(BaseModel):
    """One object of a picture."""

    box: Box = Field(description="In pixels: left, top, right, bottom.")
    label: str


class Shape(BaseModel):
    """The label of a picture that shows one object."""

    label: str


Body = Annotated[Picture, Depends(read_picture)]
Timeout = Annotated[float | None, Depends(request_timeout(detector))]
Detecting = Annotated[DynBatcher[Picture, list[Box]], Depends(get_detector)]
Classifying = Annotated[DynBatcher[Picture, str], Depends(get_classifier)]

# The same for both endpoints. The body is read before anything waits for the disconnect.
picture_endpoint: dict[str, Any] = {
    "dependencies": [Depends(read_picture), cancel_on_disconnect],
    "responses": error_responses(503, 504)
    | {413: {"description": "The file is too large."}, 422: {"description": "Not a picture."}},
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}}
                for kind in ("image/jpeg", "image/png")
            },
        }
    },
}


@app.post("/objects", **picture_endpoint)
async def find_objects(
    picture: Body, timeout: Timeout, detector: Detecting, classifier: Classifying
) -> list[Found]:
    """Find the objects of a JPEG or PNG file, and name their shapes."""
    # One deadline for the whole chain: each model gets what the ones before it have left.
    deadline = monotonic() + (timeout or BUDGET)
    boxes = await detector.process_batched(picture, timeout=remaining(deadline))
    crops = [picture[box.top : box.bottom, box.left : box.right] for box in boxes]
    labels = await classifier.process_many(crops, timeout=remaining(deadline))
    return [Found(box=box, label=label) for box, label in zip(boxes, labels, strict=True)]


@app.post("/classify", **picture_endpoint)
async def classify(picture: Body, timeout: Timeout, classifier: Classifying) -> Shape:
    """Name the shape of the one object that a JPEG or PNG file shows."""
    return Shape(label=await classifier.process_batched(picture, timeout=timeout))


@app.get("/stats")
async def stats() -> dict[str, dict[str, Any]]:
    """Return what each batcher has done so far."""
    return {batcher.name: asdict(batcher.stats) for batcher in batchers}
