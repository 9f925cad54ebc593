"""No batching: the model in a separate process, through `concurrent.futures`."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS: list[str] = []

# In the pool's process: the one model that it has.
_models: list[Any] = []


def _load(model: str) -> None:
    _models.append(MODELS[model]())


def _infer(value: Any) -> Any:
    return _models[0].infer([value])[0]


def _infer_tensor(value: Any) -> Any:
    import torch

    answer = _infer(value.numpy())
    return answer if isinstance(answer, float) else torch.from_numpy(answer)


@asynccontextmanager
async def opened(load: Load, *, tensors: bool = False) -> AsyncIterator[Process]:
    """Start one process, because the model is to be in memory once.

    Arrays are pickled; as `tensors` they go through the shared memory of torch.multiprocessing,
    both ways.
    """
    if tensors:
        DISTRIBUTIONS.append("torch")
        import torch.multiprocessing  # teaches the pool's pickler what tensors are
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _load, (load.model,)) as executor:

        async def process(value: Any) -> Any:
            return await loop.run_in_executor(executor, _infer, value)

        async def process_tensor(value: Any) -> Any:
            tensor = torch.from_numpy(value)
            return await loop.run_in_executor(executor, _infer_tensor, tensor)

        yield process_tensor if tensors else process
        executor.shutdown(cancel_futures=True)
