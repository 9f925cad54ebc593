"""Retries of requests whose worker died or whose batch failed. Pure; part of the scheduler.

These requests wait in groups. Each group goes as a batch of its own, and before the queue, whose
requests are younger. A group larger than the size cap goes in several batches.

- A worker died while it computed or unpickled a batch: each request of it goes alone, so that a
  second death has one culprit and the other requests are answered. See docs/decisions/0010.
- A worker died before it had read the batch: the batch goes unchanged.
- `infer` raised: the two halves go, until the guilty request is alone. For a batch of n requests
  that takes at most 2n - 1 batches.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final

from fast_batcher._core.prediction import SizeCap, cap_of
from fast_batcher._core.values import (
    Batch,
    BatchProgress,
    Phase,
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

    Args:
        idempotent: Whether a request may be computed twice.
        isolate_errors: Whether a batch that fails is divided.
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

    def after_loss(
        self, batch: Batch, progress: BatchProgress
    ) -> tuple[list[Request], list[Request]]:
        """Retry the requests of a dead worker's batch, or settle them.

        Returns:
            The settled requests: those that must not be computed twice (`idempotent` is False), and
            those with which too many workers died.
        """
        failed: list[Request] = []
        poisonous: list[Request] = []
        again: list[Request] = []
        for request in batch.requests:
            if request.is_settled:
                continue
            request.losses += progress is not BatchProgress.SENT
            request.deaths += progress is BatchProgress.BEGUN
            if progress is BatchProgress.BEGUN and not self._idempotent:
                failed.append(request)
            elif request.deaths >= MOST_DEATHS or request.losses >= MOST_LOSSES:
                poisonous.append(request)
            else:
                again.append(request)
        settle_open(failed + poisonous)
        self._put_first(
            [again] if progress is BatchProgress.SENT else [[one] for one in again], inf
        )
        return failed, poisonous

    def after_failure(self, now: float, batch: Batch, *, may_divide: bool) -> list[Request]:
        """Divide a batch for which `infer` raised, or return the requests that fail.

        Args:
            now: The moment.
            batch: The batch.
            may_divide: False if another try is useless; it overrides `isolate_errors`.
        """
        waiting = [request for request in batch.requests if not request.is_settled]
        until = batch.isolate_until
        if until == inf:
            until = now + ISOLATION_SECONDS
        if not (may_divide and self._isolates) or len(batch.requests) == 1 or now >= until:
            return waiting
        middle = (len(waiting) + 1) // 2
        self._put_first([waiting[:middle], waiting[middle:]], until)
        return []

    def take(self, size_cap: SizeCap) -> RetryGroup | None:
        """Remove and return the next batch of one group, None if there are none.

        Args:
            size_cap: Limits the batches of a model with one method.
        """
        while self.groups:
            group = self.groups.popleft()
            requests = [request for request in group.requests if not request.is_settled]
            count = cap_of(group.requests[0].group, size_cap).size
            if len(requests) > count:
                self.groups.appendleft(group._replace(requests=requests[count:]))
            if requests:
                return group._replace(requests=requests[:count])
        return None

    def _put_first(self, groups: list[list[Request]], isolate_until: float) -> None:
        for requests in reversed(groups):
            if requests:
                for request in requests:
                    request.phase = Phase.RETRYING
                self.groups.appendleft(RetryGroup(requests, isolate_until))
