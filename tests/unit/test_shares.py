"""Shares: turns within a priority, and room in the queue."""

from collections import Counter
from itertools import combinations, count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedulers import make, make_request, poll_batches

from fast_batcher._core.queue import (
    AGED_BATCHES,
    BatchPacker,
    PaddedPacker,
    RankedQueue,
    SummedPacker,
)
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Group, Request
from fast_batcher.errors import BatcherClosedError, QueueFullError

COSTS = (1.0, 2.5, 9.0)
GROUPS = (Group("a"), Group("b"))


class Arrivals:
    """A ranked queue, and the numbers of its requests."""

    def __init__(self, queue: RankedQueue | None = None) -> None:
        self.queue = queue or RankedQueue()
        self._ids = count()

    def add(
        self,
        share: str | None,
        cost: float = 1.0,
        priority: int = 0,
        group: Group | None = None,
    ) -> Request:
        request = make_request(None, 100.0)
        request.id = next(self._ids)
        request.rank(priority, share)
        request.cost, request.group = cost, group
        self.queue.extend([request])
        return request

    def send(self, most: int) -> str:
        """The next batch leaves; return the shares of its requests."""
        return "".join([str(request.share) for request in self.take(most)])

    def take(self, most: int) -> list[Request]:
        requests = self.queue.choose(most)
        assert requests == self.queue.choose(most), "choosing changes nothing"
        assert requests[0].group is self.queue._first().group
        self.queue.batch_left(requests)
        return requests


# Turns.


def test_one_request_each_goes_before_a_flood() -> None:
    arrivals = Arrivals()
    for _ in range(1000):
        arrivals.add("A")
    for share in "BCDEFGHIJ":
        arrivals.add(share)
    batch = arrivals.send(32)
    assert Counter(batch) == Counter("A" * 23 + "BCDEFGHIJ")
    assert arrivals.send(32) == "A" * 32


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ([("A", 1)] * 3 + [("B", 1)] * 2, "ABABA"),
        ([("A", 1)] * 4 + [("B", 1), ("C", 1)], "ABCAAA"),
        # By cost: one of A is worth three of B.
        ([("A", 3)] * 2 + [("B", 1)] * 6, "BBABBBAB"),
        # A long one waits until the others have been served as much.
        ([("A", 5), ("B", 1), ("B", 1), ("C", 2), ("C", 2)], "BBCCA"),
        # Without a name.
        ([(None, 1)] * 2 + [("B", 1)], "NoneBNone"),
    ],
)
@pytest.mark.parametrize("most", [1, 2, 8])
def test_order(waiting: list[tuple[str | None, float]], order: str, most: int) -> None:
    arrivals = Arrivals()
    for share, cost in waiting:
        arrivals.add(share, cost)
    sent = ""
    while arrivals.queue.size:
        sent += arrivals.send(most)
    assert sent == order


def test_share_that_returns_saves_no_turns() -> None:
    """Neither a share that asks again at once nor new ones keep a waiting one from its turns."""
    arrivals = Arrivals()
    for _ in range(20):
        arrivals.add("A")
    for share in ("B", *"CDEFGHI"):
        arrivals.add(share)
        assert arrivals.send(1) + arrivals.send(1) == f"A{share}"
    for _ in range(3):
        # Each costs as much as four of A.
        arrivals.add("B", 4.0)
        assert "".join(arrivals.send(1) for _ in range(5)) == "AAAAB"


def test_new_share_gains_nothing_from_one_that_waits_for_a_costly_turn() -> None:
    arrivals = Arrivals()
    arrivals.add("A", 10.0)
    for _ in range(10):
        arrivals.add("B")
    assert "".join(arrivals.send(1) for _ in range(9)) == "B" * 9
    # The next turn is that of A, whose account is still empty.
    for _ in range(10):
        arrivals.add("C")
    assert arrivals.send(3) == "ABC"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("clients", [2, 3, 16])
def test_shares_that_return_do_not_pass_a_costlier_request_for_ever(
    clients: int, size: int
) -> None:
    """Each client asks again as soon as it is answered."""
    arrivals = Arrivals()
    arrivals.add("Z", 50.0)
    names = "ABCDEFGHIJKLMNOPQ"[:clients]
    for name in names:
        arrivals.add(name)
    for _ in range(60 * clients):
        served = arrivals.send(size)
        if "Z" in served:
            return
        for name in served:
            arrivals.add(name)
    pytest.fail("Z was not served")


def test_priorities_come_before_shares() -> None:
    arrivals = Arrivals()
    for share, priority in (("A", 0), ("A", 5), ("B", 0), ("A", 5), ("B", 5)):
        arrivals.add(share, priority=priority)
    assert arrivals.send(4) == "ABAA"
    assert arrivals.send(4) == "B"


