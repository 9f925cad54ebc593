"""The app of `examples/pipeline` with models that wait at a gate, and flat counts."""

import os

from fastapi import FastAPI
from models.pipeline import HeldClassifier, HeldDetector

from examples.pipeline import app as example
from fast_batcher import DynBatcher
from fast_batcher.fastapi import combine_lifespans, dependency

GATE = (os.environ["GATE"],)

detector = DynBatcher(HeldDetector, model_args=GATE)
classifier = DynBatcher(HeldClassifier, model_args=GATE)
example.app.dependency_overrides = {
    example.get_detector: dependency(detector),
    example.get_classifier: dependency(classifier),
}

# The example's own batchers stay closed: the lifespan of a mounted app does not run.
app = FastAPI(lifespan=combine_lifespans(detector.lifespan, classifier.lifespan))


@app.get("/stats")
async def stats() -> dict[str, int]:
    return {
        f"{name}_{count}": getattr(batcher.stats, count)
        for name, batcher in (("detector", detector), ("classifier", classifier))
        for count in ("submitted", "waiting", "running", "cancelled", "expired", "completed")
    }


app.mount("/", example.app)
