"""The scheduler with streams: batches of one request, of which a worker has many at a time."""

import random
from math import inf
from typing import Any

import pytest
from schedulers import make_request

from fast_batcher._core.policy import make_policy
from fast_batcher._core.retries import MOST_DEATHS
from fast_batcher._core.stream_scheduler import StreamScheduler
from fast_batcher._core.values import (
    Dispatch,
    Expire,
    ExpiryReason,
    Limits,
    Replace,
    Request,
    Skip,
    most_streams,
)

PLACES = 4


def make_scheduler(
    *,
    timeout: float | None = None,
    infer_timeout: float | None = None,
    most_cost: float = inf,
    max_latency: float | None = None,
    max_queue_size: int = 1000,
    ahead: bool = True,
) -> StreamScheduler:
    return StreamScheduler(
        make_policy("greedy", None),
        Limits(
            max_batch_size=1,
            max_queue_size=max_queue_size,
            max_latency=max_latency,
            places=PLACES,
            timeout=timeout,
            infer_timeout=infer_timeout,
            batches_per_worker=most_streams(PLACES) if ahead else PLACES,
            most_stream_cost=most_cost,
        ),
    )


def submit(scheduler: StreamScheduler, count: int, now: float = 0.0) -> list[Request]:
    requests = [Request(number, None) for number in range(count)]
    assert scheduler.submit(now, requests) == []
    return requests


def dispatched(scheduler: StreamScheduler, now: float = 0.0) -> list[Any]:
    return [action.batch for action in scheduler.poll(now)[0] if isinstance(action, Dispatch)]


def test_a_worker_gets_a_stream_for_each_place_and_few_ahead() -> None:
    scheduler = make_scheduler()
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, 10)
    batches = dispatched(scheduler)
    assert [len(batch.requests) for batch in batches] == [1] * most_streams(PLACES)
    assert scheduler.batch_done(1.0, 1, batches[2].id) is batches[2]
    assert [batch.requests[0].value for batch in dispatched(scheduler, 1.0)] == [5]


def test_the_worker_with_the_fewest_streams_gets_the_next() -> None:
    scheduler = make_scheduler()
    for worker in (1, 2):
        scheduler.worker_ready(0.0, worker)
    submit(scheduler, 6)
    assert sorted(batch.worker for batch in dispatched(scheduler)) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("ahead", [False, True])
def test_beside_others_a_worker_gets_no_stream_ahead(*, ahead: bool) -> None:
    """A stream that no worker can begin goes to the worker that has room first."""
    scheduler = make_scheduler(ahead=ahead)
    for worker in (1, 2):
        scheduler.worker_ready(0.0, worker)
    submit(scheduler, 2 * PLACES + 1)
    batches = dispatched(scheduler)
    assert len(batches) == 2 * PLACES
    last = batches[-1]
    assert scheduler.batch_done(1.0, last.worker, last.id) == last
    assert [batch.worker for batch in dispatched(scheduler, 1.0)] == [last.worker]


def test_a_worker_of_a_range_gets_no_stream_ahead() -> None:
    """A worker that is added begins the stream that waits."""
    scheduler = make_scheduler(ahead=False)
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, PLACES + 1)
    assert len(dispatched(scheduler)) == PLACES
    scheduler.worker_ready(1.0, 2)
    assert [batch.worker for batch in dispatched(scheduler, 1.0)] == [2]


def test_a_worker_that_is_not_needed_finishes_its_streams() -> None:
    """The worker with the fewest streams gets no more, unless it is needed again."""
    scheduler = make_scheduler(ahead=False)
    for worker in (1, 2):
        scheduler.worker_ready(0.0, worker, index=worker)
    submit(scheduler, 3)
    batches = dispatched(scheduler)
    (last,) = [batch for batch in batches if batch.worker == 2]
    assert scheduler.let_leave(0.0, 1, 1) == []
    assert scheduler.ready_count == 1
    submit(scheduler, PLACES)
    assert {batch.worker for batch in dispatched(scheduler)} == {1}
    assert scheduler.queue_size == 2
    assert scheduler.let_leave(0.0, 0, 2) == []
    assert [batch.worker for batch in dispatched(scheduler)] == [2, 2]
    assert scheduler.needed_workers == 2
    for batch in [*scheduler.batches_of(2)]:
        assert scheduler.batch_done(1.0, 2, batch.id) == batch
    assert last.worker == 2
    assert scheduler.let_leave(1.0, 1, 1) == [2]