def test_new_share_gains_nothing_from_one_that_filled_batches_of_a_higher_priority() -> None:
    arrivals = Arrivals()
    for share in "AB":
        arrivals.add(share, priority=1)
    for _ in range(20):
        arrivals.add("C")
    assert arrivals.send(12) == "AB" + "C" * 10
    for _ in range(10):
        arrivals.add("D")
    assert arrivals.send(4) == "CDCD"


def test_a_batch_that_ignores_priorities_goes_by_turns() -> None:
    arrivals = Arrivals()
    for share in "AAAAB":
        arrivals.add(share)
    for _ in range(AGED_BATCHES - 1):
        arrivals.add("C", priority=1)
        assert arrivals.send(1) == "C"
    arrivals.add("C", priority=1)
    assert arrivals.send(2) == "AB"


def test_a_batch_that_ignores_priorities_begins_with_the_share_whose_turn_it_is() -> None:
    arrivals = Arrivals()
    older = arrivals.add("A", 3.0)
    high = [arrivals.add("C", priority=1) for _ in range(AGED_BATCHES)]
    first = arrivals.add("B")
    for request in high[:-1]:
        assert arrivals.take(1) == [request]
    assert arrivals.take(3) == [first, older, high[-1]]


def test_groups_follow_the_share_whose_turn_it_is() -> None:
    arrivals = Arrivals()
    x, y = Group("x"), Group("y")
    arrivals.add("A", group=x)
    arrivals.add("A", group=x)
    # Its oldest is of another group; the cheaper one behind that goes after A's first.
    arrivals.add("B", 2.0, group=y)
    arrivals.add("B", 0.1, group=x)
    assert arrivals.send(4) == "ABA"
    assert arrivals.send(4) == "B"


def test_share_pays_for_requests_that_join_before_its_turn() -> None:
    arrivals = Arrivals()
    x, y, z = Group("x"), Group("y"), Group("z")
    for share, group in (("B", y), ("A", x), ("A", y), ("C", z), *[("D", z), ("E", z)] * 2):
        arrivals.add(share, group=group)
    assert arrivals.send(2) == "BA"
    assert "".join(arrivals.send(1) for _ in range(6)) == "CDEADE"


@pytest.mark.parametrize("packer", [SummedPacker(6.0), PaddedPacker(6.0)])
def test_packers_begin_with_the_share_whose_turn_it_is(
    packer: SummedPacker | PaddedPacker,
) -> None:
    arrivals = Arrivals(RankedQueue(packer))
    for _ in range(8):
        arrivals.add("A", 3.0)
    arrivals.add("B", 2.0)
    assert arrivals.send(8)[0] == "B"
    assert arrivals.send(8) == "AA"


class Ledger:
    """A queue whose requests come, leave and are cancelled; notes who was served while waiting."""

    def __init__(self, packer: BatchPacker | None = None) -> None:
        self.arrivals = Arrivals(RankedQueue(packer))
        self.waiting: list[Request] = []
        # Of each pair of shares that wait, by how much the first was served more.
        self.leads: dict[tuple[str, str], float] = {}

    def add(self, share: str, cost: float, group: Group | None = None) -> None:
        self.waiting.append(self.arrivals.add(share, cost, group=group))

    def cancel(self, number: int) -> None:
        if self.waiting:
            self.arrivals.queue.discard(self.waiting.pop(number % len(self.waiting)))

    def send(self, most: int) -> None:
        if not self.waiting:
            return
        served: Counter[object] = Counter()
        for request in self.arrivals.take(most):
            self.waiting.remove(request)
            served[request.share] += request.cost  # type: ignore[assignment]
        for one, other in self.leads:
            self.leads[one, other] += served[one] - served[other]

    def end_step(self) -> None:
        present = sorted({str(request.share) for request in self.waiting})
        self.leads = {pair: self.leads.get(pair, 0.0) for pair in combinations(present, 2)}
        queue = self.arrivals.queue
        assert queue.size == len(self.waiting)
        assert queue.cost == pytest.approx(sum(request.cost for request in self.waiting))


ADD = st.tuples(st.just(Ledger.add), st.sampled_from("ABCD"), st.sampled_from(COSTS))
ADD_IN_GROUP = st.builds(lambda step, group: (*step, group), ADD, st.sampled_from(GROUPS))
SEND = st.tuples(st.just(Ledger.send), st.integers(1, 5))
CANCEL = st.tuples(st.just(Ledger.cancel), st.integers(0, 50))


