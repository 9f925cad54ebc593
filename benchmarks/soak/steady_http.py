"""S8: an hour over HTTP with frozen objects, after 50 reloads of the app in one process."""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from fastapi import FastAPI

from benchmarks.soak.lives import ENVIRONMENT, free_port, until_ready
from benchmarks.soak.models import Works
from benchmarks.soak.report import Findings, slope
from benchmarks.soak.watch import descriptors, rss_bytes, worker_pids
from fast_batcher import DynBatcher

RELOADS = 50
CONNECTIONS = 16
# Requests per second of each connection, on average: part load, in which requests wait.
RATE = 20.0
# Seconds after which everything has settled.
SETTLED = 600.0
# Bytes per hour that the server may grow by, at the upper end of the confidence interval.
MOST_GROWTH = 2**20
# Between two looks at the server's memory, seconds.
LOOK_INTERVAL = 1.0


@dataclass
class Client:
    """Connections that ask one question after the other until the time is over."""

    port: int
    until: float
    answered: int = 0
    failures: int = 0
    # Seconds since the start, and bytes.
    moments: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    async def ask(self, number: int) -> None:
        """Be one connection."""
        rng = random.Random(number)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"name": f"client {number}"}).encode()
        lines = ("POST / HTTP/1.1", "Host: a", "Content-Type: application/json")
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
        while monotonic() < self.until:
            await asyncio.sleep(rng.expovariate(RATE))
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length:")[2].split()[0])
            is_right = json.loads(await reader.readexactly(length)) == f"client {number}"
            self.answered += is_right
            self.failures += not is_right
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def look(self, pid: int, started: float) -> None:
        """Look at the memory of the server until the time is over."""
        while monotonic() < self.until:
            self.moments.append(monotonic() - started)
            self.sizes.append(float(rss_bytes(pid)))
            await asyncio.sleep(LOOK_INTERVAL)


async def s8(short: bool, _: int) -> Findings:
    """Reload an app many times, then judge a server after it has settled."""
    findings = Findings("S8 HTTP")
    await _reload(findings, 2 if short else RELOADS)
    seconds = 3.0 if short else 3600.0
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.soak.app:app", "--port", str(port)]
    environment = {**ENVIRONMENT, "SOAK_JOURNAL": os.devnull}
    server = subprocess.Popen(
        [*command, "--log-level", "error", "--no-access-log"], env=environment
    )
    try:
        await until_ready(f"http://127.0.0.1:{port}")
        started = monotonic()
        client = Client(port, started + seconds)
        asking = [client.ask(number) for number in range(CONNECTIONS)]
        await asyncio.gather(client.look(server.pid, started), *asking)
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait)
    findings.tell("seconds", seconds)
    findings.tell("requests", client.answered)
    findings.none("wrong answers", client.failures)
    after = [index for index, moment in enumerate(client.moments) if short or moment > SETTLED]
    rise, doubt = slope(
        [client.moments[index] for index in after], [client.sizes[index] for index in after]
    )
    growth = f"{3600 * rise / 2**20:.2f} +- {3600 * doubt / 2**20:.2f}"
    if short:
        findings.tell("growth of the server, MB/h (too short to tell)", growth)
    else:
        holds = 3600 * (rise + doubt) < MOST_GROWTH
        findings.check("growth of the server, MB/h", growth, "upper end below 1", holds=holds)
    return findings


async def _reload(findings: Findings, times: int) -> None:
    """Start and end an app again and again; all that it holds must be gone each time."""
    thresholds = gc.get_threshold()
    held: list[tuple[int, ...]] = []
    for _ in range(times):
        batcher: DynBatcher[str, str] = DynBatcher(Works, 8)
        app = FastAPI(lifespan=batcher.lifespan)
        async with app.router.lifespan_context(app):
            await batcher.process_batched("a request")
        del batcher, app
        gc.collect()
        held.append(
            (
                gc.get_freeze_count(),
                descriptors(),
                threading.active_count(),
                len(worker_pids()),
                len(gc.get_objects()),
            )
        )
    findings.tell("reloads", times)
    findings.none("thresholds that stay changed", int(gc.get_threshold() != thresholds))
    # The first times load modules and fill caches.
    first, last = held[min(2, times - 1)], held[-1]
    for index, what in enumerate(
        ("frozen objects", "descriptors", "threads", "workers", "objects")
    ):
        more = max(0, last[index] - first[index])
        findings.none(f"{what} after the reloads, beyond those after the third", more)
