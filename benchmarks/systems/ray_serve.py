"""Ray Serve's `@serve.batch` without a cluster: on the event loop, the model in a thread."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.serve import batching

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS = ["ray"]

# All that needs a replica: a warning about settings, which asks it for the most ongoing requests.
_WARNING = "_warn_if_max_batch_size_exceeds_max_ongoing_requests"
setattr(vars(batching)["_BatchQueue"], _WARNING, lambda _: None)


@asynccontextmanager
async def opened(load: Load, *, wait: float | None = None) -> AsyncIterator[Process]:
    """Decorate a function that runs the model in a thread, as its documentation advises.

    With a `wait` (`batch_wait_timeout_s`; 0.01 is its default), batches are as large as the load's.
    """
    infer = MODELS[load.model]().infer
    loop = asyncio.get_running_loop()
    settings: dict[str, Any] = {}
    if wait is not None:
        settings = {"max_batch_size": load.max_batch_size, "batch_wait_timeout_s": wait}
    with ThreadPoolExecutor(1) as executor:

        @serve.batch(**settings)
        async def process(inputs: list[Any]) -> list[Any]:
            return await loop.run_in_executor(executor, infer, inputs)

        yield process
