"""The waiting requests of calls of several sizes, in batches of limited length. Pure.

Lower ranks go first, and equals in order of arrival. So that a steady stream of low ranks starves
nobody, every `OLDEST_EVERY`-th batch takes the oldest request along, whatever its rank: one with
j older ones leaves with the `OLDEST_EVERY * (j + 1)`-th batch at the latest.
"""

from collections import OrderedDict
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


class CallQueue(RequestQueue):
    """A queue by `Request.rank`, for requests without deadlines.

    Args:
        max_length: Most that the lengths of a batch add up to; a longer request goes alone.
    """

    __slots__ = ("_batches", "_max_length", "_ranked", "_waiting")

    def __init__(self, max_length: float = inf) -> None:
        super().__init__()
        self._max_length = max_length
        # In order of arrival, by id.
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        # (rank, id) of each of them, and of some that have left.
        self._ranked: list[tuple[int, int]] = []
        # How many have been taken.
        self._batches = 0

    def __iter__(self) -> Iterator[Request]:
        """The requests that wait, in order of arrival."""
        return iter(self._waiting.values())

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return next(iter(self._waiting.values()), None)

    def earliest_deadline(self) -> float:
        """None of them expires."""
        return inf

    def pop_expired(self, now: float) -> list[Request]:
        """None of them expires."""
        return []

    def extend(self, requests: list[Request], own: list[Request]) -> None:
        """Add requests; their ids rise, and are higher than every id before.

        Args:
            requests: All of them.
            own: Those with a deadline of their own: none.
        """
        assert not own, "requests of unequal rank have no deadlines"
        self.size += len(requests)
        for request in requests:
            self._waiting[request.id] = request
            heappush(self._ranked, (getattr(request, "rank", 0), request.id))

    def take(self, count: int) -> list[Request]:
        """Remove and return at most `count` requests, and at least one if any waits."""
        taken: list[Request] = []
        length = 0
        self._batches += 1
        if self._waiting and self._batches % OLDEST_EVERY == 0:
            _, oldest = self._waiting.popitem(last=False)
            taken.append(oldest)
            length = getattr(oldest, "length", 0)
        while self._ranked and len(taken) < count:
            request = self._waiting.get(self._ranked[0][1])
            if request is not None:
                length += getattr(request, "length", 0)
                if taken and length > self._max_length:
                    break
                del self._waiting[request.id]
                taken.append(request)
            heappop(self._ranked)
        self.size -= len(taken)
        return taken

    def discard(self, request: Request) -> None:
        """Forget a waiting request that its owner has marked as settled."""
        del self._waiting[request.id]
        self.size -= 1
        if len(self._ranked) > 2 * self.size + MIN_GONE_ENTRIES:
            self._ranked = [entry for entry in self._ranked if entry[1] in self._waiting]
            heapify(self._ranked)
