"""The queue by itself: order, deadlines, and what it keeps. Values only, no clock."""

import itertools
import random
import weakref
from collections.abc import Iterable
from math import inf

import pytest

from fast_batcher._core.messages import Phase, Request
from fast_batcher._core.request_queue import MIN_DEAD_ENTRIES, RequestQueue

# The deadline that the scheduler would give to requests that name none.
DEFAULT_DEADLINE = 100.0


class Value:
    """An input that can be watched."""


class Arrivals:
    """A queue and the numbering of what arrives in it, which is the scheduler's part."""

    def __init__(self) -> None:
        self.queue = RequestQueue()
        self._next_id = 0

    def add(self, *deadlines: float | None) -> list[Request]:
        """Requests that arrive together; None is a request that names no deadline."""
        requests = []
        for deadline in deadlines:
            request = Request(Value(), caller=None, deadline=deadline)
            request.id = self._next_id
            self._next_id += 1
            if deadline is None:
                request.deadline = DEFAULT_DEADLINE
            requests.append(request)
        self.queue.extend(requests)
        return requests

    def discard(self, *requests: Request) -> None:
        """What the scheduler does when a caller goes."""
        for request in requests:
            request.is_settled = True
            self.queue.discard(request)


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


def entries(queue: RequestQueue) -> int:
    """Places that the queue takes in memory, dead ones included."""
    return len(list(queue)) + len(queue._heap)


# Order.


def test_an_empty_queue_gives_nothing(arrivals: Arrivals) -> None:
    assert arrivals.queue.take(4) == []
    assert arrivals.queue.oldest() is None
    assert arrivals.queue.earliest_deadline() == inf
    assert arrivals.queue.pop_expired(1e9) == []
    assert arrivals.queue.size == 0


@pytest.mark.parametrize(
    "deadlines",
    [(None, 5.0, None, 3.0), (5.0, None, 3.0, None), (5.0, 3.0), (9.0, None, None, 1.0)],
)
def test_a_deadline_of_its_own_changes_nobodys_turn(
    arrivals: Arrivals, deadlines: tuple[float | None, ...]
) -> None:
    requests = arrivals.add(*deadlines)
    taken = [request for _ in deadlines for request in arrivals.queue.take(1)]
    assert taken == requests


@pytest.mark.parametrize("deadlines", [(None, None), (4.0, None), (None, 4.0), (4.0, 4.0)])
def test_oldest_is_the_one_that_arrived_first(
    arrivals: Arrivals, deadlines: tuple[float | None, ...]
) -> None:
    first, second = arrivals.add(*deadlines)
    assert arrivals.queue.oldest() is first
    arrivals.discard(first)
    assert arrivals.queue.oldest() is second
    arrivals.discard(second)
    assert arrivals.queue.oldest() is None


# Leaving early.


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("deadlines", [(None,) * 4, (8.0,) * 4, (None, 8.0, None, 8.0)])
def test_a_discarded_request_is_not_taken(
    arrivals: Arrivals, deadlines: tuple[float | None, ...], position: int
) -> None:
    requests = arrivals.add(*deadlines)
    arrivals.discard(requests.pop(position))
    assert arrivals.queue.size == 3
    assert arrivals.queue.take(4) == requests
    assert arrivals.queue.size == 0


def test_iterating_meets_every_live_request(arrivals: Arrivals) -> None:
    requests = arrivals.add(None, 5.0, None, 5.0)
    arrivals.discard(requests[1])
    assert {id(r) for r in arrivals.queue if not r.is_settled} == {
        id(r) for r in requests if r is not requests[1]
    }


# Deadlines.


@pytest.mark.parametrize(
    ("deadlines", "earliest"),
    [
        ((None,), DEFAULT_DEADLINE),
        ((5.0,), 5.0),
        ((None, 5.0), 5.0),
        ((5.0, None), 5.0),
        ((None, 500.0), DEFAULT_DEADLINE),
        ((9.0, 5.0, 7.0), 5.0),
        ((inf,), inf),
        ((inf, None), DEFAULT_DEADLINE),
    ],
)
def test_the_earliest_deadline_is_found(
    arrivals: Arrivals, deadlines: tuple[float | None, ...], earliest: float
) -> None:
    arrivals.add(*deadlines)
    assert arrivals.queue.earliest_deadline() == earliest


def test_a_request_that_was_taken_has_no_deadline_here(arrivals: Arrivals) -> None:
    arrivals.add(3.0, None, 8.0)
    for request in arrivals.queue.take(1):
        request.phase = Phase.SENT
    assert arrivals.queue.earliest_deadline() == 8.0
    for request in arrivals.queue.take(1):
        request.phase = Phase.SENT
    assert arrivals.queue.earliest_deadline() == 8.0
    for request in arrivals.queue.take(1):
        request.phase = Phase.SENT
    assert arrivals.queue.earliest_deadline() == inf


def test_expired_requests_come_in_their_order_of_arrival(arrivals: Arrivals) -> None:
    requests = arrivals.add(None, 9.0, None, 3.0, 500.0, 7.0)
    assert arrivals.queue.pop_expired(DEFAULT_DEADLINE) == [
        request for request in requests if request.deadline <= DEFAULT_DEADLINE
    ]
    assert arrivals.queue.take(9) == [requests[4]]


# Memory.


@pytest.mark.parametrize("deadline", [None, 50.0, inf])
def test_dead_entries_never_outnumber_the_live_for_long(
    arrivals: Arrivals, deadline: float | None
) -> None:
    live = arrivals.add(*[deadline] * 10)
    for _ in range(20 * MIN_DEAD_ENTRIES):
        arrivals.discard(*arrivals.add(deadline))
        # Once in the order of arrival, and once more by deadline.
        assert entries(arrivals.queue) <= 2 * (len(live) + MIN_DEAD_ENTRIES)
    assert arrivals.queue.take(100) == live


