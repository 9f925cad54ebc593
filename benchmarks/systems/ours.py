"""fast_batcher: a worker process, all settings at their defaults but the batch size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import fast_batcher
from benchmarks import models
from benchmarks.scenarios import Load, Process
from fast_batcher import DynBatcher, InferenceModel

DISTRIBUTIONS = ["fast_batcher"]


class NoOp(models.NoOp, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class Flat5ms(models.Flat5ms, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class Linear5ms(models.Linear5ms, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class Gpu(models.Gpu, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class Mid(models.Mid, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class ArrayLabel(models.ArrayLabel, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class ArrayRead(models.ArrayRead, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


class ArrayStacked(models.ArrayStacked, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""

    def stack(self, inputs: list[Any]) -> Any:
        """By the library's own function."""
        return fast_batcher.stack(inputs)


class ArrayEcho(models.ArrayEcho, InferenceModel[Any, Any]):
    """See `benchmarks.models`."""


MODELS: dict[str, type[InferenceModel[Any, Any]]] = {
    model.__name__: model
    for model in (
        *(NoOp, Flat5ms, Linear5ms, Gpu, Mid),
        *(ArrayLabel, ArrayRead, ArrayStacked, ArrayEcho),
    )
}


@asynccontextmanager
async def opened(
    load: Load, *, none_ahead: bool = False, **settings: Any
) -> AsyncIterator[Process]:
    """Start the worker and wait until it is ready.

    Args:
        load: Of the model.
        none_ahead: Whether even a full batch waits until the worker is free, as others do.
        settings: Of the batcher.
    """
    batcher = DynBatcher(MODELS[load.model], max_batch_size=load.max_batch_size, **settings)
    if none_ahead:
        scheduler = batcher._scheduler  # noqa: SLF001  no setting: nobody gains
        limits = replace(scheduler._limits, batches_per_worker=1)  # noqa: SLF001
        scheduler.reconfigure(limits, None)
    async with batcher:
        yield batcher.process_batched
