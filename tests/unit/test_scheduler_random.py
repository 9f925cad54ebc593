"""The scheduler's promises under random schedules, against an oracle that only keeps the books.

The oracle decides nothing. It knows what has happened (who waits, who runs where, since when) and
checks that each decision was allowed, and that none was missing. A second scheduler is told the
same events and must decide the same.
"""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedulers import make_request

from fast_batcher._core import queue
from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import SizeCap
from fast_batcher._core.queue import AGED_BATCHES, PaddedPacker
from fast_batcher._core.retries import ISOLATION_SECONDS, MOST_DEATHS, MOST_LOSSES
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import (
    Action,
    Batch,
    BatchProgress,
    Dispatch,
    Expire,
    ExpiryReason,
    Fail,
    Group,
    Limits,
    Release,
    Replace,
    Request,
    Skip,
    Stall,
)
from fast_batcher.errors import BatcherClosedError, DeadlineExceededError, QueueFullError

QUEUE: Any = queue
# Dead entries that the queues tolerate, made small: schedules of fifty steps must meet the sweep.
TOLERATED_DEAD_ENTRIES = 2
# One that runs, and a full one behind it.
MOST_BATCHES_PER_WORKER = 2
MAX_BATCH_COST = 6.0
GROUPS = [Group(number) for number in range(3)]
# A chain of wake-ups without an event between them must come to an end; more than there can be
# deadlines in a schedule.
MAX_WAKE_UPS = 1000

# Some moments coincide by design: equal deadlines and windows are where off-by-one errors live.
durations = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 8.0]),
    st.floats(min_value=0.0, max_value=12.0, allow_nan=False),
)

# Between events: short against deadlines, or else there is nothing but expiry.
pauses = st.one_of(st.sampled_from([0.0, 0.0, 0.5, 1.0]), st.floats(min_value=0.0, max_value=3.0))
# From the arrival to the deadline; None is a request that names none.
patience_lists = st.lists(st.one_of(st.none(), st.just(inf), durations), min_size=1, max_size=6)
usually = st.sampled_from([True, True, True, False])


@dataclass(frozen=True)
class Options:
    """The settings of one schedule."""

    policy: str
    max_delay: float | None
    max_batch_size: int
    max_queue_size: int
    num_workers: int
    timeout: float | None
    max_latency: float | None
    infer_timeout: float | None
    idempotent: bool
    isolate_errors: bool
    # What makes requests unequal: "" for nothing, else letters of priority, group and cost.
    ranks: str
    # Requests after which the batcher may be drained: too early, and nothing happens any more.
    drain_after: int
    workers_at_first: int
    # Whether the queue adds up the sizes of what waits; there is room for all of them.
    counts_bytes: bool


options_strategy = st.builds(
    Options,
    policy=st.sampled_from(["adaptive", "greedy", "fixed", "fixed"]),
    max_delay=st.sampled_from([0.0, 1.0, 3.0, 9.0]),
    max_batch_size=st.integers(1, 4),
    max_queue_size=st.integers(1, 16),
    num_workers=st.integers(1, 3),
    timeout=st.sampled_from([None, 2.0, 6.0, 30.0]),
    max_latency=st.sampled_from([None, None, 1.0, 4.0]),
    infer_timeout=st.sampled_from([None, None, 3.0, 7.0]),
    idempotent=st.sampled_from([True, True, False]),
    isolate_errors=st.sampled_from([True, True, False]),
    ranks=st.sampled_from(["", "", "", "p", "g", "c", "pgc"]),
    drain_after=st.sampled_from([5, 20, 60]),
    workers_at_first=st.integers(0, 3),
    counts_bytes=st.booleans(),
)


def make_scheduler(options: Options) -> Scheduler:
    return Scheduler(
        make_policy(options.policy, options.max_delay),
        Limits(
            max_batch_size=options.max_batch_size,
            max_queue_size=options.max_queue_size,
            max_queue_bytes=10**9 if options.counts_bytes else None,
            timeout=options.timeout,
            max_latency=options.max_latency,
            infer_timeout=options.infer_timeout,
            idempotent=options.idempotent,
            isolate_errors=options.isolate_errors,
        ),
        packer=PaddedPacker(MAX_BATCH_COST) if "c" in options.ranks else None,
        is_grouped="g" in options.ranks,
    )


