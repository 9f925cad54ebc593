"""No batching: the model in one thread of the same process."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process

DISTRIBUTIONS: list[str] = []


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Start one thread."""
    loop = asyncio.get_running_loop()
    model = MODELS[load.model]()
    with ThreadPoolExecutor(1) as executor:

        async def process(value: Any) -> Any:
            return (await loop.run_in_executor(executor, model.infer, [value]))[0]

        yield process
