"""Waiting requests: their order, and the choice of the next batch among them. Pure.

`RequestQueue` serves requests that differ in nothing but their inputs. As soon as a request has
another timeout, a priority, a share, a group, a cost or a size, a `RankedQueue` takes its place.
With costs, its `BatchPacker` chooses the requests of a batch.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import chain, filterfalse, islice, takewhile
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from fast_batcher._core.service_model import (
    PaddedModel,
    ScalarModel,
    ServiceModel,
    Shape,
    ShapeModel,
)
from fast_batcher._core.values import Group, Request, Share, settle

# A sweep of fewer dead entries costs more than their memory is worth.
MIN_DEAD_ENTRIES = 64

_is_settled, _cost_of = attrgetter("is_settled"), attrgetter("cost")


class Deadlines:
    """Requests by id, in the order in which they were added, with a heap of their deadlines.

    Entries of removed requests stay in the heap until they reach its top or are the majority.
    """

    def __init__(self) -> None:
        # A plain dict would be slow to find its first entry after many were removed before it.
        self.requests: OrderedDict[int, Request] = OrderedDict()
        # Deadlines and ids: an entry of a removed request must not keep its input.
        self._heap: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        """Add a request that has its deadline and its id."""
        self.requests[request.id] = request
        heappush(self._heap, (request.deadline, request.id))

    def remove(self, request_id: int) -> Request | None:
        """Remove and return a request, None if it is not there."""
        request = self.requests.pop(request_id, None)
        count = len(self.requests)
        if not count or len(self._heap) > 2 * count + MIN_DEAD_ENTRIES:
            self._heap = [(left.deadline, left.id) for left in self.requests.values()]
            heapify(self._heap)
        return request

    def oldest(self) -> Request:
        """Return the request that was added first; there has to be one."""
        return next(iter(self.requests.values()))

    def earliest(self) -> float:
        """Return the first deadline, infinite without a request."""
        while self._heap and self._heap[0][1] not in self.requests:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def pop_expired(self, now: float, grace: float = 0.0) -> list[Request]:
        """Remove and return the requests whose deadlines passed `grace` ago, earliest first."""
        expired = []
        while self.earliest() + grace <= now:
            expired.append(self.requests.pop(heappop(self._heap)[1]))
        return expired


class RequestQueue:
    """First-in, first-out queue.

    All requests have the default timeout, so their order of arrival is the order of their
    deadlines, too.

    A cancelled request stays as a dead entry until it is at the head or dead entries are the
    majority. So every operation is O(1) amortised.
    """

    # Only `RankedQueue` sums up sizes.
    bytes = 0

    def __init__(self, method: Any = None) -> None:
        # The `Method` that computes all batches.
        self.next_method = method
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

    def take(self, count: int) -> list[Request]:
        """Remove and return the next batch of at most `count` requests."""
        if self.size <= count:
            requests = list(self)
            self._entries.clear()
        else:
            requests = list(
                islice(filterfalse(_is_settled, iter(self._entries.popleft, None)), count)
            )
        self.size -= len(requests)
        return requests

    def choose(self, count: int) -> list[Request]:
        """Return the next batch of at most `count` requests, which stay in the queue."""
        return [*islice(self, count)]

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


# Batches' worth of the oldest requests to choose from. Source: `tests/project/test_simulation.py`:
# with log-normal lengths, 128 callers and batches of 32 that cost up to 1000 tokens by themselves,
# 4.9 tokens are computed for each real one in order of arrival, and 1.0 to 1.5 with four.
WINDOW_BATCHES = 4


class BatchPacker(ABC):
    """Fills batches up to a cost.

    Args:
        max_batch_cost: Most that a batch costs, None for no limit.
        times: Seconds of batches by their shape; the scheduler adds the observations.
    """

    def __init__(self, max_batch_cost: float | None, times: ShapeModel) -> None:
        self.max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self.times = times

    @abstractmethod
    def charge(self, shape: Shape) -> float:
        """Return the cost of a batch."""

    @abstractmethod
    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Add requests of the window to a batch, which its first request joins at any cost."""


