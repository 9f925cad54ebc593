"""Queue of requests that differ in deadline, priority, group, cost or bytes. Pure.

It replaces `RequestQueue` as soon as one of these is used. The next batch is built around its
*first* request: the oldest of the highest priority. Only requests of the same group join it, those
of its own priority before lower ones.

So that no request starves, every eighth batch ignores priorities and goes by age. A request with j
older ones before it leaves at the latest with the 8 (j + 1)th batch after its arrival; without
priorities, where every batch goes by age, with the (j + 1)th.

Where costs decide which requests join, younger requests may overtake an older one, but a bounded
number of them: a request that arrived a window (`WINDOW_BATCHES` full batches) or more later than
the oldest of its group and priority does not go before it. So at most j plus one window less one
requests are served before a request. The bound is in requests and not in seconds: in a backlog
every request has waited long, and going by age then would keep the padding, and with it the
backlog.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice, takewhile
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from fast_batcher._core.batch_packer import WINDOW_BATCHES, BatchPacker
from fast_batcher._core.messages import Group, Phase, Request, settle
from fast_batcher._core.request_queue import MIN_DEAD_ENTRIES, RequestQueue

# Every eighth batch is built by age. That bounds the wait of low priorities, and takes at most an
# eighth of the workers' time from high ones, however long the backlog is.
AGED_BATCHES = 8

# Ids rise with the order of arrival.
_age = attrgetter("id")


class WorkAhead(NamedTuple):
    """Waiting requests that are served before a new one."""

    requests: int
    # The sum of their costs.
    cost: float
    # Number of their groups; requests of different groups never share a batch.
    groups: int


class _Lane:
    """Requests by id, in their order of arrival."""

    __slots__ = ("arrivals", "cost", "requests")

    def __init__(self) -> None:
        # A plain dict would be slow to find its first entry after many were removed before it.
        self.requests: OrderedDict[int, Request] = OrderedDict()
        # Requests enqueued so far, and the total cost of the waiting ones.
        self.arrivals = 0
        self.cost = 0.0

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        request.lane_position = self.arrivals
        self.arrivals += 1
        self.cost += request.cost

    def insert(self, request: Request) -> None:
        """Add a request that may be older than others of the lane."""
        younger = [one for one in self.requests.values() if one.id > request.id]
        self.add(request)
        for one in younger:
            self.requests.move_to_end(one.id)
        if younger:
            # Of two equal positions neither is passed over for longer.
            request.lane_position = younger[0].lane_position

    def remove(self, request: Request) -> None:
        del self.requests[request.id]
        # Rounding must leave no cost in an empty lane, and never a negative one.
        self.cost = max(0.0, self.cost - request.cost) if self.requests else 0.0

    def oldest(self) -> Request:
        return next(iter(self.requests.values()))

    def window(self, count: float) -> Iterator[Request]:
        """Iterate over the requests that arrived fewer than `count` positions after the oldest."""
        end = self.oldest().lane_position + count
        return takewhile(lambda request: request.lane_position < end, self.requests.values())


class RankedQueue:
    """Queue by priority, then by age; each batch has requests of one group and of similar costs.

    Args:
        packer: Fills batches by cost, or None where there are no costs.
    """

    def __init__(self, packer: BatchPacker | None = None) -> None:
        self._packer = packer
        self.size = 0
        # The sum of the requests' sizes; meaningful only if each has its `size`.
        self.bytes = 0
        # Every request is in two lanes: in one by its priority, in one by priority and group.
        self._levels: defaultdict[int, _Lane] = defaultdict(_Lane)
        self._lanes: defaultdict[tuple[int, Group | None], _Lane] = defaultdict(_Lane)
        # A heap; entries of requests that left stay until they reach its top or are the majority.
        self._deadlines: list[tuple[float, int, Request]] = []
        # Batches taken from this queue; retries do not come from here.
        self._batches = 0

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, by priority, then by arrival."""
        return chain.from_iterable(level.requests.values() for level in self._levels.values())

    @property
    def cost(self) -> float:
        """Total cost of the waiting requests."""
        return sum(level.cost for level in self._levels.values())

    def extend(self, requests: list[Request]) -> None:
        """Append requests; their ids must rise, and be higher than every id before."""
        for request in requests:
            self._levels[request.priority].add(request)
            # Both lanes set `lane_position`; the second one's counts.
            self._lanes[request.priority, request.group].add(request)
            self.size += 1
            self.bytes += request.size
            heappush(self._deadlines, (request.deadline, request.id, request))

    @property
    def next_group(self) -> Group | None:
        """Group of the next batch, None also without requests."""
        return self._first().group if self.size else None

    def is_full(self, count: int) -> bool:
        """Whether the next batch would have `count` requests, or cost the most that it may."""
        if self._packer is None and self.size < count:
            return False
        lanes = self._lanes_of(self._first().group)
        if sum(len(lane.requests) for lane in lanes) >= count:
            return True
        return (
            self._packer is not None
            and sum(lane.cost for lane in lanes) > self._packer.max_batch_cost
        )

    def has_full_group(self, count: int) -> bool:
        """Whether a full batch of one group and priority waits; `count` is one without methods."""
        return any(
            len(lane.requests)
            >= (count if group is None or group.method is None else group.method.size_cap.size)
            for (_, group), lane in self._lanes.items()
        )

    def ahead_of(self, priority: int) -> WorkAhead:
        """Estimate which part of the queue is served before a new request of this priority."""
        levels = [level for key, level in self._levels.items() if key >= priority]
        requests = sum(len(level.requests) for level in levels)
        # Lanes of lower priorities are counted too: leaving them out would take too long.
        groups = min(len(self._lanes), requests)
        return WorkAhead(requests, sum(level.cost for level in levels), groups)

    def choose(self, count: int) -> list[Request]:
        """Return the next batch of at most `count` requests, which stay in the queue.

        Its first request, around which it is built, comes first.
        """
        lanes = self._lanes_of(self._first().group)
        # Without costs no request is passed over.
        reach = inf if self._packer is None else WINDOW_BATCHES * count
        windows = [lane.window(reach) for lane in lanes]
        chosen: list[Request] = []
        if self._goes_by_age():
            self._fill(chosen, merge(*windows, key=_age), count)
            return chosen
        for lane, window in zip(lanes, windows, strict=True):
            self._fill(chosen, window, count)
            reach -= len(lane.requests)
            if len(chosen) == count or reach <= 0:
                break
        return chosen

    def batch_left(self, requests: list[Request]) -> None:
        """Remove a batch that was given to a worker."""
        self._batches += 1
        for request in requests:
            self.discard(request)

    def discard(self, request: Request) -> None:
        """Forget a waiting request."""
        self.size -= 1
        self.bytes -= request.size
        _remove_from(self._levels, request.priority, request)
        _remove_from(self._lanes, (request.priority, request.group), request)
        if not self.size or len(self._deadlines) > 2 * self.size + MIN_DEAD_ENTRIES:
            self._deadlines = [(one.deadline, one.id, one) for one in self]
            heapify(self._deadlines)

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a waiting request; the time is proportional to its new lane."""
        _remove_from(self._levels, request.priority, request)
        _remove_from(self._lanes, (request.priority, request.group), request)
        request.priority = priority
        self._levels[priority].insert(request)
        # As in `extend`, the position in the second lane counts.
        self._lanes[priority, request.group].insert(request)

    def oldest(self) -> Request | None:
        """Return the request that has waited longest."""
        oldest = [level.oldest() for level in self._levels.values()]
        return min(oldest, key=_age, default=None)

    def earliest_deadline(self) -> float:
        """Return the first moment at which a waiting request expires, infinite if none does."""
        while self._deadlines and not _is_waiting(self._deadlines[0][2]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and settle every request whose deadline is at or before `now`, oldest first."""
        expired = []
        while self.earliest_deadline() <= now:
            request = heappop(self._deadlines)[2]
            settle(request)
            self.discard(request)
            expired.append(request)
        return sorted(expired, key=_age)

    def _goes_by_age(self) -> bool:
        return self._batches % AGED_BATCHES == AGED_BATCHES - 1

    def _first(self) -> Request:
        """Return the request around which the next batch is built."""
        if self._goes_by_age():
            return min([level.oldest() for level in self._levels.values()], key=_age)
        return self._levels[max(self._levels)].oldest()

    def _lanes_of(self, group: Group | None) -> list[_Lane]:
        """Return the lanes of a group, the highest priority first."""
        ranks = [(priority, group) for priority in sorted(self._levels, reverse=True)]
        return [self._lanes[rank] for rank in ranks if rank in self._lanes]

    def _fill(self, chosen: list[Request], waiting: Iterator[Request], count: int) -> None:
        if self._packer is None:
            chosen += islice(waiting, count - len(chosen))
        else:
            self._packer.fill(chosen, list(waiting), count)


Queue = RequestQueue | RankedQueue


def _remove_from(lanes: dict[Any, _Lane], key: Any, request: Request) -> None:
    """Remove a request from its lane, and the lane if that was its last one."""
    lanes[key].remove(request)
    if not lanes[key].requests:
        del lanes[key]


def _is_waiting(request: Request) -> bool:
    return request.phase is Phase.QUEUED and not request.is_settled
