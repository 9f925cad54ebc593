"""Batches whose requests meet their targets. Pure; part of the scheduler."""

from bisect import bisect_left
from itertools import accumulate
from math import inf

from fast_batcher._core.policy import latest_start
from fast_batcher._core.prediction import BatchTimes, Methods
from fast_batcher._core.queue import Queue, RankedQueue
from fast_batcher._core.values import Request, target_of
from fast_batcher._core.workers import WorkerSlot


class DeadlineBatches:
    """Chooses batches whose requests meet their targets, and drops late requests.

    If a batch would be late by the 95 % quantile, the requests that would miss their targets are
    dropped, provided that other requests can run in their place; otherwise the batch is made
    smaller. A free worker always runs the last candidate, late or not: only batches that run are
    measured.
    """

    def __init__(self, times: BatchTimes, methods: Methods) -> None:
        self._times = times
        self._methods = methods
        # Whether the queue may hold requests whose target comes from `max_latency`.
        self.has_set_targets = False
        # Whether the waiting requests are held for more of them, although a worker is free.
        self.is_held = False
        # Requests that `choose` has removed from the queue; the scheduler settles them.
        self.dropped: list[Request] = []

    def latest_start(self, queue: Queue) -> float:
        """Return the last moment to start a batch at which its oldest request is not late."""
        oldest = queue.oldest() if self.has_set_targets else None
        if oldest is None or oldest.target is None:
            return inf
        times = self._times.by_size
        seconds = times.high(queue.size + 1) if times.is_known else 0.0
        return latest_start(oldest.target, seconds)

    def choose(
        self, now: float, slot: WorkerSlot, queue: RankedQueue
    ) -> tuple[list[Request], bool]:
        """Choose the next batch and drop late requests; return whether targets changed the choice.

        The batch stays in the queue. It is empty if it is to wait. What was held for more requests
        could be late by the hold alone, and is not dropped.
        """
        if self.is_held and not slot.batches:
            return self._next(queue), False
        # A batch that was sent cannot be dropped any more, however long the one before it takes.
        if slot.batches and (slot.is_second_late or self._is_unknown(queue)):
            return [], False
        start = now + self._times.seconds_until_free(now, slot, self._times.by_shape.median)
        requests, is_smaller = self._choose(start, queue)
        is_other = is_smaller or bool(self.dropped)
        full = self._methods.of(requests).size_cap.size
        if is_other and slot.batches and len(requests) < full:
            # A second batch is full, or waits in the queue for what arrives.
            slot.is_second_late = True
            return [], True
        return requests, is_other

    def _is_unknown(self, queue: RankedQueue) -> bool:
        """Return whether it cannot be predicted if the next batch meets its targets."""
        if self._times.is_known:
            return False
        return any(target_of(request) < inf for request in self._next(queue))

    def _next(self, queue: RankedQueue) -> list[Request]:
        """Return the next batch without regard to targets; it stays in the queue."""
        method = queue.next_method
        requests = queue.choose(method.size_cap.size)
        if method.service.steps and not self._times.has_costs:
            # The others go with requests that arrive while these are computed.
            return requests[: method.service.best_size(len(requests))]
        return requests

    def _choose(self, start: float, queue: RankedQueue) -> tuple[list[Request], bool]:
        """Choose a batch that begins at `start`; the flag says that targets made it smaller."""
        requests = self._next(queue)
        if not self._times.is_known:
            return requests, False
        while (finish := start + self._times.seconds_of(requests)) > min(map(target_of, requests)):
            method = queue.next_method
            could_be_all = method.service.steps and queue.size <= method.size_cap.size
            if len(requests) == queue.size or could_be_all:
                return self._choose_of_last(start, queue, requests)
            # Other requests can run in the place of these.
            self._drop(queue, [request for request in requests if target_of(request) < finish])
            requests = self._next(queue)
        return requests, False

    def _choose_of_last(
        self, start: float, queue: RankedQueue, requests: list[Request]
    ) -> tuple[list[Request], bool]:
        """Drop requests that would be late even alone, except the last one; shrink the batch."""
        hopeless = [
            request
            for request in requests
            if target_of(request) < start + self._times.seconds_of([request])
        ]
        if len(hopeless) == len(requests):
            hopeless.pop()
        self._drop(queue, hopeless)
        requests = [request for request in requests if request not in hopeless]
        size = self._largest_in_time(start, requests)
        return requests[:size], size < len(requests)

    def _drop(self, queue: RankedQueue, late: list[Request]) -> None:
        self.dropped += late
        for request in late:
            queue.discard(request)

    def _largest_in_time(self, start: float, requests: list[Request]) -> int:
        """Return the largest number of these requests that can run as one batch without being late.

        It is at least 1. A larger batch ends later, and its first target is not later: so sizes can
        be searched by bisection.
        """
        targets = list(accumulate(map(target_of, requests), min))

        def is_late(size: int) -> bool:
            return start + self._times.seconds_of(requests[:size]) > targets[size - 1]

        return bisect_left(range(2, len(requests) + 1), True, key=is_late) + 1
