"""Refusing and dropping what would be late: rule by rule, and whole services in virtual time."""

import itertools
import random
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

import pytest
from marks import long
from schedulers import make, make_request, poll_batches, reject, settle
from virtual_time import Seconds, World, poisson, with_knee

from fast_batcher._core.policy import FixedPolicy, GreedyPolicy, Load
from fast_batcher._core.prediction import SAFETY_FACTOR, Backlog, BatchTimes, Method, Methods
from fast_batcher._core.queue import BatchPacker, PaddedPacker, Queue, RequestQueue, WorkAhead
from fast_batcher._core.scheduler import LATE_ARRIVAL, Scheduler
from fast_batcher._core.service_model import Shape
from fast_batcher._core.values import (
    Batch,
    Dispatch,
    Expire,
    ExpiryReason,
    Rejection,
    Release,
    Request,
)
from fast_batcher.errors import DeadlineExceededError, QueueFullError

# Batches that a scheduler sees before a test: a service model is sure of itself after ten.
LESSONS = 12


def linear(size: int) -> float:
    """Seconds of a batch: half of one is fixed."""
    return 0.5 + 0.5 * size


def learned(
    seconds: float = 0.0, *sizes: int, most: int = 4, packer: BatchPacker | None = None
) -> BatchTimes:
    """What is known after batches of these sizes; they took `linear`, or so many seconds."""
    times = BatchTimes(Methods([Method("infer", None, most)]), packer)
    for size in sizes or (1, 2, 4):
        for _ in range(LESSONS):
            times.by_shape.observe(Shape(size, 1.0, size), seconds or linear(size))
    return times


def knows_nothing(most: int = 4) -> BatchTimes:
    return BatchTimes(Methods([Method("infer", None, most)]), None)


def arrive(
    scheduler: Scheduler, now: float, count: int = 1, deadline: float | None = None
) -> Batch | None:
    """Requests that arrive together and are accepted; the batch that leaves then."""
    requests = [make_request(deadline=deadline) for _ in range(count)]
    assert scheduler.submit(now, requests) == []
    batches = poll_batches(scheduler, now)
    return batches[0] if batches else None


def refused_at(
    scheduler: Scheduler, now: float, count: int = 1, deadline: float | None = None
) -> list[tuple[Request, Rejection]]:
    return scheduler.submit(now, [make_request(deadline=deadline) for _ in range(count)])


def backlog(
    waiting: int = 0,
    delay: float = 0.0,
    workers: int = 1,
    *,
    is_idle: bool = False,
    is_behind: bool = False,
) -> Backlog:
    return Backlog(waiting, float(waiting), delay, workers, is_idle, is_behind)


def predict(times: BatchTimes, backlog: Backlog, more: int = 0) -> float:
    """For a request behind all that wait and some more, all of them equals."""
    ahead = backlog.requests + more
    return times.seconds_until_answered(backlog, WorkAhead(ahead, float(ahead), 1), 1.0)


# What is predicted.


def test_first_request_takes_a_batch_of_one() -> None:
    assert predict(learned(), backlog()) == pytest.approx(linear(1), rel=0.02)


@pytest.mark.parametrize(
    ("waiting", "more", "full", "own"),
    [
        pytest.param(1, 0, 0, 2, id="with the one that waits"),
        pytest.param(9, 0, 2, 4, id="in the third batch, which will fill"),
        pytest.param(5, 4, 2, 4, id="behind others of its turn"),
    ],
)
def test_prediction_includes_all_batches_before_the_request(
    waiting: int, more: int, full: int, own: int
) -> None:
    predicted = predict(learned(), backlog(waiting, 3.0), more)
    takes = SAFETY_FACTOR * (3.0 + full * linear(4) + linear(own))
    assert predicted == pytest.approx(takes, rel=0.01)


def test_scattered_times_are_predicted_by_their_quantile() -> None:
    times = knows_nothing()
    for number in range(400):
        times.by_size.observe(4, 2.0 if number % 10 else 4.0)
    assert times.by_size.median(4) == pytest.approx(2.0, rel=0.1)
    assert predict(times, backlog(8)) > SAFETY_FACTOR * 3 * 3.0, "two before it and its own"