@pytest.mark.parametrize(("live", "needed"), [(0, 1), (PLACES - 1, 1), (PLACES, 2)])
def test_workers_are_needed_for_the_live_streams_and_one_more(live: int, needed: int) -> None:
    scheduler = make_scheduler(ahead=False)
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, live)
    dispatched(scheduler)
    assert scheduler.needed_workers == needed


def test_a_stream_goes_to_the_worker_with_room_for_its_cost() -> None:
    scheduler = make_scheduler(most_cost=100.0)
    for worker in (1, 2):
        scheduler.worker_ready(0.0, worker)
    requests = submit(scheduler, 4)
    for request, cost in zip(requests, (95.0, 10.0, 10.0, 90.0), strict=True):
        request.cost = cost
    first, *others = dispatched(scheduler)
    assert [batch.requests[0].cost for batch in others] == [10.0, 10.0]
    assert {batch.worker for batch in others} == {1, 2} - {first.worker}
    # A stream that is tried again goes where it fits, before the queue.
    assert scheduler.batch_done(1.0, first.worker, first.id, has_raised=True) == first
    assert scheduler.stream_evicted(first) == []
    assert [batch.requests[0].cost for batch in dispatched(scheduler, 1.0)] == [95.0]


def test_a_stream_whose_caller_has_gone_is_to_leave_and_keeps_its_place_until_it_has() -> None:
    scheduler = make_scheduler()
    scheduler.worker_ready(0.0, 1)
    first, *_ = submit(scheduler, 6)
    batch, *_ = dispatched(scheduler)
    assert scheduler.cancel(first)
    assert scheduler.poll(1.0)[0] == [Skip(batch)]
    assert scheduler.batch_done(1.0, 1, batch.id, has_raised=True) is batch
    assert len(dispatched(scheduler, 1.0)) == 1


def test_streams_of_a_retired_worker_end_at_a_moment() -> None:
    scheduler = make_scheduler()
    scheduler.worker_ready(0.0, 1)
    requests = submit(scheduler, 2)
    batches = dispatched(scheduler)
    scheduler.retire(1, 20.0)
    actions, wake_at = scheduler.poll(19.0)
    assert (actions, wake_at) == ([], 20.0)
    actions, wake_at = scheduler.poll(20.0)
    ended = [Expire(request, ExpiryReason.RETIRED) for request in requests]
    assert (actions, wake_at) == ([*ended, *map(Skip, batches)], None)


def test_a_renewed_deadline_counts() -> None:
    scheduler = make_scheduler(timeout=10.0)
    scheduler.worker_ready(0.0, 1)
    (request,) = submit(scheduler, 1)
    (batch,) = dispatched(scheduler)
    scheduler.stepped(5.0, 1, [batch], {})
    request.deadline = 15.0
    actions, wake_at = scheduler.poll(10.0)
    assert (actions, wake_at) == ([], 15.0)
    scheduler.stepped(14.0, 1, [], {})
    actions, _ = scheduler.poll(15.0)
    assert [type(action) for action in actions] == [Expire, Skip]
    assert batch.open_count == 0


def test_infer_timeout_is_that_of_one_step() -> None:
    scheduler = make_scheduler(infer_timeout=5.0)
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, 2)
    batches = dispatched(scheduler)
    scheduler.stepped(4.0, 1, batches, {})
    assert scheduler.poll(8.0) == ([], 9.0)
    actions, _ = scheduler.poll(9.0)
    assert actions == [Expire(batches[0].requests[0], ExpiryReason.INFER_TIMEOUT), Replace(1)]
    # What comes from a worker that is being replaced does not excuse it.
    scheduler.stepped(10.0, 1, batches, {})
    assert scheduler.poll(20.0) == ([], None)
    scheduler.stepped(20.0, 2, [], {})  # a worker that is gone


