"""Dynamic batching of model inference inside your own FastAPI app.

Subclass `InferenceModel`, give the class to a `DynBatcher`, open it in the app's lifespan, and
`await batcher.process_batched(x)` in an endpoint.
"""

import logging
from typing import TYPE_CHECKING, Any

from fast_batcher._arrays.collation import Collation
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    CollationError,
    ConfigurationError,
    DeadlineExceededError,
    DynamicBatchIndexError,
    InferenceError,
    NotReadyError,
    OutputMismatchError,
    PoisonRequestError,
    QueueFullError,
    RequestTooLargeError,
    TransportError,
    UnsendableValueError,
    WorkerError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.model import InferenceModel
from fast_batcher.stats import BatcherStats

if TYPE_CHECKING:
    from fast_batcher.batcher import DynBatcher

__version__ = "0.1.0"

__all__ = [
    "BatcherClosedError",
    "BatcherError",
    "BatcherStats",
    "Collation",
    "CollationError",
    "ConfigurationError",
    "DeadlineExceededError",
    "DynBatcher",
    "DynamicBatchIndexError",
    "InferenceError",
    "InferenceModel",
    "NotReadyError",
    "OutputMismatchError",
    "PoisonRequestError",
    "QueueFullError",
    "RequestTooLargeError",
    "TransportError",
    "UnsendableValueError",
    "WorkerError",
    "WorkerLostError",
    "WorkerStartupError",
]

# A library leaves it to the program where its log goes.
logging.getLogger("fast_batcher").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a worker imports this package for its model and needs no event loop.
    if name == "DynBatcher":
        from fast_batcher.batcher import DynBatcher

        globals()[name] = DynBatcher
        return DynBatcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
