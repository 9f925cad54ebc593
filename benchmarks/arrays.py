"""How `payload` measures large arrays. Runs in the measured process."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from benchmarks.models import make_row
from benchmarks.scenarios import Figures, Load, Process, full_speed

# Between arrivals, seconds: twice what copying 6 MB takes, so that a system that copies what
# arrives has done so before the next arrival.
ARRIVAL_INTERVAL = 0.005
# Batches that do not count at the start: by then all memory has been used before.
WARM_UP_BATCHES = 5


async def last_arrival(process: Process, load: Load) -> Figures:
    """Measure from the last arrival of a batch until the worker has the batch as one array.

    Arrivals come one after the other, and the batch leaves because it is full. Both moments are
    read from the same clock (CLOCK_MONOTONIC), the second in the worker (`ArrayStacked`).
    """
    *first, last = [load.payload(number) for number in range(load.max_batch_size)]
    called = 0.0

    async def arrive(payload: Any) -> Any:
        nonlocal called
        # Here and not before: making a task and waiting for its turn is the caller's time.
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
        # Share of all batches that the model got in one call.
        "whole": whole / (len(latencies) + WARM_UP_BATCHES),
    }


async def copying(_: Process, load: Load) -> Figures:
    """Measure what it takes to copy one array without any library.

    As many arrays as the load has callers, so that caches help no more than elsewhere, into memory
    that was used before. With a pause before each copy, as before the last arrival of
    `last_arrival`: other processes use the caches meanwhile.
    """
    import numpy

    sources = [load.payload(caller) for caller in range(load.callers)]
    rows = numpy.stack(sources)
    elapsed: list[float] = []
    end = time.monotonic() + load.seconds
    while not elapsed or time.monotonic() < end:
        for row, source in zip(rows, sources, strict=True):
            await asyncio.sleep(ARRIVAL_INTERVAL)
            start = time.monotonic()
            numpy.copyto(row, source)
            elapsed.append(time.monotonic() - start)
    return {"memcpy_ms": 1e3 * statistics.median(elapsed)}


# The kinds of rows that `rows` compares.
KINDS = ("tensor", "array", "list")


async def rows(process: Process, load: Load) -> Figures:
    """Measure a row of a table as a tensor, an array and a list: CPU time and bytes per request.

    The bytes are those of its pickle, which crosses between the processes.
    """
    from fast_batcher._transport.pickling import OutOfBandPickler

    figures: Figures = {}
    for kind in KINDS:
        found = await full_speed(process, replace(load, row=kind))
        figures[f"{kind}_us"] = found["all_cpu_us"]
        pickler = OutOfBandPickler(16384, makes_writable=load.model == "RowIn")
        figures[f"{kind}_bytes"] = len(pickler.dumps(make_row(kind)))
    for kind in ("tensor", "list"):
        figures[f"{kind}_times"] = figures[f"{kind}_us"] / figures["array_us"]
    return figures


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario for scenario in (last_arrival, copying, rows)
}
