"""One API process of `benchmarks.shared_model`: it opens a batcher, and loads it on command.

Its argument is JSON. It writes "ready", and for each line with seconds on stdin one line of JSON.
"""

import asyncio
import json
import sys
import time
from typing import Any

from benchmarks.scenarios import Load, Process, percentiles, steady_rate
from fast_batcher import DynBatcher

# From one lone request to the next, seconds.
INTERVAL = 0.02


async def call_lone(process: Process, load: Load, seconds: float) -> dict[str, Any]:
    """Send one request at a time, with pauses."""
    payload, latencies = load.payload(), []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await asyncio.sleep(INTERVAL)
        asked = time.perf_counter()
        await process(payload)
        latencies.append(time.perf_counter() - asked)
    return {"requests": len(latencies), **percentiles(latencies)}


async def call_all(process: Process, load: Load, seconds: float) -> dict[str, Any]:
    """Let each caller ask again as soon as it is answered."""
    end = time.perf_counter() + seconds
    answered: list[list[float]] = [[] for _ in range(load.callers)]

    async def call(times: list[float], payload: Any) -> None:
        while time.perf_counter() < end:
            await process(payload)
            times.append(time.perf_counter())

    await asyncio.gather(
        *(call(times, load.payload(caller)) for caller, times in enumerate(answered))
    )
    return {
        "requests": sum(len(times) for times in answered),
        "requests_per_second": steady_rate(answered),
    }


async def obey(process: Process, load: Load) -> None:
    """Load a system whenever a line with seconds comes."""
    run = call_lone if load.callers == 1 else call_all
    print("ready", flush=True)
    while seconds := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await run(process, load, float(seconds))), flush=True)


async def main() -> None:
    """Open, obey, close."""
    job = json.loads(sys.argv[1])
    load, model = Load(**job["load"]), "benchmarks.systems.ours:Model"
    arguments: tuple[Any, ...] = (load.model,)
    if load.model == "MiniLM":
        model, arguments = "examples.embeddings.model:MiniLM", ()
    batcher: DynBatcher[Any, Any] = DynBatcher(
        model, load.max_batch_size, model_args=arguments, shared=job["shared"]
    )
    async with batcher:
        await obey(batcher.process_batched, load)


if __name__ == "__main__":
    asyncio.run(main())
