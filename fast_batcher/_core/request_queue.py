"""The waiting requests, in order of arrival and by deadline. Pure; part of the scheduler.

Requests with the default timeout have deadlines in their order of arrival, so a deque serves for
both. Requests with a deadline of their own wait in a second deque, with a heap beside it. A request
that leaves early (cancelled, expired) stays in its deque as a dead entry until it comes up or until
dead entries are the majority; a heap entry likewise. So every operation is O(1) amortised, O(log n)
for requests with a deadline of their own.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from fast_batcher._core.messages import Request

# Below this many dead entries a sweep costs more than the memory is worth.
MIN_DEAD_ENTRIES = 64


class RequestQueue:
    """First in, first out, with deadlines; all requests are equals.

    Args:
        is_weighed: Whether every request has its `size`, and `bytes` is wanted.
    """

    __slots__ = ("_dead", "_default", "_heap", "_own", "bytes", "is_weighed", "size", "taken")

    def __init__(self, *, is_weighed: bool = False) -> None:
        # Live requests waiting, and the sum of their sizes, 0 if that is not wanted.
        self.size = 0
        self.bytes = 0
        self.is_weighed = is_weighed
        # What `take` returned last, until it belongs to a batch or is put back.
        self.taken: Sequence[Request] = ()
        self._default: deque[Request] = deque()
        self._own: deque[Request] = deque()
        self._heap: list[tuple[float, int, Request]] = []
        # Entries of the two deques whose request has been settled.
        self._dead = 0

    def __iter__(self) -> Iterator[Request]:
        """The entries, dead ones included, in no particular order."""
        return chain(self._default, self._own)

    def extend(self, requests: list[Request], own: list[Request]) -> None:
        """Append requests; their ids rise, and are higher than every id before.

        Args:
            requests: All of them.
            own: Those among them with a deadline of their own.
        """
        self.size += len(requests)
        if self.is_weighed:
            self.bytes += sum_of_sizes(requests)
        if not own:
            self._default.extend(requests)
            return
        self._own.extend(own)
        for request in own:
            heappush(self._heap, (request.deadline, request.id, request))
        if len(own) < len(requests):
            ids = {request.id for request in own}
            self._default.extend(request for request in requests if request.id not in ids)

    def take(self, count: int) -> list[Request]:
        """Remove and return the `count` oldest requests, or all if there are fewer."""
        if self._own or self._dead:
            taken = self._take_live(count)
            self._limit_heap()
        else:
            default = self._default
            if len(default) <= count:
                taken = list(default)
                default.clear()
            else:
                popleft = default.popleft
                taken = [popleft() for _ in range(count)]
        self.size -= len(taken)
        if self.is_weighed:
            self.bytes -= sum_of_sizes(taken)
        self.taken = taken
        return taken

    def put_back(self, requests: list[Request]) -> None:
        """Undo `take` for some of those that it has just returned, in their order."""
        # Among those with a deadline of their own, for which any deadline is right.
        self._own.extendleft(reversed(requests))
        for request in requests:
            heappush(self._heap, (request.deadline, request.id, request))
        self.size += len(requests)
        if self.is_weighed:
            self.bytes += sum_of_sizes(requests)

    @property
    def has_own(self) -> bool:
        """Whether a request may wait that has a deadline of its own."""
        return bool(self._own)

    def discard(self, request: Request) -> None:
        """Forget a waiting request that its owner has marked as settled."""
        self.size -= 1
        if self.is_weighed:
            self.bytes -= request.size
        self._dead += 1
        if self._dead >= MIN_DEAD_ENTRIES and self._dead > self.size:
            self._default = deque(entry for entry in self._default if not entry.is_settled)
            self._own = deque(entry for entry in self._own if not entry.is_settled)
            self._dead = 0
            self._rebuild_heap()

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        self._drop_dead_heads()
        if not self._own:
            return self._default[0] if self._default else None
        if not self._default or self._own[0].id < self._default[0].id:
            return self._own[0]
        return self._default[0]

    def earliest_deadline(self) -> float:
        """The first moment at which a waiting request expires, `inf` if none does."""
        self._drop_dead_heads()
        earliest = self._default[0].deadline if self._default else inf
        if not self._heap:
            return earliest
        heap = self._heap
        while heap and (heap[0][2].is_settled or heap[0][2].batch_id is not None):
            heappop(heap)
        return min(earliest, heap[0][0]) if heap else earliest

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return every request whose deadline is at or before `now`, oldest first."""
        expired: list[Request] = []
        while self.earliest_deadline() <= now:
            if self._default and self._default[0].deadline <= now:
                request = self._default.popleft()
                self.size -= 1
                if self.is_weighed:
                    self.bytes -= request.size
                request.is_settled = True
            else:
                request = heappop(self._heap)[2]
                request.is_settled = True
                self.discard(request)
            expired.append(request)
        return sorted(expired, key=_by_id)

    def _drop_dead_heads(self) -> None:
        if not self._dead:
            return
        for entries in (self._default, self._own):
            while entries and entries[0].is_settled:
                entries.popleft()
                self._dead -= 1

    def _take_live(self, count: int) -> list[Request]:
        taken: list[Request] = []
        while len(taken) < count:
            request = self.oldest()
            if request is None:
                break
            own = self._own
            (own if own and own[0] is request else self._default).popleft()
            taken.append(request)
        return taken

    def _limit_heap(self) -> None:
        """Requests that have left hold their values: keep no more of them than wait."""
        if len(self._heap) > 2 * len(self._own) + MIN_DEAD_ENTRIES:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [
            (request.deadline, request.id, request)
            for request in self._own
            if not request.is_settled
        ]
        heapify(self._heap)


def sum_of_sizes(requests: list[Request]) -> int:
    """Of requests that have their `size`, bytes."""
    return sum([request.size for request in requests])


def _by_id(request: Request) -> int:
    return request.id
