"""The scheduler: events in, decisions out. Pure; runs on the one thread of its shell.

A shell applies an event, calls `poll`, carries out the actions, and sleeps until `wake_at` or the
next event. Every accepted request leaves exactly once: through `batch_done`, `batch_raised`,
`worker_lost`, `withdraw`, `cancel`, `give_up`, `close` or an `Expire` or `Fault` action; from then
on its `is_settled` is True. No exception changes that: what learns and predicts is asked before
anything is taken over, or where what has been taken is in these books.
"""

from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import TypeVar

from fast_batcher._core.admission import SAFETY_FACTOR, Admission, Backlog
from fast_batcher._core.batch_packer import BatchPacker
from fast_batcher._core.load import Load
from fast_batcher._core.messages import (
    Action,
    Batch,
    Dispatch,
    Expire,
    ExpiryReason,
    Fault,
    Refusal,
    Release,
    Replace,
    Request,
    RetryBatch,
    Stage,
    Stall,
)
from fast_batcher._core.policy import Policy
from fast_batcher._core.ranked_queue import RankedQueue
from fast_batcher._core.request_queue import RequestQueue
from fast_batcher._core.retries import Lost, Retries
from fast_batcher._core.service_model import ServiceModel
from fast_batcher._core.size_cap import SizeCap
from fast_batcher.errors import BatcherClosedError, QueueFullError
from fast_batcher.stats import Counters

# A busy worker gets one batch ahead, and only a full one: it hides the hand-over at saturation and
# costs no latency below it. Source: LIMITS "second batch in flight", eager +60 % p50, this none.
BATCHES_PER_WORKER = 2
# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_FULL, _IDLE, _RETRY = Release.FULL, Release.IDLE, Release.RETRY
_B = TypeVar("_B", bound=Batch)


class _Slot:
    """A worker that has been ready and has not been lost."""

    __slots__ = ("batches", "has_answered", "has_put_back", "id", "is_stalled", "started_at")

    def __init__(self, worker: int) -> None:
        self.id = worker
        # What it has, oldest first; the first one is being computed.
        self.batches: list[Batch] = []
        # When it began with the first one.
        self.started_at = 0.0
        # No caller waits for its first batch any more, which has run for the batcher's `timeout`;
        # or it is being replaced. It gets no more until it answers.
        self.is_stalled = False
        # The first batch of a process is slow for reasons of its own.
        self.has_answered = False
        # Its second batch would have been late: none is tried before it answers, for to try takes
        # a batch out of the queue and puts it back, at every arrival.
        self.has_put_back = False


