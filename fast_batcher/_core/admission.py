"""Admission control: accept or reject arrivals. Pure; part of the scheduler.

An arrival is rejected if the batcher is draining, if the queue has no room for it or for its bytes,
or if its answer would come too late. A request has a *target*: the deadline that its caller named,
or `max_latency` after its arrival, whichever is first. A request that has the default timeout alone
has no target: that timeout is a safety net, and nothing is predicted for it.

- An arrival is rejected if its answer is predicted to come after its target.
- When a batch leaves, requests that have become late meanwhile are dropped: see `DeadlineBatches`.
- An idle batcher accepts any request, and a free worker runs the last candidate, late or not.
  Otherwise a wrong prediction would reject for ever: only batches that run are measured.

A target ends nothing by itself: a request that runs past its target is answered, until its
deadline.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from fast_batcher._core.prediction import Backlog, BatchTimes
from fast_batcher._core.queue import Queue, RankedQueue, WorkAhead
from fast_batcher._core.retries import Retries
from fast_batcher._core.values import Limits, Rejection, Request, or_infinite, target_of
from fast_batcher._core.workers import WorkerTable
from fast_batcher.errors import BatcherClosedError, DeadlineExceededError, QueueFullError


class Admission:
    """Sorts arrivals into accepted and rejected ones.

    Args:
        limits: The limits of the scheduler.
        times: Predicts when requests would be answered.
        workers: Workers and their running batches.
        retries: Requests that are tried again.
        measure_size: Returns the bytes of an input; None if requests have their `size`. Measuring
            takes time, so an input is measured only if nothing else rejects its request.
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
        self.reconfigure(limits)

    def reconfigure(self, limits: Limits) -> None:
        """Use other limits for arrivals from now on."""
        self._limits = limits
        self._max_latency = or_infinite(limits.max_latency)
        if limits.max_latency is not None:
            self._times.is_wanted = True

    def backlog(self, now: float, queue: Queue) -> Backlog:
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

    def room(self, queue: Queue) -> int:
        """Return how many more requests the queue can take."""
        return max(0, self._limits.max_queue_size - queue.size)

    def admit(
        self, now: float, requests: list[Request], queue: Queue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Sort arrivals into accepted and rejected ones; earlier ones have precedence."""
        rejected: list[tuple[Request, Rejection]] = []
        room = 0 if self.is_draining else self._limits.max_queue_size - queue.size
        if len(requests) > room:
            room = max(0, room)
            rejection = self._rejection_without_room(now, queue, room)
            rejected = [(request, rejection) for request in requests[room:]]
            requests = requests[:room]
        if requests and isinstance(queue, RankedQueue):
            requests, late = self._reject_late(now, requests, queue)
            rejected += late
        if self._limits.max_queue_bytes is not None:
            count = self.count_fitting(queue, requests)
            if count < len(requests):
                rejection = self._rejection_without_room(now, queue, count, are_bytes=True)
                rejected += [(request, rejection) for request in requests[count:]]
                requests = requests[:count]
        return requests, rejected

    def count_fitting(self, queue: Queue, requests: list[Request]) -> int:
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

    def _rejection_without_room(
        self, now: float, queue: Queue, accepted: int, *, are_bytes: bool = False
    ) -> Rejection:
        """Describe why the arrivals after the first `accepted` ones are rejected."""
        if self.is_draining:
            return Rejection(
                BatcherClosedError, "the batcher is draining and takes no more requests"
            )
        # Predictions are needed from now on: errors carry `retry_after`.
        self._times.is_wanted = True
        waiting = f"{queue.size + accepted} requests wait already"
        if are_bytes:
            limit = f"max_queue_bytes={self._limits.max_queue_bytes}"
            text = f"no room for its bytes: {waiting} ({limit})"
        else:
            text = f"{waiting} (max_queue_size={self._limits.max_queue_size})"
        drained = self._times.seconds_until_drained(self.backlog(now, queue))
        return Rejection(QueueFullError, text, drained)

    def _reject_late(
        self, now: float, requests: list[Request], queue: RankedQueue
    ) -> tuple[list[Request], list[tuple[Request, Rejection]]]:
        """Set the targets of arrivals, and reject the arrivals that would miss theirs."""
        if not self._set_targets(now, requests):
            return requests, []
        self._times.is_wanted = True
        backlog = self.backlog(now, queue)
        mean_cost = sum([request.cost for request in requests]) / len(requests)
        levels = {one.priority for one in requests}
        ahead_of = {priority: queue.ahead_of(priority) for priority in levels}

        def predict(request: Request, accepted: int) -> float:
            waiting, cost, groups = ahead_of[request.priority]
            ahead = WorkAhead(waiting + accepted, cost + accepted * mean_cost, groups)
            return self._times.seconds_until_answered(backlog, ahead, request.cost)

        if len(levels) == 1 and not self._times.has_costs:
            # Of equal requests the last one waits longest. This saves 2 us for each of the others.
            slowest = now + predict(requests[-1], len(requests) - 1)
            if slowest <= min(map(target_of, requests)):
                return requests, []
        accepted: list[Request] = []
        rejected: list[tuple[Request, Rejection]] = []
        for request in requests:
            seconds, left = predict(request, len(accepted)), target_of(request) - now
            if seconds <= left or (backlog.is_idle and not accepted):
                accepted.append(request)
            else:
                ahead = backlog.requests + len(accepted)
                rejected.append((request, _rejection_of_late_arrival(ahead, seconds, left)))
        return accepted, rejected

    def _set_targets(self, now: float, requests: list[Request]) -> bool:
        """Set the targets of arrivals; return whether any request was given one."""
        latest = now + self._max_latency
        has_set = latest != inf
        for request in requests:
            if request.has_explicit_deadline and request.target is None:
                request.target = min(request.deadline, latest)
                has_set = True
            elif latest != inf:
                request.target = latest
        return has_set

    def rejection_of_dropped(self, now: float, queue: Queue) -> Rejection:
        """Describe why waiting requests were dropped."""
        backlog = self.backlog(now, queue)
        return Rejection(
            DeadlineExceededError,
            "the answer would have come too late, and others could be answered in time; "
            f"{backlog.requests} requests wait",
            self._times.seconds_until_drained(backlog),
        )


def _rejection_of_late_arrival(ahead: int, seconds: float, left: float) -> Rejection:
    return Rejection(
        DeadlineExceededError,
        f"the answer would take {seconds:.3g} seconds, and {max(left, 0.0):.3g} are left; "
        f"{ahead} requests wait already",
        max(0.0, seconds - left),
    )
