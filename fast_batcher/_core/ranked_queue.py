"""Waiting requests of unequal rank, in batches of limited length. Pure; part of the scheduler.

Lower ranks go first, and equals in order of arrival. So that a steady stream of low ranks starves
nobody, every `OLDEST_EVERY`-th batch takes the oldest request along, whatever its rank: one with
j older ones leaves with the `OLDEST_EVERY * (j + 1)`-th batch at the latest.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from fast_batcher._core.messages import Request
from fast_batcher._core.request_queue import RequestQueue

# Often enough that a large call behind many small ones makes progress, and seldom enough that it
# takes at most a quarter of the batches from them, even where a batch is a single request.
OLDEST_EVERY: Final = 4
# Below this many entries a sweep costs more than the memory is worth.
MIN_GONE_ENTRIES: Final = 64


class RankedQueue(RequestQueue):
    """A queue by `Request.rank`.

    Args:
        max_length: Most that the lengths of a batch add up to; a longer request goes alone.
    """

    __slots__ = ("_max_length", "_ranked", "_taken_batches")

    def __init__(self, max_length: float = inf) -> None:
        super().__init__()
        self._max_length = max_length
        # Every waiting request is here and in `_default`; it leaves either when it comes up.
        self._ranked: list[tuple[int, int, Request]] = []
        self._taken_batches = 0

    def __iter__(self) -> Iterator[Request]:
        """The requests that wait, in order of arrival."""
        return filter(_waits, self._default)

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return next(iter(self), None)

    def extend(self, requests: list[Request], own: list[Request]) -> None:
        """Add requests; their ids rise, and are higher than every id before.

        Args:
            requests: All of them.
            own: Those with a deadline of their own, which this queue has no use for.
        """
        assert not own, "requests of unequal rank have no deadlines"
        self.size += len(requests)
        self._default.extend(requests)
        for request in requests:
            heappush(self._ranked, (getattr(request, "rank", 0), request.id, request))

    def take(self, count: int) -> list[Request]:
        """Remove and return at most `count` requests, and at least one if any waits.

        The caller gives each of them a batch id before it asks for more.
        """
        self._taken_batches += 1
        taken: list[Request] = []
        total = 0
        if self._taken_batches % OLDEST_EVERY == 0:
            while self._default and not taken:
                if _waits(self._default[0]):
                    taken.append(self._default[0])
                    total = getattr(self._default[0], "length", 0)
                self._default.popleft()
        oldest = taken[0] if taken else None
        while self._ranked and len(taken) < count:
            request = self._ranked[0][2]
            if _waits(request) and request is not oldest:
                total += getattr(request, "length", 0)
                if taken and total > self._max_length:
                    break
                taken.append(request)
            heappop(self._ranked)
        self.size -= len(taken)
        self._drop_gone()
        return taken

    def discard(self, request: Request) -> None:
        """Forget a waiting request that its owner has marked as settled."""
        self.size -= 1
        self._drop_gone()

    def _drop_gone(self) -> None:
        """Requests that have left hold their values: keep no more entries than twice those that wait.

        Those taken last still look as if they waited; the next batch finds them gone.
        """
        while self._default and not _waits(self._default[0]):
            self._default.popleft()
        most = 2 * self.size + MIN_GONE_ENTRIES
        if len(self._default) > most:
            waiting = [request for request in self._default if _waits(request)]
            self._default.clear()
            self._default.extend(waiting)
        if len(self._ranked) > most:
            self._ranked = [entry for entry in self._ranked if _waits(entry[2])]
            heapify(self._ranked)


def _waits(request: Request) -> bool:
    return not request.is_settled and request.batch_id is None