@dataclass
class Running:
    """The oracle's record of a batch on a worker."""

    batch: Batch
    open_ids: list[int]
    is_skipped: bool = field(default=False, kw_only=True)
    # Until when it is divided if it fails; infinite before the first failure.
    isolate_until: float = inf


@dataclass(eq=False)
class Worker:
    """The oracle's record of a ready worker."""

    batches: list[Running] = field(default_factory=list)
    started_at: float = 0.0
    is_stalled: bool = False
    is_replaced: bool = False
    is_retired: bool = False

    @property
    def is_ready(self) -> bool:
        return not self.is_stalled and not self.is_retired


@dataclass
class Turn:
    """Requests before a request in the queue at its arrival."""

    older: int
    batches_before: int


def plain(action: Action) -> tuple[Any, ...]:
    """An action as data, to compare the decisions of two schedulers."""
    if isinstance(action, Dispatch):
        batch = action.batch
        return "dispatch", batch.id, batch.worker, [r.id for r in batch.requests], batch.release
    if isinstance(action, Expire):
        return "expire", action.request.id, action.reason
    assert not isinstance(action, Fail), action.error
    if isinstance(action, Skip):
        return "skip", action.batch.id
    return type(action).__name__, action.worker


class Schedule(RuleBasedStateMachine):
    """Events in any order, at any time; what `poll` answers is checked against the books."""

    def __init__(self) -> None:
        super().__init__()
        self._usual_dead_entries = QUEUE.MIN_DEAD_ENTRIES
        QUEUE.MIN_DEAD_ENTRIES = TOLERATED_DEAD_ENTRIES

    @initialize(options=options_strategy)
    def begin(self, options: Options) -> None:
        self.options = options
        self.scheduler = make_scheduler(options)
        self.twin = make_scheduler(options)
        # By id, for both schedulers.
        self.requests: dict[int, tuple[Request, Request]] = {}
        self.now = 0.0
        self.wake_at: float | None = None
        # Whether all that workers had said was known at the last poll.
        self.has_read = True
        # Those of whose next answer a part was there.
        self.answering: list[Worker] = []
        self.is_draining = False
        # Since when there has been a free worker and requests that it was not given.
        self.held_since: float | None = None
        # The books.
        self.deadlines: dict[int, float] = {}
        self.arrivals: dict[int, float] = {}
        self.waiting: list[int] = []
        self.workers: dict[int, Worker] = {}
        # Groups that wait for another try, next first, each with the end of its isolation.
        self.groups: list[tuple[list[int], float]] = []
        self.losses: Counter[int] = Counter()
        self.deaths: Counter[int] = Counter()
        self.cap = SizeCap(options.max_batch_size)
        # Then batches were smaller for a while, and the queue took more turns.
        self.cap_was_used = False
        # Requests that have a target, and whether a batch has been made smaller for one.
        self.aimed: set[int] = set()
        self.was_smaller = False
        self.retries_sent = 0
        self.turns: dict[int, Turn] = {}
        self.left: dict[int, str] = {}
        self.batches_sent = 0
        self.refused = 0
        for _ in range(min(options.workers_at_first, options.num_workers)):
            self.worker_ready(is_polled=True)

    def teardown(self) -> None:
        QUEUE.MIN_DEAD_ENTRIES = self._usual_dead_entries
        if hasattr(self, "options"):
            self.finish()

    # Events. A shell polls after each; here it may also be late, so that several come together.

    @rule(
        pause=pauses,
        patiences=patience_lists,
        is_polled=usually,
        ranks=st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=6, max_size=6),
    )
    def submit(
        self,
        pause: float,
        patiences: list[float | None],
        is_polled: bool,
        ranks: list[tuple[int, int, int]],
    ) -> None:
        self.now += pause
        deadlines = [None if p is None else self.now + p for p in patiences]
        pair = [[make_request(number, d) for number, d in enumerate(deadlines)] for _ in range(2)]
        arriving, twins = pair
        for requests, scheduler in zip(pair, (self.scheduler, self.twin), strict=True):
            for request, rank in zip(requests, ranks, strict=False):
                self.set_rank(request, scheduler, rank)
        room = 0 if self.is_draining else self.options.max_queue_size - len(self.waiting)
        running = any(worker.batches for worker in self.workers.values())
        is_idle = not (self.waiting or self.retrying() or running)
        refused = self.scheduler.submit(self.now, list(arriving))
        twins_refused = self.twin.submit(self.now, list(twins))
        assert [(one.value, why) for one, why in refused] == [
            (one.value, why) for one, why in twins_refused
        ]
        without_room = arriving[max(room, 0) :]
        assert [request for request, _ in refused[: len(without_room)]] == without_room
        full = BatcherClosedError if self.is_draining else QueueFullError
        assert all(type(why.to_error()) is full for _, why in refused[: len(without_room)])
        late = refused[len(without_room) :]
        for request, why in late:
            assert type(why.to_error()) is DeadlineExceededError
            assert request.target is not None
            assert request.target < inf
        assert not (is_idle and late and late[0][0] is arriving[0]), "an idle batcher takes any"
        self.refused += len(refused)
        for request, twin in zip(arriving, twins, strict=True):
            if request in [one for one, _ in refused]:
                continue
            number = request.id
            assert number == len(self.requests)
            self.requests[number] = request, twin
            self.arrivals[number] = self.now
            self.deadlines[number] = request.deadline
            if self.options.max_latency is not None or deadlines[request.value] is not None:
                self.aimed.add(number)
            default = inf if self.options.timeout is None else self.now + self.options.timeout
            explicit = deadlines[request.value]
            assert request.deadline == (default if explicit is None else explicit)
            self.turns[number] = Turn(len(self.waiting), self.batches_sent - self.retries_sent)
            self.waiting.append(number)
        self.end_turn(is_polled)

    def set_rank(self, request: Request, scheduler: Scheduler, rank: tuple[int, int, int]) -> None:
        priority, group, cost = rank
        request.size = 1 + 10 * priority + 100 * group + 1000 * cost
        if "p" in self.options.ranks and priority:
            scheduler.rank_requests()
            request.priority = priority
        if "g" in self.options.ranks:
            request.group = GROUPS[group]
        if "c" in self.options.ranks:
            request.cost = [1.0, 2.5, 7.0][cost]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Of anybody: callers do not know whether they have been answered."""
        number = data.draw(st.sampled_from(sorted(self.requests)), label="request")
        self.cancel_one(number)

    @precondition(lambda self: len(self.waiting) > 4)
    @rule()
    def cancel_most_that_wait(self) -> None:
        """A client with many requests disconnects: this is what makes the queue sweep."""
        for number in self.waiting[1:]:
            self.cancel_one(number)

    def cancel_one(self, number: int) -> None:
        for scheduler, request in zip(
            (self.scheduler, self.twin), self.requests[number], strict=True
        ):
            scheduler.cancel(request)
        if number not in self.left:
            self.leave(number, "cancelled")
        # No poll follows, unless the scheduler asks for one: the moment may have come forward.
        expiry = min(self.scheduler._next_expiry, self.scheduler._workers.next_expiry)
        if expiry < (inf if self.wake_at is None else self.wake_at):
            assert self.scheduler.is_poll_due
            self.wake_at = expiry

    @precondition(lambda self: len(self.workers) < self.options.num_workers)
    @rule(is_polled=usually)
    def worker_ready(self, is_polled: bool) -> None:
        index = min(set(range(self.options.num_workers)) - set(self.workers))
        self.scheduler.worker_ready(self.now, index)
        self.twin.worker_ready(self.now, index)
        self.workers[index] = Worker(started_at=self.now)
        self.end_turn(is_polled)

    @precondition(lambda self: self.workers)
    @rule(
        data=st.data(),
        progress=st.sampled_from(BatchProgress),
        memory=st.booleans(),
        is_polled=usually,
    )
    def worker_lost(
        self, data: st.DataObject, progress: BatchProgress, memory: bool, is_polled: bool
    ) -> None:
        index = data.draw(st.sampled_from(sorted(self.workers)), label="worker")
        worker = self.workers.pop(index)
        first = worker.batches[0].batch if worker.batches else None
        taken = first.id if first is not None and progress is not BatchProgress.SENT else None
        begun = taken if progress is BatchProgress.BEGUN else None
        both = [
            scheduler.worker_lost(index, taken, begun, out_of_memory=memory)
            for scheduler in (self.scheduler, self.twin)
        ]
        if first is not None and begun is not None and memory and len(first.requests) > 1:
            self.cap.ran_out(len(first.requests), is_retry=first.release is Release.RETRY)
            self.cap_was_used = True
        given_up: list[list[int]] = [[], []]
        groups: list[tuple[list[int], float]] = []
        for position, one in enumerate(worker.batches):
            again = self.count_loss(
                one, progress if position == 0 else BatchProgress.SENT, given_up
            )
            is_in_hand = position == 0 and progress is not BatchProgress.SENT
            groups += [([i], inf) for i in again] if is_in_hand else [(again, inf)]
        self.groups = [group for group in groups if group[0]] + self.groups
        for lost in both:
            assert [[r.id for r in requests] for requests in lost] == given_up
        for number in itertools.chain(*given_up):
            self.leave(number, "failed")
        self.end_turn(is_polled)

    def count_loss(
        self, one: Running, progress: BatchProgress, given_up: list[list[int]]
    ) -> list[int]:
        """Those of a batch that are tried again; the others are added to the failed, poisonous."""
        again = []
        for number in one.open_ids:
            self.losses[number] += progress is not BatchProgress.SENT
            self.deaths[number] += progress is BatchProgress.BEGUN
            if progress is BatchProgress.BEGUN and not self.options.idempotent:
                given_up[0].append(number)
            elif self.deaths[number] == MOST_DEATHS or self.losses[number] == MOST_LOSSES:
                given_up[1].append(number)
            else:
                again.append(number)
        return again

    @precondition(lambda self: any(worker.batches for worker in self.workers.values()))
    @rule(data=st.data(), pause=pauses, memory=st.booleans(), is_fatal=st.booleans())
    def infer_raised(self, data: st.DataObject, pause: float, memory: bool, is_fatal: bool) -> None:
        self.now += pause
        busy = sorted(index for index, worker in self.workers.items() if worker.batches)
        index = data.draw(st.sampled_from(busy), label="worker")
        worker = self.workers[index]
        one = worker.batches.pop(0)
        failed = []
        for scheduler in (self.scheduler, self.twin):
            batch = scheduler.batch_done(self.now, index, one.batch.id, has_raised=True)
            assert batch is not None
            failed.append(
                scheduler.batch_raised(self.now, batch, out_of_memory=memory, is_fatal=is_fatal)
            )
        if memory:
            is_retry = one.batch.release is Release.RETRY
            self.cap.ran_out(len(one.batch.requests), is_retry=is_retry)
            self.cap_was_used = True
        worker.started_at = self.now
        worker.is_stalled = worker.is_replaced = False
        until = one.isolate_until if one.isolate_until != inf else self.now + ISOLATION_SECONDS
        if not is_fatal and self.may_divide(one, until):
            half = (len(one.open_ids) + 1) // 2
            halves = [one.open_ids[:half], one.open_ids[half:]]
            self.groups = [(half, until) for half in halves if half] + self.groups
            assert failed == [[], []]
        else:
            for requests in failed:
                assert [r.id for r in requests] == one.open_ids
            for number in list(one.open_ids):
                for request in self.requests[number]:
                    request.is_settled = True
                self.leave(number, "failed")
        self.poll()

    def may_divide(self, one: Running, until: float) -> bool:
        settings = self.options.idempotent and self.options.isolate_errors
        return settings and len(one.batch.requests) > 1 and self.now < until

    @precondition(lambda self: any(worker.is_ready for worker in self.workers.values()))
    @rule(data=st.data(), is_polled=usually)
    def worker_retired(self, data: st.DataObject, is_polled: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.workers)), label="worker")
        self.scheduler.retire(index)
        self.twin.retire(index)
        self.workers[index].is_retired = True
        self.end_turn(is_polled)

    @precondition(lambda self: any(worker.batches for worker in self.workers.values()))
    @rule(data=st.data(), pause=pauses, is_polled=usually)
    def batch_done(self, data: st.DataObject, pause: float, is_polled: bool) -> None:
        """Each worker answers in order; between workers there is none."""
        self.now += pause
        busy = sorted(index for index, worker in self.workers.items() if worker.batches)
        self.answer(data.draw(st.sampled_from(busy), label="worker"))
        self.end_turn(is_polled)

    @precondition(lambda self: any(worker.batches for worker in self.workers.values()))
    @rule(pause=pauses)
    def all_answer(self, pause: float) -> None:
        self.now += pause
        for index, worker in self.workers.items():
            if worker.batches:
                self.answer(index)
        self.poll()

    def answer(self, index: int) -> None:
        worker = self.workers[index]
        running = worker.batches.pop(0)
        for scheduler in (self.scheduler, self.twin):
            # Answers to batches that the worker does not have change nothing.
            assert scheduler.batch_done(self.now, index, running.batch.id + 1000) is None
            assert scheduler.batch_done(self.now, index + 1, running.batch.id) is None
        batch = self.scheduler.batch_done(self.now, index, running.batch.id)
        assert batch is running.batch
        if self.cap.is_watching:
            self.cap.went_well(len(batch.requests))
        assert self.twin.batch_done(self.now, index, running.batch.id) is not None
        worker.started_at = self.now
        worker.is_stalled = worker.is_replaced = False
        assert [r.id for r in batch.requests if not r.is_settled] == running.open_ids
        for number in running.open_ids:
            for request in self.requests[number]:
                request.is_settled = True
            self.leave(number, "completed")

    @precondition(lambda self: any(worker.batches for worker in self.workers.values()))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Some of a batch could not be sent, or the worker could not read them."""
        running = [(w, one) for w in self.workers.values() for one in w.batches]
        worker, one = data.draw(st.sampled_from(running), label="batch")
        numbers = [request.id for request in one.batch.requests]
        gone = data.draw(st.lists(st.sampled_from(numbers), unique=True), label="gone")
        is_first = one is worker.batches[0]
        twin_batch = self.twin.find(one.batch.worker, one.batch.id)
        assert twin_batch is not None
        self.scheduler.withdraw(self.now, one.batch, [self.requests[i][0] for i in gone])
        self.twin.withdraw(self.now, twin_batch, [self.requests[i][1] for i in gone])
        for number in gone:
            if number in one.open_ids:
                self.leave(number, "failed")
        assert [r.id for r in one.batch.requests] == [i for i in numbers if i not in gone]
        if len(gone) == len(numbers):
            worker.batches.remove(one)
            if is_first:
                worker.started_at = self.now
                worker.is_stalled = worker.is_replaced = False

    @precondition(
        lambda self: len(self.requests) > self.options.drain_after and not self.is_draining
    )
    @rule()
    def begin_drain(self) -> None:
        self.scheduler.begin_drain()
        self.twin.begin_drain()
        self.is_draining = True

    def end_turn(self, is_polled: bool) -> None:
        if is_polled:
            self.poll()

    @rule(pause=pauses, has_read=usually, answering=st.sets(st.integers(0, 3)))
    def time_passes(self, pause: float, has_read: bool, answering: set[int]) -> None:
        self.now += pause
        self.poll(has_read, answering)

    def poll(self, has_read: bool = True, answering: Collection[int] = ()) -> None:
        was_due = self.wake_at is not None and self.now >= self.wake_at
        before = self.wake_at
        self.has_read = has_read
        self.answering = [self.workers[index] for index in answering if index in self.workers]
        unread: dict[str, Any] = {"has_read": has_read, "answering": answering}
        actions, wake_at = self.scheduler.poll(self.now, **unread)
        twin_actions, twin_wake_at = self.twin.poll(self.now, **unread)
        assert [plain(action) for action in actions] == [plain(action) for action in twin_actions]
        assert wake_at == twin_wake_at
        self.wake_at = wake_at
        self.apply(actions)
        self.check_nothing_is_missing()
        if not has_read or answering:
            return
        assert wake_at is None or wake_at > self.now
        if was_due and before is not None:
            assert actions or wake_at is None or wake_at > before

    @precondition(lambda self: self.wake_at is not None)
    @rule()
    def wake_up(self) -> None:
        """The timer rings when it should."""
        assert self.wake_at is not None
        self.now = max(self.now, self.wake_at)
        self.poll()

    # The books.

    def leave(self, number: int, how: str) -> None:
        assert number not in self.left, "it leaves exactly once"
        self.left[number] = how
        running = [one.open_ids for worker in self.workers.values() for one in worker.batches]
        for numbers in (self.waiting, *(group for group, _ in self.groups), *running):
            if number in numbers:
                numbers.remove(number)
        for request in self.requests[number]:
            assert request.is_settled

    def apply(self, actions: list[Action]) -> None:
        ready = [worker for worker in self.workers.values() if worker.is_ready]
        waiting_reason = ExpiryReason.WAITING if ready else ExpiryReason.NOT_READY
        has_dispatched = False
        for action in actions:
            if isinstance(action, Dispatch):
                has_dispatched = True
                self.dispatch(action.batch)
                continue
            if isinstance(action, Expire) and action.reason is ExpiryReason.UNREACHABLE:
                self.drop(action)
                continue
            assert not has_dispatched, "what has expired is told first, and never dispatched"
            if isinstance(action, Expire):
                self.expire(action, waiting_reason)
            elif isinstance(action, Skip):
                self.skip(action.batch)
            elif isinstance(action, Stall):
                self.stall(self.workers[action.worker])
            else:
                assert isinstance(action, Replace)
                self.replace(self.workers[action.worker])

    def skip(self, batch: Batch) -> None:
        worker = self.workers[batch.worker]
        (one,) = [one for one in worker.batches if one.batch.id == batch.id]
        assert not one.open_ids, "nobody waits for it"
        assert not one.is_skipped, "a worker is told once"
        one.is_skipped = True

    def drop(self, action: Expire) -> None:
        number = action.request.id
        assert action.request is self.requests[number][0]
        assert action.rejection is not None
        assert number in self.aimed
        assert number in self.waiting
        assert len(self.waiting) > 1, "the last candidate is never dropped"
        self.was_smaller = True
        self.leave(number, "expired")

    def expire(self, action: Expire, waiting_reason: ExpiryReason) -> None:
        number = action.request.id
        assert action.request is self.requests[number][0]
        deadline = self.deadlines[number]
        if number in self.waiting or number in self.retrying():
            assert (action.reason, deadline <= self.now) == (waiting_reason, True)
        else:
            worker, one = next(
                (worker, one)
                for worker in self.workers.values()
                for one in worker.batches
                if number in one.open_ids
            )
            assert self.has_read, "its answer may be there"
            is_next = one is worker.batches[0]
            assert not (is_next and worker in self.answering), "a part of its answer is there"
            if action.reason is ExpiryReason.INFER_TIMEOUT:
                assert one is worker.batches[0]
                assert self.has_run_too_long(worker)
            else:
                assert (action.reason, deadline <= self.now) == (ExpiryReason.RUNNING, True)
        self.leave(number, "expired")

    def stall(self, worker: Worker) -> None:
        assert not worker.is_stalled
        assert self.has_read, "its answer may be there"
        assert worker not in self.answering, "a part of its answer is there"
        assert self.has_run_for_nobody(worker)
        worker.is_stalled = True

    def replace(self, worker: Worker) -> None:
        assert not worker.is_replaced, "it is replaced once"
        assert self.has_read, "its answer may be there"
        assert worker not in self.answering, "a part of its answer is there"
        assert self.has_run_too_long(worker)
        assert not worker.batches[0].open_ids, "its callers have been told"
        worker.is_stalled = worker.is_replaced = True

    def has_run_for_nobody(self, worker: Worker) -> bool:
        limit = self.options.timeout
        is_deserted = bool(worker.batches) and not worker.batches[0].open_ids
        return limit is not None and is_deserted and worker.started_at + limit <= self.now

    def has_run_too_long(self, worker: Worker) -> bool:
        limit = self.options.infer_timeout
        return limit is not None and bool(worker.batches) and worker.started_at + limit <= self.now

    def retrying(self) -> list[int]:
        return [number for group, _ in self.groups for number in group]

    def retry(self, batch: Batch) -> None:
        self.groups = [group for group in self.groups if group[0]]
        group, until = self.groups.pop(0)
        numbers = group[: self.cap.size]
        if len(numbers) < len(group):
            self.groups.insert(0, (group[self.cap.size :], until))
        assert [request.id for request in batch.requests] == numbers
        assert all(self.deadlines[number] > self.now for number in numbers)
        worker = self.workers[batch.worker]
        assert worker.is_ready
        assert not worker.batches
        worker.started_at = self.now
        worker.batches.append(Running(batch, list(numbers), until))
        self.batches_sent += 1
        self.retries_sent += 1

    def dispatch(self, batch: Batch) -> None:
        if batch.release is Release.RETRY:
            self.retry(batch)
            return
        most = self.cap.size
        size = len(batch.requests)
        assert 1 <= size <= most
        numbers = [request.id for request in batch.requests]
        if self.options.ranks:
            self.check_company(batch.requests)
        else:
            assert numbers == self.waiting[:size], "the oldest go"
        is_smaller = size < min(most, len(self.waiting))
        if self.options.ranks:
            self.was_smaller = self.was_smaller or batch.release is Release.DEADLINE
        elif is_smaller or batch.release is not self.expected_release(len(self.waiting) >= most):
            # Targets have had a say.
            assert batch.release is Release.DEADLINE
            assert self.aimed
            self.was_smaller = True
        assert all(self.deadlines[number] > self.now for number in numbers)
        assert all(request is self.requests[request.id][0] for request in batch.requests)
        worker = self.workers[batch.worker]
        assert worker.is_ready
        assert not self.retrying(), "another try comes before the queue"
        loads = [len(one.batches) for one in self.workers.values() if one.is_ready]
        assert len(worker.batches) == min(loads), "the least loaded comes first"
        assert len(worker.batches) < MOST_BATCHES_PER_WORKER
        is_full = size == most or "c" in self.options.ranks
        assert not worker.batches or is_full, "late binding: a second batch is full"
        self.held_since = None
        self.batches_sent += 1
        for number in numbers:
            turn = self.turns[number]
            turns_waited = self.batches_sent - self.retries_sent - turn.batches_before
            if not (self.cap_was_used or self.was_smaller):
                assert turns_waited <= self.most_turns(turn.older, most), "nobody starves"
        if not worker.batches:
            worker.started_at = self.now
        worker.batches.append(Running(batch, numbers))
        self.waiting = [number for number in self.waiting if number not in numbers]

    def most_turns(self, older: int, most: int) -> int:
        """Batches until a request with so many older ones has to be in one."""
        if not self.options.ranks:
            return floor(older / most) + 1  # first come, first served
        return (AGED_BATCHES if "p" in self.options.ranks else 1) * (older + 1)

    def check_company(self, requests: list[Request]) -> None:
        waiting = [self.requests[number][0] for number in self.waiting]
        assert all(request in waiting for request in requests)
        assert len({request.group for request in requests}) == 1
        if "c" in self.options.ranks and len(requests) > 1:
            highest = max(request.cost for request in requests)
            assert len(requests) * highest <= MAX_BATCH_COST
        if "p" in self.options.ranks:
            first = requests[0]
            priorities = [request.priority for request in waiting]
            goes_by_age = self.batches_sent > 0 and first is waiting[0]
            assert goes_by_age or getattr(first, "priority", 0) == max(priorities)
        else:
            assert requests[0] is waiting[0]

    def expected_release(self, is_full: bool) -> Release:
        if is_full:
            return Release.FULL
        if self.is_draining:
            return Release.DRAIN
        if self.options.policy != "fixed":
            return Release.IDLE if self.held_since is None else Release.HOLD
        if self.now >= self.window_end():
            return Release.WINDOW
        return Release.DEADLINE

    def window_end(self) -> float:
        assert self.options.max_delay is not None
        return self.arrivals[self.waiting[0]] + self.options.max_delay

    def check_nothing_is_missing(self) -> None:
        """After a poll: nobody waits for a decision that should have been made."""
        alive = [*self.waiting, *self.retrying()]
        for worker in self.workers.values():
            if self.has_read and worker not in self.answering:
                alive += [number for one in worker.batches for number in one.open_ids]
                assert worker.is_replaced or not self.has_run_too_long(worker)
                assert worker.is_stalled or not self.has_run_for_nobody(worker)
            for one in worker.batches[1:]:
                assert one.open_ids or one.is_skipped, "it would be computed for nobody"
            limit = self.options.infer_timeout
            if worker.batches and limit is not None and not worker.is_replaced:
                self.check_it_wakes_by(worker.started_at + limit)
            limit = self.options.timeout
            is_deserted = bool(worker.batches) and not worker.batches[0].open_ids
            if is_deserted and limit is not None and not worker.is_stalled:
                self.check_it_wakes_by(worker.started_at + limit)
        for number in alive:
            assert self.deadlines[number] > self.now, "it expires at the poll at its deadline"
            self.check_it_wakes_by(self.deadlines[number])
        self.check_no_needless_wait()

    def check_no_needless_wait(self) -> None:
        ready = [worker for worker in self.workers.values() if worker.is_ready]
        free = [worker for worker in ready if not worker.batches]
        if not (self.waiting and free):
            self.held_since = None
        assert not self.retrying() or not free
        if len(self.waiting) >= self.cap.size and not self.options.ranks:
            # A worker must get free for what is to be tried again.
            most = 1 if self.retrying() else MOST_BATCHES_PER_WORKER
            least = 1 if self.aimed else most  # a second batch may be too small for a busy worker
            assert all(len(worker.batches) >= min(most, least) for worker in ready)
        elif self.waiting and free:
            assert not self.is_draining
            if self.options.policy == "adaptive":
                self.check_hold()
                return
            assert self.options.policy == "fixed"
            window_end = self.window_end()
            assert self.now < window_end, "a hold is no longer than max_delay"
            assert all(self.deadlines[number] >= window_end for number in self.waiting)
            self.check_it_wakes_by(window_end)

    def check_hold(self) -> None:
        assert self.options.max_delay is not None
        if self.held_since is None:
            self.held_since = self.now
        end = self.held_since + self.options.max_delay
        assert self.now < end, "a hold is no longer than max_delay"
        self.check_it_wakes_by(end)

    def check_it_wakes_by(self, moment: float) -> None:
        if moment != inf:
            assert self.wake_at is not None
            assert self.wake_at <= moment

    def finish(self) -> None:
        """Let the timer ring until it is still, then close: everybody has left, exactly once."""
        for _ in range(MAX_WAKE_UPS):
            if self.wake_at is None:
                break
            self.wake_up()
        assert self.wake_at is None, "without an event it comes to rest"
        alive = {*self.requests} - {*self.left}
        rest = self.scheduler.close()
        assert {r.id for r in self.twin.close()} == {r.id for r in rest}
        assert sorted(r.id for r in rest) == sorted(alive)
        self.waiting.clear()
        self.groups.clear()
        self.workers.clear()
        for number in alive:
            self.leave(number, "failed")
        self.is_draining = True
        self.books_agree()
        assert self.scheduler.poll(self.now)[0] == []

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "options"):
            return
        scheduler = self.scheduler
        running = [i for w in self.workers.values() for one in w.batches for i in one.open_ids]
        retrying = self.retrying()
        assert scheduler.waiting == len(self.waiting) + len(retrying)
        assert scheduler.running == len(running)
        sizes = [self.requests[number][0].size for number in self.waiting]
        assert not self.options.counts_bytes or scheduler._queue.bytes == sum(sizes)
        room = self.options.max_queue_size - len(self.waiting)
        assert scheduler.has_room(room)
        assert not scheduler.has_room(room + 1)
        assert scheduler.ready_count == sum(w.is_ready for w in self.workers.values())
        idle = [index for index, worker in self.workers.items() if not worker.batches]
        assert sorted(scheduler.idle_workers) == sorted(idle)
        open_ids = sorted(self.waiting + retrying + running)
        assert sorted(r.id for r in scheduler.open_requests()) == open_ids
        assert len(open_ids) + len(self.left) == len(self.requests)


TestSchedule = pytest.mark.slow(Schedule.TestCase)
TestSchedule.settings = settings(max_examples=150, stateful_step_count=60)
