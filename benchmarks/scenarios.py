"""The loads, and how a system under each is measured. Runs in the measured process.

A system is one coroutine function that answers one input. All systems have the same callers.
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
from typing import Any

from benchmarks.cpu import TreeCpu
from benchmarks.models import MODELS, ROW, make_row
from benchmarks.pictures import SIDE, make_jpeg
from benchmarks.stepping import SHORTEST, STEP_TIMES

Process = Callable[[Any], Awaitable[object]]
Figures = dict[str, float]

# A short string, so that the batching is measured and not the pickling.
TEXT = "a short input, number {}"
# One image for an ImageNet model, as float32: 602112 bytes.
ARRAY_SHAPE = (3, 224, 224)
# Lone requests that do not count at the start: caches, lazily started threads.
WARM_UP_REQUESTS = 20


@dataclass(frozen=True)
class Load:
    """What a system is measured under, as all systems of a comparison are."""

    # A name in `benchmarks.models.MODELS` or `benchmarks.stepping.STEP_TIMES`, or "Picture" for the
    # models of `systems.ours_stages`.
    model: str
    max_batch_size: int
    callers: int
    # Of the measured part, without start and warm-up.
    seconds: float
    # From one lone request to the next, seconds.
    interval: float = 0.02
    # In an open loop: arrivals per second, and what draws them.
    rate: float = 0.0
    seed: int = 0
    # Of the inputs of the models whose names begin with Array: float32 numbers.
    array_shape: tuple[int, ...] = ARRAY_SHAPE
    # Of the inputs of RowIn, and the outputs of RowOut: see `models.make_row`.
    row: str = ""

    def payload(self, caller: int = 0) -> Any:
        """Make this caller's input; each caller has its own, as pickle sends an object once."""
        if self.model == "Picture":
            return make_jpeg()
        if self.model in STEP_TIMES:
            return SHORTEST
        if self.row:
            return make_row(self.row, caller) if self.model == "RowIn" else self.row
        if not self.model.startswith("Array"):
            return TEXT.format(caller)
        import numpy  # only where it is needed: not every environment has it

        return numpy.full(self.array_shape, caller, numpy.float32)

    def is_right(self, answer: Any) -> bool:
        """Whether this is the model's answer to the first caller's input."""
        if self.row:
            return bool(answer == ROW if self.model == "RowIn" else len(answer) == ROW)
        if self.model == "ArrayLabel":
            return bool(answer == 0)
        if self.model == "ArrayStacked":
            return bool(answer[1] == 0)
        if self.model == "ArrayEcho":
            return bool((answer == self.payload()).all())
        if self.model == "Picture":
            return bool(answer == SIDE)
        if self.model in STEP_TIMES:
            return bool(answer.chunks == SHORTEST)
        if self.model == "Gpu":
            return bool(answer[0] == self.payload())
        return bool(answer == self.payload())


async def full_speed(process: Process, load: Load) -> Figures:
    """Measure callers that ask again as soon as they are answered.

    While CPU time is measured the callers only count; latency is measured in a second pass.
    """
    payloads = [load.payload(caller) for caller in range(load.callers)]

    async def call(payload: Any, times: int) -> None:
        for _ in range(times):
            await process(payload)

    async def all_call(times: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(call(payload, times) for payload in payloads))
        return time.perf_counter() - start

    # The warm-up also finds out how many requests fill the time.
    times = 1
    while (elapsed := await all_call(times)) < load.seconds / 4:
        times *= 2
    times = math.ceil(times * load.seconds / elapsed)
    gc.collect()
    start = TreeCpu.read()
    elapsed = await all_call(times)
    used = TreeCpu.read().since(start)

    latencies: list[float] = []

    async def call_timed(payload: Any, times: int) -> None:
        for _ in range(times):
            asked = time.perf_counter()
            await process(payload)
            latencies.append(time.perf_counter() - asked)

    fewer = math.ceil(times / 4) + 1
    await asyncio.gather(*(call_timed(payload, fewer) for payload in payloads))
    return {
        "requests_per_second": times * load.callers / elapsed,
        **cpu_per_request(used, times * load.callers),
        **percentiles(latencies),
    }


async def saturation(process: Process, load: Load) -> Figures:
    """Measure the steady state, with more callers than a batch holds.

    Each caller's rate is taken from its first to its last answer, and summed: start and end do not
    count, and nothing is rounded to whole batches.
    """
    answered: list[list[float]] = [[] for _ in range(load.callers)]

    async def call(caller: int, times: list[float], start: float, end: float) -> None:
        payload = load.payload(caller)
        while (now := time.perf_counter()) < end:
            await process(payload)
            if now >= start:
                times.append(time.perf_counter())

    warm_up = load.seconds / 4
    begin = time.perf_counter() + warm_up
    end = begin + load.seconds
    tasks = [
        asyncio.ensure_future(call(caller, times, begin, end))
        for caller, times in enumerate(answered)
    ]
    await asyncio.sleep(warm_up)
    before = TreeCpu.read()
    await asyncio.gather(*tasks)
    used = TreeCpu.read().since(before)
    return {
        "requests_per_second": steady_rate(answered),
        **cpu_per_request(used, sum(len(times) for times in answered)),
    }


def steady_rate(answered: list[list[float]]) -> float:
    """Compute requests per second from the moments at which each caller was answered."""
    return sum((len(times) - 1) / (times[-1] - times[0]) for times in answered if len(times) > 1)


async def lone_requests(process: Process, load: Load) -> Figures:
    """Measure one request at a time, with the system idle in between.

    The pause is one timer of the event loop for every system. The clock starts after it has fired,
    so its lateness does not count, and every system starts from a loop that was just woken.
    """
    payload = load.payload()
    latencies: list[float] = []
    due = time.perf_counter()
    for _ in range(WARM_UP_REQUESTS + round(load.seconds / load.interval)):
        due = max(due + load.interval, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        asked = time.perf_counter()
        await process(payload)
        latencies.append(time.perf_counter() - asked)
    return percentiles(latencies[WARM_UP_REQUESTS:])


async def idle(process: Process, load: Load) -> Figures:
    """Measure the share of a core that all processes use without any request."""
    await process(load.payload())
    await asyncio.sleep(0.5)  # what the request left behind settles
    before = TreeCpu.read()
    start = time.perf_counter()
    await asyncio.sleep(load.seconds)
    used = TreeCpu.read().since(before)
    return {"idle_share_of_core": (used.api + used.workers) / (time.perf_counter() - start)}


def bare_loop(load: Load) -> Figures:
    """Measure a child process that calls `infer` on full batches and does nothing else."""
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
    inputs = [load.payload(number) for number in range(load.max_batch_size)]
    model.infer(inputs)
    batches = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < load.seconds:
        model.infer(inputs)
        batches += 1
    connection.send(batches * load.max_batch_size / elapsed)


def cpu_per_request(used: TreeCpu, requests: int) -> Figures:
    """Compute microseconds of CPU time per request."""
    return {
        "api_cpu_us": used.api / requests * 1e6,
        "workers_cpu_us": used.workers / requests * 1e6,
        "all_cpu_us": (used.api + used.workers) / requests * 1e6,
    }


def percentiles(latencies: list[float]) -> Figures:
    """Compute the median and the 99th percentile, milliseconds."""
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario for scenario in (full_speed, saturation, lone_requests, idle)
}