class Scheduler:
    """Queue, workers and batches of one batcher.

    Args:
        policy: Decides when a batch leaves that is not full.
        counters: Where it counts; it may have counted for another scheduler before.
        max_batch_size: Most requests in a batch.
        max_queue_size: Most requests waiting.
        max_queue_bytes: Most bytes of them together, or None.
        weigh: Sees to it that a request has its `size`, where there is `max_queue_bytes`. That
            takes time, so it is called for those alone that nothing else refuses. None if all have.
        timeout: Seconds from arrival to deadline where the caller names none, or None for no limit.
            A worker that has run a batch for as long, and for which no caller waits, counts as
            stalled.
        max_latency: Seconds from arrival by which an answer is wanted, or None: see `Admission`.
        infer_timeout: Seconds that a batch may run before its worker is replaced, or None.
        idempotent: Whether a request may be computed twice.
        isolate_errors: Whether a batch for which `infer` raised is divided to find the culprit.
        batches_per_worker: Most batches that a worker has; above 1, one that waits full behind it.
        packer: Fills batches by cost, or None; every request must have its cost then.
        is_grouped: Whether only requests of one group share a batch.
    """

    def __init__(
        self,
        policy: Policy,
        counters: Counters,
        *,
        max_batch_size: int,
        max_queue_size: int,
        max_queue_bytes: int | None = None,
        weigh: Callable[[Request], None] | None = None,
        timeout: float | None,
        max_latency: float | None = None,
        infer_timeout: float | None,
        idempotent: bool,
        isolate_errors: bool,
        batches_per_worker: int = BATCHES_PER_WORKER,
        packer: BatchPacker | None = None,
        is_grouped: bool = False,
    ) -> None:
        self.counters = counters
        self._policy = policy
        self._max_queue_size = max_queue_size
        self._max_queue_bytes = max_queue_bytes
        self._weigh = weigh
        self._timeout = inf if timeout is None else timeout
        self._max_latency = inf if max_latency is None else max_latency
        # Whether a request may wait that has a target for which it did not ask itself.
        self._has_had_targets = max_latency is not None
        self._infer_timeout = inf if infer_timeout is None else infer_timeout
        # The shell looks whether anything waits, and asks nothing then: see `submit_at_once`.
        self.queue = self._new_queue()
        # The same, where requests are not equals.
        self._ranked: RankedQueue | None = None
        self._packer = packer
        # Whether any requests may share a batch, in which their priorities make no difference.
        self._shares_freely = packer is None and not is_grouped
        self._batches_per_worker = batches_per_worker
        self._retries = Retries(idempotent=idempotent, isolate_errors=isolate_errors)
        # The same of those that wait for another try.
        self.retries = self._retries.groups
        self._service = ServiceModel()
        # Whether somebody wants to know how long batches take, besides the policy. It costs each
        # batch some microseconds, so it begins when the first one does.
        self._is_measuring = max_latency is not None or packer is not None
        # The same by what batches are charged, where there are costs.
        self._charges = self._service if packer is None else packer.service
        # Sizes and seconds of warm-ups, until a request tells what such sizes may be charged.
        self._warm_ups: list[tuple[float, float]] = []
        self._admission = Admission(self._charges, max_batch_size, packer)
        # Before this moment every request with no target but `max_latency` is refused, unless what
        # that depends on has changed: see `_refuse_all`.
        self._shut_until = -inf
        self._shut_by: tuple[int, ...] = ()
        self._size_cap = SizeCap(max_batch_size)
        self._limit_size()
        if packer is not None or is_grouped:
            self.rank_requests()
        # Ready workers by id: those that may be given a batch, and all of them. And what they have,
        # by batch id.
        self._slots: dict[int, _Slot] = {}
        self._all_slots: dict[int, _Slot] = {}
        self._batches: dict[int, Batch] = {}
        # Those that no worker has any more, and whose answer is being copied out: see
        # `begin_copy_out`.
        self._copying_out: dict[int, Batch] = {}
        self._next_batch_id = 0
        # Requests dropped while the next batch is formed, and not told by an action yet.
        self._dropped: list[Request] = []
        # Why something was not learned; `poll` has to be called for it.
        self.fault: Exception | None = None
        # Nothing expires before this moment. A bound, worked out anew when it is reached: most
        # requests are answered long before their deadlines, and are not looked at for it.
        self.next_expiry = inf
        self._is_draining = False
        # After `close`: there is nothing, and there will be nothing.
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """Requests in the queue, and those that wait for another try."""
        return self.queue.size + sum(1 for _ in self._retries)

    @property
    def room(self) -> int:
        """How many requests `submit` would find a place for."""
        return max(0, self._max_queue_size - self.queue.size)

    @property
    def running(self) -> int:
        """Requests that a worker has, or has answered just now, and whose caller still waits."""
        count = sum(batch.open_count for batch in self._batches.values())
        if self._copying_out:
            count += sum(batch.open_count for batch in self._copying_out.values())
        return count

    @property
    def workers_ready(self) -> int:
        """Workers that have loaded their model, are alive and are not stalled."""
        return sum(not slot.is_stalled for slot in self._slots.values())

    def submit(  # noqa: C901  flat on purpose
        self, now: float, requests: list[Request]
    ) -> list[Request]:
        """Take requests into the queue, those first that come first.

        All that arrived in one turn of the shell are taken together: it is this loop that every
        request pays for, so it does nothing that can be done once for all.

        Args:
            now: The moment of their arrival, seconds; not before any earlier one.
            requests: New requests.

        Returns:
            Those that were refused, and whose `refusal` tells the reason.
        """
        if now < self._shut_until and self._refuse_all(now, requests):
            return requests
        if self._warm_ups and requests:
            self._learn_warm_ups(sum([request.cost for request in requests]) / len(requests))
        requests, refused = self._refuse_without_room(now, requests)
        own = [
            request
            for request in requests
            if request.deadline is not None  # type: ignore[redundant-expr]  # see Request
        ]
        if requests and (self._max_latency != inf or any(one.target is None for one in own)):
            late = self._reject_unreachable(now, requests, own)
            if late:
                refused += late
                if not own and self._ranked is None:
                    self._shut(now, late[-1].refusal, len(requests) - len(late))
                requests = [request for request in requests if request.refusal is None]
                own = [request for request in own if request.refusal is None]
        if self._max_queue_bytes is not None:
            count = self._take_fitting(now, requests)
            refused += requests[count:]
            requests = requests[:count]
            own = [request for request in own if request.refusal is None]
        if requests and self._policy.learns:
            self._policy.arrived(now, len(requests), not self.queue.size and not self._batches)
        # From here on nothing is asked any more that could raise: all are taken, or none.
        self.counters.rejected += len(refused)
        deadline = now + self._timeout
        request_id = self.counters.submitted
        for request in requests:
            request.id = request_id
            request_id += 1
            request.arrival = now
            if request.deadline is None:
                request.deadline = deadline  # type: ignore[unreachable]  # see Request
        self.counters.submitted = request_id
        self.queue.extend(requests, own)
        if own:
            if len(own) == len(requests):
                deadline = inf
            deadline = min(deadline, min([request.deadline for request in own]))
        if deadline < self.next_expiry:
            self.next_expiry = deadline
        return refused

    def _refuse_all(self, now: float, requests: list[Request]) -> bool:
        """Refuse arrivals for the reason of the last one, if that is certain; False if it is not.

        Under overload most requests are refused, one after the other, for the same reason: nothing
        has been taken or answered meanwhile, and too little time has passed. They are told in the
        least time that it can take, for it is taken from those that can be answered.
        """
        if (
            self._is_draining
            or self._shut_by != self._outlook_depends_on(0)
            or len(requests) > self._max_queue_size - self.queue.size
        ):
            return False
        for request in requests:
            if request.deadline is not None:
                return False
        left = self._max_latency
        seconds = left + (self._shut_until - now) * SAFETY_FACTOR
        refusal = self._admission.refusal(self.queue.size, seconds, left)
        for request in requests:
            request.target = now + left
            request.refusal = refusal
        self.counters.rejected += len(requests)
        return True

    def _shut(self, now: float, refusal: Refusal, taken: int) -> None:
        """A request with no target but `max_latency` has just been refused, after so many others.

        A prediction falls `SAFETY_FACTOR` seconds in each second if nothing else happens, or less
        where a batch takes longer than expected or a worker is free.
        """
        assert refusal.retry_after is not None, "it is late by so much"
        self._shut_until = now + refusal.retry_after / SAFETY_FACTOR
        self._shut_by = self._outlook_depends_on(taken)

    def _outlook_depends_on(self, more: int) -> tuple[int, ...]:
        """Differs whenever a prediction may have become better, with so many more that wait."""
        return (
            self.queue.size + more,
            len(self._batches),
            self._next_batch_id,
            len(self._slots),
            bool(self.retries),
        )

    def submit_at_once(  # noqa: C901  flat on purpose
        self, now: float, requests: list[Request]
    ) -> Batch | None:
        """`submit` and `poll` in one for the usual case; None, and nothing done, in any other.

        The usual case: nothing waits, a worker is free, and the policy gives it what has come, or
        that is a full batch. It is what a lone request goes through, and after a pause every
        further call costs it about five microseconds (`benchmarks/idle_latency.py`).

        Returns:
            The one batch that now has to be sent. Nothing else has to be done before `next_expiry`.
        """
        size = len(requests)
        policy = self._policy
        if (
            self.queue.size
            or self.retries
            or self._is_draining
            or size > self._most_at_once
            or self.next_expiry <= now
            or (not policy.is_greedy and size < self._max_batch_size)
            or (size > 1 and policy.sizes is not None and policy.sizes.best(size) < size)
        ):
            return None
        for slot in self._slots.values():
            if not slot.batches:  # so it is not stalled either
                break
        else:
            return None
        for request in requests:
            if request.deadline is not None:
                return None
        if policy.learns:
            policy.arrived(now, size, not self._batches)
        deadline = now + self._timeout
        counters = self.counters
        request_id = counters.submitted
        batch_id = self._next_batch_id
        for request in requests:
            request.id = request_id
            request_id += 1
            request.arrival = now
            request.deadline = deadline
            request.batch_id = batch_id
        counters.submitted = request_id
        self._next_batch_id = batch_id + 1
        release = _FULL if size == self._max_batch_size else _IDLE
        batch = Batch(batch_id, slot.id, requests, release, now, deadline)
        slot.started_at = now
        slot.batches.append(batch)
        self._batches[batch_id] = batch
        if now + self._infer_timeout < deadline:
            deadline = now + self._infer_timeout
        if deadline < self.next_expiry:
            self.next_expiry = deadline
        return batch

    def count_batch(self, batch: Batch) -> None:
        """Count a batch; one of `submit_at_once` after it is sent, while the worker wakes up."""
        size = len(batch.requests)
        counters = self.counters
        counters.batch_sizes[size] += 1
        counters.releases[batch.release] += 1
        # One request speaks for its batch; which one moves on with the id, so that in the long run
        # every position is heard. Recording all of them would cost more than sending them.
        arrival = batch.requests[batch.id % size].arrival
        counters.queue_waits.append((batch.sent_at - arrival, size))

    def reconfigure(
        self,
        *,
        max_batch_size: int,
        max_queue_size: int,
        max_latency: float | None,
        policy: Policy | None,
    ) -> None:
        """Change these settings; all of them are valid. `poll` has to follow.

        What waits keeps its place, though there may be more of it than `max_queue_size` now, and
        the target that it was accepted with. Without a policy the present one stays.
        """
        self._max_queue_size = max_queue_size
        self._max_latency = inf if max_latency is None else max_latency
        self._has_had_targets = self._has_had_targets or max_latency is not None
        self._is_measuring = self._is_measuring or max_latency is not None
        self._policy = policy or self._policy
        self._size_cap.limit(max_batch_size)
        self._limit_size()

    def rank_requests(self) -> None:
        """From now on requests are not equals: priorities, groups and costs count.

        What waits goes over to the other queue. Not before the first use, for it costs every
        request some microseconds.
        """
        if self._ranked is not None:
            return
        waiting = [request for request in self.queue if not request.is_settled]
        waiting.sort(key=lambda request: request.id)
        self.queue = self._ranked = RankedQueue(self._packer, is_weighed=self.queue.is_weighed)
        self._ranked.extend(waiting, waiting)
        self._limit_size()

    def _refuse_without_room(
        self, now: float, requests: list[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Divide arrivals into those that the queue has room for, and the refused."""
        refused: list[Request] = []
        room = 0 if self._is_draining else self.room
        if len(requests) > room:
            requests, refused = requests[:room], requests[room:]
            self._refuse(now, refused, room)
        return requests, refused

    def _take_fitting(self, now: float, requests: list[Request]) -> int:
        """How many of the arrivals there is room for in bytes; the others are told."""
        count = self.count_fitting(requests)
        if count < len(requests):
            self._refuse(now, requests[count:], count, "no room for its bytes: ")
        return count

    def _refuse(self, now: float, requests: list[Request], taken: int, why: str = "") -> None:
        """Tell requests that there is no room for them, after so many of the same turn."""
        if self._is_draining:
            refusal = Refusal(
                BatcherClosedError, "the batcher is draining and takes no more requests"
            )
        else:
            # From now on it can tell after how long it makes sense to come again.
            self._is_measuring = True
            name, limit = "max_queue_size", self._max_queue_size
            if why:
                name, limit = "max_queue_bytes", self._max_queue_bytes or 0
            refusal = Refusal(
                QueueFullError,
                f"{why}{self.queue.size + taken} requests wait already ({name}={limit})",
                self._admission.seconds_until_drained(self._backlog(now)),
            )
        for request in requests:
            request.refusal = refusal

    def _reject_unreachable(
        self, now: float, requests: list[Request], own: list[Request]
    ) -> list[Request]:
        """Set targets; returns those that will not be answered by theirs, with their refusals."""
        self._is_measuring = True
        target = now + self._max_latency
        asked = [request for request in own if request.target is None]
        if target != inf:
            for request in requests:
                request.target = target
        for request in asked:
            request.target = min(request.deadline, target)
        backlog = self._backlog(now)
        if self._ranked is not None:
            predict = self._predictor(self._ranked, backlog, requests)
            return self._admission.find_late(now, backlog, requests, predict)
        if own:
            return self._admission.find_late(now, backlog, requests)
        return self._admission.find_late_equals(now, backlog, requests)

    def _predictor(
        self, queue: RankedQueue, backlog: Backlog, requests: list[Request]
    ) -> Callable[[Request, int], float]:
        """What `find_late` asks where requests are not equals: one is behind its betters alone."""
        cost = 1.0 if self._packer is None else sum(r.cost for r in requests) / len(requests)

        def predict(request: Request, taken: int) -> float:
            ahead = queue.ahead_of(request.priority)
            ahead = ahead._replace(requests=ahead.requests + taken, cost=ahead.cost + taken * cost)
            return self._admission.seconds_behind(backlog, ahead, request.cost)

        return predict

    def _backlog(self, now: float) -> Backlog:
        """What a request that comes now has to wait for."""
        # A stalled worker is still computing, and will come back.
        slots = self._slots.values()
        return Backlog(
            ahead=self.queue.size,
            delay=min(
                [self._seconds_until_free(now, slot, self._charges.high) for slot in slots],
                default=inf,
            ),
            workers=len(slots),
            is_idle=not self.queue.size and not self._batches and not self.retries,
            cost=0.0 if self._ranked is None else self._ranked.cost,
            is_behind=bool(slots) and all(len(slot.batches) > 1 for slot in slots),
        )

    def _seconds_until_free(
        self, now: float, slot: _Slot, seconds: Callable[[float], float]
    ) -> float:
        """Until a worker has answered all that it has; 0.0 while nothing is known.

        Args:
            now: The moment.
            slot: The worker.
            seconds: Which reading of the service model says how long a batch of a size takes.
        """
        if not slot.batches or not self._charges.is_known:
            return 0.0
        size_of = self._admission.size_of
        first, *others = [seconds(size_of(batch.requests)) for batch in slot.batches]
        return max(0.0, first - (now - slot.started_at)) + sum(others)

    def count_fitting(self, requests: list[Request]) -> int:
        """How many of these, from the first on, may wait as far as their bytes go."""
        most = inf if self._max_queue_bytes is None else self._max_queue_bytes
        waiting = self.queue.bytes
        count = 0
        for request in requests:
            if self._weigh is not None:
                self._weigh(request)
            # One that is larger than all room there is may wait alone, or it would never be served.
            if waiting and waiting + request.size > most:
                break
            waiting += request.size
            count += 1
        return count

    def cancel(self, request: Request) -> None:
        """Forget a request whose caller has gone; if it runs, its output will be dropped."""
        if request.is_settled:
            return
        request.is_settled = True
        self.counters.cancelled += 1
        if request.batch_id is None:
            self.queue.discard(request)
            if self._policy.is_holding and not self.queue.size:
                self._policy.end_hold()  # nobody is left to be held
        else:
            batch = self._batches.get(request.batch_id) or self._copying_out.get(request.batch_id)
            if batch is not None:  # else it waits for another try
                batch.open_count -= 1
                self._notice_desertion(batch)

    def _notice_desertion(self, batch: Batch) -> None:
        """If no caller waits for a batch any more, its worker may be stalled, now or later."""
        slot = self._all_slots.get(batch.worker)
        if not batch.open_count and slot and slot.batches and batch is slot.batches[0]:
            self.next_expiry = min(self.next_expiry, slot.started_at + self._timeout)

    def begin_drain(self) -> None:
        """Take no more requests, and wait for nobody: what is queued leaves as workers get free."""
        self._is_draining = True

    def worker_ready(
        self, now: float, worker: int, times: Iterable[tuple[float, float]] = ()
    ) -> None:
        """A worker has loaded its model and can take batches.

        Args:
            now: The moment.
            worker: Which one.
            times: Sizes and seconds of batches that it has computed to warm up.
        """
        assert worker not in self._all_slots, "a worker is lost before it can be ready again"
        self._slots[worker] = self._all_slots[worker] = _Slot(worker)
        self._shut_until = -inf
        for size, seconds in times:
            self._service.observe(size, seconds)
            if self._packer is not None and not self._charges.is_known:
                self._warm_ups.append((size, seconds))
        if self._warm_ups and self._ranked is not None and self._ranked.size:
            self._learn_warm_ups(self._ranked.cost / self._ranked.size)

    def _learn_warm_ups(self, cost: float) -> None:
        """Take the inputs of the warm-up for such of this cost: what they cost the model knows.

        If they are not, batches that are answered correct it. To believe the first of these alone,
        which may be slow for reasons of its own, would refuse what could be served.
        """
        for size, seconds in self._warm_ups:
            self._charges.observe(size * cost, seconds)
        self._warm_ups.clear()

    def worker_retired(self, worker: int) -> None:
        """A worker is given nothing more; it answers what it has."""
        self._slots.pop(worker, None)

    @property
    def idle_workers(self) -> list[int]:
        """Ready workers, retired ones included, that have nothing to do."""
        return [slot.id for slot in self._all_slots.values() if not slot.batches]

    def worker_lost(
        self,
        worker: int,
        taken: int | None = None,
        begun: int | None = None,
        *,
        out_of_memory: bool = False,
    ) -> Lost:
        """A worker has died or is being ended; what it had is tried again where that is right.

        Args:
            worker: Which one.
            taken: The id of the batch that it read last, None if there is none.
            begun: The id of the batch that it began to compute last, None if there is none.
            out_of_memory: Whether that may be what it died of: batches become smaller.

        Returns:
            The requests that are not tried again; they are now the shell's to settle.
        """
        lost = Lost([], [])
        self._slots.pop(worker, None)
        slot = self._all_slots.pop(worker, None)
        if slot is None:
            return lost
        # The youngest first: what is put first last goes first.
        for batch in reversed(slot.batches):
            del self._batches[batch.id]
            stage = Stage.SENT
            if batch.id == begun:
                stage = Stage.BEGUN
                if out_of_memory and len(batch.requests) > 1:
                    self._run_out(batch)
            elif batch.id == taken:
                stage = Stage.TAKEN
            given_up = self._retries.after_loss(batch, stage)
            for requests, more in zip(lost, given_up, strict=True):
                requests[:0] = more
                for request in more:
                    request.is_settled = True
        return lost

    def batch_done(
        self, now: float, worker: int, batch_id: int, has_raised: bool = False
    ) -> Batch | None:
        """A worker has answered a batch.

        Args:
            now: The moment.
            worker: Which one.
            batch_id: Of which batch it says so.
            has_raised: Whether `infer` raised: nothing is learned from how long that took, and
                `batch_raised` has to follow.

        Returns:
            The batch, whose requests that are not settled yet are now the shell's to settle, or
            None if the worker does not have such a batch: then it talks nonsense.
        """
        batch = self._batches.get(batch_id)
        if batch is None or batch.worker != worker:
            return None
        del self._batches[batch_id]
        slot = self._all_slots[worker]
        slot.batches.remove(batch)
        slot.is_stalled = slot.has_put_back = False
        started_at = slot.started_at
        if slot.batches:
            self._begin_batch(slot, now)
        if has_raised:
            return batch
        try:
            self._learn(now, slot, batch, started_at)
        except Exception as error:  # noqa: BLE001  whatever it is, the batch has been answered
            self.fault = error
        slot.has_answered = True
        return batch

    def _learn(self, now: float, slot: _Slot, batch: Batch, started_at: float) -> None:
        """Learn from a batch that has been answered."""
        policy = self._policy
        if policy.learns:
            self._measure(now, slot, batch, started_at)
            policy.batch_done(now, len(batch.requests), self._load())
        else:
            if self._is_measuring or policy.sizes is not None:
                self._measure(now, slot, batch, started_at)
            if policy.rest:
                policy.rest -= 1
                if not policy.rest:
                    policy.end_rest()
        if self._size_cap.is_watching:
            self._size_cap.went_well(len(batch.requests))
            self._limit_size()

    def _measure(self, now: float, slot: _Slot, batch: Batch, started_at: float) -> None:
        """Learn how long a batch took."""
        if not slot.has_answered or batch.release is _RETRY:
            return
        self._service.observe(len(batch.requests), now - started_at)
        if self._packer is not None:
            self._charges.observe(self._packer.charge(batch.requests), now - started_at)

    def batch_raised(
        self, now: float, batch: Batch, *, out_of_memory: bool, is_fatal: bool
    ) -> list[Request]:
        """`infer` raised for a batch that `batch_done` has just given back.

        Args:
            now: The moment.
            batch: The batch.
            out_of_memory: Whether that is why: batches become smaller.
            is_fatal: Whether the worker cannot go on; then it is not tried again.

        Returns:
            The requests that are not tried again; they are now the shell's to settle.
        """
        if out_of_memory:
            self._run_out(batch)
        failed = self._retries.after_failure(now, batch, may_divide=not is_fatal)
        if not failed and batch.deadline < self.next_expiry:
            self.next_expiry = batch.deadline
        return failed

    def _run_out(self, batch: Batch) -> None:
        self._size_cap.ran_out(len(batch.requests), is_retry=isinstance(batch, RetryBatch))
        self._limit_size()

    def begin_copy_out(self, batch: Batch) -> None:
        """The answer of a batch that `batch_done` has just given back is not all here yet.

        Its worker is free. Until `end_copy_out` its requests count as running, and do not expire:
        their answer has come in time.
        """
        self._copying_out[batch.id] = batch

    def end_copy_out(self, batch: Batch) -> bool:
        """All of the answer is here.

        Returns:
            Whether the requests of the batch that are not settled yet are now the shell's to
            settle; else `close` has given them back.
        """
        if self._copying_out.get(batch.id) is not batch:
            return False
        del self._copying_out[batch.id]
        return True

    def not_sent_yet(self, now: float, worker: int, begun: int | None) -> None:
        """A worker has only just been sent what it has been given, or not yet.

        For a batch that it has not begun time counts from now: the worker is not to blame if the
        shell was held up.

        Args:
            now: The moment.
            worker: Which one.
            begun: The id of the batch that it began to compute last, None if there is none.
        """
        slot = self._all_slots.get(worker)
        is_judged = slot is None or not slot.batches or slot.started_at == inf
        if slot is not None and not is_judged and slot.batches[0].id != begun:
            slot.started_at = now

    def find_batch(self, worker: int, batch_id: int) -> Batch | None:
        """The batch of this id that the worker has, or None."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and batch.worker == worker else None

    def withdraw(self, now: float, batch: Batch, requests: list[Request]) -> None:
        """Take requests out of a batch that has not reached its worker: they could not be sent.

        A batch that has none left is as if it had never been sent.
        """
        self._shut_until = -inf  # the batch takes less time
        gone = {request.id for request in requests}
        batch.requests = [request for request in batch.requests if request.id not in gone]
        for request in requests:
            if not request.is_settled:
                request.is_settled = True
                batch.open_count -= 1
        self._notice_desertion(batch)
        if not batch.requests:
            slot = self._all_slots[batch.worker]
            was_first = slot.batches[0] is batch
            slot.batches.remove(batch)
            del self._batches[batch.id]
            if was_first:
                slot.is_stalled = False
                self._begin_batch(slot, now)

    def close(self) -> list[Request]:
        """End: returns every request, waiting or running, whose caller still waits."""
        self._is_draining = self.is_closed = True
        rest = self.give_up()
        for batch in (*self._batches.values(), *self._copying_out.values()):
            rest.extend(_settle_open(batch))
        self._slots.clear()
        self._all_slots.clear()
        self._batches.clear()
        self._copying_out.clear()
        self.next_expiry = inf
        return rest

    def _new_queue(self) -> RequestQueue:
        return RequestQueue(is_weighed=self._max_queue_bytes is not None)

    def give_up(self) -> list[Request]:
        """There will be no worker for a while: returns every request that waits for one."""
        rest = [request for request in (*self.queue, *self._retries) if not request.is_settled]
        for request in rest:
            request.is_settled = True
        self.queue = self._new_queue()
        if self._ranked is not None:
            self._ranked = None
            self.rank_requests()
        self.retries.clear()
        return rest

    def open_requests(self) -> list[Request]:
        """Every request, waiting or running, whose caller still waits."""
        batches = (*self._batches.values(), *self._copying_out.values())
        running = [request for batch in batches for request in batch.requests]
        return [r for r in (*self.queue, *self._retries, *running) if not r.is_settled]

    def poll(
        self, now: float, *, has_read: bool = True, answering: Collection[int] = ()
    ) -> tuple[list[Action], float | None]:
        """Decide what to do now.

        Args:
            now: The moment.
            has_read: Whether all that the workers had said by this moment has been applied. While
                it has not, no request that a worker has is late, and no worker: the answer may be
                there already. The moment returned may then have passed.
            answering: Workers whose next answer has arrived in part: for the batch that they answer
                it is the same.

        Returns:
            What the shell has to do, in this order, and the moment at which `poll` wants to be
            called again if no event comes before, or None. At that moment it has something to do,
            or finds that the deadline that it had in mind is no longer anybody's.
        """
        actions: list[Action] = []
        if self.fault is not None:
            actions.append(Fault(self.fault, []))
            self.fault = None
        wake_at = inf
        try:
            wake_at = self._decide_all(now, has_read, answering, actions)
        except Exception as error:  # noqa: BLE001  whatever it is, no caller may wait for ever
            self._recover(error, actions)
        # Sending batches may have brought the next expiry nearer, through `infer_timeout`.
        wake_at = min(wake_at, self.next_expiry)
        return actions, None if wake_at == inf else wake_at

    def _decide_all(  # noqa: C901  flat on purpose
        self, now: float, has_read: bool, answering: Collection[int], actions: list[Action]
    ) -> float:
        """Append what `poll` returns; returns until when a batch is held, or the next expiry."""
        if self.next_expiry <= now:
            self._expire(now, actions, has_read, answering)
            self.next_expiry = self._earliest_expiry()
        wake_at = self.next_expiry
        if self.retries:
            self._send_retries(now, actions)
        queue = self.queue
        is_held = False
        while queue.size:
            slot = self._least_loaded(self._batches_per_worker)
            if slot is None:
                break
            # One that has nothing, or one batch if the next one is full. What is to be tried again
            # needs one that has nothing, so that workers must get free first. Ranks make it dear to
            # ask whether it is full, so that is not asked for busy workers.
            is_full = self._has_full_batch()
            if slot.batches and (self.retries or not is_full):
                break
            release = Release.FULL if is_full else self._decide(now)
            if not isinstance(release, Release):
                wake_at = min(wake_at, release)
                is_held = True
                break
            if self._policy.is_holding:
                self._policy.end_hold()
            requests, release = self._choose(now, slot, release, actions)
            if not requests:
                queue.taken = ()  # they have been put back
                break
            self._send(self._make(now, slot, requests, release, Batch), actions)
        if self._policy.is_holding and not is_held:
            self._policy.end_hold()
        return wake_at

    def _recover(self, error: Exception, actions: list[Action]) -> None:
        """Deciding has raised: give up what waits, and what was on its way from there to a batch.

        To decide once more would raise once more. What workers have is not touched.
        """
        taken = self.queue.taken
        lost = [*self.give_up(), *self._dropped]
        self._dropped = []
        for request in taken:
            if request.batch_id is None and not request.is_settled:
                request.is_settled = True
                lost.append(request)
        actions.append(Fault(error, lost))

    def _has_full_batch(self) -> bool:
        if self._ranked is not None:
            return self._ranked.is_full(self._max_batch_size)
        return self.queue.size >= self._max_batch_size == self._most_now()

    def _most_now(self) -> int:
        """How many of those that wait may leave together: all, if any of them has a target."""
        sizes = self._policy.sizes
        if sizes is None or self._has_had_targets or self.queue.has_own:
            return self._max_batch_size
        return min(self._max_batch_size, sizes.best(self.queue.size))

    def _decide(self, now: float) -> Release | float:
        if self._is_draining:
            return Release.DRAIN
        if self._policy.is_greedy:
            return Release.HOLD if self._policy.is_holding else _IDLE
        if self._ranked is not None and self._ranked.has_full_group(self._max_batch_size):
            return _IDLE  # of another group than the first request's, which stands in its way
        decision = self._policy.decide(now, self.queue, self._load())
        if isinstance(decision, Release) or not self._has_had_targets:
            return decision
        # No hold makes its oldest request late.
        oldest = self.queue.oldest()
        assert oldest is not None, "it is asked only while requests wait"
        until = inf if oldest.target is None else oldest.target
        if self._service.is_known:
            until -= self._service.high(self.queue.size + 1)
        return Release.DEADLINE if until <= now else min(decision, until)

    def _load(self) -> Load:
        return Load(
            self.queue.size,
            self.running,
            len(self._slots),
            self._max_batch_size,
            self._service,
            self.counters.submitted,
        )

    def _choose(
        self, now: float, slot: _Slot, release: Release, actions: list[Action]
    ) -> tuple[list[Request], Release]:
        """Take the next batch, without those that would be late; nothing if it is to wait."""
        if self._ranked is None and not self._has_had_targets and not self.queue.has_own:
            return self.queue.take(self._most_now()), release
        if slot.batches and slot.has_put_back:
            return [], release
        if slot.batches and self._has_had_targets and not self._charges.is_known:
            # What a worker has cannot be dropped any more, however long its first batch takes.
            return [], release
        start = now + self._seconds_until_free(now, slot, self._charges.median)
        late = self._dropped
        requests, is_smaller = self._admission.take(start, self.queue, late)
        if late:
            refusal = self._admission.refusal_of_late(self._backlog(now))
            actions.extend(Expire(one, ExpiryReason.UNREACHABLE, refusal) for one in late)
            self.counters.expired += len(late)
            self._dropped = []
        if late or is_smaller:
            if slot.batches and len(requests) < self._max_batch_size:
                # A second batch is full, or open to those that come.
                self.queue.put_back(requests)
                slot.has_put_back = True
                return [], release
            release = Release.DEADLINE
        return requests, release

    def _least_loaded(self, load: int) -> _Slot | None:
        """The worker that has the fewest batches, and fewer than `load`."""
        slot = None
        for candidate in self._slots.values():
            if len(candidate.batches) < load and not candidate.is_stalled:
                slot, load = candidate, len(candidate.batches)
        return slot

    def _send_retries(self, now: float, actions: list[Action]) -> None:
        while (group := self._retries.take()) is not None:
            slot = self._least_loaded(1)
            if slot is None:
                self._retries.put_back(group)
                return
            # Batches may have become smaller since it was made.
            requests = group.requests[: self._max_batch_size]
            if len(requests) < len(group.requests):
                rest = group.requests[self._max_batch_size :]
                self._retries.put_back(group._replace(requests=rest))
            batch = self._make(now, slot, requests, Release.RETRY, RetryBatch)
            batch.isolate_until = group.isolate_until
            self._send(batch, actions)

    def _make(
        self, now: float, slot: _Slot, requests: list[Request], release: Release, kind: type[_B]
    ) -> _B:
        """Give a worker a batch."""
        deadline = min([request.deadline for request in requests])
        batch = kind(self._next_batch_id, slot.id, requests, release, now, deadline)
        self._next_batch_id += 1
        batch_id = batch.id
        for request in requests:
            request.batch_id = batch_id
        if not slot.batches:
            self._begin_batch(slot, now)
        slot.batches.append(batch)
        self._batches[batch.id] = batch
        self.queue.taken = ()
        return batch

    def _send(self, batch: Batch, actions: list[Action]) -> None:
        """Let the shell send a batch that its worker has been given."""
        actions.append(Dispatch(batch))
        if self._ranked is not None:
            self._ranked.batch_left(is_retry=batch.release is _RETRY)
        self.count_batch(batch)

    def _limit_size(self) -> None:
        self._max_batch_size = self._size_cap.size
        self._shut_until = -inf
        # A batch that passes by the queue still finds room in it: `max_queue_size` says how many
        # requests of one turn are taken, on either way.
        self._most_at_once = min(self._max_batch_size, self._max_queue_size)
        self._admission.max_batch_size = self._max_batch_size
        if self._max_latency != inf or not self._shares_freely:
            self._most_at_once = 0

    def _begin_batch(self, slot: _Slot, now: float) -> None:
        """The worker begins with its first batch."""
        slot.started_at = now
        if now + self._infer_timeout < self.next_expiry:
            self.next_expiry = now + self._infer_timeout
        if slot.batches:  # its callers may have gone while it waited behind another
            self._notice_desertion(slot.batches[0])

    def _earliest_expiry(self) -> float:
        earliest = self.queue.earliest_deadline() if self.queue.size else inf
        for request in self._retries:
            earliest = min(earliest, request.deadline)
        for batch in self._batches.values():
            if batch.deadline < earliest and batch.open_count:
                earliest = batch.deadline
        for slot in self._all_slots.values():
            if slot.batches:
                earliest = min(earliest, slot.started_at + self._infer_timeout)
                if not slot.is_stalled and not slot.batches[0].open_count:
                    earliest = min(earliest, slot.started_at + self._timeout)
        return earliest

    def _expire(
        self, now: float, actions: list[Action], has_read: bool, answering: Collection[int]
    ) -> None:
        counters = self.counters
        reason = ExpiryReason.WAITING if self.workers_ready else ExpiryReason.NOT_READY
        expired = self.queue.pop_expired(now)
        if self.retries:
            late = [request for request in self._retries if request.deadline <= now]
            for request in late:
                request.is_settled = True
            expired = late + expired
        counters.expired += len(expired)
        actions.extend(Expire(request, reason) for request in expired)
        if has_read:
            for slot in self._all_slots.values():
                if slot.id in answering:
                    for batch in slot.batches[1:]:
                        self._expire_batch(now, batch, actions)
                else:
                    self._expire_running(now, slot, actions)

    def _expire_running(self, now: float, slot: _Slot, actions: list[Action]) -> None:
        if slot.batches and slot.started_at + self._infer_timeout <= now:
            late = _settle_open(slot.batches[0])
            self.counters.expired += len(late)
            actions.extend(Expire(request, ExpiryReason.INFER_TIMEOUT) for request in late)
            actions.append(Replace(slot.id))
            slot.is_stalled = True
            slot.started_at = inf  # said once
        for batch in slot.batches:
            self._expire_batch(now, batch, actions)
        if (
            slot.batches
            and not slot.batches[0].open_count
            and slot.started_at + self._timeout <= now
            and not slot.is_stalled
        ):
            slot.is_stalled = True
            actions.append(Stall(slot.id))

    def _expire_batch(self, now: float, batch: Batch, actions: list[Action]) -> None:
        """Expire those of a batch whose time is over."""
        if batch.deadline > now or not batch.open_count:
            return
        for request in batch.requests:
            if not request.is_settled and request.deadline <= now:
                request.is_settled = True
                batch.open_count -= 1
                self.counters.expired += 1
                actions.append(Expire(request, ExpiryReason.RUNNING))
        open_deadlines = [r.deadline for r in batch.requests if not r.is_settled]
        batch.deadline = min(open_deadlines, default=inf)


def _was_settled(request: Request) -> bool:
    was_settled = request.is_settled
    request.is_settled = True
    return was_settled


def _settle_open(batch: Batch) -> list[Request]:
    batch.open_count = 0
    return [request for request in batch.requests if not _was_settled(request)]
