"""S10: four API processes share a host while workers, hosts and API processes are killed."""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from waits import LIMIT

from benchmarks.soak.lives import ENVIRONMENT
from benchmarks.soak.models import read_journal
from benchmarks.soak.report import Findings
from benchmarks.soak.watch import shared_names

API_PROCESSES = 4
# Seconds of the run, and from one kill to the next.
SECONDS, SHORT_SECONDS = 600.0, 4.0
PAUSES = 0.2, 2.0
# Shares of the kills.
KILLED = {"a worker": 0.5, "the host": 0.2, "an API process": 0.3}
# The error of a request with which two hosts, or two workers, died.
EXPLAINED = "PoisonRequestError"


@dataclass
class Sharer:
    """An API process."""

    process: asyncio.subprocess.Process

    async def read(self) -> str:
        """Wait for a line; "" at the end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT):
            return (await self.process.stdout.readline()).decode()

    def end(self) -> None:
        """Let it close its batcher and tell what it saw."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"end\n")


def find_hosts(folder: str) -> list[int]:
    """Find the living hosts whose sockets are in this folder."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = folder.encode() in (path / "environ").read_bytes()
            if is_ours and b"fast_batcher._host.main" in (path / "cmdline").read_bytes():
                status = (path / "stat").read_text().rpartition(")")[2].split()
                found[int(path.name)] = int(status[1])
    # A worker has its host's command line until it runs its own program.
    return [pid for pid, parent in found.items() if parent not in found]


def find_workers(hosts: list[int], folder: str) -> list[int]:
    """Find the workers of hosts that have computed a batch.

    The death of a worker that loads the first model of its host is a failed start, which every
    caller is told.
    """
    children: list[int] = []
    for host in hosts:
        for path in Path(f"/proc/{host}/task").glob("*/children"):
            with suppress(OSError):
                children += [int(pid) for pid in path.read_text().split()]
    return [pid for pid in children if read_journal(folder, pid)]


@dataclass
class Run:
    """A run of the scenario.

    Args:
        folder: Where sockets and journals are.
        rng: Chooses the kills.
    """

    folder: str
    rng: random.Random
    sharers: list[Sharer] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    most_hosts: int = 0

    async def start(self) -> None:
        """Start an API process, and wait until its batcher is open."""
        program = (sys.executable, "-m", "benchmarks.soak.sharer")
        pipe = asyncio.subprocess.PIPE
        environment = {**ENVIRONMENT, "XDG_RUNTIME_DIR": self.folder}
        process = await asyncio.create_subprocess_exec(
            *program, env=environment, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        self.sharers.append(Sharer(process))
        await self.sharers[-1].read()

    async def kill_something(self) -> None:
        """Kill a process; start another API process if it was one."""
        (what,) = self.rng.choices([*KILLED], [*KILLED.values()])
        hosts = find_hosts(self.folder)
        self.most_hosts = max(self.most_hosts, len(hosts))
        victims = {
            "a worker": find_workers(hosts, self.folder),
            "the host": hosts,
            "an API process": [one.process.pid for one in self.sharers],
        }[what]
        if not victims:  # the next host is being started
            return
        victim = self.rng.choice(victims)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.kills[what] += 1
        for dead in [one for one in self.sharers if one.process.pid == victim]:
            await dead.process.wait()
            self.sharers.remove(dead)
            await self.start()

    async def end(self) -> None:
        """End the API processes, and add up what they saw."""
        for one in self.sharers:
            one.end()
        for one in self.sharers:
            seen = json.loads(await one.read())
            self.counts.update(seen["counts"])
            self.longest = max(self.longest, seen["longest"])
            await one.process.wait()


async def s10(short: bool, seed: int) -> Findings:
    """Kill everything in turn; each call has its outcome, and nothing is left."""
    findings = Findings("S10 shared")
    before = shared_names()
    seconds = SHORT_SECONDS if short else SECONDS
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, random.Random(seed))
        await asyncio.gather(*(run.start() for _ in range(API_PROCESSES)))
        begun, told = monotonic(), 0.0
        while (now := monotonic() - begun) < seconds:
            if now >= told:
                print(f"S10 shared: {now:.0f} of {seconds:.0f} s, {dict(run.kills)}", flush=True)
                told += 30.0
            await asyncio.sleep(run.rng.uniform(*PAUSES))
            await run.kill_something()
        await run.end()
        hosts_left = len(find_hosts(folder))
        sockets_left = sum(name.endswith(".sock") for name in os.listdir(f"{folder}/fast_batcher"))
    counts = run.counts
    findings.tell("seconds", seconds)
    findings.tell("kills", json.dumps(run.kills, sort_keys=True))
    findings.tell("right answers, of the API processes that lived", counts.pop("right", 0))
    findings.none("wrong answers", counts.pop("WRONG", 0))
    findings.none("calls without an outcome in time", counts.pop("LATE", 0))
    findings.tell("calls that two deaths have ended", counts.pop(EXPLAINED, 0))
    findings.none(f"other errors {dict(counts) or ''}".strip(), sum(counts.values()))
    findings.tell("longest call, s", run.longest)
    wanted = "at most 1"
    findings.check("hosts at one time", run.most_hosts, wanted, holds=run.most_hosts <= 1)
    findings.none("hosts left", hosts_left)
    findings.none("sockets left", sockets_left)
    findings.none("new entries in /dev/shm and TMPDIR", len(shared_names() - before))
    return findings
