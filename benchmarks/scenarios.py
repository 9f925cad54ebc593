"""What is done to a system: the loads, and how each is measured. Runs in the measured process.

A system is one coroutine function that answers one input. All systems see the very same callers.
"""

import asyncio
import gc
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.arrivals import RECORD
from benchmarks.cpu import TreeCpu, process_cpu
from benchmarks.models import MODELS, SIZED
from benchmarks.wake import wake_us

Process = Callable[[Any], Awaitable[object]]
Figures = dict[str, float]

# A short string, so that the batching is measured and not the pickling.
TEXT = "a short input, number {}"
# One image for an ImageNet model, as float32: 602112 bytes.
ARRAY_SHAPE = (3, 224, 224)
# Lone requests left out at the start: caches, lazily started threads.
WARM_UP_REQUESTS = 20
# The same of an open loop, in seconds: BentoML's dispatcher learns from its first requests.
WARM_UP_SECONDS = 1.0
# How long after the last arrival a request of an open loop may still be answered, in seconds.
PATIENCE = 5.0


@dataclass(frozen=True)
class Load:
    """What a system is put under; the same for all systems of a comparison."""

    # A name in `benchmarks.models.MODELS`, or "MiniLM", the example's embedding model.
    model: str
    max_batch_size: int
    callers: int
    # How long the measured part takes, without start and warm-up.
    seconds: float
    # From one lone request to the next.
    interval: float = 0.02
    # In an open loop: arrivals per second, and what draws them.
    rate: float = 0.0
    seed: int = 0
    # Of what is sent to the models of arrays: float32 numbers.
    array_shape: tuple[int, ...] = ARRAY_SHAPE

    def payload(self, caller: int = 0) -> Any:
        """What this caller's requests carry; nobody else's, since pickle sends an object once."""
        if not self.model.startswith("Array"):
            return TEXT.format(caller)
        import numpy  # only where it is needed: not every environment has it

        return numpy.full(self.array_shape, caller, numpy.float32)

    def is_right(self, answer: Any) -> bool:
        """Whether the model has answered what the first caller's requests carry."""
        if self.model in ("ArrayLabel", "ArrayRead"):
            return bool(answer == 0)
        if self.model == "ArrayStacked":
            return bool(answer[1] == 0)
        if self.model == "ArrayEcho":
            return bool((answer == self.payload()).all())
        if self.model in SIZED:
            return bool(answer[0] == self.payload())
        if self.model == "MiniLM":
            return math.isclose(math.hypot(*answer), 1.0, abs_tol=1e-3)
        return bool(answer == self.payload())


async def full_speed(process: Process, load: Load) -> Figures:
    """CPU per request, requests/s and latency of callers that ask again as soon as answered.

    The callers only count down while CPU is measured; latency is taken in a pass of its own.
    """
    payloads = [load.payload(caller) for caller in range(load.callers)]

    async def call(payload: Any, times: int) -> None:
        for _ in range(times):
            await process(payload)

    async def all_call(times: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(call(payload, times) for payload in payloads))
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
        "wake_us": wake_us(),
    }


async def saturation(process: Process, load: Load) -> Figures:
    """Requests/s in the steady state, with more callers than a batch holds.

    Each caller's own rate is taken from its first to its last answer in the time, and summed: the
    figure has no share of start and end, and no rounding to whole batches.
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
    """Requests/s of callers, from the moments at which each was answered."""
    return sum((len(times) - 1) / (times[-1] - times[0]) for times in answered if len(times) > 1)


def mean_batch_size(sizes: list[int]) -> float:
    """Of the batches, from the sizes of the batches that each request was in."""
    return len(sizes) / math.fsum(1 / size for size in sizes)


async def lone_requests(process: Process, load: Load) -> Figures:
    """Latency of one request at a time, with the system idle in between.

    The pause is one timer of the same event loop for every system. The clock starts after it has
    fired, so how late it was does not count, and every system starts from a loop just woken.
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


