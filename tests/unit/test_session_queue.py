"""The scheduler with sessions: one worker for each, one request in a batch, no retries."""

import os
import random
from math import inf
from typing import Any

import pytest
from schedulers import make

from fast_batcher._core.policy import make_policy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import (
    Batch,
    Dispatch,
    EndSession,
    Expire,
    Release,
    Request,
    SessionPlace,
)
from fast_batcher.errors import BatcherClosedError, QueueFullError, SessionLostError


def make_sessions(workers: int = 2, **limits: Any) -> Scheduler:
    scheduler = make(workers=workers, **{"max_sessions": 4, **limits})
    scheduler.use_sessions()
    return scheduler


def call(place: SessionPlace, value: Any = "") -> Request:
    request = Request(value, None)
    request.session = place
    return request


def batches_of(scheduler: Scheduler, now: float = 0.0) -> list[Batch]:
    return [action.batch for action in scheduler.poll(now)[0] if isinstance(action, Dispatch)]


def begin(scheduler: Scheduler, count: int = 1, timeout: float = inf) -> list[SessionPlace]:
    """Sessions whose first calls were answered."""
    places = [SessionPlace(timeout) for _ in range(count)]
    assert scheduler.submit(0.0, [call(place) for place in places]) == []
    while batches := batches_of(scheduler):
        for batch in batches:
            scheduler.batch_done(0.0, batch.worker, batch.id)
    return places


def test_sessions_are_spread_over_the_workers_and_stay_there() -> None:
    scheduler = make_sessions()
    places = begin(scheduler, 4)
    assert sorted([place.worker or 0 for place in places]) == [0, 0, 1, 1]
    before = [place.worker for place in places]
    assert scheduler.submit(1.0, [call(place, place) for place in places]) == []
    batches = batches_of(scheduler, 1.0)
    assert all(r.value.worker == batch.worker for batch in batches for r in batch.requests)
    assert [place.worker for place in places] == before
    assert scheduler.session_count == 4


def test_shares_limit_each_other_beside_sessions() -> None:
    scheduler = make_sessions(max_queue_size=8)
    begin(scheduler)
    scheduler._workers.clear()
    accepted = []
    for share in ("flood", "other"):
        scheduler.rank_requests(share)
        requests = [Request("", None) for _ in range(10)]
        for request in requests:
            request.rank(0, share)
        accepted.append(10 - len(scheduler.submit(1.0, requests)))
        assert not scheduler.has_room(1, requests[-1])
    assert accepted == [4, 2]
    assert scheduler.has_room(1, Request("", None))


def test_a_session_waits_for_its_own_worker_while_another_is_free() -> None:
    scheduler = make_sessions(max_batch_size=1)
    first, second, third = begin(scheduler, 3)
    assert first.worker == third.worker != second.worker
    scheduler.submit(1.0, [call(first)])
    (batch,) = batches_of(scheduler, 1.0)
    scheduler.submit(1.0, [call(third)])
    ahead = batches_of(scheduler, 1.0)  # a full batch waits behind the first
    assert [one.worker for one in ahead] == [batch.worker]
    scheduler.submit(1.0, [call(second)])
    assert [one.worker for one in batches_of(scheduler, 1.0)] == [second.worker]


def test_without_a_place_the_first_call_is_rejected_with_a_prediction() -> None:
    scheduler = make_sessions(1, max_sessions=2)
    first, second = begin(scheduler, 2)
    ((_, rejection),) = scheduler.submit(1.0, [call(SessionPlace(inf))])
    assert rejection.kind is QueueFullError
    assert "max_sessions=2" in rejection.text
    scheduler.end_session(8.0, first)
    assert scheduler.submit(8.0, [call(SessionPlace(inf))]) == []
    ((_, rejection),) = scheduler.submit(9.0, [call(SessionPlace(inf))])
    assert rejection.retry_after == 4.0  # one of two places after 8 s
    assert scheduler.submit(9.0, [call(second)]) == []


def test_first_calls_wait_for_a_worker_and_then_for_a_place() -> None:
    scheduler = make_sessions(0, max_sessions=1)
    places = [SessionPlace(inf) for _ in range(3)]
    assert scheduler.submit(0.0, [call(place) for place in places]) == []
    assert batches_of(scheduler) == []
    scheduler.worker_ready(1.0, 7)
    (batch,) = batches_of(scheduler, 1.0)
    assert [request.session for request in batch.requests] == places[:1]
    scheduler.batch_done(1.0, 7, batch.id)
    scheduler.end_session(1.0, places[0])
    actions, _ = scheduler.poll(1.0)
    assert actions[0] == EndSession(7, places[0].id)
    assert [a.batch.requests[0].session for a in actions[1:] if isinstance(a, Dispatch)] == [
        places[1]
    ]