class SummedPacker(BatchPacker):
    """Fills batches whose cost is the sum of their requests' costs, in order."""

    def __init__(self, max_batch_cost: float | None) -> None:
        super().__init__(max_batch_cost, ScalarModel(ServiceModel(), 2))

    def charge(self, shape: Shape) -> float:
        """Return the sum of the costs."""
        return shape.cost

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Add the oldest requests that fit."""
        total = sum(request.cost for request in chosen)
        for request in window:
            if len(chosen) == most:
                return
            if not chosen or total + request.cost <= self.max_batch_cost:
                chosen.append(request)
                total += request.cost


# Sizes of batches that a padded packer compares; without the others a plan for 128 requests takes
# 0.2 ms instead of 0.5, and is as good within 1 %.
_SIZES = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# The larger of two batches with equal times is taken: otherwise a wrong estimate for large batches
# would never be corrected. Sums of floats that should be equal differ by less than this.
_SHORTER = 1 - 1e-9


class PaddedPacker(BatchPacker):
    """Fills batches of inputs that are padded to the longest: their cost is size times longest.

    Sorted by length, the requests of the window are divided into the batches that take least time
    together; of these the packer sends the one with the first request. Filling the budget at any
    price would put short texts beside a long one, each at the price of the long one. Padding least
    would send one text at a time, each at the fixed cost of a batch. The learned times weigh the
    two. docs/decisions/0014-unequal-requests.md gives the reasons.
    """

    def __init__(self, max_batch_cost: float | None) -> None:
        self._model = PaddedModel()
        super().__init__(max_batch_cost, self._model)

    def charge(self, shape: Shape) -> float:
        """Return the size times the highest cost."""
        return shape.requests * shape.longest

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Add the requests that are planned for one batch with the first, as far as they fit."""
        first, *rest = [*chosen, *window]
        if not chosen:
            chosen.append(first)
        longest = max([request.cost for request in chosen])
        has_joined = set(map(id, chosen))
        for request in self._plan(first, rest, most):
            longer = max(longest, request.cost)
            fits = len(chosen) < most and (len(chosen) + 1) * longer <= self.max_batch_cost
            if fits and id(request) not in has_joined:
                chosen.append(request)
                longest = longer

    def _plan(self, first: Request, rest: list[Request], most: int) -> list[Request]:
        """Return the batch of the first request, out of a division that takes least time.

        A dynamic program over the sorted requests: `best[end]` are the least seconds of the first
        `end` ones, whose last batch has `sizes[end]`. Of equal requests older ones are nearer to
        the first.
        """
        shorter = sorted([one for one in reversed(rest) if one.cost < first.cost], key=_cost_of)
        longer = sorted([one for one in rest if one.cost >= first.cost], key=_cost_of)
        ordered = [*shorter, first, *longer]
        best, sizes = [0.0], [0]
        for end, request in enumerate(ordered, 1):
            longest = request.cost
            limit = int(min(most, end, max(1.0, self.max_batch_cost / longest)))
            fixed, each = self._model.line(longest)
            least, size = best[end - limit] + limit * each, limit
            for number in _SIZES:
                if number >= limit:
                    break
                seconds = best[end - number] + number * each
                if seconds < least * _SHORTER:
                    least, size = seconds, number
            best.append(least + fixed)
            sizes.append(size)
        end = len(ordered)
        while end - sizes[end] > len(shorter):
            end -= sizes[end]
        return ordered[end - sizes[end] : end]


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


class _Account:
    """The costs that were served for a share of one priority."""

    __slots__ = ("spent",)

    def __init__(self, spent: float) -> None:
        self.spent = spent


# The balance of a share after its oldest request, the id of the request, and the share.
_Turn = tuple[float, int, Share]