async def open_loop(process: Process, load: Load) -> Figures:
    """Latency of requests that come when they come, however many are under way.

    Another process says when (`benchmarks.arrivals`), so a system that holds up the event loop is
    not forgiven: a latency begins when its request was due. What is refused, fails, or is not
    answered `PATIENCE` seconds after the last arrival is lost.
    """
    command = [sys.executable, "-m", "benchmarks.arrivals"]
    command += [str(load.rate), str(WARM_UP_SECONDS + load.seconds), str(load.seed)]
    # Starting it blocks the loop, but nothing is measured yet.
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as arrivals:
        requests = _OpenLoop(process, load, arrivals)
        await requests.all_sent
        if requests.tasks:
            await asyncio.wait(requests.tasks, timeout=PATIENCE)
        used = requests.read_cpu().since(requests.cpu_at_start)
        for task in list(requests.tasks):
            task.cancel()
        arrivals.communicate()
    answered = sorted(requests.latencies)
    lost = requests.count - len(answered)
    # The lost ones took for ever; a percentile that falls on one of them is left out.
    latencies = answered + [math.inf] * lost
    in_time = sum(latency <= 0.050 for latency in answered)
    figures = {
        "arrivals_per_second": load.rate,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3,
        "lost": lost / requests.count,
        "within_50_ms": in_time / requests.count,
        "in_time_per_second": in_time / load.seconds,
        "requests_per_second": len(answered) / load.seconds,
        **cpu_per_request(used, max(1, len(answered))),
    }
    if requests.refusals:
        refusals = sorted(requests.refusals)
        figures["refusal_p99_ms"] = 1e3 * refusals[len(refusals) * 99 // 100]
    if requests.sizes:
        figures["mean_ms"] = 1e3 * statistics.fmean(answered)
        figures["batch_size"] = mean_batch_size(requests.sizes)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


class _OpenLoop:
    """Asks once for every arrival that it reads of, and does not count those of the warm-up."""

    def __init__(self, process: Process, load: Load, arrivals: subprocess.Popen[bytes]) -> None:
        assert arrivals.stdout is not None
        self.all_sent = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[None]] = set()
        # Counted requests, the latencies of those that were answered, and the CPU before the first.
        self.count = 0
        self.latencies: list[float] = []
        # After how long others failed, and, where answers tell it, the sizes of their batches.
        self.refusals: list[float] = []
        self.sizes: list[int] = []
        self._arrivals = arrivals
        self.cpu_at_start = self.read_cpu()
        self._process = process
        self._load = load
        self._source = arrivals.stdout.fileno()
        self._start = 0.0
        os.set_blocking(self._source, False)
        asyncio.get_running_loop().add_reader(self._source, self._read)

    def read_cpu(self) -> TreeCpu:
        """Without the process that says when requests come: it is no part of the system."""
        tree = TreeCpu.read()
        return TreeCpu(tree.api, tree.workers - process_cpu(self._arrivals.pid))

    def _read(self) -> None:
        loop = asyncio.get_running_loop()
        # A multiple of the record's size, as every write at the other end is.
        records = os.read(self._source, RECORD.size * 4096)
        if not records:
            loop.remove_reader(self._source)
            self.all_sent.set_result(None)
        for (due,) in RECORD.iter_unpack(records):
            if not self._start:
                self._start = due + WARM_UP_SECONDS
            is_counted = due >= self._start
            if is_counted and not self.count:
                self.cpu_at_start = self.read_cpu()
            self.count += is_counted
            payload = self._load.payload(self.count)
            task = loop.create_task(self._ask(payload, due, is_counted))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _ask(self, payload: Any, due: float, is_counted: bool) -> None:
        try:
            answer: Any = await self._process(payload)
        except Exception:  # noqa: BLE001  whatever a system refuses with, the request is lost
            if is_counted:
                self.refusals.append(time.perf_counter() - due)
            return
        if is_counted:
            self.latencies.append(time.perf_counter() - due)
            if self._load.model in SIZED:
                self.sizes.append(answer[1])


async def idle(process: Process, load: Load) -> Figures:
    """Share of a core that all processes use while nobody asks."""
    await process(load.payload())
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
    inputs = [load.payload(number) for number in range(load.max_batch_size)]
    model.infer(inputs)
    batches = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < load.seconds:
        model.infer(inputs)
        batches += 1
    connection.send(batches * load.max_batch_size / elapsed)


def cpu_per_request(used: TreeCpu, requests: int) -> Figures:
    """In microseconds, which is the same as milliseconds per 1000 requests."""
    return {
        "api_cpu_us": used.api / requests * 1e6,
        "workers_cpu_us": used.workers / requests * 1e6,
        "all_cpu_us": (used.api + used.workers) / requests * 1e6,
    }


def percentiles(latencies: list[float]) -> Figures:
    """In milliseconds; the maximum stands for the 99th percentile of fewer than 100."""
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario
    for scenario in (full_speed, saturation, lone_requests, open_loop, idle)
}
