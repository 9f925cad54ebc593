"""S3, S5 and S7: programs are killed or ended under load, and a batcher is opened many times."""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

import httpx2
from waits import LIMIT

from benchmarks.soak.models import Works
from benchmarks.soak.report import Findings
from benchmarks.soak.watch import descriptors, probing, shared_names, worker_pids
from fast_batcher import DynBatcher

# The programs import what this process imports.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
# A worker whose parent has died ends within this time, seconds.
ORPHAN_TIME = 1.0
# Enough that at any moment one batch runs and another waits.
CLIENTS = 20


async def s3(short: bool, seed: int) -> Findings:
    """Kill a program under load; its workers must end too."""
    findings = Findings("S3 parent killed")
    rng = random.Random(seed)
    times = 3 if short else 200
    before = shared_names()
    survivors, longest = 0, 0.0
    for number in range(times):
        if number % 20 == 0:
            print(f"S3 parent killed: {number} of {times}", flush=True)
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.soak.victim"),
            env=ENVIRONMENT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert program.stdout is not None
        async with asyncio.timeout(LIMIT):
            workers = json.loads(await program.stdout.readline())
        watches = [os.pidfd_open(pid) for pid in workers]
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        program.kill()
        started = monotonic()
        for watch in watches:
            survivors += not await _is_dead(watch)
            os.close(watch)
        longest = max(longest, monotonic() - started)
        await program.wait()
    findings.tell("programs killed under load", times)
    findings.none(f"workers alive after {ORPHAN_TIME:g} s", survivors)
    findings.tell("longest life of a worker after its parent, ms", 1000 * longest)
    findings.none("new entries in /dev/shm and TMPDIR", len(shared_names() - before))
    return findings


async def _is_dead(pidfd: int) -> bool:
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    loop.add_reader(pidfd, dead.set)
    try:
        await asyncio.wait_for(dead.wait(), ORPHAN_TIME)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


async def s5(short: bool, seed: int) -> Findings:
    """Open, call and close many times in one process."""
    findings = Findings("S5 open and close")
    times = 3 if short else 500
    held: list[tuple[int, int, int]] = []
    async with probing() as probe:
        for number in range(times + 1):
            if number % 50 == 0:
                print(f"S5 open and close: {number} of {times}", flush=True)
            async with DynBatcher(Works, num_workers=1 + number % 2) as batcher:
                assert await batcher.process_batched(number) == number
            held.append((descriptors(), threading.active_count(), len(worker_pids())))
    # The first time starts what lives as long as the interpreter.
    findings.tell("times", times)
    for index, what in enumerate(("descriptors", "threads", "worker processes")):
        more = max(entry[index] for entry in held[1:]) - held[0][index]
        findings.none(f"{what} beyond those after the first time", max(0, more))
    probe.tell(findings)
    return findings


@dataclass
class Clients:
    """HTTP clients that send one request after the other until the server has ended."""

    url: str
    received: set[str] = field(default_factory=set)
    statuses: Counter[int] = field(default_factory=Counter)

    async def ask(self, number: int, run: int) -> None:
        """Be one client."""
        sequence = 0
        async with httpx2.AsyncClient(base_url=self.url, trust_env=False, timeout=LIMIT) as client:
            while True:
                name = f"{run}-{number}-{sequence}"
                sequence += 1
                try:
                    response = await client.post("/", json={"name": name})
                except Exception:  # noqa: BLE001  the server has ended, or is ending
                    # Whatever the client raises, the journal says whether the app had begun.
                    return
                self.statuses[response.status_code] += 1
                self.received.add(name)


async def s7(short: bool, seed: int) -> Findings:
    """Send SIGTERM to uvicorn under load; what the app has begun with must be answered."""
    findings = Findings("S7 SIGTERM")
    rng = random.Random(seed)
    times = 1 if short else 50
    accepted, lost, slow, wrong_exit = 0, 0, 0.0, 0
    statuses: Counter[int] = Counter()
    for run in range(times):
        if run % 10 == 0:
            print(f"S7 SIGTERM: {run} of {times}", flush=True)
        with tempfile.NamedTemporaryFile() as journal:
            port = free_port()
            environment = {**ENVIRONMENT, "SOAK_JOURNAL": journal.name}
            command = ["-m", "uvicorn", "benchmarks.soak.app:app", "--port", str(port)]
            server = await asyncio.create_subprocess_exec(
                sys.executable, *command, "--log-level", "error", env=environment
            )
            clients = Clients(f"http://127.0.0.1:{port}")
            await until_ready(clients.url)
            tasks = [asyncio.create_task(clients.ask(one, run)) for one in range(CLIENTS)]
            await asyncio.sleep(rng.uniform(0.2, 0.6))
            started = monotonic()
            server.send_signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*tasks)
                code = await server.wait()
            slow = max(slow, monotonic() - started)
            # uvicorn's own status after this signal.
            wrong_exit += code not in (0, -signal.SIGTERM)
            begun = set(journal.read().decode().split())
        accepted += len(begun)
        lost += len(begun - clients.received)
        statuses += clients.statuses
    findings.tell("times", times)
    findings.tell("requests that the app had begun with", accepted)
    findings.none("of those, not answered", lost)
    findings.tell("answers by status", json.dumps(statuses, sort_keys=True))
    findings.none("exits with another status than uvicorn's own", wrong_exit)
    findings.tell("longest from the signal to the end, s", slow)
    return findings


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until_ready(url: str) -> None:
    async with (
        asyncio.timeout(LIMIT),
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT) as client,
    ):
        while True:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    return
            except (httpx2.TransportError, AttributeError):  # of a socket closed while it opened
                pass
            await asyncio.sleep(0.02)
