"""Part `prepare`: images are normalised on the CPU beside `infer`, or inside of it."""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.models import normalise
from benchmarks.gpu.part import SEED, Figures, Run
from examples.image_classification.prediction import SIZE
from fast_batcher import DynBatcher

TABLE = "prepare"
# The system whose images are normalised already: it has the speed of `infer` alone.
INFER_ALONE = "infer alone"
# The systems, and their classes in `models`.
MODELS = {
    "in prepare": "Staged",
    "inside infer": "Inside",
    "inside infer, threads": "InsideThreads",
    INFER_ALONE: "Classifier",
}
IMAGES = 64


def measure(run: Run) -> None:
    """Open all batchers, then let them take turns."""
    asyncio.run(_measure(run))


async def _measure(run: Run) -> None:
    size, side = run.pick(32, 4), run.pick(SIZE, 64)
    arch = run.pick("resnet50", "resnet18")
    # Two batches for each stage, and for the queue.
    callers = 6 * size
    random = np.random.default_rng(SEED)
    images = [random.integers(0, 256, (side, side, 3), np.uint8) for _ in range(IMAGES)]
    run.title(TABLE, f"{arch}, {run.dtype}, batches of {size}, {callers} callers, {side}^2 pixels")
    run.note(f"prepare: normalising one image takes {_time(images):.3f} ms of one core")
    normalised = [normalise(image) for image in images]
    inputs = {name: normalised if name == INFER_ALONE else images for name in MODELS}
    firsts = [float(image[0, 0, 0]) for image in normalised]
    async with AsyncExitStack() as stack:
        batchers = {
            name: DynBatcher[Any, Any](
                f"benchmarks.gpu.models:{model}",
                size,
                devices=run.device,
                model_kwargs={"arch": arch, "dtype": run.dtype},
                name=name,
                # As many as the threads of `InsideThreads`, in place of a share for each worker.
                stage_threads=len(os.sched_getaffinity(0)),
            )
            for name, model in MODELS.items()
        }
        await asyncio.gather(*map(stack.enter_async_context, batchers.values()))

        async def measure_one(name: str) -> Figures:
            async def ask(number: int) -> bool:
                _, first = await batchers[name].process_batched(inputs[name][number])
                return bool(first == firsts[number])

            return await run.closed_loop(ask, range(IMAGES), callers)

        for name in batchers:
            await measure_one(name)
        for repetition, name in run.take_turns([*batchers]):
            run.tell(TABLE, name, repetition, await measure_one(name))


def _time(images: list[Any]) -> float:
    taken = []
    for image in images:
        start = time.perf_counter()
        normalise(image)
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)