def test_a_late_step_ends_the_streams_that_cannot_begin_again() -> None:
    scheduler = make_scheduler(infer_timeout=5.0)
    scheduler.worker_ready(0.0, 1)
    requests = submit(scheduler, 3)
    batches = dispatched(scheduler)
    requests[1].has_chunks = True
    scheduler.stepped(1.0, 1, [batches[1]], {})
    expired = [action.request for action in scheduler.poll(6.0)[0] if isinstance(action, Expire)]
    assert expired == requests[:2]
    assert scheduler.worker_lost(1, batches[2].id, batches[2].id) == ([], [])
    scheduler.worker_ready(7.0, 2)
    assert [batch.requests for batch in dispatched(scheduler, 7.0)] == [[requests[2]]]


def test_a_paused_stream_whose_caller_has_gone_stalls_no_worker() -> None:
    scheduler = make_scheduler(timeout=5.0)
    scheduler.worker_ready(0.0, 1)
    (request,) = submit(scheduler, 1)
    (batch,) = dispatched(scheduler)
    scheduler.pause(batch)
    actions, _ = scheduler.poll(5.0)
    assert actions == [Expire(request, ExpiryReason.RUNNING), Skip(batch)]
    assert scheduler.poll(20.0) == ([], None)
    assert scheduler.ready_count == 1


def test_infer_timeout_does_not_count_while_all_streams_are_paused() -> None:
    scheduler = make_scheduler(infer_timeout=5.0)
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, 2)
    first, second = dispatched(scheduler)
    scheduler.pause(first)
    assert scheduler.poll(4.0) == ([], 5.0)
    scheduler.resume(4.0, first)  # beside a stream that goes on with its step
    assert scheduler.poll(4.0) == ([], 5.0)
    scheduler.pause(first)
    scheduler.pause(second)
    assert scheduler.poll(5.0) == ([], None)
    was_due = scheduler.is_poll_due
    scheduler.resume(20.0, first)
    assert (was_due, scheduler.is_poll_due) == (False, True)  # the shell has no timer
    assert scheduler.poll(24.0) == ([], 25.0)
    scheduler.pause(first)
    assert scheduler.poll(30.0) == ([], None)
    # A newcomer begins a step.
    submit(scheduler, 1, 40.0)
    (third,) = dispatched(scheduler, 40.0)
    assert scheduler.poll(44.0) == ([], 45.0)
    assert scheduler.batch_done(44.0, 1, third.id) is third
    assert scheduler.batch_done(44.0, 1, first.id) is first
    assert scheduler.poll(50.0) == ([], None)
    scheduler.resume(60.0, second)
    assert scheduler.poll(60.0) == ([], 65.0)


def test_a_target_keeps_no_stream_from_a_busy_worker() -> None:
    scheduler = make_scheduler()
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, 1)
    assert len(dispatched(scheduler)) == 1
    assert scheduler.submit(0.0, [make_request("named", 5.0)]) == []
    assert len(dispatched(scheduler)) == 1


def test_after_a_death_streams_with_chunks_fail_and_others_begin_one_by_one() -> None:
    scheduler = make_scheduler()
    scheduler.worker_ready(0.0, 1)
    requests = submit(scheduler, 4)
    batches = dispatched(scheduler)
    requests[0].has_chunks = True
    failed, poisonous = scheduler.worker_lost(1, taken=batches[3].id, begun=batches[2].id)
    assert (failed, poisonous) == ([requests[0]], [])
    scheduler.worker_ready(1.0, 2)
    (trial,) = dispatched(scheduler, 1.0)
    assert trial.requests == [requests[1]]
    scheduler.stepped(2.0, 2, [trial], {})
    # The next suspect, and no further one.
    (second,) = dispatched(scheduler, 2.0)
    assert second.requests == [requests[2]]
    # It kills again: it alone is guilty of two deaths.
    failed, poisonous = scheduler.worker_lost(2, taken=second.id, begun=second.id)
    assert (failed, poisonous) == ([], [requests[2]])
    assert requests[2].deaths == MOST_DEATHS
    scheduler.worker_ready(3.0, 3)
    # The first of these has stepped before the second death, and the other had not begun.
    assert [batch.requests[0] for batch in dispatched(scheduler, 3.0)] == [requests[1]]


