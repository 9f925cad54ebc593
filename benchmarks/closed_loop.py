"""Clients that ask again a pause after their answer. Runs in the measured process.

For the models that answer with their batch's size (`benchmarks.models.SIZED`).
"""

import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.clients import RECORD
from benchmarks.scenarios import (
    PATIENCE,
    WARM_UP_SECONDS,
    Figures,
    Load,
    Process,
    mean_batch_size,
    percentiles,
    steady_rate,
)


async def closed_loop(process: Process, load: Load) -> Figures:
    """Requests/s, latency and batch size of clients that ask again a pause after their answer.

    Another process draws the pauses (`benchmarks.clients`). A latency begins when its request was
    due. A client whose request fails asks again as well.
    """
    seconds = WARM_UP_SECONDS + load.seconds
    arguments = [str(load.callers), str(seconds), str(load.seed)]
    command = [sys.executable, "-m", "benchmarks.clients", *arguments]
    # Starting it blocks the loop, but nothing is measured yet.
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as clients:
        requests = _ClosedLoop(process, load, clients)
        await requests.all_sent
        if requests.tasks:
            await asyncio.wait(requests.tasks, timeout=PATIENCE)
        for task in list(requests.tasks):
            task.cancel()
        clients.communicate()
    latencies = [latency for _, latency, _ in requests.answers]
    return {
        "requests_per_second": steady_rate(requests.times),
        "mean_ms": 1e3 * statistics.fmean(latencies),
        **percentiles(latencies),
        "batch_size": mean_batch_size([size for _, _, size in requests.answers]),
        "lost": requests.lost / (requests.lost + len(latencies)),
    }


class _ClosedLoop:
    """Asks for each client that asks, tells it of the answer, and notes what came of it."""

    def __init__(self, process: Process, load: Load, clients: subprocess.Popen[bytes]) -> None:
        assert clients.stdin is not None
        assert clients.stdout is not None
        self._loop = asyncio.get_running_loop()
        self.all_sent = self._loop.create_future()
        self.tasks: set[asyncio.Task[None]] = set()
        # What was answered in the time: its moment, latency and batch size; the moments by client.
        # And how many were refused in it.
        self.answers: list[tuple[float, float, int]] = []
        self.times: list[list[float]] = [[] for _ in range(load.callers)]
        self.lost = 0
        self._process = process
        self._payloads = [load.payload(client) for client in range(load.callers)]
        self._begin = math.inf
        self._seconds = load.seconds
        self._source, self._output = clients.stdout.fileno(), clients.stdin.fileno()
        # Answers of this turn of the event loop.
        self._settled: list[bytes] = []
        os.set_blocking(self._source, False)
        self._loop.add_reader(self._source, self._read)

    def _read(self) -> None:
        # A multiple of the record's size, as every write at the other end is.
        records = os.read(self._source, RECORD.size * 4096)
        if not records:
            self._loop.remove_reader(self._source)
            self.all_sent.set_result(None)
        for due, client in RECORD.iter_unpack(records):
            if self._begin == math.inf:
                self._begin = due + WARM_UP_SECONDS
            task = self._loop.create_task(self._ask(due, client))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _ask(self, due: float, client: int) -> None:
        try:
            answer: Any = await self._process(self._payloads[client])
            size = answer[1]
        except Exception:  # noqa: BLE001  whatever a system refuses with, the request is lost
            size = 0
        now = time.perf_counter()
        if not self._settled:
            self._loop.call_soon(self._tell)
        self._settled.append(RECORD.pack(now, client))
        if not self._begin <= now < self._begin + self._seconds:
            return
        if size:
            self.answers.append((now, now - due, size))
            self.times[client].append(now)
        else:
            self.lost += 1

    def _tell(self) -> None:
        os.write(self._output, b"".join(self._settled))
        self._settled.clear()


SCENARIOS: dict[str, Callable[[Process, Load], Awaitable[Figures]]] = {
    closed_loop.__name__: closed_loop
}
