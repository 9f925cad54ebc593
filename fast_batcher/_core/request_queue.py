"""Queue of requests that differ in nothing but their inputs. Pure; part of the scheduler.

All requests have the default timeout, so their order of arrival is the order of their deadlines,
too. As soon as a request has another timeout, a priority, a group, a cost or a size, a
`RankedQueue` takes the place of this queue.
"""

from collections import deque
from collections.abc import Iterator
from itertools import filterfalse, islice
from math import inf
from operator import attrgetter

from fast_batcher._core.messages import Request, settle

# Below this number of dead entries a sweep costs more than the memory is worth.
MIN_DEAD_ENTRIES = 64

_is_settled = attrgetter("is_settled")


class RequestQueue:
    """First-in, first-out queue.

    A cancelled request stays as a dead entry until it is at the head or dead entries are the
    majority. So every operation is O(1) amortised.
    """

    # Only `RankedQueue` sums up sizes, and has groups.
    bytes = 0
    next_group = None

    def __init__(self) -> None:
        # Requests that wait.
        self.size = 0
        self._entries: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests in order of arrival."""
        return filterfalse(_is_settled, self._entries)

    @property
    def cost(self) -> float:
        """Total cost of the waiting requests; each costs 1."""
        return self.size

    def extend(self, requests: list[Request]) -> None:
        """Append requests; none may have an earlier deadline than the requests before it."""
        self.size += len(requests)
        self._entries.extend(requests)

    def is_full(self, count: int) -> bool:
        """Return whether the next batch would have `count` requests."""
        return self.size >= count

    def has_full_group(self, count: int) -> bool:
        """Return whether `count` requests wait that may share a batch."""
        return self.size >= count

    def choose(self, count: int) -> list[Request]:
        """Return the next batch of at most `count` requests, which stay in the queue."""
        return list(islice(filterfalse(_is_settled, self._entries), count))

    def batch_left(self, requests: list[Request]) -> None:
        """Remove the requests that `choose` has just returned."""
        self.size -= len(requests)
        if not self.size:
            self._entries.clear()
            return
        while self._entries.popleft() is not requests[-1]:
            pass

    def discard(self, request: Request) -> None:
        """Remove a waiting request that the caller has marked as settled."""
        self.size -= 1
        if not self.size or len(self._entries) > 2 * self.size + MIN_DEAD_ENTRIES:
            self._entries = deque(self)

    def oldest(self) -> Request | None:
        """Return the request that has waited longest."""
        while self._entries and self._entries[0].is_settled:
            self._entries.popleft()
        return self._entries[0] if self._entries else None

    def earliest_deadline(self) -> float:
        """Return the first moment at which a waiting request expires, infinite if none does."""
        oldest = self.oldest()
        return inf if oldest is None else oldest.deadline

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and settle every request whose deadline is at or before `now`, oldest first."""
        expired = []
        while self.earliest_deadline() <= now:
            request = self._entries.popleft()
            settle(request)
            self.size -= 1
            expired.append(request)
        return expired
