"""`OpenCalls`: which requests of an API process end without an answer, and which are sent again."""

from collections.abc import Callable
from math import inf, nextafter

from hypothesis import given
from hypothesis import strategies as st
from schedulers import make_request

from fast_batcher._core.host import GRACE, MOST_LOSSES, OpenCalls
from fast_batcher._core.values import QUEUED, RETRYING, SENT, Request, settle


def make(calls: OpenCalls, now: float, deadline: float | None = None) -> Request:
    request = make_request("value", deadline)
    calls.add(now, request)
    return request


def test_requests_are_found_until_removed() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    plain, timed = make(calls, 1.0), make(calls, 2.0, 5.0)
    assert (plain.id, timed.id) == (0, 1)
    assert (plain.arrival, plain.deadline, timed.deadline) == (1.0, 11.0, 5.0)
    assert [*calls] == [plain, timed]
    assert (calls.find(0), calls.find(1), calls.find(2)) == (plain, timed, None)
    assert calls.remove(1) is timed
    assert calls.remove(1) is None
    assert calls.remove(0) is plain
    assert len(calls) == 0
    # An id is not used again.
    assert make(calls, 3.0).id == 2


def test_crowd_has_the_limits_of_a_queue() -> None:
    calls = OpenCalls(10.0, idempotent=True)

    def may_wait(share: str | None = None, size: int = 0) -> bool:
        request = Request("value", None)
        request.share, request.size = share, size
        return calls.may_wait(request, 4, 100)

    assert may_wait(size=1000), "nobody waits"
    for _ in range(2):
        request = make(calls, 0.0)
        request.share, request.size = "a", 40
        calls.crowded[request.id] = request
    assert may_wait(size=20)
    assert not may_wait(size=21)
    assert not may_wait("a"), "it has as many as there is room for"
    assert may_wait("b")
    unshared = [make(calls, 0.0) for _ in range(2)]
    calls.crowded |= {request.id: request for request in unshared}
    assert not may_wait()
    assert may_wait("b"), "the first of a share"
    calls.remove(unshared[0].id)
    assert may_wait()


def test_calls_of_a_share_are_counted_until_they_end() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    requests = [Request("value", None) for _ in range(6)]
    for number, request in enumerate(requests):
        request.share = None if number == 5 else "a" if number else "b"
        calls.add(0.0, request)
    assert (calls.held_by("a"), calls.held_by("b"), calls.held_by("c")) == (4, 1, 0)
    requests[1].has_chunks = True
    assert calls.held_by("a") == 4
    for request in (requests[1], requests[1], requests[2], requests[5]):
        calls.remove(request.id)
    assert calls.held_by("a") == 2
    for request in requests[3:]:
        request.phase = SENT
    assert calls.host_lost()[0] == []
    assert len(calls.expire(10.0 + GRACE)) == 3
    assert (calls.held_by("a"), calls.held_by("b")) == (0, 0)
    calls.add(0.0, requests[0])
    calls.take_all()
    assert calls.held_by("b") == 0


def test_request_expires_once_after_its_deadline() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    assert calls.next_expiry == inf
    plain, timed, late = make(calls, 0.0), make(calls, 0.0, 5.0), make(calls, 0.0, 50.0)
    gone = make(calls, 0.0, 4.0)
    calls.remove(gone.id)
    settled = make(calls, 0.0, 5.0)
    assert settle(settled)
    moment = 5.0 + GRACE
    assert calls.next_expiry <= moment
    assert calls.expire(nextafter(moment, 0.0)) == []
    assert calls.expire(moment) == [timed]
    assert timed.is_settled
    assert calls.next_expiry == 10.0 + GRACE
    assert calls.expire(10.0 + GRACE) == [plain]
    assert calls.expire(20.0) == []
    assert calls.next_expiry == 50.0 + GRACE
    assert [*calls] == [late]


def test_stream_with_a_chunk_has_no_further_deadline_here() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    stream, other = make(calls, 0.0), make(calls, 0.0, 50.0)
    stream.has_chunks = True
    assert calls.expire(10.0 + GRACE) == []
    assert calls.find(stream.id) is stream
    assert calls.next_expiry == 50.0 + GRACE
    assert calls.expire(50.0 + GRACE) == [other]
    assert calls.remove(stream.id) is stream
    assert not stream.is_settled


