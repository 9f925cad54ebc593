"""The app of `benchmarks.ray_workers`: it opens a system, and loads it on command.

Its argument is JSON. It writes "ready", and for each line with seconds on stdin one line of JSON.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.models import MODELS
from benchmarks.scenarios import Load, Process
from benchmarks.shared_client import obey


@asynccontextmanager
async def opened_batcher(load: Load, kind: str, address: str) -> AsyncIterator[Process]:
    """Open a batcher with its worker in this process's care, in a host's, or on the cluster."""
    from fast_batcher import DynBatcher
    from fast_batcher.ray import RayWorkers

    options: dict[str, Any] = {}
    if kind == "shared":
        options["shared"] = True
    elif kind == "ray":
        options["workers"] = RayWorkers(address=address)
    batcher: DynBatcher[Any, Any] = DynBatcher(
        "benchmarks.systems.ours:Model", load.max_batch_size, model_args=(load.model,), **options
    )
    async with batcher:
        yield batcher.process_batched


@asynccontextmanager
async def opened_serve(load: Load, address: str) -> AsyncIterator[Process]:
    """Deploy one replica, whose model runs in a thread, as Ray Serve's documentation advises."""
    import ray
    from ray import serve

    ray.init(address=address, configure_logging=False, log_to_driver=False)

    @serve.deployment(max_ongoing_requests=1024)
    class Replica:
        def __init__(self) -> None:
            self.infer = MODELS[load.model]().infer
            self.thread = ThreadPoolExecutor(1)

        @serve.batch(max_batch_size=load.max_batch_size)
        async def process(self, inputs: list[Any]) -> list[Any]:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.thread, self.infer, inputs)

        async def __call__(self, value: Any) -> Any:
            return await self.process(value)

    deployment: Any = Replica
    handle = serve.run(deployment.bind(), route_prefix=None)

    async def process(value: Any) -> Any:
        return await handle.remote(value)

    # It ends with its cluster.
    yield process


async def main() -> None:
    """Open, obey, close."""
    job = json.loads(sys.argv[1])
    load, kind, address = Load(**job["load"]), job["kind"], job["address"]
    is_serve = kind == "serve"
    opened = opened_serve(load, address) if is_serve else opened_batcher(load, kind, address)
    async with opened as process:
        await obey(process, load)


if __name__ == "__main__":
    asyncio.run(main())