def test_first_calls_wait_for_a_stalled_worker_that_has_a_place() -> None:
    scheduler = make_sessions(1, max_sessions=1, timeout=5.0)
    assert scheduler.submit(0.0, [Request("", None)]) == []
    (running,) = batches_of(scheduler)
    scheduler.poll(5.0)
    assert scheduler.ready_count == 0  # its caller has gone
    place, other = SessionPlace(inf), SessionPlace(inf)
    assert scheduler.submit(6.0, [call(place)]) == []
    assert batches_of(scheduler, 6.0) == []
    scheduler.batch_done(7.0, 0, running.id)
    (batch,) = batches_of(scheduler, 7.0)
    assert [request.session for request in batch.requests] == [place]
    ((_, rejection),) = scheduler.submit(7.0, [call(other)])
    assert rejection.kind is QueueFullError


def test_an_idle_session_ends_and_one_that_is_used_does_not() -> None:
    scheduler = make_sessions(1)
    idle, used = begin(scheduler, 2, timeout=10.0)
    scheduler.submit(9.0, [call(used)])
    batches_of(scheduler, 9.0)
    actions, _ = scheduler.poll(10.0)
    assert actions == [EndSession(0, idle.id)]
    assert idle.end == "it was idle for its timeout of 10.0 seconds"
    assert scheduler.poll(19.0)[0] == []  # its call runs
    assert used.end is None
    ((_, rejection),) = scheduler.submit(20.0, [call(idle)])
    assert rejection.kind is SessionLostError


def test_a_session_that_has_waited_for_its_worker_ends_by_its_timeout() -> None:
    scheduler = make_sessions(0)
    place = SessionPlace(10.0)
    scheduler.submit(0.0, [call(place)])
    scheduler.poll(0.0)
    scheduler.worker_ready(5.0, 7)
    (batch,) = batches_of(scheduler, 5.0)
    scheduler.batch_done(6.0, 7, batch.id)
    _, wake_at = scheduler.poll(6.0)
    assert wake_at == 15.0  # it has had an answer since
    assert scheduler.poll(15.0) == ([], 16.0)
    assert scheduler.poll(16.0)[0] == [EndSession(7, place.id)]


def test_a_new_session_whose_first_call_finds_the_queue_full_has_no_place() -> None:
    scheduler = make_sessions(1, max_queue_size=1, max_batch_size=1)
    (old,) = begin(scheduler)
    places = [SessionPlace(inf) for _ in range(3)]
    for place in (old, *places):
        scheduler.submit(1.0, [call(place)])
        scheduler.poll(1.0)
    assert scheduler.session_count == 3  # one runs, one waits behind it, one in the queue
    assert [place.worker for place in places] == [0, 0, None]


@pytest.mark.parametrize("how", ["lost", "retired"])
def test_with_their_worker_sessions_end_and_nothing_is_retried(how: str) -> None:
    scheduler = make_sessions(1, max_batch_size=2)
    running, waiting, idle = begin(scheduler, 3)
    (sent, queued) = call(running), call(waiting)
    scheduler.submit(1.0, [sent])
    (batch,) = batches_of(scheduler, 1.0)
    scheduler.submit(1.0, [queued])
    if how == "lost":
        assert scheduler.worker_lost(0) == ([sent, queued], [])
    else:
        assert scheduler.retire(0, inf) == [queued]
        assert scheduler.batch_done(2.0, 0, batch.id) is batch
        assert not sent.is_settled  # it is answered
    scheduler.worker_ready(2.0, 1)
    assert scheduler.poll(2.0)[0] == []
    kinds = {rejection.kind for _, rejection in scheduler.submit(3.0, [call(idle), call(running)])}
    assert kinds == {SessionLostError}
    assert scheduler.session_count == scheduler.waiting == 0


