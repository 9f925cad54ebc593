"""The waiting requests, in order of arrival and by deadline. Pure; part of the scheduler.

Requests with the default timeout have deadlines in their order of arrival, so a deque serves for
both. Requests with explicit deadlines wait in a second deque, with a heap beside it. A request that
leaves early (cancelled, expired) stays in its deque as a dead entry until it is at the head or
until dead entries are the majority; a heap entry likewise. So every operation is O(1) amortised,
and O(log n) for requests with explicit deadlines.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from fast_batcher._core.messages import Phase, Request

# Below this number of dead entries a sweep costs more than the memory is worth.
MIN_DEAD_ENTRIES = 64


class RequestQueue:
    """First in, first out, with deadlines; all requests are equals.

    Args:
        counts_bytes: Whether every request has its `size`, and `bytes` is wanted.
    """

    __slots__ = (
        "_dead",
        "_default",
        "_explicit",
        "_heap",
        "bytes",
        "counts_bytes",
        "size",
        "taken",
    )

    def __init__(self, *, counts_bytes: bool = False) -> None:
        # Live requests waiting, and the sum of their sizes, 0 if that is not wanted.
        self.size = 0
        self.bytes = 0
        self.counts_bytes = counts_bytes
        # What `take` has returned since the last `batch_left`: put back, dropped, or about to join
        # a batch. If an internal error strikes in between, this is where those requests are found.
        self.taken: list[Request] = []
        self._default: deque[Request] = deque()
        self._explicit: deque[Request] = deque()
        self._heap: list[tuple[float, int, Request]] = []
        # Entries of the two deques whose request has been settled.
        self._dead = 0

    def __iter__(self) -> Iterator[Request]:
        """The entries, dead ones included, in no particular order."""
        return chain(self._default, self._explicit)

    @property
    def cost(self) -> float:
        """What all that wait cost together."""
        return self.size

    @property
    def has_explicit(self) -> bool:
        """Whether a request with an explicit deadline may be waiting."""
        return bool(self._explicit)

    def extend(self, requests: list[Request]) -> None:
        """Append requests; their ids rise, and are higher than every id before."""
        self.size += len(requests)
        if self.counts_bytes:
            self.bytes += sum_of_sizes(requests)
        explicit = [request for request in requests if request.has_explicit_deadline]
        if not explicit:
            self._default.extend(requests)
            return
        self._explicit.extend(explicit)
        for request in explicit:
            heappush(self._heap, (request.deadline, request.id, request))
        self._default.extend([one for one in requests if not one.has_explicit_deadline])

    def is_full(self, count: int) -> bool:
        """Whether the next batch would have `count` requests."""
        return self.size >= count

    def has_full_group(self, count: int) -> bool:
        """Whether `count` requests wait that may share a batch."""
        return self.size >= count

    def take(self, count: int) -> list[Request]:
        """Remove and return the `count` oldest requests, or all if there are fewer."""
        if self._explicit or self._dead:
            taken = self._take_live(count)
            self._limit_heap()
        elif len(self._default) <= count:
            taken = list(self._default)
            self._default.clear()
        else:
            taken = [self._default.popleft() for _ in range(count)]
        self.size -= len(taken)
        if self.counts_bytes:
            self.bytes -= sum_of_sizes(taken)
        self.taken += taken
        return taken

    def put_back(self, requests: list[Request]) -> None:
        """Undo `take` for some of the requests that it has just returned, in their order."""
        # Any deadline is right among the explicit ones.
        self._explicit.extendleft(reversed(requests))
        for request in requests:
            heappush(self._heap, (request.deadline, request.id, request))
        self.size += len(requests)
        if self.counts_bytes:
            self.bytes += sum_of_sizes(requests)

    def batch_left(self, *, is_retry: bool) -> None:
        """A batch was given to a worker: what was taken last, or with `is_retry` another one."""
        self.taken = []

    def discard(self, request: Request) -> None:
        """Forget a waiting request that its owner has marked as settled."""
        self.size -= 1
        if self.counts_bytes:
            self.bytes -= request.size
        self._dead += 1
        if self._dead >= MIN_DEAD_ENTRIES and self._dead > self.size:
            self._default = deque(r for r in self._default if not r.is_settled)
            self._explicit = deque(r for r in self._explicit if not r.is_settled)
            self._dead = 0
            self._rebuild_heap()

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        self._drop_dead_heads()
        if not self._explicit:
            return self._default[0] if self._default else None
        if not self._default or self._explicit[0].id < self._default[0].id:
            return self._explicit[0]
        return self._default[0]

    def earliest_deadline(self) -> float:
        """The first moment at which a waiting request expires, infinite if none does."""
        self._drop_dead_heads()
        earliest = self._default[0].deadline if self._default else inf
        while self._heap and not is_waiting(self._heap[0][2]):
            heappop(self._heap)
        return min(earliest, self._heap[0][0]) if self._heap else earliest

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and settle every request whose deadline is at or before `now`, oldest first."""
        expired: list[Request] = []
        while self.earliest_deadline() <= now:
            if self._default and self._default[0].deadline <= now:
                request = self._default.popleft()
                self.size -= 1
                if self.counts_bytes:
                    self.bytes -= request.size
                request.is_settled = True
            else:
                request = heappop(self._heap)[2]
                request.is_settled = True
                self.discard(request)
            expired.append(request)
        return sorted(expired, key=id_of)

    def _drop_dead_heads(self) -> None:
        if not self._dead:
            return
        for entries in (self._default, self._explicit):
            while entries and entries[0].is_settled:
                entries.popleft()
                self._dead -= 1

    def _take_live(self, count: int) -> list[Request]:
        taken: list[Request] = []
        while len(taken) < count:
            request = self.oldest()
            if request is None:
                break
            is_explicit = self._explicit and self._explicit[0] is request
            (self._explicit if is_explicit else self._default).popleft()
            taken.append(request)
        return taken

    def _limit_heap(self) -> None:
        """Sweep the heap when most of its entries have left: they keep their values alive."""
        if len(self._heap) > 2 * len(self._explicit) + MIN_DEAD_ENTRIES:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [
            (request.deadline, request.id, request)
            for request in self._explicit
            if not request.is_settled
        ]
        heapify(self._heap)


def sum_of_sizes(requests: list[Request]) -> int:
    """Bytes of requests that have their `size`."""
    return sum([request.size for request in requests])


def id_of(request: Request) -> int:
    """The id, which orders requests by arrival."""
    return request.id


def is_waiting(request: Request) -> bool:
    """Whether a request has not left the queue; an entry for another request is dead."""
    return request.phase is Phase.QUEUED and not request.is_settled
