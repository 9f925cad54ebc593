"""Admission: which arrivals the queue takes, and which it rejects. Pure; part of the scheduler."""

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from fast_batcher._core.prediction import Backlog, BatchTimes
from fast_batcher._core.queue import Queue, RankedQueue, RequestQueue, WorkAhead
from fast_batcher._core.retries import Retries
from fast_batcher._core.sessions import SessionQueue
from fast_batcher._core.values import Limits, Rejection, Request, Share, or_infinite, target_of
from fast_batcher._core.workers import WorkerTable
from fast_batcher.errors import BatcherClosedError, DeadlineExceededError, QueueFullError


def has_room_in_share(own: int, waiting: int, most: int) -> bool:
    """Return whether a share that has `own` of the requests waiting in a queue may add one.

    A share may hold as many requests as there is room for: one share half of the queue, and each of
    n shares that send all they can one part of n + 1. The last part is left for the next share. The
    first request of a share finds room in a full queue, too, which then holds at most twice its
    limit `most`. Source: A. Choudhury and E. Hahne, "Dynamic queue length thresholds for
    shared-memory packet switches", 1998.
    """
    return own < max(most - waiting, 1) and waiting < 2 * most


class Admission:
    """Sorts arrivals into accepted and rejected ones.

    An arrival is rejected if the batcher is draining, if the queue has no room for it or for its
    bytes, or if its answer would come too late. A request has a *target*: the deadline that its
    caller named, or `max_latency` after its arrival, whichever is first. A request that has the
    default timeout alone has no target: that timeout is a safety net, and nothing is predicted for
    it.

    - An arrival is rejected if its answer is predicted to come after its target.
    - When a batch leaves, requests that have become late meanwhile are dropped: see
      `DeadlineBatches`.
    - An idle batcher accepts any request, and a free worker runs the last candidate, late or not.
      Otherwise a wrong prediction would reject for ever: only batches that run are measured.

    A target ends nothing by itself: a request that runs past its target is answered, until its
    deadline.
    """

    def __init__(
        self,
        limits: Limits,
        times: BatchTimes,
        workers: WorkerTable,
        retries: Retries,
        measure_size: Callable[[Any], int] | None,
    ) -> None:
        self._times = times
        self._workers = workers
        self._retries = retries
        self._measure_size = measure_size
        # Once True, every further arrival is rejected.
        self.is_draining = False
        # Whether a request has named its share; then shares limit each other.
        self.has_shares = False
        self.reconfigure(limits)

    def reconfigure(self, limits: Limits) -> None:
        """Use other limits for arrivals from now on."""
        self._limits = limits
        self._max_latency = or_infinite(limits.max_latency)
        if limits.max_latency is not None:
            self._times.is_wanted = True

    def backlog(self, now: float, queue: Queue | SessionQueue) -> Backlog:
        """Measure the work that is before a request that arrives now."""
        slots = self._workers.assignable
        delays = [self._times.seconds_until_free(now, slot) for slot in slots]
        return Backlog(
            requests=queue.size,
            cost=queue.cost,
            delay=min(delays, default=inf),
            workers=len(slots),
            is_idle=not (queue.size or self._workers.batches or self._retries.groups),
            is_behind=bool(slots) and all(len(slot.batches) > 1 for slot in slots),
        )

    def room(self, queue: Queue | SessionQueue) -> int:
        """Return how many more requests the queue can take."""
        return max(0, self._limits.max_queue_size - queue.size)

    def admit(
        self, now: float, requests: list[Request], queue: Queue | SessionQueue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Sort arrivals into accepted and rejected ones; earlier ones have precedence."""
        has_room = len(requests) <= self._limits.max_queue_size - queue.size
        if isinstance(queue, RequestQueue) and has_room and not self.is_draining:
            return requests, []
        return self._sort(now, requests, queue)

    def _sort(
        self, now: float, requests: list[Request], queue: Queue | SessionQueue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Sort arrivals that differ, or of which some have no room."""
        rejected: list[tuple[Request, Rejection]] = []
        if self.is_draining:
            # Sessions go on: `SessionQueue` has rejected new ones.
            closed = Rejection(BatcherClosedError, "the batcher is draining and takes no requests")
            rejected = [(request, closed) for request in requests if request.session is None]
            requests = [request for request in requests if request.session is not None]
        room = self._limits.max_queue_size - queue.size
        if self.has_shares and not isinstance(queue, RequestQueue):
            requests, without_room = self._limit_shares(now, requests, queue)
            rejected += without_room
        elif len(requests) > room:
            room = max(0, room)
            text = f"{queue.size + room} requests wait already ({self._limit_of_requests})"
            rejection = self._rejection_without_room(now, queue, text)
            rejected += [(request, rejection) for request in requests[room:]]
            requests = requests[:room]
        if requests and not isinstance(queue, RequestQueue):
            requests, late = self._reject_late(now, requests, queue)
            rejected += late
        if self._limits.max_queue_bytes is not None:
            count = self.count_fitting(queue, requests)
            if count < len(requests):
                waiting = f"{queue.size + count} requests wait already"
                limit = f"max_queue_bytes={self._limits.max_queue_bytes}"
                text = f"no room for its bytes: {waiting} ({limit})"
                rejection = self._rejection_without_room(now, queue, text)
                rejected += [(request, rejection) for request in requests[count:]]
                requests = requests[:count]
        return requests, rejected

    def _limit_shares(
        self, now: float, requests: list[Request], queue: RankedQueue | SessionQueue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Reject the arrivals of shares that hold as many requests as there is room for."""
        accepted: list[Request] = []
        rejected: list[tuple[Request, Rejection]] = []
        held = {share: queue.held_by(share) for share in {request.share for request in requests}}
        rejections: dict[Share, Rejection] = {}
        for request in requests:
            share = request.share
            if self.has_room_in_share(held[share], queue.size + len(accepted)):
                accepted.append(request)
                held[share] += 1
                continue
            if share not in rejections:
                own = f"share {share!r:.80} has {held[share]} of {queue.size + len(accepted)}"
                rest = f"the room left is for those with fewer ({self._limit_of_requests})"
                text = f"{own} waiting requests; {rest}"
                rejections[share] = self._rejection_without_room(now, queue, text)
            rejected.append((request, rejections[share]))
        return accepted, rejected

    def has_room_in_share(self, own: int, waiting: int) -> bool:
        """Return whether a share that has `own` of the waiting requests may add one."""
        return has_room_in_share(own, waiting, self._limits.max_queue_size)

    def count_fitting(self, queue: Queue | SessionQueue, requests: list[Request]) -> int:
        """Count the requests, from the first on, whose bytes fit into the queue."""
        most = or_infinite(self._limits.max_queue_bytes)
        waiting = queue.bytes
        for count, request in enumerate(requests):
            if self._measure_size is not None and request.size < 0:
                request.size = self._measure_size(request.value)
            # An empty queue takes a request of any size, or one above the limit would never run.
            if waiting and waiting + request.size > most:
                return count
            waiting += request.size
        return len(requests)

    @property
    def _limit_of_requests(self) -> str:
        return f"max_queue_size={self._limits.max_queue_size}"

    def _rejection_without_room(
        self, now: float, queue: Queue | SessionQueue, text: str
    ) -> Rejection:
        """Describe why arrivals are rejected that find no room."""
        # Predictions are needed from now on: errors carry `retry_after`.
        self._times.is_wanted = True
        return Rejection(QueueFullError, text, self._seconds_until_room(now, queue))

    def _seconds_until_room(self, now: float, queue: Queue | SessionQueue) -> float | None:
        """Predict the seconds until a retry makes sense."""
        return self._times.seconds_until_drained(self.backlog(now, queue))

    def _reject_late(
        self, now: float, requests: list[Request], queue: RankedQueue | SessionQueue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Set the targets of arrivals, and reject the arrivals that would miss theirs."""
        if not self._set_targets(now, requests):
            return requests, []
        self._times.is_wanted = True
        backlog = self.backlog(now, queue)
        mean_cost = sum([request.cost for request in requests]) / len(requests)
        ranks = {(request.priority, request.share) for request in requests}
        ahead_of = {rank: queue.ahead_of(*rank) for rank in ranks}
        # The accepted requests of each share: those of others wait in their own turns.
        accepted_of: Counter[Share] = Counter()

        def predict(request: Request, accepted: int) -> float:
            waiting, cost, groups = ahead_of[request.priority, request.share]
            ahead = WorkAhead(waiting + accepted, cost + accepted * mean_cost, groups)
            return self._times.seconds_until_answered(backlog, ahead, request.cost)

        if len(ranks) == 1 and not self._times.has_costs:
            # The last of equal requests waits longest. This saves 2 us for each of the others.
            slowest = now + predict(requests[-1], len(requests) - 1)
            if slowest <= min(map(target_of, requests)):
                return requests, []
        accepted: list[Request] = []
        rejected: list[tuple[Request, Rejection]] = []
        for request in requests:
            seconds = predict(request, accepted_of[request.share])
            left = target_of(request) - now
            if seconds <= left or (backlog.is_idle and not accepted):
                accepted.append(request)
                accepted_of[request.share] += 1
            else:
                ahead = backlog.requests + len(accepted)
                rejected.append((request, reject_late_arrival(ahead, seconds, left)))
        return accepted, rejected

    def _set_targets(self, now: float, requests: list[Request]) -> bool:
        """Set the targets of arrivals; return whether any request has one."""
        latest = now + self._max_latency
        for request in requests:
            target = latest if request.timeout is None else min(request.deadline, latest)
            if request.target is None and target != inf:
                request.target = target
        return min(map(target_of, requests)) != inf

    def rejection_of_dropped(self, now: float, queue: Queue | SessionQueue) -> Rejection:
        """Describe why waiting requests were dropped."""
        backlog = self.backlog(now, queue)
        return Rejection(
            DeadlineExceededError,
            "the answer would have come too late, and others could be answered in time; "
            f"{backlog.requests} requests wait",
            self._times.seconds_until_drained(backlog),
        )


def reject_late_arrival(ahead: int, seconds: float, left: float, what: str = "answer") -> Rejection:
    """Describe why an arrival is rejected that would be late."""
    return Rejection(
        DeadlineExceededError,
        f"the {what} would take {seconds:.3g} seconds, and {max(left, 0.0):.3g} are left; "
        f"{ahead} requests wait already",
        max(0.0, seconds - left),
    )