def test_a_failed_batch_ends_its_sessions_and_is_not_divided() -> None:
    scheduler = make_sessions(1)
    places = begin(scheduler, 2)
    requests = [call(place) for place in places]
    scheduler.submit(1.0, requests)
    (batch,) = batches_of(scheduler, 1.0)
    scheduler.batch_done(1.0, 0, batch.id, True)
    failed = scheduler.batch_raised(1.0, batch, out_of_memory=False, is_fatal=False)
    assert failed == requests
    scheduler.batch_failed(1.0, batch)
    assert scheduler.poll(1.0)[0] == [EndSession(0, place.id) for place in places]


def test_sessions_go_on_while_the_batcher_drains_and_no_new_one_begins() -> None:
    scheduler = make_sessions(1)
    (place,) = begin(scheduler)
    scheduler.begin_drain()
    rejected = scheduler.submit(1.0, [call(place), call(SessionPlace(inf)), Request("", None)])
    assert [rejection.kind for _, rejection in rejected] == [BatcherClosedError] * 2
    assert [len(batch.requests) for batch in batches_of(scheduler, 1.0)] == [1]


def test_requests_without_a_session_and_with_one_take_turns() -> None:
    scheduler = make_sessions(1, max_batch_size=1)
    (place,) = begin(scheduler)
    mine, others = call(place), [Request("", None) for _ in range(9)]
    scheduler.submit(1.0, [others[0], mine, *others[1:]])
    order = []
    while batches := batches_of(scheduler, 1.0):
        for batch in batches:
            order += batch.requests
            scheduler.batch_done(1.0, 0, batch.id)
    # At most one batch behind the one that runs goes before it.
    assert order.index(mine) <= 2
    assert sorted(order, key=lambda request: request.id) == [others[0], mine, *others[1:]]


class Rule:
    """Holds each batch for half a second."""

    def hold(self, *_: object) -> float:
        return 0.5


# A policy, and the longest wait: the hold of 1 s, the step of the clock that it needs, and batches.
# The adaptive policy keeps one hold, and holds nothing.
@pytest.mark.parametrize(
    ("policy", "longest"), [("adaptive", 0.1), ("fixed", 1.2), ("greedy", 0.1), (Rule(), 1.2)]
)
def test_of_several_queues_a_policy_holds_none_beyond_its_limit(
    policy: Any, longest: float
) -> None:
    scheduler = make(make_policy(policy, 1.0), workers=2, max_batch_size=4, max_sessions=9)
    scheduler.use_sessions()
    now, answered, held = 0.0, 0, 0
    arrivals: dict[SessionPlace, float] = {}
    places = [SessionPlace(inf) for _ in range(6)]
    for _ in range(200):
        for place in places:
            if place not in arrivals:
                arrivals[place] = now
                assert scheduler.submit(now, [call(place, place)]) == []
        batches = batches_of(scheduler, now)
        for batch in batches:
            now += 0.01
            scheduler.batch_done(now, batch.worker, batch.id)
            for request in batch.requests:
                assert now - arrivals.pop(request.value) < longest
                answered += 1
                held += batch.release is Release.HOLD
        now += 0.1 * (not batches)
    assert answered > 50
    assert (held > 0) == isinstance(policy, Rule)  # it is asked for each queue