def test_a_worker_gets_streams_until_they_cost_the_most() -> None:
    scheduler = make_scheduler(most_cost=10.0)
    scheduler.worker_ready(0.0, 1)
    requests = submit(scheduler, 4)
    for request in requests:
        request.cost = 6.0
    batches = dispatched(scheduler)
    assert [batch.requests for batch in batches] == [requests[:1], requests[1:2]]
    scheduler.stepped(0.0, 1, [], {batches[0].id: 12.0, 99: 1.0})
    assert scheduler.batch_done(1.0, 1, batches[1].id) is batches[1]
    assert dispatched(scheduler, 1.0) == []
    scheduler.stepped(1.0, 1, [], {batches[0].id: 1.0})
    assert len(dispatched(scheduler, 1.0)) == 2


@pytest.mark.parametrize(("cost", "is_held"), [(9.0, True), (4.0, False)])
def test_a_late_stream_is_told_that_costs_have_held_it_back(cost: float, *, is_held: bool) -> None:
    scheduler = make_scheduler(most_cost=10.0, timeout=5.0)
    scheduler.worker_ready(0.0, 1)
    for request in submit(scheduler, 2):
        request.cost = 4.0
    first, second = dispatched(scheduler)
    scheduler.stepped(1.0, 1, [first, second], {second.id: cost})
    first.requests[0].deadline = 20.0
    (expired, *_) = [one for one in scheduler.poll(5.0)[0] if isinstance(one, Expire)]
    assert expired.request is second.requests[0]
    text = "cost 13, and max_batch_cost=10; raise it"
    assert (expired.rejection is not None and text in expired.rejection.text) == is_held


def test_a_late_step_is_no_fault_of_costs() -> None:
    scheduler = make_scheduler(most_cost=10.0, timeout=5.0)
    scheduler.worker_ready(0.0, 1)
    for request in submit(scheduler, 2):
        request.cost = 9.0
    first, _ = dispatched(scheduler)
    scheduler.stepped(1.0, 1, [first], {})
    first.requests[0].deadline = 6.0
    expired = [one for one in scheduler.poll(6.0)[0] if isinstance(one, Expire)]
    found = {one.request.value: one.rejection for one in expired}
    assert found[0] is None
    assert found[1] is not None


def test_an_evicted_stream_begins_again_before_the_queue_unless_it_has_chunks() -> None:
    scheduler = make_scheduler(timeout=10.0)
    scheduler.worker_ready(0.0, 1)
    requests = submit(scheduler, 8)
    first, second, third, *_ = dispatched(scheduler)
    requests[1].has_chunks = True
    assert scheduler.cancel(requests[2])
    for batch, failed in ((first, []), (second, [requests[1]]), (third, [])):
        assert scheduler.batch_done(1.0, 1, batch.id, has_raised=True) == batch
        assert scheduler.stream_evicted(batch) == failed
    values = [batch.requests[0].value for batch in dispatched(scheduler, 1.0)]
    assert values == [0, 5, 6]
    assert scheduler.next_expiry == 10.0


def test_streams_without_a_place_in_time_are_rejected() -> None:
    scheduler = make_scheduler(max_latency=10.0)
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, PLACES)
    for batch in dispatched(scheduler):
        assert scheduler.batch_done(8.0, 1, batch.id) is batch
    requests = [Request(number, None) for number in range(9)]
    requests[8].priority = 1
    rejected = scheduler.submit(10.0, requests)
    # Places are free at 10, for four of them, and at 18; the next ones at 26.
    assert rejected[0][1].to_error().args == (
        "the first chunk would take 16 seconds, and 10 are left; 8 requests wait already",
    )
    assert [(late.value, why.retry_after) for late, why in rejected] == [(8, 6.0)]
    assert len(dispatched(scheduler, 10.0)) == most_streams(PLACES)
    # The queue has three; higher priorities overtake them.
    urgent = [Request(9, None), Request(10, None)]
    urgent[0].priority = 1
    assert [late.value for late, _ in scheduler.submit(10.0, urgent)] == [10]


