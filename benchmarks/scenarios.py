"""What is done to a system: the loads, and how each is measured. Runs in the measured process.

A system is one coroutine function that answers one input. All systems see the very same callers.
"""

import asyncio
import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.cpu import TreeCpu
from benchmarks.models import MODELS

Process = Callable[[str], Awaitable[object]]
Figures = dict[str, float]

# A short string, so that the batching is measured and not the pickling.
PAYLOAD = "a short input"
# Lone requests left out at the start: caches, lazily started threads.
WARM_UP_REQUESTS = 20


@dataclass(frozen=True)
class Load:
    """What a system is put under; the same for all systems of a comparison."""

    # A name in `benchmarks.models.MODELS`.
    model: str
    max_batch_size: int
    callers: int
    # How long the measured part takes, without start and warm-up.
    seconds: float
    # From one lone request to the next.
    interval: float = 0.02


async def full_speed(process: Process, load: Load) -> Figures:
    """CPU per request, requests/s and latency of callers that ask again as soon as answered.

    The callers only count down while CPU is measured; latency is taken in a pass of its own.
    """

    async def call(times: int) -> None:
        for _ in range(times):
            await process(PAYLOAD)

    async def all_call(times: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(call(times) for _ in range(load.callers)))
        return time.perf_counter() - start

    # Warming up finds out as well how many requests fill the time.
    times = 1
    while (elapsed := await all_call(times)) < load.seconds / 4:
        times *= 2
    times = math.ceil(times * load.seconds / elapsed)
    gc.collect()
    start = TreeCpu.read()
    elapsed = await all_call(times)
    used = TreeCpu.read().since(start)

    latencies: list[float] = []

    async def call_timed(times: int) -> None:
        for _ in range(times):
            asked = time.perf_counter()
            await process(PAYLOAD)
            latencies.append(time.perf_counter() - asked)

    await asyncio.gather(*(call_timed(math.ceil(times / 4)) for _ in range(load.callers)))
    return {
        "requests_per_second": times * load.callers / elapsed,
        **_cpu_per_request(used, times * load.callers),
        **_percentiles(latencies),
    }


async def saturation(process: Process, load: Load) -> Figures:
    """Requests/s in the steady state, with more callers than a batch holds.

    Each caller's own rate is taken from its first to its last answer in the time, and summed: the
    figure has no share of start and end, and no rounding to whole batches.
    """
    answered: list[list[float]] = [[] for _ in range(load.callers)]

    async def call(times: list[float], start: float, end: float) -> None:
        while (now := time.perf_counter()) < end:
            await process(PAYLOAD)
            if now >= start:
                times.append(time.perf_counter())

    warm_up = load.seconds / 4
    begin = time.perf_counter() + warm_up
    end = begin + load.seconds
    tasks = [asyncio.ensure_future(call(times, begin, end)) for times in answered]
    await asyncio.sleep(warm_up)
    before = TreeCpu.read()
    await asyncio.gather(*tasks)
    used = TreeCpu.read().since(before)
    return {
        "requests_per_second": sum(
            (len(times) - 1) / (times[-1] - times[0]) for times in answered if len(times) > 1
        ),
        **_cpu_per_request(used, sum(len(times) for times in answered)),
    }


async def lone_requests(process: Process, load: Load) -> Figures:
    """Latency of one request at a time, with the system idle in between.

    The pause is one timer of the same event loop for every system. The clock starts after it has
    fired, so how late it was does not count, and every system starts from a loop just woken.
    """
    latencies: list[float] = []
    due = time.perf_counter()
    for _ in range(WARM_UP_REQUESTS + round(load.seconds / load.interval)):
        due = max(due + load.interval, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        asked = time.perf_counter()
        await process(PAYLOAD)
        latencies.append(time.perf_counter() - asked)
    return _percentiles(latencies[WARM_UP_REQUESTS:])


async def idle(process: Process, load: Load) -> Figures:
    """Share of a core that all processes use while nobody asks."""
    await process(PAYLOAD)
    await asyncio.sleep(0.5)  # lets what the request left behind come to rest
    before = TreeCpu.read()
    start = time.perf_counter()
    await asyncio.sleep(load.seconds)
    used = TreeCpu.read().since(before)
    return {"idle_share_of_core": (used.api + used.workers) / (time.perf_counter() - start)}


def bare_loop(load: Load) -> Figures:
    """Requests/s of a child process that calls `infer` on full batches and does nothing else."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_infer_in_a_loop, args=(theirs, load))
    child.start()
    theirs.close()
    rate = ours.recv()
    child.join()
    return {"requests_per_second": rate}


def _infer_in_a_loop(connection: Connection, load: Load) -> None:
    model = MODELS[load.model]()
    inputs = [PAYLOAD] * load.max_batch_size
    model.infer(inputs)
    batches = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < load.seconds:
        model.infer(inputs)
        batches += 1
    connection.send(batches * load.max_batch_size / elapsed)


def _cpu_per_request(used: TreeCpu, requests: int) -> Figures:
    """In microseconds, which is the same as milliseconds per 1000 requests."""
    return {
        "api_cpu_us": used.api / requests * 1e6,
        "workers_cpu_us": used.workers / requests * 1e6,
        "all_cpu_us": (used.api + used.workers) / requests * 1e6,
    }


def _percentiles(latencies: list[float]) -> Figures:
    """In milliseconds; the maximum stands for the 99th percentile of fewer than 100."""
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario for scenario in (full_speed, saturation, lone_requests, idle)
}
