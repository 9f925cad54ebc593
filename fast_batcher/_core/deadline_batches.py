"""Selection of batches where requests have targets. Pure; part of the scheduler.

If a batch would be late by the 95 % quantile, the requests that would miss their targets are
dropped, provided that other requests can run in their place; otherwise the batch is made smaller. A
free worker always runs the last candidate, late or not: only batches that run are measured.
"""

from bisect import bisect_left
from itertools import accumulate
from math import inf

from fast_batcher._core.prediction import BatchTimes, SizeCap, cap_of
from fast_batcher._core.queue import Queue, RankedQueue
from fast_batcher._core.values import Request, target_of
from fast_batcher._core.workers import WorkerSlot


class DeadlineBatches:
    """Chooses batches whose requests meet their targets, and drops late requests.

    Args:
        times: Predicts how long a batch takes.
        size_cap: Most requests in a batch.
    """

    def __init__(self, times: BatchTimes, size_cap: SizeCap) -> None:
        self._times = times
        self._size_cap = size_cap
        # Whether the queue may hold requests whose target comes from `max_latency`.
        self.has_set_targets = False
        # Requests that `choose` has removed from the queue; the scheduler settles them.
        self.dropped: list[Request] = []

    def latest_start(self, queue: Queue) -> float:
        """Return the last moment to start a batch at which its oldest request is not late."""
        oldest = queue.oldest() if self.has_set_targets else None
        if oldest is None or oldest.target is None:
            return inf
        is_known = self._times.by_size.is_known
        return oldest.target - (self._times.by_size.high(queue.size + 1) if is_known else 0.0)

    def choose(
        self, now: float, slot: WorkerSlot, queue: RankedQueue
    ) -> tuple[list[Request], bool]:
        """Choose the next batch, which stays in the queue, and drop requests that would be late.

        Args:
            now: The moment.
            slot: The worker for the batch.
            queue: At least one request.

        Returns:
            The batch, empty if it is to wait, and whether targets have changed the choice.
        """
        # A batch that was sent cannot be dropped any more, however long the one before it takes.
        if slot.batches and (slot.is_second_late or self._is_unknown(queue)):
            return [], False
        start = now + self._times.seconds_until_free(now, slot, self._times.by_charge.median)
        requests, is_smaller = self._choose(start, queue)
        is_other = is_smaller or bool(self.dropped)
        full = cap_of(requests[0].group, self._size_cap).size
        if is_other and slot.batches and len(requests) < full:
            # A second batch is full, or waits in the queue for what arrives.
            slot.is_second_late = True
            return [], True
        return requests, is_other

    def _is_unknown(self, queue: RankedQueue) -> bool:
        """Return whether it cannot be predicted if the next batch meets its targets."""
        if self._times.is_known:
            return False
        requests = queue.choose(cap_of(queue.next_group, self._size_cap).size)
        return any(target_of(request) < inf for request in requests)

    def _choose(self, start: float, queue: RankedQueue) -> tuple[list[Request], bool]:
        """Choose a batch that begins at `start`; the flag says that targets made it smaller."""
        requests = queue.choose(cap_of(queue.next_group, self._size_cap).size)
        if not self._times.is_known:
            return requests, False
        while (finish := start + self._times.seconds_of(requests)) > min(map(target_of, requests)):
            if len(requests) == queue.size:
                return self._choose_of_last(start, queue, requests)
            # Others can run in their place.
            self._drop(queue, [one for one in requests if target_of(one) < finish])
            requests = queue.choose(cap_of(queue.next_group, self._size_cap).size)
        return requests, False

    def _choose_of_last(
        self, start: float, queue: RankedQueue, requests: list[Request]
    ) -> tuple[list[Request], bool]:
        """Drop requests that would be late even alone, except the last one; shrink the batch."""
        hopeless = [
            one for one in requests if target_of(one) < start + self._times.seconds_of([one])
        ]
        if len(hopeless) == len(requests):
            hopeless.pop()
        self._drop(queue, hopeless)
        requests = [one for one in requests if one not in hopeless]
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
