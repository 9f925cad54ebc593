"""Runs the reference experiment on one system, in a fresh process, and prints JSON.

Every system gets the same inputs, all at once, and the same model; `reference_experiment` says what
is compared. It also runs with the interpreter of a peer's virtual environment.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata
from typing import Any

import fast_batcher
from benchmarks.cpu import TreeCpu
from benchmarks.load.gpu import GpuWatch
from benchmarks.resnet_model import Answer, Job, Model, make_inputs
from fast_batcher import DynBatcher

BATCH_SIZE = 16
# The settings of the reference's own script: the wait, and threads for three batches.
REFERENCE_DELAY = 0.1
REFERENCE_THREADS = 3 * BATCH_SIZE

# Answers all inputs, in their order.
Answerer = Callable[[Sequence[Any]], Awaitable[list[Answer]]]


@asynccontextmanager
async def bare_loop(batch_size: int) -> AsyncIterator[Answerer]:
    """The model alone, on one batch after the other: the ceiling for any batching."""
    infer = Model().infer

    async def answer(inputs: Sequence[Any]) -> list[Answer]:
        answers = []
        for start in range(0, len(inputs), batch_size):
            answers += infer(list(inputs[start : start + batch_size]))
        return answers

    yield answer


@asynccontextmanager
async def ours() -> AsyncIterator[Answerer]:
    """fast_batcher with its defaults, but without a time-out."""
    async with DynBatcher(Model, max_batch_size=BATCH_SIZE, timeout=None) as batcher:
        yield lambda inputs: asyncio.gather(*map(batcher.process_batched, inputs))


@asynccontextmanager
async def fast_dynamic_batcher() -> AsyncIterator[Answerer]:
    """fast_dynamic_batcher, with the settings of the reference's own script."""
    from fast_dynamic_batcher.dyn_batcher import DynBatcher  # type: ignore[import-not-found]

    executor = ThreadPoolExecutor(REFERENCE_THREADS)
    asyncio.get_running_loop().set_default_executor(executor)
    batcher = DynBatcher(Model, BATCH_SIZE, REFERENCE_DELAY)
    try:
        yield lambda inputs: asyncio.gather(*map(batcher.process_batched, inputs))
    finally:
        batcher.stop()


@asynccontextmanager
async def batched() -> AsyncIterator[Answerer]:
    """batched.aio with its default wait; the model runs in a thread of the same process."""
    from batched import aio  # type: ignore[import-not-found]

    process = aio.dynamically(Model().infer, batch_size=BATCH_SIZE)
    yield lambda inputs: asyncio.gather(*map(process, inputs))


SYSTEMS: dict[str, Callable[[], AbstractAsyncContextManager[Answerer]]] = {
    "bare loop": lambda: bare_loop(BATCH_SIZE),
    "one by one": lambda: bare_loop(1),
    "ours": ours,
    "fast_dynamic_batcher": fast_dynamic_batcher,
    "batched": batched,
}


async def measure(job: Job) -> dict[str, Any]:
    """Warm up with two batches, then answer everything once.

    Raises:
        RuntimeError: An answer belongs to another request, or is missing.
    """
    inputs = make_inputs(job)
    async with SYSTEMS[job.system]() as answer:
        await answer(inputs[: 2 * BATCH_SIZE])
        gc.collect()
        before = TreeCpu.read()
        with GpuWatch() as gpu:
            start = time.perf_counter()
            answers = await answer(inputs)
            seconds = time.perf_counter() - start
        used = TreeCpu.read().since(before)
    firsts = [float(value[0, 0, 0]) for value in inputs]
    if [first for _, _, first in answers] != firsts:
        raise RuntimeError(f"{job.system} mixed up its answers")
    return {
        "seconds": seconds,
        "requests_per_second": job.requests / seconds,
        "api_cpu_ms": used.api / job.requests * 1e3,
        "workers_cpu_ms": used.workers / job.requests * 1e3,
        **({} if gpu.busy_share is None else {"gpu_busy": gpu.busy_share}),
    }


def find_versions(system: str) -> dict[str, str]:
    """Find the versions of PyTorch and of the system."""
    own = {"ours": {"fast_batcher": fast_batcher.__version__}, "bare loop": {}, "one by one": {}}
    versions = own[system] if system in own else {system: metadata.version(system)}
    versions |= {name: metadata.version(name) for name in ("torch", "numpy")}
    return {"python": sys.version.split()[0], **versions}


def main() -> None:
    """Measure what the environment says."""
    job = Job.read()
    figures = asyncio.run(measure(job))
    print(json.dumps({"figures": figures, "versions": find_versions(job.system)}))


if __name__ == "__main__":
    main()