def test_prediction_needs_a_batch_and_a_worker() -> None:
    assert predict(knows_nothing(), backlog(100)) == 0.0
    without_worker = backlog(100, inf, workers=0)
    assert predict(learned(), without_worker) == 0.0
    assert learned().seconds_until_drained(without_worker) is None


# Where requests are not equals.


def test_queue_drains_by_costs() -> None:
    times = learned(0.0, 10, 20, 40, packer=PaddedPacker(40))
    world = backlog(10, 3.0)._replace(cost=100.0)
    assert times.seconds_until_drained(world) == pytest.approx(3.0 + 3 * linear(40), rel=0.02)
    assert times.seconds_until_drained(backlog(0, 3.0)) == 3.0


def test_queue_drains_despite_rounding() -> None:
    times = learned(0.0, 10, 20, 40, packer=PaddedPacker(None))
    seconds = times.seconds_until_drained(backlog(2, 1.0)._replace(cost=0.0))
    assert seconds is not None
    assert 1.0 <= seconds < inf


def test_low_priority_is_rejected_first() -> None:
    scheduler = make(max_batch_size=2, max_latency=4.9)
    now = taught_from(scheduler, 0.0)
    scheduler.rank_requests()
    arrive(scheduler, now, 2)
    arrive(scheduler, now, 2)
    assert len(refused_at(scheduler, now, 3)) == 1, "two share the third batch"
    assert len(refused_at(scheduler, now)) == 1
    (urgent,) = [Request("urgent", None)]
    urgent.priority = 1
    assert scheduler.submit(now, [urgent]) == []


# At the door.


def test_rejection_names_predicted_times() -> None:
    scheduler = make(max_batch_size=2)
    now = taught_by_deadlines(scheduler)
    assert arrive(scheduler, now, 2, now + 100) is not None
    assert arrive(scheduler, now, 2, now + 100) is not None
    arrive(scheduler, now, 1, now + 100)
    # Two full batches run, one waits: it would share the third.
    takes = SAFETY_FACTOR * 3 * linear(2)
    ((_, rejection),) = refused_at(scheduler, now, deadline=now + takes - 0.5)
    error = rejection.to_error()
    assert isinstance(error, DeadlineExceededError)
    assert error.retry_after == pytest.approx(0.5)
    assert (
        str(error)
        == "the answer would take 4.73 seconds, and 4.22 are left; 1 requests wait already"
    )
    assert refused_at(scheduler, now, deadline=now + takes + 0.01) == []


def taught_by_deadlines(scheduler: Scheduler) -> float:
    """As `taught`, for a scheduler that begins to measure with the first deadline."""
    batch = arrive(scheduler, 0.0, 1, 1000.0)
    assert batch is not None
    settle(scheduler, 0.5, batch)
    return taught_from(scheduler, 0.5)


def taught_that_one_takes(scheduler: Scheduler, seconds: float) -> float:
    """The moment after batches of one that took so long."""
    now = 0.0
    for _ in range(LESSONS):
        batch = arrive(scheduler, now)
        assert batch is not None
        now += seconds
        settle(scheduler, now, batch)
    return now


def taught_from(scheduler: Scheduler, now: float) -> float:
    for size in (1, 2) * 3:
        for _ in range(LESSONS):
            batch = arrive(scheduler, now, size)
            assert batch is not None
            now += linear(size)
            settle(scheduler, now, batch)
    return now


def test_max_latency_is_a_target_for_every_request() -> None:
    scheduler = make(max_batch_size=2, max_latency=3.3)
    now = taught_from(scheduler, 0.0)
    arrive(scheduler, now, 2)
    # 1.5 for the batch that runs and 1.5 for the next: the third batch would be late.
    assert len(refused_at(scheduler, now, 9)) == 7
    assert refused_at(scheduler, now) != []


