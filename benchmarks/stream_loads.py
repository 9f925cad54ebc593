"""Loads of streams, and how a system under each is measured. Runs in the measured process."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

from benchmarks.cpu import TreeCpu
from benchmarks.scenarios import Figures, Load, Process
from benchmarks.stepping import StepCount, draw_arrivals, draw_length

# Streams that begin in the first seconds do not count: the longest takes 1.7 s of full steps.
WARM_UP_SECONDS = 1.7
# Chunks of a stream that never ends.
ENDLESS = 10**9
# For the start of all endless streams, seconds.
SETTLING = 0.5


class StreamAnswer(NamedTuple):
    """What came of a request."""

    # The moment of the first chunk; that of the whole answer where chunks come at its end.
    first_at: float
    chunks: int


class Streams:
    """A system that streams answers; a call reads one to its end.

    Args:
        begin: Begins an answer of so many chunks.
        count: The model's.
    """

    def __init__(
        self, begin: Callable[[int], Awaitable[AsyncIterator[Any]]], count: StepCount
    ) -> None:
        self.begin = begin
        self.count = count

    async def __call__(self, length: int) -> StreamAnswer:
        """Ask for an answer of so many chunks, and read it."""
        first_at, chunks = 0.0, 0
        async for _ in await self.begin(length):
            if not chunks:
                first_at = time.perf_counter()
            chunks += 1
        if chunks != length:
            raise RuntimeError(f"{chunks} chunks instead of {length}")
        return StreamAnswer(first_at, chunks)


@contextmanager
def counted() -> Iterator[tuple[str, StepCount]]:
    """Make the file of a `StepCount`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(StepCount.SIZE))
        file.flush()
        yield file.name, StepCount(file.name)


async def closed_streams(process: Process, load: Load) -> Figures:
    """Measure clients that ask again as soon as their answer has ended.

    An answer counts with the share of its time inside of the measured time.
    """
    assert isinstance(process, Streams)
    random = Random(load.seed)
    begin = time.perf_counter() + WARM_UP_SECONDS
    end = begin + load.seconds
    answered: list[tuple[float, float, float]] = []

    async def call() -> None:
        while (asked := time.perf_counter()) < end:
            answer = await process(draw_length(random))
            answered.append((asked, answer.first_at, time.perf_counter()))

    tasks = [asyncio.ensure_future(call()) for _ in range(load.callers)]
    await asyncio.sleep(WARM_UP_SECONDS)
    began = time.perf_counter()
    before = process.count.read()
    await asyncio.sleep(end - time.perf_counter())
    seconds = time.perf_counter() - began
    after = process.count.read()
    await asyncio.gather(*tasks)
    inside = [
        max(0.0, min(ended, end) - max(asked, begin)) / (ended - asked)
        for asked, _, ended in answered
    ]
    steps, chunks = after[0] - before[0], after[1] - before[1]
    return {
        "requests_per_second": sum(inside) / load.seconds,
        "steps_per_second": steps / seconds,
        "live": chunks / steps,
        **first_chunks([first - asked for asked, first, _ in answered if begin <= asked < end]),
    }


async def open_streams(process: Process, load: Load) -> Figures:
    """Measure requests that arrive at random; their time begins when they are due."""
    assert isinstance(process, Streams)
    begin = time.perf_counter()
    firsts: list[float] = []

    async def call(moment: float, length: int) -> None:
        answer = await process(length)
        if moment >= WARM_UP_SECONDS:
            firsts.append(answer.first_at - begin - moment)

    tasks = []
    for moment, length in draw_arrivals(load.rate, WARM_UP_SECONDS + load.seconds, load.seed):
        await asyncio.sleep(begin + moment - time.perf_counter())
        tasks.append(asyncio.ensure_future(call(moment, length)))
    await asyncio.gather(*tasks)
    return first_chunks(firsts)


async def endless_streams(process: Process, load: Load) -> Figures:
    """Measure the CPU time of a chunk, with streams that never end."""
    assert isinstance(process, Streams)
    read = 0

    async def call() -> None:
        nonlocal read
        async for _ in await process.begin(ENDLESS):
            read += 1

    tasks = [asyncio.ensure_future(call()) for _ in range(load.callers)]
    await asyncio.sleep(SETTLING)
    used, before, began = TreeCpu.read(), read, time.perf_counter()
    await asyncio.sleep(load.seconds)
    used, chunks = TreeCpu.read().since(used), read - before
    seconds = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "chunks_per_second": chunks / seconds,
        "api_cpu_us": used.api / chunks * 1e6,
        "workers_cpu_us": used.workers / chunks * 1e6,
        "all_cpu_us": (used.api + used.workers) / chunks * 1e6,
    }


def first_chunks(seconds: list[float]) -> Figures:
    """Compute the median and the 99th percentile of the times to the first chunk, milliseconds."""
    ordered = sorted(seconds)
    return {
        f"first_p{percent}_ms": ordered[len(ordered) * percent // 100] * 1e3 for percent in (50, 99)
    }


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario for scenario in (closed_streams, open_streams, endless_streams)
}
