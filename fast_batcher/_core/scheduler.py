"""Scheduler: decides which requests leave, when, and to which worker. Events in, actions out.

Pure; runs on one thread of its *shell*, the code that drives it: the event loop's for a
`DynBatcher`, any thread under a lock for a decorated function. The scheduler itself neither waits,
sends, logs nor reads a clock.

The shell applies an event, calls `poll`, carries out the actions, and sleeps until `wake_at` or the
next event. Every accepted request leaves exactly once: through `batch_done`, `batch_raised`,
`worker_lost`, `workers.withdraw`, `cancel`, `give_up`, `close`, or an `Expire` or `Fail` action;
from then on its `is_settled` is True. An internal error does not change that: see `poll`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Any

from fast_batcher._core.admission import Admission
from fast_batcher._core.batch_packer import BatchPacker
from fast_batcher._core.batch_times import BatchTimes, Method, SizeCap, cap_of, method_of, shrink
from fast_batcher._core.deadline_batches import DeadlineBatches
from fast_batcher._core.limits import Limits, or_infinite
from fast_batcher._core.messages import (
    Action,
    Batch,
    BatchProgress,
    Dispatch,
    Expire,
    ExpiryReason,
    Fail,
    Phase,
    Rejection,
    Release,
    Request,
    settle,
    settle_open,
)
from fast_batcher._core.policy import Load, Policy
from fast_batcher._core.ranked_queue import Queue, RankedQueue
from fast_batcher._core.request_queue import RequestQueue
from fast_batcher._core.retries import Retries
from fast_batcher._core.workers import WorkerSlot, WorkerTable

# Read once: on Python 3.11 a member of an enumeration costs as much as a call.
_FULL, _IDLE, _RETRY, _SENT = Release.FULL, Release.IDLE, Release.RETRY, Phase.SENT
_deadline = attrgetter("deadline")
_has_explicit_deadline = attrgetter("has_explicit_deadline")


class Scheduler:
    """The queue, the workers and the batches of one batcher.

    Args:
        policy: Decides when a batch that is not full leaves.
        limits: Sizes and durations.
        packer: Fills batches by cost, or None; with it every request must have its `cost`.
        is_grouped: Whether only requests of one `group` share a batch.
        measure_size: Returns the bytes of an input, for `max_queue_bytes`. None if every request
            has its `size`.
        methods: Of a model that has several; every request must have a group of one of them.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        *,
        packer: BatchPacker | None = None,
        is_grouped: bool = False,
        measure_size: Callable[[Any], int] | None = None,
        methods: Sequence[Method] = (),
    ) -> None:
        self._policy = policy
        self.counts_bytes = limits.max_queue_bytes is not None
        self._timeout = or_infinite(limits.timeout)
        self._packer = packer
        ranks = (packer, limits.max_latency, limits.max_queue_bytes)
        self._methods = methods
        is_ranked = is_grouped or bool(methods) or ranks != (None, None, None)
        self.queue: Queue = RankedQueue(packer) if is_ranked else RequestQueue()
        self.workers = WorkerTable(limits)
        self._retries = Retries(idempotent=limits.idempotent, isolate_errors=limits.isolate_errors)
        # The most requests that a batch may have now.
        self._size_cap = SizeCap(limits.max_batch_size)
        self._times = BatchTimes(self._size_cap, packer)
        # The seconds of batches by their size, as far as they were learned.
        self.service = self._times.by_size
        self._admission = Admission(limits, self._times, self.workers, self._retries, measure_size)
        self._deadline_batches = DeadlineBatches(self._times, self._size_cap)
        self._deadline_batches.has_set_targets = limits.max_latency is not None
        self._next_request_id = self._next_batch_id = 0
        # Lower bound of the next expiry of a waiting request, as in the worker table.
        self._next_expiry = inf
        # Errors while learning from answers; the next `poll` reports them.
        self._learning_errors: list[Action] = []
        # True after `close`: no request is left, and none is accepted.
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """Number of requests in the queue or waiting for a retry."""
        return self.queue.size + sum(1 for _ in self._retries)

    @property
    def next_expiry(self) -> float:
        """Lower bound of the next expiry; before it `poll` need not be called for expiries."""
        # Not `min`, which takes 0.07 us; here and below.
        waiting, running = self._next_expiry, self.workers.next_expiry
        return waiting if waiting < running else running

    @property
    def is_poll_due(self) -> bool:
        """Whether `poll` may have something to do after a batch was answered."""
        return bool(self.queue.size or self._retries.groups or self._learning_errors)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether batches are smaller for now because the model ran out of memory."""
        caps = [self._size_cap, *[method.size_cap for method in self._methods]]
        return any(cap.is_watching for cap in caps)

    def has_room(self, count: int, request: Request | None = None) -> bool:
        """Return whether the queue has room for `count` requests, and for this one's bytes."""
        if count > self._admission.room(self.queue):
            return False
        return request is None or self._admission.count_fitting(self.queue, [request]) == 1

    def submit(self, now: float, requests: list[Request]) -> list[tuple[Request, Rejection]]:
        """Take requests into the queue, in their order.

        Args:
            now: The moment of their arrival, seconds; not before any earlier one.
            requests: All new requests that arrived in one turn of the shell.

        Returns:
            The rejected requests, with reasons. The shell settles them.
        """
        if self._times.unpriced_warm_ups:
            self._times.price_warm_ups(requests)
        are_named = any(map(_has_explicit_deadline, requests))
        if are_named:
            self.rank_requests()
        accepted, rejected = self._admission.admit(now, requests, self.queue)
        if not accepted:
            return rejected
        if self._policy.learns:
            self._policy.arrived(now, len(accepted), not (self.queue.size or self.workers.batches))
        # No call below can raise: either all requests are enqueued, or none.
        deadline = now + self._timeout
        for request_id, request in enumerate(accepted, self._next_request_id):
            request.id = request_id
            request.arrival = now
            if not (are_named and request.has_explicit_deadline):
                request.deadline = deadline
        self._next_request_id += len(accepted)
        self.queue.extend(accepted)
        earliest = min(map(_deadline, accepted)) if are_named else deadline
        self._next_expiry = min(self._next_expiry, earliest)
        return rejected

    def cancel(self, request: Request) -> bool:
        """Cancel a request whose caller has gone; the output of a running request is dropped.

        Returns:
            False if the request has ended before.
        """
        if not settle(request):
            return False
        if request.phase is Phase.QUEUED:
            self.queue.discard(request)
            if not self.queue.size:
                self._policy.end_hold()
        elif request.phase is not Phase.RETRYING:
            self.workers.caller_gone(request)
        return True

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a request in the queue, where it keeps its age; ignore others."""
        is_queued = request.phase is Phase.QUEUED and not request.is_settled
        if is_queued and request.priority < priority:
            self.rank_requests()
            assert isinstance(self.queue, RankedQueue), "made one"
            self.queue.raise_priority(request, priority)

    def reconfigure(self, limits: Limits, policy: Policy | None) -> None:
        """Change `max_batch_size`, `max_queue_size` and `max_latency`; a `poll` must follow.

        Waiting requests keep their places and targets, even if there are more than the new
        `max_queue_size`. With None the present policy stays.
        """
        if limits.max_latency is not None:
            self.rank_requests()
            self._deadline_batches.has_set_targets = True
        self._admission.reconfigure(limits)
        self._policy = policy or self._policy
        self._size_cap.limit(limits.max_batch_size)
        for method in self._methods:
            method.reconfigure(limits.max_batch_size)

    def rank_requests(self) -> None:
        """Use a `RankedQueue` from now on, for priorities, groups, costs and explicit deadlines.

        Waiting requests move to it. Called on first use only, because a ranked queue costs every
        request some microseconds.
        """
        if not isinstance(self.queue, RankedQueue):
            waiting = list(self.queue)
            self.queue = RankedQueue(self._packer)
            self.queue.extend(waiting)

    def begin_drain(self) -> None:
        """Reject further requests; queued ones leave as soon as workers are free."""
        self._admission.is_draining = True

    def worker_ready(
        self, now: float, worker: int, times: Iterable[tuple[float, float]] = (), stages: int = 1
    ) -> None:
        """Add a worker that has loaded its model.

        Args:
            now: The moment.
            worker: The worker's number.
            times: Sizes and seconds of its warm-up batches.
            stages: Batches on which it works at the same time.
        """
        self.workers.add(worker, stages)
        self._times.observe_warm_up(times)
        self._times.price_warm_ups(list(self.queue))

    def worker_lost(
        self,
        worker: int,
        taken: int | None = None,
        begun: int | None = None,
        *,
        out_of_memory: bool = False,
    ) -> tuple[list[Request], list[Request]]:
        """Remove a worker that has died or is being ended, and retry its requests if allowed.

        Args:
            worker: The worker's number.
            taken: The id of the batch that it read last, or None. Ids rise in the order of sending.
            begun: The id of the batch that it began to compute last, or None.
            out_of_memory: Whether it may have run out of memory; then batches become smaller.

        Returns:
            The requests without a retry: those that must not be computed twice, and those with
            which too many workers died. They are settled; the shell tells their callers.
        """
        failed: list[Request] = []
        poisonous: list[Request] = []
        # The youngest batch first: each is put before the others, so the oldest ends up first.
        for batch in reversed(self.workers.remove(worker)):
            progress = BatchProgress.SENT
            if begun is not None and batch.id <= begun:
                progress = BatchProgress.BEGUN
                if out_of_memory and len(batch.requests) > 1:
                    shrink(batch, self._size_cap)
            elif taken is not None and batch.id <= taken:
                progress = BatchProgress.TAKEN
            given_up = self._retries.after_loss(batch, progress)
            failed, poisonous = given_up[0] + failed, given_up[1] + poisonous
        return failed, poisonous

    def batch_done(
        self, now: float, worker: int, batch_id: int, has_raised: bool = False
    ) -> Batch | None:
        """Take an answered batch from its worker, and learn from its time.

        Args:
            now: The moment.
            worker: The worker's number.
            batch_id: The id in the worker's answer.
            has_raised: Whether `infer` raised. Then nothing is learned, and a call of
                `batch_raised` must follow.

        Returns:
            The batch; the shell must settle its remaining requests. None if the worker does not
            have such a batch, and so breaks the protocol.
        """
        batch = self.workers.find(worker, batch_id)
        if batch is None:
            return None
        slot = self.workers.slots[worker]
        seconds = now - slot.started_at if slot.has_answered and not batch.is_retry else None
        batch.began_at = slot.started_at
        self.workers.take_back(now, batch)
        if not has_raised:
            try:
                self._learn(now, batch, seconds)
            except Exception as error:  # noqa: BLE001  the batch was answered in any case
                self._learning_errors.append(Fail(error, []))
            slot.has_answered = True
        slot.is_second_late = False
        return batch

    def _learn(self, now: float, batch: Batch, seconds: float | None) -> None:
        """Learn from an answered batch; from its time only if `seconds` is not None."""
        if seconds is not None and (self._policy.learns or self._times.is_wanted):
            self._times.observe(batch, seconds)
        if self._policy.learns:
            self._policy.batch_done(now, len(batch.requests), self._load())
        else:
            self._policy.batch_skipped()
        cap_of(batch.requests[0].group, self._size_cap).went_well(len(batch.requests))

    def batch_raised(
        self, now: float, batch: Batch, *, out_of_memory: bool, is_fatal: bool
    ) -> list[Request]:
        """Divide and retry a batch for which `infer` raised, after `batch_done` has returned it.

        Args:
            now: The moment.
            batch: The batch.
            out_of_memory: Whether the model ran out of memory; then batches become smaller.
            is_fatal: Whether the worker cannot continue; then the batch is not retried.

        Returns:
            The requests without a retry; the shell must settle them.
        """
        if out_of_memory:
            shrink(batch, self._size_cap)
        failed = self._retries.after_failure(now, batch, may_divide=not is_fatal)
        if not failed:
            self._next_expiry = min(self._next_expiry, batch.deadline)
        return failed

    def give_up(self) -> list[Request]:
        """Settle and return every waiting request; running batches are not affected."""
        dropped = self._deadline_batches.dropped
        given_up = settle_open([*self.queue, *self._retries, *dropped])
        is_ranked = isinstance(self.queue, RankedQueue)
        self.queue = RankedQueue(self._packer) if is_ranked else RequestQueue()
        self._retries.groups.clear()
        dropped.clear()
        return given_up

    def close(self) -> list[Request]:
        """Close: settle and return all open requests, and forget all workers."""
        self._admission.is_draining = self.is_closed = True
        rest = settle_open(self.open_requests())
        self.give_up()
        self.workers.clear()
        self._next_expiry = inf
        return rest

    def open_requests(self) -> list[Request]:
        """Return every request, waiting or running, whose caller still waits."""
        running = [one for batch in self.workers.all_batches() for one in batch.requests]
        return [one for one in (*self.queue, *self._retries, *running) if not one.is_settled]

    def poll(
        self, now: float, *, has_read: bool = True, answering: Collection[int] = ()
    ) -> tuple[list[Action], float | None]:
        """Decide which actions are due now.

        If deciding raises, all waiting requests are given up with a `Fail`, because the next
        decision would raise again. Running batches are not affected.

        Args:
            now: The moment.
            has_read: Whether all frames that the workers had sent by this moment were applied.
                Otherwise no running request and no worker counts as late, because the answer may
                have arrived; the returned moment may then be in the past.
            answering: Workers whose next answer has arrived in part; the batch that they answer
                does not count as late either.

        Returns:
            The actions, in order, and the moment at which `poll` must be called again if no event
            comes before, or None. The moment may be early: then `poll` returns no actions.
        """
        actions, self._learning_errors = self._learning_errors, []
        held_until = inf
        try:
            if self._next_expiry <= now or self.workers.next_expiry <= now:
                self._expire(now, actions, has_read=has_read, answering=answering)
            if self.workers.deserted:
                actions += self.workers.take_deserted()
            held_until = self._dispatch(now, actions)
        except Exception as error:  # noqa: BLE001  no caller may wait for ever
            actions.append(Fail(error, self.give_up()))
        wake_at = held_until if held_until < self.next_expiry else self.next_expiry
        return actions, None if wake_at == inf else wake_at

    def _expire(
        self, now: float, actions: list[Action], *, has_read: bool, answering: Collection[int]
    ) -> None:
        """Expire late requests: first waiting, then running ones."""
        reason = ExpiryReason.WAITING if self.workers.ready_count else ExpiryReason.NOT_READY
        late = settle_open([one for one in self._retries if one.deadline <= now])
        late += self.queue.pop_expired(now)
        actions += [Expire(request, reason) for request in late]
        actions += self.workers.expire(now, has_read=has_read, answering=answering)
        waiting = [self.queue.earliest_deadline(), *[one.deadline for one in self._retries]]
        self._next_expiry = min(waiting)

    def _dispatch(self, now: float, actions: list[Action]) -> float:
        """Dispatch batches to workers; return the end of a hold, infinite without a hold."""
        # Retries go first, to idle workers. The size cap may have fallen below the group's size.
        while self._retries.groups and (slot := self.workers.least_loaded(1)) is not None:
            group = self._retries.take(self._size_cap)
            if group is None:
                break
            self._send(now, slot, group.requests, Release.RETRY, actions, group.isolate_until)
        while self.queue.size:
            slot = self.workers.least_loaded()
            if slot is None:
                break
            is_full = self.queue.is_full(cap_of(self.queue.next_group, self._size_cap).size)
            # A busy worker gets only full batches, and none while retries wait: these need an idle
            # worker.
            if slot.batches and (self._retries.groups or not is_full):
                break
            release = _FULL if is_full else self._decide(now)
            if release is not _IDLE and not isinstance(release, Release):
                return release
            requests, release = self._choose(now, slot, release, actions)
            if not requests:
                break
            self._send(now, slot, requests, release, actions)
        self._policy.end_hold()
        return inf

    def _decide(self, now: float) -> Release | float:
        """Decide about a batch that is not full: its reason to leave, or the end of its hold."""
        if self._admission.is_draining:
            return Release.DRAIN
        # A full batch of another group can follow.
        if not self._policy.may_hold or self.queue.has_full_group(self._size_cap.size):
            return _IDLE
        decision = self._policy.decide(now, self.queue, self._load())
        if isinstance(decision, Release):
            return decision
        until = self._deadline_batches.latest_start(self.queue)
        return Release.DEADLINE if until <= now else min(decision, until)

    def _load(self) -> Load:
        method = method_of(self.queue.next_group)
        service = self._times.by_size if method is None else method.service
        size = cap_of(self.queue.next_group, self._size_cap).size
        ready = len(self.workers.assignable)
        return Load(self.queue.size, self.workers.running, ready, size, service)

    def _choose(
        self, now: float, slot: WorkerSlot, release: Release, actions: list[Action]
    ) -> tuple[list[Request], Release]:
        """Choose the next batch, and expire requests that would be late; empty if it must wait."""
        if not isinstance(self.queue, RankedQueue):
            return self.queue.choose(self._size_cap.size), release
        requests, is_other = self._deadline_batches.choose(now, slot, self.queue)
        if dropped := self._deadline_batches.dropped:
            rejection = self._admission.rejection_of_dropped(now, self.queue)
            actions += [Expire(one, ExpiryReason.UNREACHABLE, rejection) for one in dropped]
            settle_open(dropped)
            dropped.clear()
        return requests, Release.DEADLINE if is_other else release

    def _send(
        self,
        now: float,
        slot: WorkerSlot,
        requests: list[Request],
        release: Release,
        actions: list[Action],
        isolate_until: float = inf,
    ) -> None:
        """Make a batch, assign it to a worker, and add its `Dispatch` action."""
        queue, batch_id = self.queue, self._next_batch_id
        # A `RequestQueue` is in the order of deadlines.
        is_ranked = isinstance(queue, RankedQueue)
        deadline = min(map(_deadline, requests)) if is_ranked else requests[0].deadline
        batch = Batch(batch_id, slot.id, requests, release, deadline, len(requests), now)
        self._next_batch_id += 1
        if release is not _RETRY:
            queue.batch_left(requests)
        batch.isolate_until, batch.left_waiting = isolate_until, queue.size
        for request in requests:
            request.phase = _SENT
            request.batch_id = batch_id
        self.workers.give(now, slot, batch)
        actions.append(Dispatch(batch))
