"""S1 and S2: callers check every answer while workers are killed, stopped or made to fail."""

import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from openings import opening_of

from benchmarks.soak.models import Item, Journal, read_journal, right_answer
from benchmarks.soak.report import Findings
from benchmarks.soak.watch import probing, worker_pids
from fast_batcher import (
    BatcherError,
    DynBatcher,
    InferenceError,
    OutputMismatchError,
    PoisonRequestError,
)
from fast_batcher._core import supervision

# With two workers one may be killed while the other serves.
WORKERS = 2
# Each call's, in seconds: many times what a restart takes.
DEADLINE = 20.0
# A call that has not ended this long after its deadline is late, seconds.
LATE = 1.0
# Between two kills, seconds.
KILL_PAUSES = (0.05, 0.5)
# Longest back-off before a restart, seconds: workers that die while they start would otherwise
# keep the run waiting for ten seconds each.
MOST_BACKOFF = 0.1
# Until a caller cancels, seconds: about what an answer takes, so that some cancel too late.
MOST_PATIENCE = 0.01
# One item in this many has a payload, of up to a megabyte.
PAYLOAD_EVERY = 500
MOST_PAYLOAD = 1_000_000


@dataclass(frozen=True)
class Plan:
    """What is done to the workers and by the callers."""

    requests: int
    max_batch_size: int = 16
    callers: int = 64
    # Shares of batches that raise, and of calls that are cancelled.
    fault_rate: float = 0.0
    cancel_rate: float = 0.0
    # Whether workers are stopped for a while besides being killed.
    stops: bool = False