class _Lane:
    """Requests of one share by id, in their order of arrival."""

    __slots__ = ("account", "arrivals", "requests")

    def __init__(self, account: _Account) -> None:
        self.account = account
        self.requests: OrderedDict[int, Request] = OrderedDict()  # as in `Deadlines`
        # Requests enqueued so far.
        self.arrivals = 0

    def oldest(self) -> Request:
        return next(iter(self.requests.values()))

    def turn(self) -> _Turn:
        oldest = self.oldest()
        return self.account.spent + oldest.cost, oldest.id, oldest.share

    def window(self, count: float) -> Iterator[Request]:
        """Iterate over the requests that arrived fewer than `count` positions after the oldest."""
        end = self.oldest().lane_position + count
        return takewhile(lambda request: request.lane_position < end, self.requests.values())

    def begin(self, reach: float) -> tuple[float, Request, Iterator[Request]]:
        """Return the balance after the oldest request, that request, and the following ones."""
        window = self.window(reach)
        return self.turn()[0], next(window), window


class _Section:
    """Requests of one priority, or of one priority and group, in a lane for each share."""

    __slots__ = ("_turns", "balance", "cost", "lanes", "size")

    def __init__(self) -> None:
        self.lanes: dict[Share, _Lane] = {}
        # The number of requests, and their total cost.
        self.size = 0
        self.cost = 0.0
        # The balance with which an account is opened: the highest after a request that was served.
        # It rises with each request, so that no share is passed for ever by others that return.
        self.balance = 0.0
        # A heap with the turn of each lane, kept while there are at least two. A turn is out of
        # date if its request has left, or its account was charged since: then it is too early.
        self._turns: list[_Turn] = []

    def add(self, request: Request, account: _Account | None = None) -> _Account:
        """Add a request; return the account of its share, which is the given one or a new one."""
        lane = self.lanes.get(request.share)
        if lane is None:
            lane = self.lanes[request.share] = _Lane(account or _Account(self.balance))
        lane.requests[request.id] = request
        request.lane_position = lane.arrivals
        lane.arrivals += 1
        if len(lane.requests) == 1:
            self._note_turn(lane)
        self.size += 1
        self.cost += request.cost
        return lane.account

    def remove(self, request: Request) -> None:
        lane = self.lanes[request.share]
        del lane.requests[request.id]
        if not lane.requests:
            del self.lanes[request.share]
        elif len(self.lanes) > 1 and lane.oldest().id > request.id:
            self._note_turn(lane)
        self.size -= 1
        # Rounding must leave no cost in an empty section, and never a negative one.
        self.cost = max(0.0, self.cost - request.cost) if self.size else 0.0

    def _note_turn(self, lane: _Lane) -> None:
        """Note that the oldest request of a lane is another one."""
        count = len(self.lanes)
        if count == 2 or len(self._turns) > 2 * count + MIN_DEAD_ENTRIES:
            self._turns = [one.turn() for one in self.lanes.values()]
            heapify(self._turns)
        elif count > 2:
            heappush(self._turns, lane.turn())

    def first(self) -> Request:
        """Return the oldest request of the share whose turn it is."""
        if len(self.lanes) == 1:
            (lane,) = self.lanes.values()
            return lane.oldest()
        while (found := self._find_lane(self._turns)) is None:
            pass
        return found.oldest()

    def charge(self, request: Request) -> None:
        """Charge a request that is served to the account of its share."""
        account = self.lanes[request.share].account
        account.spent += request.cost
        self.balance = max(self.balance, account.spent)

    def window(self, reach: float, first: Request) -> Iterator[Request]:
        """Iterate by turns over the requests that may join a batch, from `first` on."""
        if len(self.lanes) == 1:
            (lane,) = self.lanes.values()
            return lane.window(reach)
        return islice(self._take_turns(reach, first), None if reach == inf else int(reach))

    def _take_turns(self, reach: float, first: Request) -> Iterator[Request]:
        self.first()  # this removes the turns of requests that have left
        turns = self._turns.copy()
        # The balance of each begun share after its next request, that request, and the others.
        begun: dict[Share, tuple[float, Request | None, Iterator[Request]]] = {}
        own = self.lanes.get(first.share)
        if own is not None and own.oldest() is first:
            begun[first.share] = own.begin(reach)
            heappush(turns, (-inf, first.id, first.share))
        while turns:
            _, number, share = turns[0]
            if share not in begun:
                lane = self._find_lane(turns)
                if lane is None:
                    continue
                begun[share] = lane.begin(reach)
            heappop(turns)
            balance, request, window = begun[share]
            if request is None or request.id != number:
                continue
            yield request
            following = next(window, None)
            if following is not None:
                balance += following.cost
                heappush(turns, (balance, following.id, share))
            begun[share] = balance, following, window

    def _find_lane(self, turns: list[_Turn]) -> _Lane | None:
        """Return the lane of the first turn; None if the turn was out of date and is corrected."""
        _, number, share = turns[0]
        lane = self.lanes.get(share)
        if lane is None or (turn := lane.turn())[1] != number:
            heappop(turns)
            return None
        if turn != turns[0]:
            heapreplace(turns, turn)
            return None
        return lane


