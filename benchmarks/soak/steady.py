"""S4: a long run at part load, in which workers are recycled: does anything grow?"""

import asyncio
import random
import sys
import threading
from array import array
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from benchmarks.soak.models import Works
from benchmarks.soak.report import Findings, Histogram, slope
from benchmarks.soak.watch import descriptors, probing, rss_bytes
from fast_batcher import BatcherError, DynBatcher

MAX_BATCH_SIZE = 32
# What the model can do in batches of 32, requests/s, and the share of it that is asked for.
CAPACITY = 32 / (0.002 + 32 * 0.0001)
LOAD = 0.7
# In the short form, in which nothing is told of latencies: a machine that runs tests is busy, and
# what it cannot do for a fifth of a second must not fill the queue.
SHORT_LOAD = 0.35
# Of the run, where the command line says nothing else.
SECONDS = 1200.0
SHORT_SECONDS = 10.0
# Between looks, seconds. In the short form many, so that some of each quarter fall between two
# recyclings; in the full one few, so that what they take themselves is not what grows.
LOOK_INTERVAL = 1.0
SHORT_LOOK_INTERVAL = 0.1
# The promise: bytes per hour that the parent may grow by, as far as anybody can tell.
MOST_GROWTH = 2 * 2**20
# Batches after which a worker is recycled: every ten seconds or so.
RECYCLE_AFTER = 2000
# Requests of 20 seconds. Where the host of a virtual machine takes all of it for a second, more
# arrive meanwhile than the default bound lets wait, and what is refused says nothing here.
MAX_QUEUE_SIZE = 100_000
# Share by which p99 may rise. Source: the fault catalogue, S4.
MOST_DRIFT = 0.10


class Look(NamedTuple):
    """What the parent held at one moment."""

    # Seconds since the start.
    moment: float
    rss_bytes: float
    descriptors: float
    threads: float
    # Of Python's allocator.
    blocks: float


@dataclass
class Run:
    """One soak while it runs."""

    seconds: float
    batcher: DynBatcher[float, float]
    started: float = 0.0
    failures: int = 0
    # Field by field, in flat arrays: a list of looks would be the growth that is found.
    looks: tuple["array[float]", ...] = field(
        default_factory=lambda: tuple(array("d") for _ in Look._fields)
    )
    # Seconds from arrival to answer, by the third of the run in which they arrived.
    latencies: list[Histogram] = field(default_factory=lambda: [Histogram() for _ in range(3)])

    async def ask(self, due: float) -> None:
        """One request."""
        try:
            await self.batcher.process_batched(due)
        except BatcherError:
            self.failures += 1
        third = min(2, int(3 * (due - self.started) / self.seconds))
        self.latencies[third].add(monotonic() - due)

    async def look(self, interval: float) -> None:
        """Until it is cancelled."""
        while True:
            look = Look(
                monotonic() - self.started,
                rss_bytes(),
                descriptors(),
                threading.active_count(),
                sys.getallocatedblocks(),
            )
            for figures, figure in zip(self.looks, look, strict=True):
                figures.append(figure)
            await asyncio.sleep(interval)

    async def load(self, rng: random.Random, share: float) -> None:
        """Poisson arrivals of so much of the capacity, until time is over and all are answered."""
        tasks: set[asyncio.Task[None]] = set()
        due, shown = self.started, 0.0
        while due < self.started + self.seconds:
            due += rng.expovariate(share * CAPACITY)
            if due > monotonic():
                await asyncio.sleep(due - monotonic())
            task = asyncio.create_task(self.ask(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if due - self.started > shown:
                print(f"S4 steady: {shown:.0f} of {self.seconds:.0f} seconds", flush=True)
                shown += 30.0
        if tasks:
            await asyncio.wait(tasks)


async def s4(short: bool, seed: int, seconds: float | None = None) -> Findings:
    """The second half of the run is looked at for growth."""
    findings = Findings("S4 steady")
    seconds = seconds or (SHORT_SECONDS if short else SECONDS)
    batcher: DynBatcher[float, float] = DynBatcher(
        Works,
        MAX_BATCH_SIZE,
        max_queue_size=MAX_QUEUE_SIZE,
        max_batches_per_worker=150 if short else RECYCLE_AFTER,
    )
    async with batcher, probing() as probe:
        run = Run(seconds, batcher, monotonic())
        looking = asyncio.create_task(run.look(SHORT_LOOK_INTERVAL if short else LOOK_INTERVAL))
        await run.load(random.Random(seed), SHORT_LOAD if short else LOAD)
        looking.cancel()
        await asyncio.wait([looking])
        restarts = batcher.stats.restarts
    findings.tell("seconds", seconds)
    findings.tell("requests", sum(third.count for third in run.latencies))
    findings.none("failed requests", run.failures)
    findings.check("workers recycled", restarts, "some", holds=restarts > 0)
    looks = (Look(*figures) for figures in zip(*run.looks, strict=True))
    half = [look for look in looks if look.moment > seconds / 2]
    moments = [look.moment for look in half]
    rise, doubt = slope(moments, [look.rss_bytes for look in half])
    growth = f"{3600 * rise / 2**20:.2f} +- {3600 * doubt / 2**20:.2f}"
    blocks, blocks_doubt = slope(moments, [look.blocks for look in half])
    drift = run.latencies[2].quantile(0.99) / run.latencies[0].quantile(0.99) - 1
    if short:
        findings.tell("growth of the parent, MB/h (too short to tell)", growth)
        findings.tell("p99, last third against first (too short to tell)", drift)
    else:
        holds = 3600 * (rise + doubt) < MOST_GROWTH
        findings.check("growth of the parent, MB/h", growth, "upper end below 2", holds=holds)
        # A count, not bytes: many small things that stay show in it, a few large ones do not.
        more = f"{3600 * blocks:.0f} +- {3600 * blocks_doubt:.0f}"
        findings.tell("more blocks of Python's allocator, per hour", more)
        what = "p99, last third against first"
        findings.check(what, drift, "below 0.1", holds=drift < MOST_DRIFT)
    # A recycling opens some and closes them again, and a look may fall on it: what never comes down
    # again is what leaks, and that raises the fewest.
    third, last = (
        [look for look in half if (look.moment > 0.75 * seconds) is is_last]
        for is_last in (False, True)
    )
    for what in ("descriptors", "threads"):
        before, after = ([getattr(look, what) for look in quarter] for quarter in (third, last))
        findings.check(
            f"{what}, fewest in the last quarter",
            round(min(after)),
            f"at most {min(before):.0f}, as in the third",
            holds=min(after) <= min(before),
        )
        findings.tell(f"{what}, most in the last quarter", round(max(after)))
    probe.tell(findings)
    return findings
