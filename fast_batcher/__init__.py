"""Dynamic batching of model inference inside your own FastAPI app.

Subclass `InferenceModel`, give the class to a `DynBatcher`, open it in the app's lifespan, and
`await batcher.process_batched(x)` in an endpoint.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fast_batcher import errors
from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.stacking import stack
from fast_batcher._version import __version__ as __version__
from fast_batcher.errors import *  # noqa: F403  the names of its `__all__`
from fast_batcher.model import InferenceModel, batchable
from fast_batcher.stats import BatcherStats

if TYPE_CHECKING:
    from fast_batcher import aio, inference
    from fast_batcher._opening.sessions import BatchSession
    from fast_batcher._opening.streams import Stream
    from fast_batcher.batcher import DynBatcher
    from fast_batcher.dynamic import dynamically
    from fast_batcher.sessions import SessionModel
    from fast_batcher.stepped import Done, Grow, SteppedModel, StreamedModel

__all__ = [
    "BatchSession",
    "BatcherStats",
    "Collation",
    "Done",
    "DynBatcher",
    "Grow",
    "InferenceModel",
    "SessionModel",
    "SteppedModel",
    "Stream",
    "StreamedModel",
    "aio",
    "batchable",
    "dynamically",
    "inference",
    "stack",
]
__all__ += errors.__all__

# Modules of names that are imported on first access: a worker imports this package for its model,
# and needs no event loop.
_LAZY = {
    "BatchSession": "fast_batcher._opening.sessions",
    "Done": "fast_batcher.stepped",
    "DynBatcher": "fast_batcher.batcher",
    "Grow": "fast_batcher.stepped",
    "SessionModel": "fast_batcher.sessions",
    "SteppedModel": "fast_batcher.stepped",
    "Stream": "fast_batcher._opening.streams",
    "StreamedModel": "fast_batcher.stepped",
    "aio": "fast_batcher.aio",
    "dynamically": "fast_batcher.dynamic",
    "inference": "fast_batcher.inference",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