def test_idle_batcher_accepts_any_request() -> None:
    """Else a wrong estimate would never be put right."""
    scheduler = make(max_batch_size=2, max_latency=0.1)
    now = taught_that_one_takes(scheduler, 50.0)
    requests = [Request("input", None) for _ in range(3)]
    assert reject(scheduler, now, requests) == requests[1:]
    assert poll_batches(scheduler, now)[0].requests == requests[:1]
    assert len(refused_at(scheduler, now, 3)) == 3


@pytest.mark.parametrize("lateness", [0.0, 0.5])
def test_a_hold_makes_no_request_late(lateness: float) -> None:
    """Nor drops one if the timer fires so late that the target is missed."""
    scheduler = make(FixedPolicy(10.0), max_batch_size=4, max_latency=3.0)
    for size in (1, 4):
        for _ in range(LESSONS):
            scheduler.service.observe(size, 1.0)
    requests = [Request("input", None) for _ in range(3)]
    assert scheduler.submit(0.0, requests) == []
    actions, latest = scheduler.poll(0.0)
    assert actions == []
    assert latest == pytest.approx(1.995)
    (batch,) = poll_batches(scheduler, 2.0 + lateness)
    assert (batch.requests, batch.release) == (requests, Release.DEADLINE)


class HoldsAll(GreedyPolicy):
    """Holds every batch, and counts the ends of holds that it is told of."""

    may_hold = True
    ended = 0

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        return inf

    def end_hold(self) -> None:
        self.ended += 1


def test_policy_is_told_that_a_target_ends_its_hold_at_once() -> None:
    """Otherwise it would take the next decision for one about the same hold."""
    policy = HoldsAll()
    scheduler = make(policy, max_batch_size=4, max_latency=3.0)
    for _ in range(LESSONS):
        scheduler.service.observe(1, 1.0)
    assert scheduler.submit(0.0, [Request("input", None)]) == []
    (batch,) = poll_batches(scheduler, 2.5)
    assert (batch.release, policy.ended) == (Release.DEADLINE, 1)


def test_a_hold_sends_no_second_batch_without_known_times() -> None:
    """It was held for a free worker, and the second batch waits for a busy one."""
    scheduler = make(FixedPolicy(10.0), max_batch_size=2, max_latency=3.0)
    assert arrive(scheduler, 0.0) is None
    requests = [Request("input", None) for _ in range(3)]
    assert scheduler.submit(0.1, requests) == []
    (batch,) = poll_batches(scheduler, 0.1)
    assert len(batch.requests) == 2


def test_too_short_deadline_is_late_or_rejected() -> None:
    """Fault F63."""
    scheduler = make(max_batch_size=2)
    now = taught_by_deadlines(scheduler)
    (first,) = [make_request("impossible", now + 0.001)]
    assert scheduler.submit(now, [first]) == []
    (batch,) = poll_batches(scheduler, now)
    # It runs, and its caller is told at its deadline.
    actions, _ = scheduler.poll(now + 0.001)
    expired = [action for action in actions if isinstance(action, Expire)]
    assert [(e.request, e.reason) for e in expired] == [(first, ExpiryReason.RUNNING)]
    # While it runs others like it are refused at once, and when it is over the next is taken.
    assert len(refused_at(scheduler, now + 0.002, 3, now + 0.003)) == 3
    settle(scheduler, now + 1.0, batch)
    assert refused_at(scheduler, now + 1.0, deadline=now + 1.001) == []
    assert len(poll_batches(scheduler, now + 1.0)) == 1


def test_a_deadline_without_a_target_predicts_nothing() -> None:
    scheduler = make(max_batch_size=2)
    now = taught_by_deadlines(scheduler)
    assert arrive(scheduler, now, 2) is not None
    assert len(refused_at(scheduler, now, deadline=now + 0.1)) == 1
    request = Request("input", None)
    request.fix_deadline(now, None, 0.1)  # the default timeout
    assert scheduler.submit(now, [request]) == []
    assert scheduler.poll(now) == ([], now + 0.1)
    actions, _ = scheduler.poll(now + 0.1)
    assert [(one.request, one.reason) for one in actions if isinstance(one, Expire)] == [
        (request, ExpiryReason.WAITING)
    ]