@given(steps=st.lists(st.one_of(ADD, SEND, CANCEL), max_size=120))
def test_waiting_shares_are_served_equally(steps: list[tuple[Any, ...]]) -> None:
    """While two shares wait, what they are served differs by at most twice the highest cost."""
    ledger = Ledger()
    for step, *arguments in [*steps, *[(Ledger.send, 5)] * len(steps)]:
        step(ledger, *arguments)
        ledger.end_step()
        assert all(abs(lead) <= 2 * max(COSTS) for lead in ledger.leads.values())
    assert ledger.waiting == []
    assert [*ledger.arrivals.queue] == []


@pytest.mark.parametrize("packer", [None, SummedPacker(12.0), PaddedPacker(12.0)])
@given(steps=st.lists(st.one_of(ADD_IN_GROUP, SEND, CANCEL), max_size=120))
def test_every_request_leaves_once(
    packer: BatchPacker | None, steps: list[tuple[Any, ...]]
) -> None:
    """Also requests that go before the turn of their share, as they fit into a batch."""
    ledger = Ledger(packer)
    for step, *arguments in [*steps, *[(Ledger.send, 5)] * len(steps)]:
        step(ledger, *arguments)
        ledger.end_step()
    assert ledger.waiting == []


def test_cancelled_requests_leave_nothing_behind() -> None:
    arrivals = Arrivals()
    for share in "ABC":
        arrivals.add(share)
    for _ in range(1000):
        arrivals.queue.discard(arrivals.add("D"))
    (section,) = arrivals.queue._levels.values()
    assert len(section._turns) < 100
    assert arrivals.send(4) == "ABC"


# Room.


def of_share(share: str | None, deadline: float | None = None) -> Request:
    request = make_request(None, deadline)
    request.rank(0, share)
    return request


def send_all(scheduler: Scheduler, share: str | None, requests: int) -> list[QueueFullError]:
    """Submit requests of a share; return the errors of those without room."""
    arriving = [of_share(share) for _ in range(requests)]
    scheduler.rank_requests(share)
    errors = [why.to_error() for _, why in scheduler.submit(0.0, arriving)]
    assert all(isinstance(error, QueueFullError) for error in errors)
    return errors  # type: ignore[return-value]


def busy(max_queue_size: int) -> Scheduler:
    """A scheduler without a worker."""
    scheduler = make(max_batch_size=4, max_queue_size=max_queue_size)
    scheduler._workers.clear()
    return scheduler


def test_each_share_holds_as_much_as_there_is_room_for() -> None:
    scheduler = busy(64)
    left = {share: 100 - len(send_all(scheduler, share, 100)) for share in "ABCD"}
    assert left == {"A": 32, "B": 16, "C": 8, "D": 4}
    (error, *_) = send_all(scheduler, "A", 1)
    wanted = "share 'A' has 32 of 60 waiting requests; the room left is for those with fewer"
    assert str(error) == f"{wanted} (max_queue_size=64)"
    assert scheduler.queue_size == 60


def test_first_request_of_a_share_finds_room_in_a_full_queue() -> None:
    scheduler = busy(8)
    # Nobody has named a share yet.
    scheduler.rank_requests()
    assert send_all(scheduler, None, 8) == []
    assert len(send_all(scheduler, None, 1)) == 1
    for number in range(8):
        assert len(send_all(scheduler, f"share {number}", 2)) == 1
    # Its memory is bounded, however many shares there are.
    assert len(send_all(scheduler, "one more", 1)) == 1
    assert scheduler.queue_size == 16


def test_room_for_a_share() -> None:
    scheduler = busy(8)
    assert send_all(scheduler, "A", 4) == []
    assert scheduler.requests_differ
    room = {share: scheduler.has_room(1, of_share(share)) for share in ("A", "B", None)}
    assert room == {"A": False, "B": True, None: True}
    assert scheduler.has_room(2, of_share("B"))
    assert not scheduler.has_room(3, of_share("B"))


def test_draining_rejects_every_share() -> None:
    scheduler = busy(8)
    scheduler.rank_requests("A")
    scheduler.begin_drain()
    ((_, rejection),) = scheduler.submit(0.0, [of_share("B")])
    assert rejection.kind is BatcherClosedError


def test_backlog_of_a_share_makes_no_other_late() -> None:
    """A request with a target is predicted by the turns that are before it."""
    scheduler = make(max_batch_size=4, max_queue_size=1000)
    scheduler.learn_times()
    now = 0.0
    for _ in range(20):
        assert send_all(scheduler, "A", 1) == []
        (batch,) = poll_batches(scheduler, now)
        now += 1.0
        scheduler.batch_done(now, 0, batch.id)
    assert send_all(scheduler, "A", 100) == []
    for share, is_late in (("A", True), ("B", False), (None, False)):
        assert len(scheduler.submit(now, [of_share(share, now + 5.0)])) == is_late
