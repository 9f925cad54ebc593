"""S4: a long run at part load in which workers are recycled; nothing may grow."""

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
# Requests per second that the model computes in batches of 32.
CAPACITY = 32 / (0.002 + 32 * 0.0001)
# Bytes per hour that the parent may grow by, at the upper end of the confidence interval.
MOST_GROWTH = 2 * 2**20
# Share by which p99 may rise: noise between thirds of a run stays below it.
MOST_DRIFT = 0.10
# Requests of 20 seconds: while a virtual machine's host takes all of its time for a second, more
# arrive than the default bound lets wait, and rejections would say nothing here.
MAX_QUEUE_SIZE = 100_000


@dataclass(frozen=True)
class Plan:
    """How long the run takes, and at what load."""

    seconds: float = 1200.0
    # Share of the capacity.
    load: float = 0.7
    # Between looks, seconds: few enough that what a look allocates is not the growth.
    look_interval: float = 1.0
    # Batches after which a worker is recycled: about every ten seconds.
    recycle_after: int = 2000


# A machine that runs tests is busy, so the load is lower. Looks are frequent, so that some of each
# quarter fall between two recyclings.
SHORT = Plan(seconds=6.0, load=0.35, look_interval=0.1, recycle_after=150)


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
    """One run in progress."""

    plan: Plan
    batcher: DynBatcher[float, float]
    started: float
    failures: int = 0
    # One array per field of `Look`: a list of objects would itself be growth.
    looks: list["array[float]"] = field(default_factory=lambda: [array("d") for _ in Look._fields])
    # From arrival to answer, by the third of the run in which the request arrived.
    latencies: list[Histogram] = field(default_factory=lambda: [Histogram() for _ in range(3)])

    async def ask(self, due: float) -> None:
        """Send one request."""
        try:
            await self.batcher.process_batched(due)
        except BatcherError:
            self.failures += 1
        third = min(2, int(3 * (due - self.started) / self.plan.seconds))
        self.latencies[third].add(monotonic() - due)

    async def look(self) -> None:
        """Look again and again until cancelled."""
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
            await asyncio.sleep(self.plan.look_interval)

    async def load(self, rng: random.Random) -> None:
        """Send Poisson arrivals until the time is over and all of them are answered."""
        tasks: set[asyncio.Task[None]] = set()
        due, shown = self.started, 0.0
        while due < self.started + self.plan.seconds:
            due += rng.expovariate(self.plan.load * CAPACITY)
            if due > monotonic():
                await asyncio.sleep(due - monotonic())
            task = asyncio.create_task(self.ask(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if due - self.started > shown:
                print(f"S4 steady: {shown:.0f} of {self.plan.seconds:.0f} seconds", flush=True)
                shown += 30.0
        if tasks:
            await asyncio.wait(tasks)


async def s4(short: bool, seed: int) -> Findings:
    """Judge the second half of the run, in which everything has settled."""
    findings = Findings("S4 steady")
    plan = SHORT if short else Plan()
    batcher: DynBatcher[float, float] = DynBatcher(
        Works,
        MAX_BATCH_SIZE,
        max_queue_size=MAX_QUEUE_SIZE,
        max_batches_per_worker=plan.recycle_after,
    )
    async with batcher, probing() as probe:
        run = Run(plan, batcher, monotonic())
        looking = asyncio.create_task(run.look())
        await run.load(random.Random(seed))
        looking.cancel()
        await asyncio.wait([looking])
        restarts = batcher.stats.restarts
    findings.tell("seconds", plan.seconds)
    findings.tell("requests", sum(third.count for third in run.latencies))
    findings.none("failed requests", run.failures)
    findings.check("workers recycled", restarts, "some", holds=restarts > 0)
    looks = (Look(*figures) for figures in zip(*run.looks, strict=True))
    half = [look for look in looks if look.moment > plan.seconds / 2]
    _judge_growth(findings, half, run, short)
    _judge_counts(findings, half, plan)
    probe.tell(findings)
    return findings


def _judge_growth(findings: Findings, half: list[Look], run: Run, short: bool) -> None:
    moments = [look.moment for look in half]
    rise, doubt = slope(moments, [look.rss_bytes for look in half])
    growth = f"{3600 * rise / 2**20:.2f} +- {3600 * doubt / 2**20:.2f}"
    drift = run.latencies[2].quantile(0.99) / run.latencies[0].quantile(0.99) - 1
    if short:
        findings.tell("growth of the parent, MB/h (too short to tell)", growth)
        findings.tell("p99, last third against first (too short to tell)", drift)
        return
    holds = 3600 * (rise + doubt) < MOST_GROWTH
    findings.check("growth of the parent, MB/h", growth, "upper end below 2", holds=holds)
    # A count, not bytes: many small objects that stay show in it, a few large ones do not.
    rise, doubt = slope(moments, [look.blocks for look in half])
    more = f"{3600 * rise:.0f} +- {3600 * doubt:.0f}"
    findings.tell("more blocks of Python's allocator, per hour", more)
    what = "p99, last third against first"
    findings.check(what, drift, f"below {MOST_DRIFT}", holds=drift < MOST_DRIFT)


def _judge_counts(findings: Findings, half: list[Look], plan: Plan) -> None:
    """Compare the fewest of each quarter: a recycling opens some for a while, a leak stays."""
    third = [look for look in half if look.moment <= 0.75 * plan.seconds]
    last = [look for look in half if look.moment > 0.75 * plan.seconds]
    for what in ("descriptors", "threads"):
        before, after = ([getattr(look, what) for look in quarter] for quarter in (third, last))
        findings.check(
            f"{what}, fewest in the last quarter",
            round(min(after)),
            f"at most {min(before):.0f}, as in the third",
            holds=min(after) <= min(before),
        )
        findings.tell(f"{what}, most in the last quarter", round(max(after)))