def test_a_default_deadline_is_kept_from_a_call_that_arrives_later() -> None:
    scheduler = make(timeout=30.0, workers=0)
    moments = [10.0 - late for late in (0.0, LATE_ARRIVAL / 2, 1.0)]
    requests = [Request("input", None) for _ in moments]
    for request, moment in zip(requests, moments, strict=True):
        request.fix_deadline(moment, None, 30.0)
    assert scheduler.submit(10.0, requests[:2]) == []
    assert isinstance(scheduler._queue, RequestQueue)  # the faster one
    assert scheduler.submit(10.0, requests[2:]) == []
    assert [request.deadline for request in requests] == [40.0, 40.0, 39.0]
    assert [request for request in requests if request.target is not None] == []


def test_a_target_of_an_api_process_is_kept() -> None:
    scheduler = make(max_latency=5.0)
    request = Request("input", None)
    request.target = inf  # it is tried again
    assert scheduler.submit(0.0, [request]) == []
    assert request.target == inf


def test_no_rejection_without_a_ready_worker() -> None:
    scheduler = make(max_batch_size=2, max_latency=1.6)
    taught_from(scheduler, 0.0)
    scheduler.worker_lost(0)
    assert refused_at(scheduler, 1000.0, 50) == []


def test_full_queue_error_has_time_to_drain() -> None:
    scheduler = make(max_batch_size=2, max_queue_size=4)
    # The first refusal is what makes it measure.
    ((_, first),) = refused_at(scheduler, 0.0, 5)
    assert first.retry_after is None
    now = 0.0
    while scheduler.waiting or scheduler.running:
        for one in poll_batches(scheduler, now):
            now += linear(2)
            settle(scheduler, now, one)
    now = taught_from(scheduler, now)
    batch = arrive(scheduler, now, 2)
    refused_at(scheduler, now, 4)
    assert arrive(scheduler, now, 0) is not None  # the second batch of the worker
    refused_at(scheduler, now, 2)
    ((_, rejection),) = refused_at(scheduler, now)
    error = rejection.to_error()
    assert isinstance(error, QueueFullError)
    assert error.retry_after == pytest.approx(4 * linear(2))
    assert batch is not None


# When a batch leaves.


# Above those of all requests that are submitted.
LATER_IDS = count(10**6)


def waiting(
    scheduler: Scheduler, now: float, *left: float, timeout: float = 1000.0
) -> list[Request]:
    """Requests in the queue with so many seconds to their targets, whatever is predicted."""
    requests = [make_request(seconds, now + timeout) for seconds in left]
    for request in requests:
        request.id = next(LATER_IDS)
        request.arrival = now
        request.target = now + request.value
    scheduler._queue.extend(requests)
    return requests


def test_late_request_leaves_room_for_others() -> None:
    scheduler = make(max_batch_size=2)
    now = taught_by_deadlines(scheduler)
    _, *others = waiting(scheduler, now, 0.1, 9.0, 9.0, 9.0)
    actions, _ = scheduler.poll(now)
    late, first, *_ = actions
    assert isinstance(late, Expire)
    assert (late.request.value, late.reason) == (0.1, ExpiryReason.UNREACHABLE)
    assert late.request.is_settled
    assert isinstance(first, Dispatch)
    assert first.batch.requests == others[:2]
    assert first.batch.release is Release.DEADLINE
    assert late.rejection is not None
    error = late.rejection.to_error()
    assert isinstance(error, DeadlineExceededError)
    assert error.retry_after is not None


def test_batch_shrinks_without_requests_behind() -> None:
    """Alone it would be in time, so it goes alone."""
    scheduler = make(max_batch_size=2)
    now = taught_by_deadlines(scheduler)
    first, second = waiting(scheduler, now, 1.2, 9.0)
    (batch,) = poll_batches(scheduler, now)
    assert (batch.requests, batch.release) == ([first], Release.DEADLINE)
    assert scheduler.waiting == 1
    now += linear(1)
    settle(scheduler, now, batch)
    assert poll_batches(scheduler, now)[0].requests == [second]


