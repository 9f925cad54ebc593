"""fast_batcher: a worker process, all settings at their defaults but the batch size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import fast_batcher
from benchmarks import models
from benchmarks.scenarios import Load, Process
from fast_batcher import DynBatcher, InferenceModel

DISTRIBUTIONS = ["fast_batcher"]


class ArrayStacked(models.ArrayStacked):
    """Stacks with the library's own function."""

    def stack(self, inputs: list[Any]) -> Any:
        """Make one array of them, mostly without a copy."""
        return fast_batcher.stack(inputs)


MODELS = models.MODELS | {"ArrayStacked": ArrayStacked}


class Model(InferenceModel[Any, Any]):
    """One of the models, named."""

    def __init__(self, name: str) -> None:
        self._model = MODELS[name]()

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Answer what the model answers."""
        return self._model.infer(inputs)


def make_batcher(load: Load, **settings: Any) -> DynBatcher[Any, Any]:
    """Make a batcher for a load, with these settings."""
    return DynBatcher(
        Model, max_batch_size=load.max_batch_size, model_args=(load.model,), **settings
    )


@asynccontextmanager
async def opened(load: Load, **settings: Any) -> AsyncIterator[Process]:
    """Start the worker and wait until it is ready.

    Args:
        load: Of the model.
        settings: Of the batcher.
    """
    async with make_batcher(load, **settings) as batcher:
        yield batcher.process_batched
