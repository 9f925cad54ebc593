"""The two queues of the scheduler: order, deadlines and contents. Values only, no clock."""

import itertools
import random
import weakref
from math import inf

import pytest
from schedulers import make_request

from fast_batcher._core.queue import MIN_DEAD_ENTRIES, Queue, RankedQueue, RequestQueue
from fast_batcher._core.values import SENT, Request

# Seconds that the scheduler would give to requests that name none.
DEFAULT_TIMEOUT = 2.0


class Value:
    """An input that can be watched."""


class Arrivals:
    """A queue, and what the scheduler does with requests before and after."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._ids = itertools.count()

    def add(self, *deadlines: float) -> list[Request]:
        """Requests that arrive together."""
        requests = [make_request(Value(), deadline) for deadline in deadlines]
        for request in requests:
            request.id = next(self._ids)
        self.queue.extend(requests)
        return requests

    def discard(self, *requests: Request) -> None:
        """Their callers go."""
        for request in requests:
            request.is_settled = True
            self.queue.discard(request)

    def send(self, count: int) -> list[Request]:
        """A batch leaves."""
        if isinstance(self.queue, RequestQueue):
            requests = self.queue.take(count)
        else:
            requests = self.queue.choose(count)
            self.queue.batch_left(requests)
        for request in requests:
            request.phase = SENT
        return requests


@pytest.fixture(params=[RequestQueue, RankedQueue])
def arrivals(request: pytest.FixtureRequest) -> Arrivals:
    return Arrivals(request.param())


@pytest.mark.parametrize("seed", range(20))
def test_queue_behaves_like_a_list(arrivals: Arrivals, seed: int) -> None:
    """A list cannot be wrong."""
    chance = random.Random(seed)
    are_equal = isinstance(arrivals.queue, RequestQueue)
    plain: list[Request] = []
    now = 0.0
    for _ in range(400):
        # Runs of arrivals and of cancellations let it grow beyond the size at which it sweeps.
        if chance.random() < 0.6:
            timeouts = [DEFAULT_TIMEOUT, DEFAULT_TIMEOUT if are_equal else chance.uniform(0, 40)]
            plain += arrivals.add(*[now + chance.choice(timeouts) for _ in range(9)])
        gone = chance.sample(plain, k=chance.randrange(len(plain) // 3 + 1))
        arrivals.discard(*gone)
        plain = [request for request in plain if request not in gone]
        now += chance.uniform(0, 0.5)
        assert arrivals.queue.earliest_deadline() == min((r.deadline for r in plain), default=inf)
        expired = arrivals.queue.pop_expired(now)
        assert expired == [request for request in plain if request.deadline <= now]
        assert all(request.is_settled for request in expired)
        plain = [request for request in plain if request.deadline > now]
        assert list(arrivals.queue) == plain
        assert arrivals.queue.oldest() is (plain[0] if plain else None)
        count = chance.randrange(1, 6)
        assert arrivals.queue.is_full(count) is (len(plain) >= count) if plain else True
        if plain:
            assert arrivals.send(count) == plain[:count]
        plain = plain[count:]
        assert arrivals.queue.size == arrivals.queue.cost == len(plain)


# Memory.


def entries(queue: Queue) -> int:
    """Places that the queue takes in memory, dead ones included."""
    return len(queue._entries if isinstance(queue, RequestQueue) else queue._deadlines._heap)


@pytest.mark.parametrize("deadline", [50.0, inf])
def test_requests_that_have_left_are_not_kept(arrivals: Arrivals, deadline: float) -> None:
    """A caller's deadline may be hours away; the input it sent must not stay for so long."""
    values: weakref.WeakSet[Value] = weakref.WeakSet()
    for _ in range(20 * MIN_DEAD_ENTRIES):
        values.update(request.value for request in arrivals.add(deadline))
        arrivals.send(1)
        assert len(values) <= 2 * MIN_DEAD_ENTRIES


def test_sweep_starts_with_majority_of_dead(arrivals: Arrivals) -> None:
    """Each costs as much as there are entries: one per discarded request would be too many."""
    requests = arrivals.add(*[50.0] * 16 * MIN_DEAD_ENTRIES)
    sizes = [len(requests)]
    # From the end, so that none of them comes up.
    for request in reversed(requests[1:]):
        arrivals.discard(request)
        sizes.append(entries(arrivals.queue))
    swept = [before for before, after in itertools.pairwise(sizes) if after < before]
    assert 3 <= len(swept) <= 4
    assert sizes[-1] <= 2 + MIN_DEAD_ENTRIES
    arrivals.discard(requests[0])
    assert entries(arrivals.queue) == 0, "an empty queue keeps no inputs"