@pytest.mark.parametrize("deadline", [None, 50.0, inf])
def test_requests_that_have_been_taken_are_not_kept(
    arrivals: Arrivals, deadline: float | None
) -> None:
    """A caller's deadline may be hours away; the input it sent must not stay for so long."""
    values: weakref.WeakSet[Value] = weakref.WeakSet()
    for _ in range(20 * MIN_DEAD_ENTRIES):
        for request in arrivals.add(deadline):
            values.add(request.value)
        for request in arrivals.queue.take(1):
            request.phase = Phase.SENT
            request.is_settled = True
        arrivals.queue.batch_left(is_retry=False)
        del request
        assert len(values) <= 2 * MIN_DEAD_ENTRIES


def test_a_sweep_comes_when_the_dead_are_the_majority(arrivals: Arrivals) -> None:
    """Each costs as much as there are entries: one per discarded request would be too many."""
    requests = arrivals.add(*[None] * 16 * MIN_DEAD_ENTRIES)
    sizes = [len(requests)]
    # From the end, so that none of them comes up.
    for request in reversed(requests[1:]):
        arrivals.discard(request)
        sizes.append(len(list(arrivals.queue)))
    swept = [after for before, after in itertools.pairwise(sizes) if after < before]
    # Half, a quarter, an eighth and a sixteenth of them; what is left then is not worth a sweep.
    assert swept == [len(requests) // share - 1 for share in (2, 4, 8, 16)]


def test_the_dead_that_come_up_are_not_counted_any_more(arrivals: Arrivals) -> None:
    """Else they would call for sweeps that find nothing."""
    for _ in range(MIN_DEAD_ENTRIES - 1):
        dead, _ = arrivals.add(None, None)
        arrivals.discard(dead)
        arrivals.queue.take(1)
    requests = arrivals.add(*[None] * 3)
    arrivals.discard(requests[1], requests[2])
    assert len(list(arrivals.queue)) == 3


def test_a_few_that_have_left_stay_in_the_order_of_deadlines(arrivals: Arrivals) -> None:
    """To take one out of the middle costs as much as there are."""
    arrivals.add(*[50.0] * MIN_DEAD_ENTRIES)
    arrivals.queue.take(MIN_DEAD_ENTRIES - 1)
    assert len(arrivals.queue._heap) == MIN_DEAD_ENTRIES
    arrivals.add(*[50.0] * 2)
    arrivals.queue.take(2)
    assert len(arrivals.queue._heap) == MIN_DEAD_ENTRIES + 2
    arrivals.add(50.0)
    arrivals.queue.take(1)
    assert len(arrivals.queue._heap) == 1


def test_a_sweep_keeps_what_lives(arrivals: Arrivals) -> None:
    kinds = [None, 50.0, 60.0]
    requests = arrivals.add(*[kinds[i % 3] for i in range(9 * MIN_DEAD_ENTRIES)])
    live = requests[::4]
    arrivals.discard(*[request for request in requests if request not in live])
    assert arrivals.queue.size == len(live)
    assert arrivals.queue.earliest_deadline() == 50.0
    assert arrivals.queue.pop_expired(50.0) == [r for r in live if r.deadline == 50.0]
    assert arrivals.queue.take(len(live)) == [r for r in live if r.deadline != 50.0]


# Against a list, which cannot be wrong.


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_plain_list_would_do(arrivals: Arrivals, seed: int) -> None:
    chance = random.Random(seed)
    plain: list[Request] = []
    now = 0.0

    def expired() -> Iterable[Request]:
        return [request for request in plain if request.deadline <= now]

    for _ in range(400):
        # Runs of arrivals and of cancellations let it grow beyond the size at which it sweeps.
        if chance.random() < 0.6:
            deadlines = [chance.choice([None, now + chance.uniform(0, 40)]) for _ in range(9)]
            plain += arrivals.add(*deadlines)
        gone = chance.sample(plain, k=chance.randrange(len(plain) // 3 + 1))
        arrivals.discard(*gone)
        plain = [request for request in plain if request not in gone]
        now = min(now + chance.uniform(0, 0.5), DEFAULT_DEADLINE)
        assert arrivals.queue.earliest_deadline() == min((r.deadline for r in plain), default=inf)
        assert arrivals.queue.pop_expired(now) == expired()
        plain = [request for request in plain if request.deadline > now]
        assert arrivals.queue.oldest() is (plain[0] if plain else None)
        count = chance.randrange(6)
        taken = arrivals.queue.take(count)
        assert taken == plain[:count]
        for request in taken:
            request.phase = Phase.SENT
        plain = plain[count:]
        assert arrivals.queue.size == len(plain)


# Those that are put back.


def test_what_is_put_back_is_the_oldest_again(arrivals: Arrivals) -> None:
    requests = arrivals.add(None, 50.0, None, None)
    taken = arrivals.queue.take(3)
    arrivals.queue.put_back(taken[1:])
    later = arrivals.add(60.0, None)
    assert arrivals.queue.size == 5
    assert arrivals.queue.earliest_deadline() == 50.0
    assert arrivals.queue.take(9) == [*requests[1:], *later]


def test_what_is_put_back_expires_once(arrivals: Arrivals) -> None:
    first, second = arrivals.add(50.0, None)
    for _ in range(3):
        arrivals.queue.put_back(arrivals.queue.take(2))
    assert arrivals.queue.pop_expired(60.0) == [first]
    assert arrivals.queue.pop_expired(DEFAULT_DEADLINE) == [second]
    assert arrivals.queue.size == 0
