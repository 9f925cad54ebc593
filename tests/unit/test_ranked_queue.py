"""Priorities, groups and costs: who shares a batch, who goes first, and who never starves."""

import sys
from itertools import count
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedulers import make, make_request, poll_batches, settle

from fast_batcher._core.deadline_batches import DeadlineBatches
from fast_batcher._core.prediction import BatchTimes, Method, Methods
from fast_batcher._core.queue import (
    AGED_BATCHES,
    WINDOW_BATCHES,
    BatchPacker,
    PaddedPacker,
    RankedQueue,
    SummedPacker,
)
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import SENT, Group, Release, Request
from fast_batcher._core.workers import WorkerSlot

GROUPS = [Group("a"), Group("b"), Group("c")]


class Arrivals:
    """A queue with the parts of the scheduler that number requests and batches."""

    def __init__(self, packer: BatchPacker | None = None) -> None:
        self.queue = RankedQueue(packer)
        self._ids = count()

    def add(self, priority: int = 0, group: int | None = None, cost: float = 1.0) -> Request:
        request = make_request(None, 100.0)
        request.id = next(self._ids)
        request.priority = priority
        request.cost = cost
        if group is not None:
            request.group = GROUPS[group]
        self.queue.extend([request])
        return request

    def add_costs(self, *costs: float) -> list[Request]:
        return [self.add(cost=cost) for cost in costs]

    def send(self, most: int) -> list[Request]:
        """The next batch leaves."""
        requests = self.queue.choose(most)
        self.queue.batch_left(requests)
        for request in requests:
            request.phase = SENT
        return requests

    def cancel(self, request: Request) -> None:
        request.is_settled = True
        self.queue.discard(request)


def costs_of(requests: list[Request]) -> list[float]:
    return [request.cost for request in requests]


# Priorities.


def test_higher_priority_goes_first() -> None:
    arrivals = Arrivals()
    low, high, lower, other_high = (arrivals.add(priority) for priority in (0, 5, -1, 5))
    assert arrivals.send(3) == [high, other_high, low]
    assert arrivals.send(3) == [lower]


def test_retried_batch_takes_no_age_turn() -> None:
    scheduler = make(max_batch_size=2)
    scheduler.rank_requests()
    low = submit_ranked(scheduler, 0, GROUPS[0])
    high = submit_ranked(scheduler, 1, GROUPS[1])
    for number in range(1, AGED_BATCHES - 1):
        (batch,) = poll_batches(scheduler, 0.0)
        assert batch.requests == [high], number
        high = submit_ranked(scheduler, 1, GROUPS[1])
        settle(scheduler, 0.0, batch)
    (batch,) = poll_batches(scheduler, 0.0)
    submit_ranked(scheduler, 1, GROUPS[1])
    # The worker dies with the seventh; another try of that is not the eighth.
    scheduler.worker_lost(0, taken=batch.id, begun=batch.id)
    scheduler.worker_ready(0.0, 0)
    (again,) = poll_batches(scheduler, 0.0)
    assert again.release is Release.RETRY
    settle(scheduler, 0.0, again)
    (aged,) = poll_batches(scheduler, 0.0)
    assert aged.requests == [low]


def submit_ranked(scheduler: Scheduler, priority: int, group: Group) -> Request:
    request = Request(None, None)
    request.priority = priority
    request.group = group
    assert scheduler.submit(0.0, [request]) == []
    return request


def test_priorities_hold_under_an_old_backlog() -> None:
    arrivals = Arrivals()
    for _ in range(1000):
        arrivals.add(0)
    sent_at = []
    for number in range(20):
        high = arrivals.add(1)
        if high in arrivals.send(2):
            sent_at.append(number)
    # All but those that came when a batch went by age, and these went with the next.
    assert len(sent_at) == 20 - 20 // AGED_BATCHES


@given(
    ranks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40),
    late=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=300),
    most=st.integers(1, 4),
    are_priorities_used=st.booleans(),
)
def test_no_request_waits_longer_than_the_bound(
    ranks: list[tuple[int, int]], late: list[tuple[int, int]], most: int, are_priorities_used: bool
) -> None:
    arrivals = Arrivals()
    worth = int(are_priorities_used)
    waiting = [arrivals.add(priority * worth, group) for priority, group in ranks]
    newcomers = iter(late)
    left: dict[int, int] = {}
    for number in count(1):
        # More of them come all the time, some more important.
        for _, (priority, group) in zip(range(most), newcomers, strict=False):
            arrivals.add(priority * worth, group)
        if not arrivals.queue.size:
            break
        batch = arrivals.send(most)
        assert 1 <= len(batch) <= most
        assert len({request.group for request in batch}) == 1
        for request in batch:
            assert request.id not in left
            left[request.id] = number
    for older, request in enumerate(waiting):
        bound = (AGED_BATCHES if are_priorities_used else 1) * (older + 1)
        assert left[request.id] <= bound
    assert len(left) == len(ranks) + len(late)


# Costs.


def test_an_input_above_the_batch_budget_goes_alone() -> None:
    """Fault F65."""
    for packer in (PaddedPacker(100), SummedPacker(100)):
        arrivals = Arrivals(packer)
        arrivals.add_costs(8192, *[10] * 3)
        assert costs_of(arrivals.send(8)) == [8192]
        assert costs_of(arrivals.send(8)) == [10] * 3


def test_window_limits_overtaking_of_the_oldest() -> None:
    """However few of those between them are left."""
    arrivals = Arrivals(PaddedPacker(None))
    requests = arrivals.add_costs(*[1] * (2 * WINDOW_BATCHES), 2)
    for request in requests[1:-1]:
        arrivals.cancel(request)
    assert arrivals.send(2) == requests[:1]
    assert arrivals.send(2) == requests[-1:]


# What it keeps.


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with another group"])
def test_dropping_late_requests_takes_linear_time(others: int) -> None:
    """Counted in calls of functions. The oldest is in time, and is chosen with each that is not."""

    def calls_to_drop(late: int) -> int:
        arrivals = Arrivals()
        # Somebody has to wait, or nobody is dropped for the others' sake.
        arrivals.add(-1)
        first = arrivals.add(0, 0)
        for _ in range(late):
            arrivals.add(0, 0).target = 0.0
            for _ in range(others):
                arrivals.add(0, 1)
        methods = Methods([Method("infer", None, 2)])
        arrivals.queue._method = methods.first
        times = BatchTimes(methods, None)
        times.by_size.observe(1, 1.0)
        batches = DeadlineBatches(times, methods)
        calls = 0

        def count_call(_frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            requests, _ = batches.choose(1.0, WorkerSlot(0, 0, 2, has_stages=False), arrivals.queue)
        finally:
            sys.setprofile(before)
        assert first in requests
        assert len(batches.dropped) == late
        assert arrivals.queue.size == 2 + others * late
        return calls

    assert calls_to_drop(400) < 2.5 * calls_to_drop(200)


def test_rounding_leaves_no_cost_below_nothing() -> None:
    arrivals = Arrivals()
    # Next to it the others vanish.
    large, small, _ = arrivals.add_costs(1e15, 0.06, 0.06)
    arrivals.cancel(large)
    arrivals.cancel(small)
    assert arrivals.queue.cost >= 0
    assert arrivals.queue.ahead_of(0, None).cost >= 0