@dataclass
class Run:
    """One run in progress, and what has come of its calls."""

    plan: Plan
    seed: int
    folder: str
    batcher: DynBatcher[Any, Any]
    ended: int = 0
    answered: int = 0
    wrong: int = 0
    # Seconds by which a call ended after its deadline, at most.
    latest: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    poisoned: list[int] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    # How many of the cancelled calls a worker may have had.
    in_flight: float = 0.0
    killed: list[int] = field(default_factory=list)

    async def call(self, rng: random.Random, item: Any) -> None:
        """Call once and check the outcome."""
        started = monotonic()
        value = self.value_of(item)
        task = asyncio.ensure_future(self.batcher.process_batched(value, timeout=DEADLINE))
        if self.plan.cancel_rate and rng.random() < self.plan.cancel_rate:
            loop = asyncio.get_running_loop()
            loop.call_later(rng.uniform(0.0, MOST_PATIENCE), self.leave, task)
        try:
            answer = await task
        except asyncio.CancelledError:
            self.cancelled.add(item.nonce)
        except BatcherError as error:
            self.note_error(item, error)
        else:
            self.answered += 1
            self.wrong += not await self.is_right(item, answer)
        self.ended += 1
        self.latest = max(self.latest, monotonic() - started - DEADLINE)

    def value_of(self, item: Any) -> Any:
        """Return the model's input for this item."""
        return item

    async def is_right(self, item: Any, answer: Any) -> bool:
        """Whether this is the answer to this item."""
        return bool(answer == right_answer(item))

    def leave(self, task: asyncio.Future[Any]) -> None:
        """Cancel a call, and add the chance that a worker has it by now."""
        if not task.done():
            scheduler = opening_of(self.batcher).scheduler  # `stats` would cost too much
            running = scheduler.running
            self.in_flight += running / max(1, running + scheduler.waiting)
            task.cancel()

    def note_error(self, item: Any, error: BatcherError) -> None:
        """Count an error; those that a deliberate fault explains are counted apart."""
        if isinstance(error, PoisonRequestError):
            self.poisoned.append(item.nonce)
        elif self.plan.fault_rate and isinstance(error, InferenceError):
            name = "mismatch" if isinstance(error, OutputMismatchError) else "raised"
            self.errors[f"deliberate: {name}"] += 1
        else:
            self.errors[type(error).__name__] += 1

    async def be_caller(self, number: int) -> None:
        """Make one call after the other."""
        rng = random.Random(f"{self.seed} {number}")
        for sequence in range(self.plan.requests // self.plan.callers):
            payload = b""
            if rng.random() < 1 / PAYLOAD_EVERY:
                # Log-uniform: most are small.
                payload = bytes(int(MOST_PAYLOAD ** rng.random()))
            nonce = sequence * self.plan.callers + number
            await self.call(rng, Item(number, sequence, nonce, payload))

    async def kill(self) -> None:
        """Kill a random worker now and then, or stop it for a while, if any has answered since."""
        answered = 0
        rng = random.Random(self.seed)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(rng.uniform(*KILL_PAUSES))
            # On a busy machine no worker would ever start, if others were killed meanwhile.
            if self.answered == answered:
                continue
            answered = self.answered
            pids = await loop.run_in_executor(None, worker_pids)
            if self.plan.stops and pids and rng.random() < 0.5:
                pid = rng.choice(sorted(pids))
                _signal(pid, signal.SIGSTOP)
                loop.call_later(rng.uniform(0.0, 0.3), _signal, pid, signal.SIGCONT)
            else:
                self.kill_one(rng, pids)

    def kill_one(self, rng: random.Random, pids: list[int]) -> None:
        """Kill a random one of these workers, if there are any."""
        if pids:
            pid = rng.choice(sorted(pids))
            self.killed.append(pid)
            _signal(pid, signal.SIGKILL)

    async def show_progress(self, name: str) -> None:
        """Print a line every ten seconds."""
        while True:
            print(f"{name}: {self.ended} of {self.plan.requests} calls", flush=True)
            await asyncio.sleep(10.0)

    async def work(self, name: str) -> int:
        """Run all callers; return how many of them never ended."""
        callers = [asyncio.create_task(self.be_caller(one)) for one in range(self.plan.callers)]
        others = [
            asyncio.create_task(self.kill()),
            asyncio.create_task(self.show_progress(name)),
        ]
        waiting: set[asyncio.Task[None]] = set(callers)
        ended = -1
        while waiting and ended != self.ended:
            ended = self.ended
            # No single call may take longer; if no call has ended since, none will.
            _, waiting = await asyncio.wait(waiting, timeout=DEADLINE + LATE + 5.0)
        for task in (*others, *waiting):
            task.cancel()
        await asyncio.wait([*others, *callers])
        for task in callers:
            if not task.cancelled():
                task.result()
        return len(waiting)

    def tell(self, findings: Findings, unended: int, prefix: str = "") -> None:
        """Add the figures that every run of calls has."""
        stats = self.batcher.stats
        findings.tell(f"{prefix}calls", self.ended)
        findings.tell(f"{prefix}kills", len(self.killed))
        findings.tell(f"{prefix}restarts", stats.restarts)
        findings.tell(f"{prefix}cancelled", len(self.cancelled))
        findings.tell(f"{prefix}given up after two deaths", len(self.poisoned))
        findings.none(f"{prefix}lost: calls without an end", unended)
        findings.none(f"{prefix}misrouted, corrupted or wrong answers", self.wrong)
        deliberate = {key: count for key, count in self.errors.items() if "deliberate" in key}
        for key, count in deliberate.items():
            findings.tell(key, count)
        others = {key: count for key, count in self.errors.items() if key not in deliberate}
        findings.none(f"{prefix}other failures {others or ''}", sum(others.values()))
        findings.none(f"{prefix}requests left inside", stats.waiting + stats.running)
        what = f"{prefix}longest beyond the deadline, s"
        findings.check(what, self.latest, f"below {LATE:g}", holds=self.latest < LATE)

    def count_unexcused(self) -> int:
        """Count the requests that were given up without two killed workers having begun them."""
        poisoned = set(self.poisoned)
        seen: Counter[int] = Counter()
        for pid in self.killed:
            seen.update(poisoned & set(read_journal(self.folder, pid)))
        return sum(seen[nonce] < 2 for nonce in poisoned)

    def count_computed(self) -> int:
        """Count the cancelled calls that a worker computed nevertheless."""
        computed: set[int] = set()
        for name in os.listdir(self.folder):
            computed |= self.cancelled & set(read_journal(self.folder, int(name)))
        return len(computed)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def shorten_backoff() -> None:
    """Bound the back-off before restarts in this process; no setting of the batcher does."""
    vars(supervision)["MAX_BACKOFF"] = MOST_BACKOFF


async def soak(name: str, plan: Plan, seed: int) -> Findings:
    """Run this plan."""
    findings = Findings(name)
    shorten_backoff()
    with tempfile.TemporaryDirectory() as folder:
        batcher = DynBatcher(
            Journal,
            plan.max_batch_size,
            model_args=(folder, plan.fault_rate),
            num_workers=WORKERS,
            max_restarts=None,
        )
        run = Run(plan, seed, folder, batcher)
        started = monotonic()
        async with batcher, probing() as probe:
            unended = await run.work(name)
            seconds = monotonic() - started
            run.tell(findings, unended)
            completed = batcher.stats.completed
        findings.tell("calls/s", run.ended / seconds)
        findings.none("given up without two deaths", run.count_unexcused())
        if plan.cancel_rate:
            # What a worker had, and what was cancelled while its answer was on its way.
            expected = run.in_flight + completed - run.answered
            # Three standard deviations of a count.
            most = expected + 3 * expected**0.5
            computed = run.count_computed()
            wanted = f"at most {most:.0f}, those in flight"
            what = "of the cancelled, computed"
            findings.check(what, computed, wanted, holds=computed <= most)
        else:  # a cancelled caller may miss an answer that was counted
            what = "answers counted and not received, or received twice"
            findings.none(what, abs(completed - run.answered))
        probe.tell(findings)
    return findings


async def s1(short: bool, seed: int) -> Findings:
    """Callers check every answer while workers are killed."""
    return await soak("S1 kills", Plan(10_000 if short else 3_000_000), seed)


async def s2(short: bool, seed: int) -> Findings:
    """Workers are also stopped, batches fail and callers cancel."""
    plan = Plan(
        6_000 if short else 1_000_000,
        max_batch_size=8,
        # Many more than a worker can have: most callers that cancel were waiting.
        callers=256,
        fault_rate=0.002,
        cancel_rate=0.3,
        stops=True,
    )
    return await soak("S2 storms", plan, seed)