# Whole services.

GPU_BATCH = 64
GPU_CAPACITY = GPU_BATCH / with_knee(GPU_BATCH)
TARGET = 0.05


def service(moments: list[float], *, max_latency: float = TARGET, **options: Any) -> World:
    """Outcomes of requests that arrive at these times."""
    return World("greedy", arrivals=moments, max_latency=max_latency, **options).run()


def sometimes(factor: float, is_slow: Callable[[int], bool]) -> Seconds:
    """The batches of which this is true take longer."""
    numbers = itertools.count()
    return lambda size: with_knee(size) * (factor if is_slow(next(numbers)) else 1)


def mid(size: float) -> float:
    """The small model of the simulations."""
    return 0.004 + 0.0003 * size


def cpu(size: float) -> float:
    """A model that gains next to nothing from batches."""
    return 0.0005 + 0.002 * size


@pytest.mark.slow
@pytest.mark.parametrize("scatter", [0.0, 0.1])
@pytest.mark.parametrize(
    ("seconds", "size", "target"),
    [
        (with_knee, 64, 0.05),
        pytest.param(mid, 32, 0.05, marks=pytest.mark.long),
        pytest.param(cpu, 16, 0.1, marks=pytest.mark.long),
    ],
)
def test_accepted_requests_are_in_time_under_overload(
    seconds: Seconds, size: int, target: float, scatter: float
) -> None:
    """Fault F60, with a millisecond to spare for the event loop before and after."""
    chance = random.Random(7)

    def scattered(size: float) -> float:
        return seconds(size) * chance.lognormvariate(-scatter * scatter / 2, scatter)

    capacity = size / seconds(size)
    end = 8_000 / capacity
    moments = poisson(5 * capacity, end, seed=8)
    world = service(moments, max_latency=target, max_batch_size=size, seconds=scattered)
    since = end / 5
    assert world.count_within(target - 0.001, since) >= 0.97 * (end - since) * capacity
    waited = sum(took > 0 for _, took in world.rejected)
    assert waited < 0.01 * len(world.rejected), "nearly all are refused at the door"


@pytest.mark.slow
@pytest.mark.parametrize("load", [1.2, 2.0, *long(5.0)])
def test_fivefold_overload_costs_no_goodput(load: float) -> None:
    """Fault F60."""
    world = service(poisson(load * GPU_CAPACITY, 4.0, seed=1))
    assert world.count_within(TARGET, since=0.5) >= 0.97 * 3.5 * GPU_CAPACITY
    waits = sorted(took for _, took in world.rejected)
    assert load < 2 or waits[int(0.99 * len(waits))] < 0.005


@pytest.mark.slow
def test_latency_recovers_after_a_pulse() -> None:
    """Fault F61."""
    before = poisson(0.5 * GPU_CAPACITY, 1.0, 3)
    pulse = poisson(10 * GPU_CAPACITY, 2.0, 4, since=1.0)
    after = poisson(0.5 * GPU_CAPACITY, 5.0, 5, since=2.0)
    world = service(before + pulse + after)
    late = [took for arrival, took in world.latencies if arrival > 2.0 + 2 * TARGET]
    assert max(late) <= TARGET
    assert not [arrival for arrival, _ in world.rejected if arrival > 2.0 + 2 * TARGET]


@pytest.mark.slow
def test_stragglers_cause_no_false_rejections() -> None:
    """Fault F35."""
    moments = poisson(0.5 * GPU_CAPACITY, 10.0, 6)
    with_stragglers = sometimes(20, lambda number: number % 100 == 99)
    world = service(moments, max_latency=1.0, seconds=with_stragglers)
    assert len(world.rejected) <= 0.01 * len(moments)
    for size in (4, 16, 64):
        median = world.scheduler._times.by_size.median(size)
        assert median == pytest.approx(with_knee(size), rel=0.15)
