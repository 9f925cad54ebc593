"""Retries of requests: those of lost workers and failed batches. Pure; part of the scheduler."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final

from fast_batcher._core.prediction import Methods
from fast_batcher._core.values import (
    RETRYING,
    Batch,
    BatchProgress,
    Request,
    RetryGroup,
    settle_open,
)

# A request fails after this many workers died while computing it: it is tried again once.
MOST_DEATHS: Final = 2
# A request fails after this many workers died after reading its batch, computing it or not: an
# input that kills workers while it is unpickled is never computed.
MOST_LOSSES: Final = 3
# Seconds after its first failure for which a failing batch is divided further: a third of the
# default timeout, so that the callers of a model that always fails get their errors in time.
ISOLATION_SECONDS: Final = 10.0


class Retries:
    """Groups of requests that are tried again, in order.

    Each group goes as a batch of its own, and before the queue, whose requests are younger. A group
    larger than the size cap goes in several batches.

    - A worker died while it computed or unpickled a batch: each request of it goes alone, so that a
      second death has one culprit and the other requests are answered. See docs/decisions/0010.
    - A worker died before it had read the batch: the batch goes unchanged.
    - `infer` raised: the two halves go, until the guilty request is alone. For a batch of n
      requests that takes at most 2n - 1 batches.
    - A request of a session is not tried again: the state of the session is lost.
    - A stream of which the caller has a chunk is not tried again. Other streams of a dead worker
      begin again one by one, beside running ones.
    """

    def __init__(self, *, idempotent: bool, isolate_errors: bool) -> None:
        self._idempotent = idempotent
        self._isolates = idempotent and isolate_errors
        # A settled request stays in its group until the group is taken.
        self.groups: deque[RetryGroup] = deque()

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests whose callers still wait."""
        requests = chain.from_iterable(group.requests for group in self.groups)
        return (request for request in requests if not request.is_settled)

    @property
    def next_cost(self) -> float:
        """Cost of the next request, 0 without one."""
        return next((request.cost for request in self), 0.0)

    def after_loss(
        self, batch: Batch, progress: BatchProgress
    ) -> tuple[list[Request], list[Request]]:
        """Retry the requests of a dead worker's batch; return the failed and the poisonous ones."""
        failed: list[Request] = []
        poisonous: list[Request] = []
        again: list[Request] = []
        for request in batch.requests:
            if request.is_settled:
                continue
            request.losses += progress is not BatchProgress.SENT
            request.deaths += progress is BatchProgress.BEGUN and not batch.has_stepped
            is_begun = progress is BatchProgress.BEGUN
            if request.has_chunks or request.session or (is_begun and not self._idempotent):
                failed.append(request)
            elif request.deaths >= MOST_DEATHS or request.losses >= MOST_LOSSES:
                poisonous.append(request)
            else:
                again.append(request)
        settle_open(failed + poisonous)
        self._put_first(
            [again] if progress is BatchProgress.SENT else [[request] for request in again], inf
        )
        return failed, poisonous

    def after_failure(self, now: float, batch: Batch, *, may_divide: bool) -> list[Request]:
        """Divide a batch for which `infer` raised, or return the requests that fail."""
        waiting = [request for request in batch.requests if not request.is_settled]
        until = batch.isolate_until
        if until == inf:
            until = now + ISOLATION_SECONDS
        can_divide = len(batch.requests) > 1 and batch.requests[0].session is None
        if not (may_divide and self._isolates and can_divide) or now >= until:
            return waiting
        middle = (len(waiting) + 1) // 2
        self._put_first([waiting[:middle], waiting[middle:]], until)
        return []

    def after_eviction(self, batch: Batch) -> list[Request]:
        """Let a stream begin again that has left its worker, or return it: it fails."""
        (request,) = batch.requests
        if request.has_chunks or not self._idempotent:
            return [request]
        self._put_first([[request]], inf)
        return []

    def take(self, methods: Methods) -> RetryGroup | None:
        """Remove and return the next batch of one group, None if there are none."""
        while self.groups:
            group = self.groups.popleft()
            requests = [request for request in group.requests if not request.is_settled]
            count = methods.of(group.requests).size_cap.size
            if len(requests) > count:
                self.groups.appendleft(group._replace(requests=requests[count:]))
            if requests:
                return group._replace(requests=requests[:count])
        return None

    def _put_first(self, groups: list[list[Request]], isolate_until: float) -> None:
        for requests in reversed(groups):
            if requests:
                for request in requests:
                    request.phase = RETRYING
                self.groups.appendleft(RetryGroup(requests, isolate_until))
