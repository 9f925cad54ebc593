"""What is done with large arrays, and what the machine needs for them itself.

Runs in the measured process. For the models of `benchmarks.models` whose names begin with Array.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.scenarios import Figures, Load, Process

# From one arrival to the next, seconds: twice what copying 6 MB takes, so that whoever copies what
# arrives has done so before the next one.
ARRIVAL_INTERVAL = 0.005
# Batches left out at the start: by then all memory has been used before.
WARM_UP_BATCHES = 5
# Of the timer whose lateness is the event loop's.
TICK = 0.001


async def last_arrival(process: Process, load: Load) -> Figures:
    """How long after the last arrival of a batch the worker has it as one array.

    Arrivals come one after the other, and the batch leaves because it is full. Both moments are
    read from the same clock (CLOCK_MONOTONIC), the second one in the worker (`ArrayStacked`).
    """
    *first, last = [load.payload(number) for number in range(load.max_batch_size)]
    called = 0.0

    async def arrive(payload: Any) -> Any:
        nonlocal called
        # Here and not before: to make a task and have its turn come is the caller's.
        called = time.monotonic()
        return await process(payload)

    latencies: list[float] = []
    whole = 0
    end = time.monotonic() + load.seconds
    while len(latencies) <= WARM_UP_BATCHES or time.monotonic() < end:
        tasks = []
        for payload in first:
            tasks.append(asyncio.ensure_future(arrive(payload)))
            await asyncio.sleep(ARRIVAL_INTERVAL)
        answers: list[Any] = await asyncio.gather(*tasks, arrive(last))
        *answers_first, (moment, _) = answers
        if [number for _, number in answers] != list(range(load.max_batch_size)):
            raise RuntimeError("answers were mixed up")
        whole += all(other == moment for other, _ in answers_first)
        latencies.append(max(moment for moment, _ in answers) - called)
    del latencies[:WARM_UP_BATCHES]
    return {
        "stacked_ms": 1e3 * statistics.median(latencies),
        "stacked_max_ms": 1e3 * max(latencies),
        "batches": len(latencies),
        # Of all batches, those that one call of the model has had whole.
        "whole": whole / (len(latencies) + WARM_UP_BATCHES),
    }


async def copying(_: Process, load: Load) -> Figures:
    """What one array costs without any library: to copy it, and to read the copy.

    As many arrays as the load has callers, so that the caches are of no more use than to others;
    into memory that was used before. One behind the other, and as in `last_arrival`, with a pause
    before each, in which the caches become others'.
    """
    import numpy

    sources = [load.payload(caller) for caller in range(load.callers)]
    rows = numpy.stack(sources)
    elapsed: list[float] = []
    copied = read = 0.0
    end = time.monotonic() + load.seconds
    while not elapsed or time.monotonic() < end:
        used = time.thread_time()
        for row, source in zip(rows, sources, strict=True):
            start = time.monotonic()
            numpy.copyto(row, source)
            elapsed.append(time.monotonic() - start)
        copied += time.thread_time() - used
        used = time.thread_time()
        for row in rows:
            row.max()
        read += time.thread_time() - used
    arriving: list[float] = []
    end = time.monotonic() + load.seconds
    while not arriving or time.monotonic() < end:
        for row, source in zip(rows, sources, strict=True):
            await asyncio.sleep(ARRIVAL_INTERVAL)
            start = time.monotonic()
            numpy.copyto(row, source)
            arriving.append(time.monotonic() - start)
    return {
        "memcpy_ms": 1e3 * statistics.median(elapsed),
        "arriving_memcpy_ms": 1e3 * statistics.median(arriving),
        "memcpy_cpu_us": 1e6 * copied / len(elapsed),
        "read_cpu_us": 1e6 * read / len(elapsed),
    }


async def loop_lag(process: Process, load: Load) -> Figures:
    """How late a timer of the event loop is while callers ask again as soon as they are answered.

    Without any caller it is how late the machine and the loop themselves are.
    """
    payloads = [load.payload(caller) for caller in range(load.callers)]
    begin = time.monotonic() + load.seconds / 4
    end = begin + load.seconds
    answered = 0
    lags: list[float] = []

    async def ask(payload: Any) -> None:
        nonlocal answered
        while time.monotonic() < end:
            await process(payload)
            answered += begin <= time.monotonic() < end

    async def tick() -> None:
        now = time.monotonic()
        while now < end:
            start = now
            await asyncio.sleep(TICK)
            now = time.monotonic()
            if now >= begin:
                lags.append(now - start - TICK)

    await asyncio.gather(tick(), *map(ask, payloads))
    lags.sort()
    return {
        "lag_p50_ms": 1e3 * lags[len(lags) // 2],
        "lag_p99_ms": 1e3 * lags[len(lags) * 99 // 100],
        "lag_max_ms": 1e3 * lags[-1],
        "requests_per_second": answered / load.seconds,
    }


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario for scenario in (last_arrival, copying, loop_lag)
}
