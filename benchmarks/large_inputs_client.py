"""One API process of `benchmarks.large_inputs`: its callers fill arrays of shared memory.

Its argument is JSON. It writes "ready", and for each line with seconds on stdin one line of JSON.
"""

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

import fast_batcher
from benchmarks.scenarios import ARRAY_SHAPE, steady_rate
from fast_batcher import DynBatcher, InferenceModel

MAX_BATCH_SIZE = 64


class DeviceCopy(InferenceModel[Any, Any]):
    """Stacks its batch, and copies it into one array, which stands for the memory of a GPU."""

    def __init__(self) -> None:
        self._device = np.zeros((MAX_BATCH_SIZE, *ARRAY_SHAPE), np.float32)
        self._numbers = self._device.reshape(MAX_BATCH_SIZE, -1)[:, 0]

    def infer(self, inputs: list[Any]) -> list[tuple[float, bool]]:
        """Answer each array with its first number, and whether its batch was copied to stack it."""
        batch = fast_batcher.stack(inputs)
        self._device[: len(batch)] = batch
        is_copied = not np.shares_memory(batch, inputs[0])
        return [(first, is_copied) for first in self._numbers[: len(batch)].tolist()]


async def run(batcher: DynBatcher[Any, Any], callers: int, seconds: float) -> dict[str, Any]:
    """Let each caller fill another array as soon as it is answered."""
    source = np.ones(ARRAY_SHAPE, np.float32)
    ordinary = stacked = 0
    end = time.perf_counter() + seconds
    answered: list[list[float]] = [[] for _ in range(callers)]

    async def call(times: list[float], number: float) -> None:
        nonlocal ordinary, stacked
        while time.perf_counter() < end:
            array = batcher.allocate_input(ARRAY_SHAPE, np.float32)
            ordinary += bool(array.flags.owndata)
            array[:] = source
            array.flat[0] = number
            first, is_copied = await batcher.process_batched(array)
            assert first == number, "an answer of another caller"
            stacked += is_copied
            times.append(time.perf_counter())

    await asyncio.gather(*(call(times, float(one)) for one, times in enumerate(answered)))
    return {
        "requests": sum(len(times) for times in answered),
        "requests_per_second": steady_rate(answered),
        "ordinary": ordinary,
        "stacked": stacked,
    }


async def main() -> None:
    """Open, obey, close."""
    job = json.loads(sys.argv[1])
    batcher: DynBatcher[Any, Any] = DynBatcher(
        "benchmarks.large_inputs_client:DeviceCopy",
        max_batch_size=MAX_BATCH_SIZE,
        shared=job["shared"],
    )
    async with batcher:
        print("ready", flush=True)
        while seconds := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await run(batcher, job["callers"], float(seconds))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