class RankedQueue:
    """Queue by priority, then by turns of shares; batches have one group and similar costs.

    The next batch is built around its *first* request: of the highest priority, the oldest of the
    share whose turn it is. Only requests of the same group join it, those of its own priority
    before lower ones.

    Within a priority each share has an account of the costs of its requests that were sent. The
    next turn is that of the share whose account will be lowest after its oldest request; of equal
    ones, that with the older request. So the accounts of two shares that wait differ by at most the
    highest cost. An account is opened with the highest balance after a request that was served, and
    closed with the last waiting request of its share: no share saves up turns, or passes another by
    returning, and there are no more accounts than requests. Requests that name no share are of one,
    None, and go by age.

    So that no request starves, every eighth batch ignores priorities: it takes the requests of the
    priority that has the oldest one first. Without shares a request with j older ones before it
    leaves at the latest with the 8 (j + 1)th batch after its arrival; without priorities, where
    every batch goes by age, with the (j + 1)th.

    Where costs decide which requests join, younger requests may overtake an older one, but a
    bounded number of them: a request that arrived a window (`WINDOW_BATCHES` full batches) or more
    later than the oldest of its group, priority and share does not go before it. So without shares
    at most j plus one window less one requests are served before a request. The bound is in
    requests and not in seconds: in a backlog every request has waited long, and going by age then
    would keep the padding, and with it the backlog.
    """

    def __init__(self, packer: BatchPacker | None = None, method: Any = None) -> None:
        self._packer = packer
        # The `Method` of requests without a group.
        self._method = method
        self.size = 0
        # The sum of the requests' sizes; meaningful only if each has its `size`.
        self.bytes = 0
        # Every request is in two sections: in one by its priority, in one by priority and group.
        self._levels: defaultdict[int, _Section] = defaultdict(_Section)
        self._sections: defaultdict[tuple[int, Group | None], _Section] = defaultdict(_Section)
        self._deadlines = Deadlines()
        # Batches taken from this queue; retries do not come from here.
        self._batches = 0

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, by priority, then by share, then by arrival."""
        lanes = chain.from_iterable(level.lanes.values() for level in self._levels.values())
        return chain.from_iterable(lane.requests.values() for lane in lanes)

    @property
    def cost(self) -> float:
        """Total cost of the waiting requests."""
        return sum(level.cost for level in self._levels.values())

    def extend(self, requests: list[Request]) -> None:
        """Append requests; their ids must rise, and be higher than every id before."""
        for request in requests:
            account = self._levels[request.priority].add(request)
            # The lanes of both sections set `lane_position`; the second one's counts.
            self._sections[request.priority, request.group].add(request, account)
            self.size += 1
            self.bytes += request.size
            self._deadlines.add(request)

    @property
    def next_method(self) -> Any:
        """The `Method` that computes the next batch."""
        group = self._first().group if self.size else None
        return self._method if group is None or group.method is None else group.method

    def is_full(self, count: int) -> bool:
        """Whether the next batch would have `count` requests, or cost the most that it may."""
        if self._packer is None and self.size < count:
            return False
        sections = self._sections_of(self._first().group)
        if sum(section.size for section in sections) >= count:
            return True
        return (
            self._packer is not None
            and sum(section.cost for section in sections) > self._packer.max_batch_cost
        )

    def has_full_group(self, count: int) -> bool:
        """Whether a full batch of one group and priority waits: of its method, or of `count`."""
        return any(
            section.size
            >= (count if group is None or group.method is None else group.method.size_cap.size)
            for (_, group), section in self._sections.items()
        )

    def held_by(self, share: Share) -> int:
        """Return the number of waiting requests of a share."""
        lanes = [level.lanes.get(share) for level in self._levels.values()]
        return sum([len(lane.requests) for lane in lanes if lane is not None])

    def ahead_of(self, priority: int, share: Share) -> WorkAhead:
        """Estimate which part of the queue is served before a new request of this rank."""
        levels = [level for key, level in self._levels.items() if key > priority]
        requests = sum(level.size for level in levels)
        cost = sum(level.cost for level in levels)
        if level := self._levels.get(priority):
            lane = level.lanes.get(share)
            own = 0 if lane is None else len(lane.requests)
            others = len(level.lanes) - (lane is not None)
            # Until its turn, every other share has as many turns as this one.
            ahead = own + min(level.size - own, (own + 1) * others)
            requests += ahead
            cost += level.cost * (ahead / level.size)
        # Groups of lower priorities are counted too: leaving them out would take too long.
        return WorkAhead(requests, cost, min(len(self._sections), requests))

    def choose(self, count: int) -> list[Request]:
        """Return the next batch of at most `count` requests, which stay in the queue.

        Its first request, around which it is built, comes first.
        """
        first = self._first()
        sections = self._sections_of(first.group)
        # Only a packer passes requests over.
        reach = inf if self._packer is None else WINDOW_BATCHES * count
        windows = [section.window(reach, first) for section in sections]
        chosen: list[Request] = []
        if self._goes_by_age():
            by_age = merge(*windows, key=lambda request: (request is not first, request.id))
            self._fill(chosen, by_age, count)
            return chosen
        for section, window in zip(sections, windows, strict=True):
            self._fill(chosen, window, count)
            reach -= section.size
            if len(chosen) == count or reach <= 0:
                break
        return chosen

    def batch_left(self, requests: list[Request]) -> None:
        """Remove a batch that was given to a worker, and charge the shares that wait together."""
        self._batches += 1
        is_shared = any(len(level.lanes) > 1 for level in self._levels.values())
        for request in requests:
            if is_shared:
                self._levels[request.priority].charge(request)
            self.discard(request)

    def discard(self, request: Request) -> None:
        """Forget a waiting request."""
        self.size -= 1
        self.bytes -= request.size
        _remove_from(self._levels, request.priority, request)
        _remove_from(self._sections, (request.priority, request.group), request)
        self._deadlines.remove(request.id)

    def oldest(self) -> Request | None:
        """Return the request that has waited longest."""
        return self._deadlines.oldest() if self.size else None

    def earliest_deadline(self) -> float:
        """Return the first moment at which a waiting request expires, infinite if none does."""
        return self._deadlines.earliest()

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and settle every request whose deadline is at or before `now`, oldest first."""
        expired = sorted(self._deadlines.pop_expired(now), key=_age)
        for request in expired:
            settle(request)
            self.discard(request)
        return expired

    def _goes_by_age(self) -> bool:
        return self._batches % AGED_BATCHES == AGED_BATCHES - 1

    def _first(self) -> Request:
        """Return the request around which the next batch is built."""
        by_age = self._goes_by_age()
        priority = self._deadlines.oldest().priority if by_age else max(self._levels)
        return self._levels[priority].first()

    def _sections_of(self, group: Group | None) -> list[_Section]:
        """Return the sections of a group, the highest priority first."""
        ranks = [(priority, group) for priority in sorted(self._levels, reverse=True)]
        return [self._sections[rank] for rank in ranks if rank in self._sections]

    def _fill(self, chosen: list[Request], waiting: Iterator[Request], count: int) -> None:
        if self._packer is None:
            chosen += islice(waiting, count - len(chosen))
        else:
            self._packer.fill(chosen, list(waiting), count)


Queue = RequestQueue | RankedQueue


def _remove_from(sections: dict[Any, _Section], key: Any, request: Request) -> None:
    """Remove a request from its section, and the section if that was its last one."""
    sections[key].remove(request)
    if not sections[key].size:
        del sections[key]
