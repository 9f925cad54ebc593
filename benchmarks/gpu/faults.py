"""Part `faults`: a model that runs out of memory, breaks its device, or is killed.

Every call has to end with its own answer or with an error.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.gpu.part import Figures, Run
from fast_batcher import DynBatcher
from fast_batcher.errors import BatcherError

TABLE = "faults"
MODELS = "benchmarks.gpu.models"
# Inputs of `models.Fragile`: an index that its table does not have, and one that kills the worker.
OUT_OF_RANGE, KILLS = 1_000_000, -1
CALLS = 64
# A replacement imports PyTorch; a call waits for two of them, seconds.
CALL_LIMIT = 60.0
# Place of the input that breaks the device or the worker.
GUILTY_AT = 20


def measure(run: Run) -> None:
    """Cause one fault after the other."""
    run.title(TABLE, f"{CALLS} calls at once, and a fault")
    asyncio.run(_measure(run))


async def _measure(run: Run) -> None:
    innocents = list(range(CALLS))
    faults: dict[str, tuple[str, int, list[int]]] = {"out of memory": ("Hungry", 32, innocents)}
    guilty = {"device-side assert": OUT_OF_RANGE} if run.is_gpu else {}
    for name, value in {**guilty, "worker killed": KILLS}.items():
        inputs = [*innocents[:GUILTY_AT], value, *innocents[GUILTY_AT + 1 :]]
        faults[name] = ("Fragile", 8, inputs)
    async with AsyncExitStack() as stack:
        batchers = [
            DynBatcher[Any, Any](f"{MODELS}:{model}", size, devices=run.device, timeout=CALL_LIMIT)
            for model, size, _ in faults.values()
        ]
        await asyncio.gather(*map(stack.enter_async_context, batchers))
        for batcher, (name, (_, _, inputs)) in zip(batchers, faults.items(), strict=True):
            run.tell(TABLE, name, 0, await _cause(batcher, inputs))


async def _cause(batcher: DynBatcher[Any, Any], inputs: list[int]) -> Figures:
    ends: list[float] = []
    sizes: list[int] = []
    failed = wrong = 0

    async def call(value: int) -> None:
        nonlocal failed, wrong
        try:
            answer, answered_with = await batcher.process_batched(value)
        except BatcherError:
            failed += 1
        else:
            wrong += answer != value
            sizes.append(answered_with)
        ends.append(time.perf_counter())

    start = time.perf_counter()
    await asyncio.gather(*map(call, inputs))
    # A worker that has been replaced answers.
    await call(0)
    ends.sort()
    gaps = [later - earlier for earlier, later in zip([start, *ends], ends, strict=False)]
    return {
        "calls": len(inputs) + 1,
        "answered": len(sizes) - wrong,
        "failed": failed,
        "lost": len(inputs) + 1 - len(sizes) - failed + wrong,
        "largest_batch": max(sizes),
        "restarts": batcher.stats.restarts,
        "recovery_s": max(gaps),
    }