class World:
    """Callers, workers with states, and the scheduler between them, at random."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        rule: Any = rng.choice(["adaptive", "greedy", "fixed", Rule()])
        policy = make_policy(rule, rng.choice([0.0, 2.0]))
        limits: dict[str, Any] = {
            "infer_timeout": rng.choice([None, 20.0]),
            "timeout": rng.choice([8.0, 30.0]),
        }
        self.scheduler = make(policy, workers=0, max_batch_size=3, max_sessions=3, **limits)
        self.scheduler.use_sessions()
        self.now = 0.0
        self.workers = 0
        # Batches of each worker, and the ends of sessions, in order; the sessions of each batch;
        # the numbers that the states of sessions have seen, None after a failed batch.
        self.queues: dict[int, list[Batch | EndSession]] = {}
        self.sent: dict[int, list[int]] = {}
        self.states: dict[tuple[int, int], list[int] | None] = {}
        self.calls: dict[SessionPlace, Request] = {}
        self.counts: dict[SessionPlace, int] = {}
        self.ended: list[Request] = []
        self.rejected: list[Request] = []
        self.submitted = 0

    def poll(self) -> None:
        actions, _ = self.scheduler.poll(self.now)
        for action in actions:
            if isinstance(action, Dispatch):
                batch = action.batch
                sessions = [r.session for r in batch.requests if r.session is not None]
                assert len({*sessions}) == len(sessions)
                assert all(session.worker == batch.worker for session in sessions)
                self.queues[batch.worker].append(batch)
                self.sent[batch.id] = batch.make_note()[1]
            elif isinstance(action, Expire):
                self.ended.append(action.request)
            elif isinstance(action, EndSession) and action.worker in self.queues:
                # Behind the batches of the worker.
                self.queues[action.worker].append(action)

    def speak(self) -> None:
        places = [place for place in self.counts if place not in self.calls]
        if not places or self.rng.random() < 0.3:
            places = [SessionPlace(self.rng.choice([inf, 5.0]))]
            self.counts[places[0]] = 0
        place = self.rng.choice(places)
        self.counts[place] += 1
        request = call(place, self.counts[place])
        self.calls[place] = request
        self.submitted += 1
        if self.rng.random() < 0.1:
            request.fix_deadline(self.now, 1.0, None)
        for rejected, _ in self.scheduler.submit(self.now, [request]):
            self.rejected.append(rejected)

    def start(self) -> None:
        if len(self.queues) < 3:
            self.workers += 1
            self.queues[self.workers] = []
            self.scheduler.worker_ready(self.now, self.workers)

    def compute(self) -> None:
        busy = [worker for worker, queue in self.queues.items() if queue]
        if not busy:
            return
        worker = self.rng.choice(busy)
        batch = self.queues[worker].pop(0)
        if isinstance(batch, EndSession):
            self.states.pop((worker, batch.session_id), None)
            return
        known = self.sent.pop(batch.id)
        fails = self.rng.random() < 0.1
        done = self.scheduler.batch_done(self.now, worker, batch.id, fails)
        assert done is batch
        for request, session in zip(batch.requests, known, strict=True):
            key = worker, session
            seen = self.states.setdefault(key, [])
            if seen is None:
                # The worker answers with an error: an earlier call has failed meanwhile.
                assert request.session is not None
                assert request.session.end is not None
                continue
            assert not seen or seen[-1] < request.value, "a call came twice or too early"
            seen.append(request.value)
            if fails:
                self.states[key] = None
        if fails:
            failed = self.scheduler.batch_raised(
                self.now, batch, out_of_memory=False, is_fatal=False
            )
            assert failed == [request for request in batch.requests if not request.is_settled]
            self.ended += self.scheduler.batch_failed(self.now, batch)
        self.ended += batch.settle_open()

    def leave(self) -> None:
        """A caller cancels its call, or ends its session."""
        if not self.counts:
            return
        place = self.rng.choice([*self.counts])
        request = self.calls.get(place)
        if request is not None and self.scheduler.cancel(request):
            self.ended.append(request)
        if self.rng.random() < 0.5:
            self.ended += self.scheduler.end_session(self.now, place)
            del self.counts[place]

    def lose(self) -> None:
        if self.queues and self.rng.random() < 0.3:
            worker = self.rng.choice([*self.queues])
            if self.rng.random() < 0.3:
                self.ended += self.scheduler.retire(worker, inf)
            batches = [one for one in self.queues.pop(worker) if isinstance(one, Batch)]
            failed, poisonous = self.scheduler.worker_lost(worker)
            assert not poisonous
            self.ended += failed
            assert all(request.is_settled for batch in batches for request in batch.requests)

    def step(self) -> None:
        self.now += self.rng.choice([0.0, 0.0, 0.1, 1.0])
        weights = [6, 2, 6, 1, 1]
        ways = [self.speak, self.start, self.compute, self.leave, self.lose]
        self.rng.choices(ways, weights)[0]()
        self.poll()
        for place, request in [*self.calls.items()]:
            if request.is_settled or request in self.rejected:
                del self.calls[place]


@pytest.mark.parametrize("seed", range(int(os.environ.get("SESSION_ROUNDS", "100"))))
def test_random_schedules(seed: int) -> None:
    """No call on another state, none twice, none out of order, and every call ends once."""
    world = World(seed)
    for _ in range(150):
        world.step()
    while any(world.queues.values()):  # they forget the sessions that have failed
        world.compute()
        world.poll()
    assert None not in [seen for key, seen in world.states.items() if key[0] in world.queues]
    world.ended += world.scheduler.close()
    ended = world.ended + world.rejected
    assert len(ended) == len({*ended}) == world.submitted
    assert world.scheduler.session_count == 0
