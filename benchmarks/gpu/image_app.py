"""A ResNet behind FastAPI, whose bodies are the numbers of an image. Runs in the API process.

GPU_BENCHMARK_IMAGES has the options of the batcher as JSON.
"""

import json
import os
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request

from examples.image_classification.prediction import ARRAY_SHAPE
from fast_batcher import DynBatcher
from fast_batcher.fastapi import install_exception_handlers, read_array, status_router

MODEL = "benchmarks.gpu.models:Classifier"
batcher: DynBatcher[Any, tuple[int, float]] = DynBatcher(
    MODEL, **json.loads(os.environ["GPU_BENCHMARK_IMAGES"])
)

app = FastAPI(lifespan=batcher.lifespan)
install_exception_handlers(app)
app.include_router(status_router(batcher))


async def read_image(request: Request) -> Any:
    """Read the body into memory that the worker sees."""
    return await read_array(request, ARRAY_SHAPE, "<f4", into=batcher)


@app.post("/classify")
async def classify(image: Annotated[Any, Depends(read_image)]) -> int:
    """Classify an image, in one batch with the others that are in flight."""
    found, _ = await batcher.process_batched(image)
    return found
