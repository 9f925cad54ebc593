"""How fast do large arrays reach the model, through shared memory and through a pipe?

`stacked`: one batch is called at once; until the model has it as one array. `callers` ask again as
soon as they are answered, with an array in and a label out: requests per second, CPU of the app's
process per request, and how late its event loop is (a timer of 1 ms; the loop's own part of that is
the row `nothing`). `memcpy` is the floor: the same arrays copied into one, in one process.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import numpy as np

from benchmarks.harness import hardware
from benchmarks.report import Spread, table
from fast_batcher import DynBatcher, InferenceModel

REPETITIONS = 5
# Bytes of an item, and items of a batch, which is also the number of callers.
CASES = ((64_000, 32), (602_112, 32), (6_000_000, 8))
# Seconds that callers ask.
SECONDS = 1.0
TICK = 0.001
SYSTEMS: dict[str, dict[str, Any]] = {"shared memory": {}, "pipe": {"max_shared_bytes": 0}}
COLUMNS = ("bytes", "batch", "way", "stacked, ms", "requests/s", "CPU us/request", "lag p99, ms")


class Stack(InferenceModel[Any, float]):
    """Stacks its inputs, which reads every byte, and answers with the moment after that."""

    def infer(self, inputs: list[Any]) -> list[float]:
        """Answer each input with the same moment."""
        np.stack(inputs)
        return [time.monotonic()] * len(inputs)


def copy_into_one(arrays: list[Any]) -> float:
    """Milliseconds of the memcpy alone, into memory that has been used before."""
    stacked = np.stack(arrays)
    start = time.monotonic()
    np.stack(arrays, out=stacked)
    return (time.monotonic() - start) * 1000


@asynccontextmanager
async def lags() -> AsyncIterator[list[float]]:
    """Milliseconds by which a timer was late meanwhile."""
    found: list[float] = []

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(TICK)
            found.append((time.monotonic() - start - TICK) * 1000)

    task = asyncio.create_task(tick())
    yield found
    task.cancel()
    found.sort()


async def nothing() -> float:
    """The lag of a loop that has nothing else to do."""
    async with lags() as found:
        await asyncio.sleep(SECONDS)
    return found[len(found) * 99 // 100]


async def measure(arrays: list[Any], settings: dict[str, Any]) -> tuple[float, float, float, float]:
    """The last four columns."""
    async with DynBatcher(Stack, len(arrays), **settings) as batcher:
        stacked = []
        for number in range(10):
            start = time.monotonic()
            moments = await asyncio.gather(*map(batcher.process_batched, arrays))
            if number >= 5:  # by then all memory has been used before
                stacked.append((max(moments) - start) * 1000)
        answered = count()
        end = time.monotonic() + SECONDS

        async def ask(array: Any) -> None:
            while time.monotonic() < end:
                await batcher.process_batched(array)
                next(answered)

        used = time.process_time()
        async with lags() as found:
            await asyncio.gather(*map(ask, arrays))
        requests = next(answered)
        used = (time.process_time() - used) / requests * 1e6
        stacked.sort()
        lag = found[len(found) * 99 // 100]
        return stacked[len(stacked) // 2], requests / SECONDS, used, lag


def main() -> int:
    """Take turns, print."""
    print(json.dumps(hardware()), sys.version)
    rows: list[list[object]] = []
    for size, batch in CASES:
        arrays = [np.full(size // 4, number, np.float32) for number in range(batch)]
        found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in SYSTEMS}
        floor = Spread.of([copy_into_one(arrays) for _ in range(REPETITIONS)])
        rows.append([size, batch, "memcpy", floor, "", "", ""])
        for repetition in range(REPETITIONS):
            for name in reversed(SYSTEMS) if repetition % 2 else SYSTEMS:
                found[name].append(asyncio.run(measure(arrays, SYSTEMS[name])))
        for name, figures in found.items():
            spreads = map(Spread.of, zip(*figures, strict=True))
            rows.append([size, batch, name, *spreads])
    idle = Spread.of([asyncio.run(nothing()) for _ in range(REPETITIONS)])
    rows.append(["", "", "nothing", "", "", "", idle])
    print(table(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
