"""How fast do large outputs come back, through shared memory and through a pipe?

Callers ask again as soon as they are answered: `echo` sends an array and gets it back, `array` and
`bytes` send a number and get something large. Requests per second, CPU of the app's process and of
the worker per request, and how late the app's event loop is (a timer of 1 ms). `memcpy` is the
floor of an answer: the same arrays copied twice, in one process, the second time into new memory.
"""

import asyncio
import json
import os
import sys
import time
from itertools import count
from typing import Any

import numpy as np
import psutil

from benchmarks.harness import hardware
from benchmarks.payload import SYSTEMS, lags
from benchmarks.report import Spread, table
from fast_batcher import DynBatcher, InferenceModel

REPETITIONS = 5
# Bytes of an output, and outputs of a batch, which is also the number of callers.
CASES = ((16_384, 32), (64_000, 32), (602_112, 32), (6_000_000, 8))
SECONDS = 1.0
WHAT = ("echo", "array", "bytes")
COLUMNS = (
    "bytes", "batch", "what", "way", "requests/s", "app CPU us", "worker CPU us", "lag p99, ms"
)  # fmt: skip


class Answers(InferenceModel[Any, Any]):
    """Gives arrays back, and something of its own for the names of what it has.

    Args:
        size: Bytes of an output.
    """

    def __init__(self, size: int) -> None:
        self._arrays = [np.full(size // 4, number, np.float32) for number in range(32)]
        self._bytes = [array.tobytes() for array in self._arrays]

    def infer(self, inputs: list[Any]) -> list[Any]:
        """One output for each, no two of which are the same object."""
        if isinstance(inputs[0], str) and inputs[0] == "pid":
            return [os.getpid()]
        own: dict[str, list[Any]] = {"array": self._arrays, "bytes": self._bytes}
        return [
            own[one][position] if isinstance(one, str) else one
            for position, one in enumerate(inputs)
        ]


def copy_twice(arrays: list[Any]) -> float:
    """Arrays per second that the memcpy alone would permit."""
    between = [array.copy() for array in arrays]
    start = time.monotonic()
    for array, copy in zip(arrays, between, strict=True):
        copy[:] = array
    kept = [copy.copy() for copy in between]
    return len(kept) / (time.monotonic() - start)


def values_of(what: str, size: int, batch: int) -> list[Any]:
    """What the callers send."""
    if what != "echo":
        return [what] * batch
    return [np.full(size // 4, number, np.float32) for number in range(batch)]


async def measure(
    size: int, values: list[Any], settings: dict[str, Any]
) -> tuple[float, float, float, float]:
    """The last four columns."""
    async with DynBatcher(Answers, len(values), model_args=(size,), **settings) as batcher:
        worker = psutil.Process(await batcher.process_batched("pid"))
        for _ in range(5):  # by then all memory has been used before
            await asyncio.gather(*map(batcher.process_batched, values))
        answered = count()
        start = time.monotonic()

        async def ask(value: Any) -> None:
            while time.monotonic() < start + SECONDS:
                await batcher.process_batched(value)
                next(answered)

        used, used_there = time.process_time(), sum(worker.cpu_times()[:2])
        async with lags() as found:
            await asyncio.gather(*map(ask, values))
        seconds = time.monotonic() - start
        requests = next(answered)
        used = (time.process_time() - used) / requests * 1e6
        used_there = (sum(worker.cpu_times()[:2]) - used_there) / requests * 1e6
        return requests / seconds, used, used_there, found[len(found) * 99 // 100]


def main() -> int:
    """Take turns, print."""
    print(json.dumps(hardware()), sys.version)
    rows: list[list[object]] = []
    for size, batch in CASES:
        arrays = values_of("echo", size, batch)
        floor = Spread.of([copy_twice(arrays) for _ in range(REPETITIONS)])
        rows.append([size, batch, "memcpy", "", floor, "", "", ""])
        for what in WHAT:
            values = values_of(what, size, batch)
            found: dict[str, list[tuple[float, float, float, float]]] = {
                name: [] for name in SYSTEMS
            }
            for repetition in range(REPETITIONS):
                for name in reversed(SYSTEMS) if repetition % 2 else SYSTEMS:
                    found[name].append(asyncio.run(measure(size, values, SYSTEMS[name])))
            for name, figures in found.items():
                spreads = map(Spread.of, zip(*figures, strict=True))
                rows.append([size, batch, what, name, *spreads])
    print(table(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