def test_calls_without_timeout_do_not_expire() -> None:
    calls = OpenCalls(None, idempotent=True)
    request = make(calls, 0.0)
    assert calls.next_expiry == inf
    assert calls.expire(1e9) == []
    assert calls.take_all() == [request]
    assert len(calls) == 0


def test_dead_host_uses_one_of_two_tries() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    requests = [make(calls, 0.0), make(calls, 0.0, 5.0), make(calls, 0.0)]
    waiting = make(calls, 0.0)
    for loss in range(1, MOST_LOSSES + 1):
        for request in requests:
            request.phase = SENT
        failed, poisonous = calls.host_lost()
        again = [*calls.unsent.values()]
        assert failed == []
        assert (again, poisonous) == (([], requests) if loss == MOST_LOSSES else (requests, []))
        calls.unsent.clear()
        assert {one.losses for one in requests} == {loss}
    assert all(one.is_settled for one in requests)
    assert [*calls] == [waiting]
    assert (waiting.losses, waiting.phase) == (0, QUEUED)


def test_host_without_workers_dies_of_no_request() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    request = make(calls, 0.0)
    for _ in range(MOST_LOSSES + 1):
        request.phase = SENT
        assert calls.host_lost(had_workers=False) == ([], [])
        assert calls.unsent == {request.id: request}
    assert (request.losses, request.phase) == (0, RETRYING)


def test_non_idempotent_requests_fail_at_once() -> None:
    calls = OpenCalls(10.0, idempotent=False)
    sent, waiting = make(calls, 0.0), make(calls, 0.0)
    sent.phase = SENT
    assert calls.host_lost() == ([sent], [])
    assert [*calls] == [waiting]


def test_many_deadlines_of_ended_requests_take_no_memory() -> None:
    calls = OpenCalls(10.0, idempotent=True)
    kept = make(calls, 0.0, 1000.0)
    for _ in range(10_000):
        calls.remove(make(calls, 0.0, 100.0).id)
    assert len(calls._calls._heap) < 2000
    assert calls.expire(2000.0) == [kept]


class Caller:
    """Makes requests, ends some of them, and checks what becomes of the others."""

    def __init__(self, *, idempotent: bool) -> None:
        self.calls = OpenCalls(10.0, idempotent=idempotent)
        self.now = 0.0
        self.alive: dict[int, Request] = {}
        self._idempotent = idempotent

    def end(self, ended: list[Request]) -> None:
        for request in ended:
            assert request.is_settled
            assert self.alive.pop(request.id) is request

    def add(self, number: int) -> None:
        deadline = self.now + number if number % 2 else None
        request = make(self.calls, self.now, deadline)
        self.alive[request.id] = request

    def send(self, number: int) -> None:
        for request in [*self.alive.values()][number:]:
            request.phase = SENT
            self.calls.unsent.pop(request.id, None)

    def answer(self, number: int) -> None:
        for request in [*self.alive.values()][number : number + 1]:
            assert settle(request)
            assert self.calls.remove(request.id) is request
            del self.alive[request.id]

    def wait(self, number: int) -> None:
        self.now += number / 4
        self.end(self.calls.expire(self.now))
        soonest = min([one.deadline for one in self.alive.values()], default=inf)
        assert soonest + GRACE > self.now
        assert self.now < self.calls.next_expiry <= soonest + GRACE

    def lose(self, _: int) -> None:
        failed, poisonous = self.calls.host_lost()
        self.end(failed + poisonous)
        again = [*self.calls.unsent]
        assert again == sorted(again)
        assert not (failed if self._idempotent else again)

    def close(self, number: int) -> None:
        if number == 0:
            self.end(self.calls.take_all())
            assert not self.alive


EVENTS: list[Callable[[Caller, int], None]] = [
    Caller.add,
    Caller.send,
    Caller.answer,
    Caller.wait,
    Caller.lose,
    Caller.close,
]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30)), max_size=60), st.booleans())
def test_each_request_ends_once_before_its_deadline(
    events: list[tuple[Callable[[Caller, int], None], int]], idempotent: bool
) -> None:
    caller = Caller(idempotent=idempotent)
    for event, number in events:
        event(caller, number)
        assert {one.id for one in caller.calls} == caller.alive.keys()
        assert len(caller.calls) == len(caller.alive)
        assert caller.calls.unsent.keys() <= caller.alive.keys()
        assert all(one.losses < MOST_LOSSES for one in caller.alive.values())
