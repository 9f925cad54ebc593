"""Open and closed loops: requests that another process says are due. Runs in the measured process.

A latency begins when its request was due, so a system that holds up the event loop is not forgiven.
"""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from benchmarks.clients import RECORD
from benchmarks.cpu import TreeCpu, process_cpu
from benchmarks.scenarios import (
    Figures,
    Load,
    Process,
    cpu_per_request,
    percentiles,
    steady_rate,
)

# Requests that are due in the first seconds do not count: BentoML's dispatcher learns from them.
WARM_UP_SECONDS = 1.0
# How long after the last request was due an answer is waited for, seconds.
PATIENCE = 5.0


async def open_loop(process: Process, load: Load) -> Figures:
    """Measure requests that arrive at random, however many are under way.

    What is rejected, fails, or is not answered `PATIENCE` seconds after the last arrival is lost.
    """
    asked, used = await _ask_all(process, load, "open", load.rate)
    answered = sorted(answer.latency for answer in asked.answers)
    lost = asked.count - len(answered)
    # A lost request took for ever; a percentile that falls on one is left out.
    latencies = answered + [math.inf] * lost
    figures = {
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3,
        "lost": lost / asked.count,
        "within_50_ms": sum(latency <= 0.050 for latency in answered) / asked.count,
        **cpu_per_request(used, max(1, len(answered))),
    }
    return {name: value for name, value in figures.items() if math.isfinite(value)}


async def closed_loop(process: Process, load: Load) -> Figures:
    """Measure clients that ask again a pause after their answer or rejection.

    For the model that also answers with the size of its batch (`benchmarks.models.Gpu`).
    """
    asked, _ = await _ask_all(process, load, "closed", load.callers)
    times: list[list[float]] = [[] for _ in range(load.callers)]
    for answer in asked.answers:
        times[answer.client].append(answer.moment)
    return {
        "requests_per_second": steady_rate(times),
        **percentiles([answer.latency for answer in asked.answers]),
        "batch_size": mean_batch_size([answer.output[1] for answer in asked.answers]),
        "lost": 1 - len(asked.answers) / asked.count,
    }


def mean_batch_size(sizes: list[int]) -> float:
    """Compute the mean over batches from the size of each request's batch."""
    return len(sizes) / math.fsum(1 / size for size in sizes)


async def _ask_all(
    process: Process, load: Load, kind: str, number: float
) -> tuple["_Asked", TreeCpu]:
    """Ask whenever the other process says so; return what came of it, and the CPU time for it."""
    seconds = WARM_UP_SECONDS + load.seconds
    command = [sys.executable, "-m", "benchmarks.clients", kind]
    command += [str(number), str(seconds), str(load.seed)]
    # Starting it blocks the loop, but nothing is measured yet.
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as clients:
        asked = _Asked(process, load, clients, tells_answers=kind == "closed")
        await asked.all_sent
        if asked.tasks:
            await asyncio.wait(asked.tasks, timeout=PATIENCE)
        used = asked.read_cpu().since(asked.cpu_at_start)
        for task in list(asked.tasks):
            task.cancel()
        clients.communicate()
    return asked, used


class _Answer(NamedTuple):
    """A request of the measured time that was answered."""

    client: int
    # Seconds since it was due.
    latency: float
    moment: float
    output: Any


class _Asked:
    """Asks for each record that it reads, and notes the answers after the warm-up."""

    def __init__(
        self,
        process: Process,
        load: Load,
        clients: subprocess.Popen[bytes],
        *,
        tells_answers: bool,
    ) -> None:
        assert clients.stdin is not None
        assert clients.stdout is not None
        self._loop = asyncio.get_running_loop()
        self.all_sent = self._loop.create_future()
        self.tasks: set[asyncio.Task[None]] = set()
        # Requests after the warm-up, their answers, and the CPU time before the first of them.
        self.count = 0
        self.answers: list[_Answer] = []
        self._process = process
        self._load = load
        self._clients = clients
        self._tells_answers = tells_answers
        self._source, self._output = clients.stdout.fileno(), clients.stdin.fileno()
        # All requests so far, and the moment from which they count.
        self._number = 0
        self._begin = 0.0
        # Records of the answers in this turn of the event loop.
        self._settled: list[bytes] = []
        self.cpu_at_start = self.read_cpu()
        os.set_blocking(self._source, False)
        self._loop.add_reader(self._source, self._read)

    def read_cpu(self) -> TreeCpu:
        """Read the CPU time, without the process that says when requests are due."""
        tree = TreeCpu.read()
        return TreeCpu(tree.api, tree.workers - process_cpu(self._clients.pid))

    def _read(self) -> None:
        # A multiple of the record's size, as every write at the other end is.
        records = os.read(self._source, RECORD.size * 4096)
        if not records:
            self._loop.remove_reader(self._source)
            self.all_sent.set_result(None)
        for due, client in RECORD.iter_unpack(records):
            if not self._number:
                self._begin = due + WARM_UP_SECONDS
            if due >= self._begin:
                if not self.count:
                    self.cpu_at_start = self.read_cpu()
                self.count += 1
            # One input for each client, or for each request of an open loop.
            self._number += 1
            payload = self._load.payload(client if self._tells_answers else self._number)
            task = self._loop.create_task(self._ask(payload, due, client))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _ask(self, payload: Any, due: float, client: int) -> None:
        try:
            output = await self._process(payload)
        except Exception:  # noqa: BLE001  whatever a system raises, the request is lost
            moment = time.perf_counter()
        else:
            moment = time.perf_counter()
            if due >= self._begin:
                self.answers.append(_Answer(client, moment - due, moment, output))
        if self._tells_answers:
            if not self._settled:
                self._loop.call_soon(self._tell)
            self._settled.append(RECORD.pack(moment, client))

    def _tell(self) -> None:
        os.write(self._output, b"".join(self._settled))
        self._settled.clear()


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    scenario.__name__: scenario for scenario in (open_loop, closed_loop)
}