def test_a_full_queue_tells_when_a_place_will_be_free() -> None:
    scheduler = make_scheduler(max_queue_size=9)
    scheduler.worker_ready(0.0, 1)
    submit(scheduler, 1)
    (batch,) = dispatched(scheduler)
    full = [Request(number, None) for number in range(10)]
    assert scheduler.submit(1.0, full)[0][1].retry_after is None
    assert scheduler.batch_done(8.0, 1, batch.id) is batch
    assert len(dispatched(scheduler, 8.0)) == most_streams(PLACES)
    full = [Request(number, None) for number in range(9)]
    assert [why.retry_after for _, why in scheduler.submit(9.0, full)] == [7.0] * 4


class Driver:
    """Workers that do what the scheduler wants, and random events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = make_scheduler(timeout=self.rng.choice([None, 30.0]))
        self.now = 0.0
        self.requests: list[Request] = []
        self.ended: list[Request] = []
        # The streams of each worker.
        self.workers: dict[int, list[Any]] = {}
        self.started = 0

    def arrive(self) -> None:
        count = len(self.requests)
        new = [Request(count + number, None) for number in range(self.rng.randint(1, 4))]
        self.requests += new
        assert self.scheduler.submit(self.now, new) == []

    def start(self) -> None:
        if len(self.workers) < 3:
            self.started += 1
            self.scheduler.worker_ready(self.now, self.started)
            self.workers[self.started] = []

    def die(self) -> None:
        if self.workers:
            worker, batches = self.workers.popitem()
            taken = self.rng.choice([None, *[batch.id for batch in batches]])
            begun = self.rng.choice([None, taken])
            failed, poisonous = self.scheduler.worker_lost(worker, taken, begun)
            assert all(request.has_chunks for request in failed)
            self.ended += failed + poisonous

    def leave(self) -> None:
        if self.requests:
            request = self.rng.choice(self.requests)
            if self.scheduler.cancel(request):
                self.ended.append(request)

    def step(self) -> None:
        """Let a worker send chunks of the streams that have places, and end some."""
        if not self.workers:
            return
        worker = self.rng.choice([*self.workers])
        steps = self.workers[worker][:PLACES]
        self.scheduler.stepped(self.now, worker, steps, {})
        for batch in steps:
            request = batch.requests[0]
            if not request.is_settled:
                request.has_chunks = True
                request.deadline = self.now + 30.0
                if self.rng.random() < 0.2:
                    self.finish(batch)
                    request.is_settled = True
                    self.ended.append(request)

    def evict(self) -> None:
        """Let the youngest stream of a worker make room."""
        streams = self.workers[self.rng.choice([*self.workers])] if self.workers else []
        if len(streams) > 1:
            batch = streams[-1]
            self.finish(batch)
            failed = self.scheduler.stream_evicted(batch)
            assert all(request.has_chunks for request in failed)
            for request in failed:
                if not request.is_settled:
                    request.is_settled = True
                    self.ended.append(request)

    def finish(self, batch: Any) -> None:
        assert self.scheduler.batch_done(self.now, batch.worker, batch.id) == batch
        self.workers[batch.worker].remove(batch)

    def poll(self) -> None:
        for action in self.scheduler.poll(self.now)[0]:
            if isinstance(action, Dispatch):
                streams = self.workers[action.batch.worker]
                streams.append(action.batch)
                assert len(streams) <= most_streams(PLACES)
                assert len(action.batch.requests) == 1
                assert sum(stream.is_on_trial for stream in streams) <= 1
            elif isinstance(action, Expire):
                self.ended.append(action.request)
            elif isinstance(action, Skip):
                self.finish(action.batch)


@pytest.mark.parametrize("seed", range(200))
def test_random_events_lose_no_stream_and_fill_no_worker(seed: int) -> None:
    """Every accepted request ends exactly once, and a worker never has too many streams."""
    driver = Driver(seed)
    events = [driver.arrive, driver.start, driver.die, driver.leave, driver.step, driver.evict]
    for _ in range(200):
        driver.now += driver.rng.random()
        driver.rng.choices(events, [35, 10, 5, 10, 35, 5])[0]()
        driver.poll()
    driver.ended += driver.scheduler.close()
    assert sorted(map(id, driver.ended)) == sorted(map(id, driver.requests))
    assert all(request.is_settled for request in driver.requests)
