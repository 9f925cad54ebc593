"""Keeps the last five minutes of a batcher's events, in bounded memory. API process.

Durations are counted in buckets that are 5 % wide, in slots of five seconds: whatever the load,
a slot holds at most some hundred numbers.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, Literal, get_args

from fast_batcher._core.supervision import choose_added, choose_surplus
from fast_batcher._process import monotonic
from fast_batcher.batcher import DynBatcher
from fast_batcher.observing import (
    BatchAnswered,
    Observer,
    Outcome,
    ReporterChanged,
    RequestEnded,
    WorkerChanged,
)
from fast_batcher.stats import weighted_quantiles

# Seconds of a slot, and slots that are kept: five minutes, and on the page a point each 5 pixels.
SLOT_SECONDS = 5.0
SLOTS = 60
# Buckets per factor e: 5 % each, which is less than one sees.
_RESOLUTION = 1 / log(1.05)
# The shortest duration that is told from zero: a microsecond.
_SHORTEST = 1e-6
SHARES = (0.50, 0.95, 0.99)
# The reason of ends that another server process is told of: the shared counts have none.
UNKNOWN_REASON = "reason not known here"
# Outcomes of requests that the model has computed.
ANSWERS: tuple[Outcome, ...] = ("completed", "failed", "refused")

Quantiles = list[float | None]
# "retired" is a worker of a batcher that was closed, or a worker that was removed.
SeatState = Literal["unknown", "loading", "ready", "lost", "retired"]


def _buckets(durations: Iterable[float]) -> list[int]:
    return [int(log(max(duration, _SHORTEST)) * _RESOLUTION // 1) for duration in durations]


def quantiles(counts: Counter[int]) -> Quantiles:
    """Return the 50, 95 and 99 % quantiles of counted durations, in seconds; None without any."""
    middles = [(exp((bucket + 0.5) / _RESOLUTION), count) for bucket, count in counts.items()]
    return weighted_quantiles(middles, SHARES)


@dataclass(slots=True)
class Slot:
    """Counts of events within five seconds, or their sums over several slots."""

    # Moment of the slot, in units of `SLOT_SECONDS`.
    number: int = 0
    # Durations in buckets: of requests until their worker began, of batches in the model, and of
    # requests until they were answered.
    queue_wait: Counter[int] = field(default_factory=Counter)
    infer: Counter[int] = field(default_factory=Counter)
    total: Counter[int] = field(default_factory=Counter)
    # Answered batches.
    sizes: Counter[int] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    # Ended requests by outcome and reason; the reason of an answer is "".
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Quantiles of `total`, kept once the slot is over.
    quantiles: Quantiles | None = None

    def count_ends(self, *outcomes: Outcome) -> int:
        """Return how many requests have ended with one of these outcomes."""
        return sum(count for (outcome, _), count in self.ends.items() if outcome in outcomes)

    def add(self, other: "Slot") -> None:
        """Add the counts of another slot."""
        self.queue_wait.update(other.queue_wait)
        self.infer.update(other.infer)
        self.total.update(other.total)
        self.sizes.update(other.sizes)
        self.releases.update(other.releases)
        self.ends.update(other.ends)


@dataclass(slots=True)
class Seat:
    """A worker of a batcher, held by one process after another."""

    state: SeatState = "unknown"
    pid: int | None = None
    # `WorkerChanged.worker_id` of the process or thread.
    worker_id: int | None = None
    # Address of the process's node in a Ray cluster; "" for this machine.
    node: str = ""
    # When it came into this state.
    since: float = 0.0
    # Batches that the present process has answered.
    batches: int = 0
    # Processes that were lost or recycled; how the last one ended, and when.
    exits: int = 0
    exit_text: str = ""
    exited_at: float = 0.0

    def exit(self, text: str, now: float) -> None:
        """Note the end of a process."""
        self.exits += 1
        self.exit_text, self.exited_at = text, now

    def move(self, state: SeatState, now: float, event: WorkerChanged | None = None) -> None:
        """Note a new state, and the event of its process; None for no process."""
        self.state, self.since = state, now
        self.pid = None if event is None else event.pid
        self.worker_id = None if event is None else event.worker_id
        self.node = "" if event is None else event.node


class Recorder(Observer):
    """Records the past of a batcher for the status page.

    A worker that ends while the batcher closes, or because it is due (`recycles`), is no loss.
    """

    def __init__(
        self, batcher: DynBatcher[Any, Any], num_workers: int, *, recycles: bool = False
    ) -> None:
        self._batcher = batcher
        self._recycles = recycles
        # Counts at the last sample. Where another server process gets the events, this one follows
        # the shared counts instead.
        self._counted = batcher.stats
        self._follows = not self._counted.is_reporter
        self._timer: asyncio.TimerHandle | None = None
        self.slots: deque[Slot] = deque(maxlen=SLOTS)
        self._first = int(monotonic() // SLOT_SECONDS)
        # Seats, by the index of their worker.
        self.seats: dict[int, Seat] = {index: Seat() for index in range(num_workers)}
        # Moments at which workers were lost; more than this in five minutes is as bad.
        self.losses: deque[float] = deque(maxlen=100)

    def _slot(self, now: float) -> Slot:
        number = int(now // SLOT_SECONDS)
        if not self.slots or self.slots[-1].number != number:
            self.slots.append(Slot(number))
        return self.slots[-1]

    def batch_answered(self, event: BatchAnswered) -> None:
        """Count a batch and its requests."""
        slot, requests = self._slot(event.answered_at), event.requests
        slot.sizes[event.size] += 1
        slot.releases[event.release] += 1
        slot.infer.update(_buckets([event.infer_seconds]))
        slot.queue_wait.update(_buckets([request.queue_wait for request in requests]))
        slot.total.update(_buckets([request.total for request in requests]))
        slot.ends.update([(request.outcome, "") for request in requests])
        if event.worker in self.seats:  # else it finishes its batches, and ends
            self.seats[event.worker].batches += 1

    def request_ended(self, event: RequestEnded) -> None:
        """Count a request that had no answer."""
        if self._follows:  # the shared counts have it, too
            return
        self._slot(monotonic()).ends[event.outcome, event.reason] += 1

    def reporter_changed(self, event: ReporterChanged) -> None:
        """Follow the shared counts while another server process gets the events."""
        self.sample()
        if self._timer is not None:
            self._timer.cancel()
        self._follows = not event.is_reporter
        if self._follows:
            self._counted = self._batcher.stats
            # The events of their next changes go to another process.
            self.seats = {index: Seat() for index in range(len(self.seats))}
            self._sample_later()

    def _sample_later(self) -> None:
        if self._batcher.state not in ("draining", "closed"):  # `stop` may have no loop
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SLOT_SECONDS, self._sample_each_slot)

    def _sample_each_slot(self) -> None:
        self._sample_later()
        self.sample()

    def sample(self) -> None:
        """Count what all server processes have counted since the last sample, as a follower."""
        if not self._follows:
            return
        before, stats, now = self._counted, self._batcher.stats, monotonic()
        self._counted = stats
        if stats.submitted < before.submitted or stats.batches < before.batches:
            return  # of a new host, which has begun to count
        slot = self._slot(now)
        for outcome in get_args(Outcome):
            count = max(0, getattr(stats, outcome) - getattr(before, outcome))
            slot.ends[outcome, "" if outcome == "completed" else UNKNOWN_REASON] += count
        slot.ends = +slot.ends
        slot.sizes += Counter(stats.batch_sizes) - Counter(before.batch_sizes)
        slot.releases += Counter(stats.releases) - Counter(before.releases)
        if not self._recycles:
            self.losses.extend([now] * (stats.restarts - before.restarts))

    def worker_changed(self, event: WorkerChanged) -> None:
        """Note which process a worker has, and how the one before it ended."""
        seat, now = self._find_seat(event), monotonic()
        # A worker that starts while the seat is ready replaces the present one, which is recycled.
        if event.change == "started" and (
            seat.state != "ready" or self._batcher.state == "opening"
        ):
            seat.move("loading", now, event)
        elif event.change == "ready":
            seat.move("ready", now, event)
            seat.batches = 0
        elif event.change == "recycled":
            seat.exit("recycled", now)
        elif event.change == "removed" and event.worker_id == seat.worker_id:
            seat.move("retired", now)
        elif event.change == "lost" and event.worker_id == seat.worker_id:
            is_loss = self._batcher.state not in ("draining", "closed")
            seat.move("lost" if is_loss else "retired", now)
            if is_loss:
                seat.exit(event.exit_text, now)
                self.losses.append(now)

    def _find_seat(self, event: WorkerChanged) -> Seat:
        """Return the seat of a worker, a spare one if the worker was removed before."""
        if event.worker not in self.seats and event.change not in ("started", "ready"):
            return Seat()
        return self.seats.setdefault(event.worker, Seat())

    def resize(self, num_workers: int) -> None:
        """Have as many seats as there should be workers; the batcher removes the same ones."""
        ready = {index: seat.state == "ready" for index, seat in self.seats.items()}
        for index in choose_surplus(ready, num_workers):
            del self.seats[index]
        for index in choose_added(self.seats, num_workers):
            self.seats[index] = Seat()

    def read(self, now: float, slots: int = SLOTS) -> Slot:
        """Add up the last slots."""
        first = int(now // SLOT_SECONDS) - slots + 1
        total = Slot()
        for slot in self.slots:
            if slot.number >= first:
                total.add(slot)
        return total

    def lost_since(self, moment: float) -> int:
        """Return how many workers were lost since a moment, at most 100."""
        return sum(at >= moment for at in self.losses)

    def rates(self, now: float) -> list[float | None]:
        """Return the answers per second of each slot, oldest first; the last goes on.

        None for the slots before the first one.
        """
        current = int(now // SLOT_SECONDS)
        age = current - self._first
        rates: list[float | None] = [0.0 if back <= age else None for back in range(SLOTS)][::-1]
        for slot in self.slots:
            if (back := current - slot.number) < SLOTS:
                rates[SLOTS - 1 - back] = slot.count_ends(*ANSWERS) / SLOT_SECONDS
        return rates

    def rate(self, now: float, *outcomes: Outcome) -> float:
        """Return the ends with these outcomes per second of the last five to ten seconds."""
        return self.read(now, 2).count_ends(*outcomes) / (SLOT_SECONDS + now % SLOT_SECONDS)

    def quantiles_of_total(self, now: float) -> list[Quantiles]:
        """Return the quantiles of the requests' times of each slot, oldest first."""
        points: list[Quantiles] = [[None] * len(SHARES) for _ in range(SLOTS)]
        current = int(now // SLOT_SECONDS)
        for slot in self.slots:
            if slot.quantiles is None:
                found = quantiles(slot.total)
                if slot.number < current:
                    slot.quantiles = found
            else:
                found = slot.quantiles
            if (back := current - slot.number) < SLOTS:
                points[SLOTS - 1 - back] = found
        return points
