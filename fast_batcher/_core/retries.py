"""Requests that a worker has had and that are computed once more. Pure; part of the scheduler.

They wait in groups, and each group goes as a batch of its own, before the queue: they are older
than what waits there. One that memory has no room for any more goes in several.

- A worker died while it had a batch in hand: each request of it goes alone, so that a second death
  has one culprit and its mates are answered. See docs/decisions/0010.
- A worker died before it had taken the batch: the batch goes as it was.
- `infer` raised: the two halves go, until the guilty one is alone. Bounded by 2n - 1 batches.
"""

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Final, NamedTuple

from fast_batcher._core.messages import RETRYING, Batch, Request, RetryBatch, Stage

# Workers that may die while they compute a request. Source: DESIGN section 6.
MOST_DEATHS: Final = 2
# Workers that may die while they have a request in hand, computing it or not yet: one that kills
# them while it is being unpickled is never computed.
MOST_LOSSES: Final = 3
# For this long after the first failure the groups of a failing batch are divided further: a third
# of the default timeout, so that a model that fails at everything is found out before its callers
# have gone.
ISOLATION_SECONDS: Final = 10.0


class Group(NamedTuple):
    """Requests that go as one batch."""

    requests: list[Request]
    # Until when they are divided if they fail.
    isolate_until: float


class Lost(NamedTuple):
    """Requests of a dead worker that are not tried again."""

    # It had begun with them, and they must not be computed twice.
    failed: list[Request]
    # They have been on too many dying workers.
    poisonous: list[Request]


class Retries:
    """Groups of requests, next first.

    Args:
        idempotent: Whether a request may be computed twice.
        isolate_errors: Whether a batch that fails is divided.
    """

    def __init__(self, *, idempotent: bool, isolate_errors: bool) -> None:
        self._idempotent = idempotent
        self._isolates = idempotent and isolate_errors
        # Requests that have been settled stay in their group until it is taken.
        self.groups: deque[Group] = deque()

    def __iter__(self) -> Iterator[Request]:
        """The requests whose callers wait."""
        for group in self.groups:
            for request in group.requests:
                if not request.is_settled:
                    yield request

    def after_loss(self, batch: Batch, stage: Stage) -> Lost:
        """The worker of a batch has died; returns those of its requests that are given up."""
        lost = Lost([], [])
        again: list[Request] = []
        for request in batch.requests:
            if request.is_settled:
                continue
            request.losses += stage is not Stage.SENT
            request.deaths += stage is Stage.BEGUN
            if stage is Stage.BEGUN and not self._idempotent:
                lost.failed.append(request)
            elif request.deaths >= MOST_DEATHS or request.losses >= MOST_LOSSES:
                lost.poisonous.append(request)
            else:
                again.append(request)
        self._put_first([again] if stage is Stage.SENT else [[one] for one in again], inf)
        return lost

    def after_failure(self, now: float, batch: Batch, *, may_divide: bool) -> list[Request]:
        """`infer` raised for a batch; returns those of its requests that have failed for good.

        Args:
            now: The moment.
            batch: The batch.
            may_divide: False if another try is of no use; it overrules `isolate_errors`.
        """
        waiting = [request for request in batch.requests if not request.is_settled]
        until = batch.isolate_until if isinstance(batch, RetryBatch) else inf
        if until == inf:
            until = now + ISOLATION_SECONDS
        if not (may_divide and self._isolates) or len(batch.requests) == 1 or now >= until:
            return waiting
        middle = (len(waiting) + 1) // 2
        self._put_first([waiting[:middle], waiting[middle:]], until)
        return []

    def take(self) -> Group | None:
        """The next group, with the requests in it whose callers wait; None if there is none."""
        while self.groups:
            group = self.groups.popleft()
            requests = [request for request in group.requests if not request.is_settled]
            if requests:
                return Group(requests, group.isolate_until)
        return None

    def put_back(self, group: Group) -> None:
        """There is no worker for it yet."""
        self.groups.appendleft(group)

    def _put_first(self, groups: list[list[Request]], isolate_until: float) -> None:
        for requests in reversed(groups):
            if requests:
                for request in requests:
                    request.batch_id = RETRYING
                self.groups.appendleft(Group(requests, isolate_until))
