"""Which batch leaves where answers may come too late. Pure; part of the scheduler.

A batch that would be late by the 95 % quantile loses the requests that would be late in it, if
others can run in their place; else it becomes smaller. A free worker always runs the last
candidate, late or not: what never runs is never measured.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from math import inf
from typing import NamedTuple

from fast_batcher._core.batch_times import BatchTimes
from fast_batcher._core.messages import Phase, Request, target_of
from fast_batcher._core.request_queue import RequestQueue
from fast_batcher._core.size_cap import SizeCap


class Selection(NamedTuple):
    """The requests of the batch that leaves, and the requests dropped for it."""

    requests: list[Request]
    # Out of the queue and not settled yet.
    dropped: list[Request]
    # Whether the batch is smaller than it could be, for the sake of a target.
    is_smaller: bool


class DeadlineBatches:
    """Takes batches out of the queue with regard to targets.

    Args:
        times: Predicts how long a batch takes.
        size_cap: Most requests in a batch.
    """

    def __init__(self, times: BatchTimes, size_cap: SizeCap) -> None:
        self._times = times
        self._size_cap = size_cap

    def latest_start(self, queue: RequestQueue) -> float:
        """Until when a batch may be held so that its oldest request is not late."""
        oldest = queue.oldest()
        if oldest is None or oldest.target is None:
            return inf
        is_known = self._times.by_size.is_known
        return oldest.target - (self._times.by_size.high(queue.size + 1) if is_known else 0.0)

    def take(self, start: float, queue: RequestQueue) -> Selection:
        """Take the next batch out of the queue.

        Args:
            start: The moment at which the worker can begin with it.
            queue: At least one request.
        """
        requests = queue.take(self._size_cap.size)
        dropped: list[Request] = []
        if not self._times.is_known:
            return Selection(requests, dropped, is_smaller=False)
        while True:
            finish = start + self._times.seconds_of(requests)
            if finish <= min(map(target_of, requests)):
                return Selection(requests, dropped, is_smaller=False)
            if not queue.size:
                break
            # Others can run in their place.
            in_time = _drop(requests, dropped, lambda one: target_of(one) < finish)  # noqa: B023  called at once
            queue.put_back(in_time)
            requests = queue.take(self._size_cap.size)
        requests = self._drop_hopeless(start, requests, dropped)
        size = self._largest_in_time(start, requests)
        queue.put_back(requests[size:])
        return Selection(requests[:size], dropped, is_smaller=size < len(requests))

    def _drop_hopeless(
        self, start: float, requests: list[Request], dropped: list[Request]
    ) -> list[Request]:
        """Drop the requests that would be late even alone, but not the last candidate."""

        def is_hopeless(request: Request) -> bool:
            return target_of(request) < start + self._times.seconds_of([request])

        if all(map(is_hopeless, requests)):
            _drop(requests[:-1], dropped, is_hopeless)
            return requests[-1:]
        return _drop(requests, dropped, is_hopeless)

    def _largest_in_time(self, start: float, requests: list[Request]) -> int:
        """How many of these requests, at least one, can run together with none of them late.

        A larger batch ends later, and the first target in it is not later: so sizes can be searched
        by bisection.
        """
        targets = list(accumulate(map(target_of, requests), min))

        def is_late(size: int) -> bool:
            return start + self._times.seconds_of(requests[:size]) > targets[size - 1]

        return bisect_left(range(2, len(requests) + 1), True, key=is_late) + 1


def _drop(
    requests: list[Request], dropped: list[Request], is_late: Callable[[Request], bool]
) -> list[Request]:
    """Move the requests that are late to `dropped`; returns the others."""
    kept = []
    for request in requests:
        if is_late(request):
            request.phase = Phase.DROPPED
            dropped.append(request)
        else:
            kept.append(request)
    return kept
