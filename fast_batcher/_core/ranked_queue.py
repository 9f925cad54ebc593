"""The waiting requests where they are not equals: priorities, groups, costs. Pure.

It takes the place of `RequestQueue` as soon as one of these is used. The next batch is built
around its *first* request: the oldest of the highest priority. Only requests of the same group
join it, its own priority before lower ones, which fill the room that is left.

So that no request starves, every eighth batch is built by age alone, whatever the priorities. A
request with j older ones before it leaves at the latest with the 8 (j + 1)th batch after its
arrival, and without priorities, where every batch goes by age, with the (j + 1)th.

Where costs decide which requests join, a request may be passed over, but by a bounded number: one
that arrived a window or more later (`WINDOW_BATCHES` full batches) does not go before the oldest of
its group and priority. So at most j plus one window less one requests are served before it. The
bound is in requests and not in seconds: in a backlog every request has waited long, and going by
age then would keep the padding, and with it the backlog.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappush, merge
from itertools import islice, takewhile
from math import inf
from typing import NamedTuple

from fast_batcher._core.batch_packer import WINDOW_BATCHES, BatchPacker
from fast_batcher._core.messages import Group, Request
from fast_batcher._core.request_queue import (
    MIN_DEAD_ENTRIES,
    RequestQueue,
    id_of,
    is_waiting,
    sum_of_sizes,
)

# Every eighth batch is built by age. That bounds how long a low priority waits, and takes at most
# an eighth of the workers' time from the high ones, however long the backlog is.
AGED_BATCHES = 8


class WorkAhead(NamedTuple):
    """What goes before a new request."""

    requests: int
    # Of all these requests together.
    cost: float
    # How many groups these requests are of; no two of them share a batch.
    groups: int


class _Lane:
    """Requests in their order of arrival. One that has left stays until it is at the head."""

    __slots__ = ("cost", "places", "requests", "size")

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        # How many requests have arrived.
        self.places = 0
        # Of the requests that wait.
        self.size = 0
        self.cost = 0.0

    def add(self, request: Request) -> None:
        """Append a request."""
        self.requests.append(request)
        self.count(request, 1)

    def count(self, request: Request, step: int) -> None:
        """Count a request in (1) or out (-1)."""
        self.size += step
        # Rounding must leave no cost in an empty lane, and never a negative one.
        self.cost = max(0.0, self.cost + step * request.cost) if self.size else 0.0

    def put_back(self, requests: list[Request]) -> None:
        """Take requests in again that have been taken out; others that stayed may be older."""
        for request in requests:
            self.count(request, 1)
        # Only entries older than these are moved. Under overload this runs for every batch that is
        # tried: sorting all that wait would take longer than computing them.
        last = max(map(id_of, requests))
        oldest = list(requests)
        while self.requests and self.requests[0].id < last:
            oldest.append(self.requests.popleft())
        self.requests.extendleft(sorted(oldest, key=id_of, reverse=True))

    def head(self) -> Request:
        """The oldest that waits, of at least one."""
        while not is_waiting(self.requests[0]):
            self.requests.popleft()
        return self.requests[0]


class RankedQueue(RequestQueue):
    """By priority, then by age; batches of one group, and of near costs.

    Args:
        packer: Fills batches by cost, or None where there are no costs.
        counts_bytes: Whether every request has its `size`, and `bytes` is wanted.
    """

    __slots__ = ("_emptied", "_entries", "_lanes", "_levels", "_order", "_packer", "batches")

    def __init__(self, packer: BatchPacker | None, *, counts_bytes: bool = False) -> None:
        super().__init__(counts_bytes=counts_bytes)
        self._packer = packer
        # Every request is in two lanes: in one by its priority, in one by priority and group.
        self._levels: dict[int, _Lane] = {}
        self._lanes: dict[tuple[int, Group | None], _Lane] = {}
        # The priorities of the levels, rising.
        self._order: list[int] = []
        # Priorities whose last request has been taken. The level, which still holds it in its
        # place, stays until it is certain that the request is not put back.
        self._emptied: list[int] = []
        # At least as many as the levels have entries, dead ones included.
        self._entries = 0
        # Batches that have left; one that is tried again counts once.
        self.batches = 0

    def __iter__(self) -> Iterator[Request]:
        """Requests that wait, and some that were cancelled, in no particular order."""
        for lane in self._lanes.values():
            yield from lane.requests

    def extend(self, requests: list[Request]) -> None:
        """Append requests; their ids rise, and are higher than every id before."""
        self.size += len(requests)
        if self.counts_bytes:
            self.bytes += sum_of_sizes(requests)
        self._entries += len(requests)
        for request in requests:
            priority, group = _rank_of(request)
            self._level_of(priority).add(request)
            lane = self._lane_of(priority, group)
            lane.add(request)
            request.place = lane.places
            lane.places += 1
            heappush(self._heap, (request.deadline, request.id, request))

    @property
    def has_explicit(self) -> bool:
        """Whether a request with an explicit deadline may be waiting: that is not tracked here."""
        return True

    def is_full(self, count: int) -> bool:
        """Whether the next batch would have `count` requests, or cost the most that it may."""
        most = inf if self._packer is None else self._packer.max_batch_cost
        size, cost = 0, 0.0
        for _, lane in self._lanes_of(self._first(by_age=self._goes_by_age())):
            size += lane.size
            cost += lane.cost
            if size >= count or cost > most:
                return True
        return False

    def has_full_group(self, count: int) -> bool:
        """Whether `count` requests of one group and priority wait."""
        return self.size >= count and any(lane.size >= count for lane in self._lanes.values())

    @property
    def cost(self) -> float:
        """What all that wait cost together."""
        return sum(level.cost for level in self._levels.values())

    def ahead_of(self, priority: int) -> WorkAhead:
        """Estimate what of the queue goes before a new request of this priority."""
        levels = [level for key, level in self._levels.items() if key >= priority]
        requests = sum(level.size for level in levels)
        # Lanes of lower priorities are counted too: leaving them out would take too long.
        groups = min(len(self._lanes), requests)
        return WorkAhead(requests, sum(level.cost for level in levels), groups)

    def take(self, count: int) -> list[Request]:
        """Remove and return the next batch, of at most `count`; the first of it comes first."""
        by_age = self._goes_by_age()
        first = self._first(by_age=by_age)
        lanes = self._lanes_of(first)
        chosen: list[Request] = []
        # Without costs no request is passed over.
        reach = inf if self._packer is None else WINDOW_BATCHES * count
        if by_age:
            windows = [_window(lane, reach) for _, lane in lanes]
            self._fill(chosen, merge(*windows, key=id_of), count)
        else:
            left = reach
            for _, lane in lanes:
                self._fill(chosen, _window(lane, reach), count)
                left -= lane.size
                if len(chosen) == count or left <= 0:
                    break
        self._remove(chosen)
        self.taken += chosen
        return chosen

    def batch_left(self, *, is_retry: bool) -> None:
        """A batch was given to a worker: what was taken last, or with `is_retry` another one."""
        # A batch that is tried again must not take the turn of a batch that goes by age.
        self.batches += not is_retry
        super().batch_left(is_retry=is_retry)
        self._sweep()

    def put_back(self, requests: list[Request]) -> None:
        """Undo `take` for some of the requests that it has just returned."""
        # Their entries of the heap are still there.
        self.size += len(requests)
        if self.counts_bytes:
            self.bytes += sum_of_sizes(requests)
        by_rank: dict[tuple[int, Group | None], list[Request]] = {}
        for request in requests:
            by_rank.setdefault(_rank_of(request), []).append(request)
        for (priority, group), equals in by_rank.items():
            level = self._levels[priority]
            for request in equals:
                level.count(request, 1)
            lane = self._lane_of(priority, group)
            lane.put_back(equals)
            # Requests that arrive later must be behind these, in a new lane too.
            lane.places = max(lane.places, *[request.place + 1 for request in equals])

    def discard(self, request: Request) -> None:
        """Forget a waiting request that its owner has marked as settled."""
        self.size -= 1
        if self.counts_bytes:
            self.bytes -= request.size
        self._count_off(_rank_of(request), request)
        self._sweep()

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return self._first(by_age=True) if self.size else None

    def _goes_by_age(self) -> bool:
        return self.batches % AGED_BATCHES == AGED_BATCHES - 1

    def _first(self, *, by_age: bool) -> Request:
        self._drop_emptied()
        if by_age:
            return min([level.head() for level in self._levels.values()], key=id_of)
        return self._levels[self._order[-1]].head()

    def _lanes_of(self, first: Request) -> Iterator[tuple[int, _Lane]]:
        """The lanes whose requests may join this one, the highest priority first."""
        group = _rank_of(first)[1]
        for key in reversed(self._order):
            lane = self._lanes.get((key, group))
            if lane is not None and lane.size:
                yield key, lane

    def _fill(self, chosen: list[Request], waiting: Iterator[Request], count: int) -> None:
        if self._packer is None:
            chosen += islice(waiting, count - len(chosen))
            return
        self._packer.fill(chosen, list(waiting), count)

    def _remove(self, chosen: list[Request]) -> None:
        by_rank: dict[tuple[int, Group | None], set[int]] = {}
        for request in chosen:
            by_rank.setdefault(_rank_of(request), set()).add(request.id)
        for rank, ids in by_rank.items():
            lane = self._lanes[rank]
            passed_over: list[Request] = []
            while ids:
                request = lane.requests.popleft()
                if request.id in ids:
                    ids.remove(request.id)
                    self._count_off(rank, request)
                elif not request.is_settled:
                    passed_over.append(request)
            lane.requests.extendleft(reversed(passed_over))
        self.size -= len(chosen)
        if self.counts_bytes:
            self.bytes -= sum_of_sizes(chosen)

    def _count_off(self, rank: tuple[int, Group | None], request: Request) -> None:
        lane = self._lanes[rank]
        lane.count(request, -1)
        if not lane.size:
            del self._lanes[rank]
        level = self._levels[rank[0]]
        level.count(request, -1)
        if not level.size:
            self._emptied.append(rank[0])

    def _drop_emptied(self) -> None:
        while self._emptied:
            priority = self._emptied.pop()
            level = self._levels.get(priority)
            if level is not None and not level.size:
                self._entries -= len(level.requests)
                del self._levels[priority]
                del self._order[bisect_left(self._order, priority)]

    def _level_of(self, priority: int) -> _Lane:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Lane()
            insort(self._order, priority)
        return level

    def _lane_of(self, priority: int, group: Group | None) -> _Lane:
        lane = self._lanes.get((priority, group))
        if lane is None:
            lane = self._lanes[priority, group] = _Lane()
        return lane

    def _sweep(self) -> None:
        """Sweep out requests that have left when they are the majority: they keep values alive."""
        self._drop_emptied()
        if self.size and max(self._entries, len(self._heap)) <= 2 * self.size + MIN_DEAD_ENTRIES:
            return
        for lane in (*self._levels.values(), *self._lanes.values()):
            lane.requests = deque(one for one in lane.requests if is_waiting(one))
        self._entries = self.size
        self._heap = [entry for entry in self._heap if is_waiting(entry[2])]
        heapify(self._heap)


def _window(lane: _Lane, reach: float) -> Iterator[Request]:
    """The waiting requests of a lane that arrived fewer than `reach` places after its oldest."""
    end = lane.head().place + reach
    waiting = (request for request in lane.requests if not request.is_settled)
    return takewhile(lambda request: request.place < end, waiting)


def _rank_of(request: Request) -> tuple[int, Group | None]:
    return request.priority, request.group
