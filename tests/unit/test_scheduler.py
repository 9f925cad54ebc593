"""The scheduler by example; `test_scheduler_random` checks its promises. Time is an argument."""

from collections.abc import Iterable
from math import inf
from typing import Any, NoReturn

import pytest
from schedulers import NOTHING, make, poll_batches, reject, run, settle, submit, told

from fast_batcher._core.policy import FixedPolicy, GreedyPolicy, Policy
from fast_batcher._core.queue import PaddedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.service_model import Shape
from fast_batcher._core.values import (
    Batch,
    Expire,
    ExpiryReason,
    Fail,
    Group,
    Limits,
    Rejection,
    Release,
    Replace,
    Request,
    Skip,
    Stall,
)
from fast_batcher._core.workers import WorkerTable
from fast_batcher._opening.kinds import BatchKind
from fast_batcher.errors import (
    BatcherClosedError,
    DeadlineExceededError,
    QueueFullError,
    SessionLostError,
    read_answer,
)
from fast_batcher.settings import Settings

# Batches.


def test_free_worker_takes_waiting_requests() -> None:
    scheduler = make(max_batch_size=4)
    requests = submit(scheduler, 1.0, 3)
    (batch,) = poll_batches(scheduler, 1.0)
    assert batch.requests == requests
    assert (batch.id, batch.worker, batch.release) == (0, 0, Release.IDLE)
    assert [request.batch_id for request in requests] == [0, 0, 0]
    assert (scheduler.waiting, scheduler.running) == (0, 3)


def test_busy_worker_gets_a_full_second_batch() -> None:
    """Late binding: until it is full, the batch is still open to later arrivals."""
    scheduler = make(max_batch_size=3)
    run(scheduler, 0.0)
    waiting = submit(scheduler, 0.1, 2)
    assert poll_batches(scheduler, 0.1) == []
    waiting += submit(scheduler, 0.2, 1)
    (second,) = poll_batches(scheduler, 0.2)
    assert second.requests == waiting
    assert (second.worker, second.release) == (0, Release.FULL)


def leave(scheduler: Scheduler, batch: Batch) -> None:
    for request in batch.requests:
        scheduler.cancel(request)


def test_batch_behind_another_is_skipped_without_callers() -> None:
    scheduler = make(max_batch_size=2)
    run(scheduler, 0.0, 2)
    second = run(scheduler, 0.0, 2)
    scheduler.cancel(second.requests[0])
    assert told(scheduler.poll(0.1)[0]) == []
    scheduler.cancel(second.requests[1])
    assert told(scheduler.poll(0.2)[0]) == [(Skip, second.id)]
    assert told(scheduler.poll(0.3)[0]) == []


def test_expired_batch_behind_another_is_skipped() -> None:
    scheduler = make(max_batch_size=2, timeout=5.0)
    run(scheduler, 0.0)
    second = run(scheduler, 1.0, 2)
    actions, _ = scheduler.poll(6.0)
    assert told(actions)[-1] == (Skip, second.id)


def test_first_batch_of_a_worker_is_not_skipped() -> None:
    scheduler = make(max_batch_size=2)
    first, second = run(scheduler, 0.0, 2), run(scheduler, 0.0, 2)
    leave(scheduler, first)
    leave(scheduler, second)
    settle(scheduler, 0.1, first)
    settle(scheduler, 0.1, second)
    assert told(scheduler.poll(0.2)[0]) == []


@pytest.mark.parametrize("has_target", [True, False])
def test_deadlines_need_times_for_second_batch(*, has_target: bool) -> None:
    """Nothing tells whether it would be in time behind the other."""
    scheduler = make(max_batch_size=2)
    run(scheduler, 0.0, 2)
    submit(scheduler, 0.0, 2, deadline=5.0 if has_target else None)
    assert len(poll_batches(scheduler, 0.0)) == (0 if has_target else 1)


def test_a_worker_cannot_be_ready_twice() -> None:
    with pytest.raises(AssertionError, match="before it can be ready again"):
        make().worker_ready(1.0, 0)


# The fixed window.


def test_fixed_window_releases_full_batch_of_group() -> None:
    scheduler = make(FixedPolicy(5.0), max_batch_size=3, is_grouped=True)
    one, other = Group("one"), Group("other")
    requests = [Request(number, None) for number in range(4)]
    for request in requests:
        request.group = other
    requests[0].group = one
    assert scheduler.submit(0.0, requests[:3]) == []
    assert scheduler.poll(0.0) == ([], 5.0)
    assert scheduler.submit(1.0, requests[3:]) == []
    batches = poll_batches(scheduler, 1.0)
    assert [batch.requests for batch in batches] == [requests[:1], requests[1:]]


def test_a_fixed_window_holds_until_its_end() -> None:
    scheduler = make(FixedPolicy(5.0), max_batch_size=3)
    first = submit(scheduler, 1.0)
    assert scheduler.poll(1.0) == ([], 6.0)
    second = submit(scheduler, 4.0)
    assert scheduler.poll(4.0) == ([], 6.0)
    (batch,) = poll_batches(scheduler, 6.0)
    assert (batch.requests, batch.release) == (first + second, Release.WINDOW)


# The door.


def test_a_refused_request_is_not_touched() -> None:
    scheduler = make(max_queue_size=1, workers=0, timeout=5.0)
    submit(scheduler, 0.0)
    refused = Request("too many", None)
    assert reject(scheduler, 0.0, [refused]) == [refused]
    assert not refused.is_settled
    assert refused.id == -1
    assert refused not in scheduler.open_requests()
    assert refused.deadline == inf


def test_the_refusal_tells_why() -> None:
    scheduler = make(max_queue_size=1, workers=0)
    arriving = [Request("input", None) for _ in range(3)]
    (refused, why), (last, why_last) = scheduler.submit(0.0, arriving)
    assert [refused, last] == arriving[1:]
    error = why.to_error()
    assert isinstance(error, QueueFullError)
    assert str(error) == "1 requests wait already (max_queue_size=1)"
    assert error.retry_after is None
    assert why.to_error() is not error
    assert why_last is why, "it is made once per turn"


# Deadlines of waiting requests.


def test_a_waiting_request_expires_at_its_deadline() -> None:
    scheduler = make()
    busy = run(scheduler, 0.0)
    (late,) = submit(scheduler, 1.0, deadline=11.0)
    assert scheduler.poll(1.0) == ([], 11.0)
    assert scheduler.poll(10.999) == ([], 11.0)
    actions, wake_at = scheduler.poll(11.0)
    assert told(actions) == [(ExpiryReason.WAITING, late)]
    assert wake_at is None
    assert late.is_settled
    assert (scheduler.waiting, scheduler.running) == (0, 1)
    settle(scheduler, 12.0, busy)
    assert poll_batches(scheduler, 12.0) == []


# Deadlines of running requests.


def arriving(scheduler: Scheduler, now: float) -> Batch:
    """The batch that its worker has answered just now, and whose answer is not all here."""
    (batch,) = poll_batches(scheduler, now)
    assert scheduler.batch_done(now, 0, batch.id) is batch
    scheduler.begin_copy_out(batch)
    return batch


def test_request_runs_until_answer_is_complete() -> None:
    scheduler = make()
    requests = submit(scheduler, 0.0, 2)
    batch = arriving(scheduler, 0.0)
    assert scheduler.running == 2
    assert scheduler.open_requests() == requests
    assert scheduler.idle_workers == [0]
    assert scheduler.end_copy_out(batch)
    assert scheduler.running == 0
    assert not scheduler.end_copy_out(batch)


def test_a_worker_goes_on_while_its_answer_arrives() -> None:
    scheduler = make()
    submit(scheduler, 0.0)
    batch = arriving(scheduler, 0.0)
    submit(scheduler, 1.0)
    (second,) = poll_batches(scheduler, 1.0)
    assert scheduler.find(0, batch.id) is None
    assert scheduler.batch_done(1.0, 0, batch.id) is None
    assert settle(scheduler, 2.0, second) == second.requests
    assert scheduler.end_copy_out(batch)


def test_no_request_expires_while_its_answer_arrives() -> None:
    scheduler = make(timeout=7.0)
    requests = [*submit(scheduler, 0.0, deadline=5.0), *submit(scheduler, 0.0)]
    batch = arriving(scheduler, 0.0)
    assert scheduler.poll(5.0) == ([], None)
    assert scheduler.poll(9.0) == ([], None)
    assert (scheduler.running, scheduler.ready_count) == (2, 1)
    assert scheduler.end_copy_out(batch)
    assert not any(request.is_settled for request in requests)


def test_arriving_answer_survives_loss_of_worker() -> None:
    scheduler = make()
    submit(scheduler, 0.0, 2)
    batch = arriving(scheduler, 0.0)
    assert scheduler.worker_lost(0) == ([], [])
    assert (scheduler.running, scheduler.waiting) == (2, 0)
    assert scheduler.end_copy_out(batch)


def test_close_returns_requests_with_arriving_answers() -> None:
    scheduler = make()
    gone, stays = submit(scheduler, 0.0, 2)
    batch = arriving(scheduler, 0.0)
    scheduler.cancel(gone)
    assert scheduler.running == 1
    assert scheduler.close() == [stays]
    assert scheduler.running == 0
    assert not scheduler.end_copy_out(batch)


def test_overdue_worker_without_callers_is_not_ready() -> None:
    scheduler = make(timeout=5.0)
    batch = run(scheduler, 0.0, 2)
    actions, wake_at = scheduler.poll(5.0)
    assert told(actions) == [
        (ExpiryReason.RUNNING, batch.requests[0]),
        (ExpiryReason.RUNNING, batch.requests[1]),
        (Stall, 0),
    ]
    assert wake_at is None
    assert (scheduler.running, scheduler.ready_count) == (0, 0)


def test_short_client_deadline_does_not_blame_worker() -> None:
    scheduler = make(max_batch_size=1, timeout=30.0)
    batch = run(scheduler, 0.0, deadline=0.05)
    # It is looked again when the server's own limit is reached.
    actions, wake_at = scheduler.poll(0.05)
    assert told(actions) == [(ExpiryReason.RUNNING, batch.requests[0])]
    assert (scheduler.ready_count, wake_at) == (1, 30.0)
    # It is still given a full batch ahead.
    run(scheduler, 1.0)
    assert told(scheduler.poll(30.0)[0]) == [(Stall, 0)]
    assert scheduler.ready_count == 0
    settle(scheduler, 31.0, batch)
    assert scheduler.ready_count == 1


def test_worker_with_waiting_callers_is_ready() -> None:
    """A caller may have allowed more than the batcher's timeout."""
    scheduler = make(timeout=5.0)
    batch = run(scheduler, 0.0, deadline=50.0)
    assert scheduler.poll(5.0) == ([], 50.0)
    scheduler.cancel(batch.requests[0])
    assert scheduler.is_poll_due
    assert told(scheduler.poll(20.0)[0]) == [(Stall, 0)]


# infer_timeout.


def test_overlong_batch_replaces_its_worker() -> None:
    scheduler = make(infer_timeout=4.0)
    batch = run(scheduler, 1.0, 2)
    assert scheduler.poll(1.0) == ([], 5.0)
    assert scheduler.poll(4.999) == ([], 5.0)
    actions, wake_at = scheduler.poll(5.0)
    assert told(actions) == [
        (ExpiryReason.INFER_TIMEOUT, batch.requests[0]),
        (ExpiryReason.INFER_TIMEOUT, batch.requests[1]),
        (Replace, 0),
    ]
    assert wake_at is None
    assert (scheduler.running, scheduler.ready_count) == (0, 0)


def test_batch_time_starts_after_the_previous_batch() -> None:
    scheduler = make(max_batch_size=1, infer_timeout=4.0)
    first = run(scheduler, 0.0)
    second = run(scheduler, 1.0)
    settle(scheduler, 3.0, first)
    assert scheduler.poll(4.0) == ([], 7.0)
    actions, _ = scheduler.poll(7.0)
    assert told(actions) == [(ExpiryReason.INFER_TIMEOUT, second.requests[0]), (Replace, 0)]


# Losing workers.


def test_non_idempotent_requests_are_returned() -> None:
    scheduler = make(max_batch_size=2, idempotent=False)
    submit(scheduler, 0.0, 5)
    first, second = poll_batches(scheduler, 0.0)
    assert scheduler.worker_lost(0, first.id, first.id) == (first.requests, [])
    assert all(request.is_settled for request in first.requests)
    # The worker had not begun with the second.
    assert not any(request.is_settled for request in second.requests)
    assert (scheduler.running, scheduler.waiting, scheduler.ready_count) == (
        0,
        3,
        0,
    )
    assert scheduler.batch_done(1.0, 0, first.id) is None


def test_losing_unready_worker_changes_nothing() -> None:
    scheduler = make(workers=1)
    assert scheduler.worker_lost(7) == NOTHING
    assert scheduler.ready_count == 1


# Bytes.


def having(name: str, values: Iterable[float]) -> list[Request]:
    requests = []
    for value in values:
        requests.append(Request(None, None))
        setattr(requests[-1], name, value)
    return requests


def sized(*sizes: int) -> list[Request]:
    return having("size", sizes)


def test_the_queue_is_bounded_in_bytes() -> None:
    scheduler = make(workers=0, max_queue_bytes=100)
    requests = sized(60, 40, 1, 1)
    rejected = scheduler.submit(0.0, requests)
    assert [request for request, _ in rejected] == requests[2:]
    assert str(rejected[1][1].to_error()) == (
        "no room for its bytes: 2 requests wait already (max_queue_bytes=100)"
    )
    scheduler.cancel(requests[0])
    assert scheduler.submit(1.0, sized(60)) == []


def test_size_is_measured_after_other_rejections() -> None:
    measured: list[object] = []

    def measure_size(value: object) -> int:
        measured.append(value)
        return 40

    scheduler = make(
        max_batch_size=1,
        max_queue_size=5,
        max_queue_bytes=100,
        max_latency=4.5,
        measure_size=measure_size,
    )
    # The first batch of a worker teaches nothing.
    for now in (0.0, 1.0):
        settle(scheduler, now + 1.0, run(scheduler, now))
    run(scheduler, 2.0)
    measured.clear()
    requests = [Request(number, None) for number in range(7)]
    # There is room for five, three would be answered in time, and two fit in by their bytes.
    kinds = {one.value: why.kind for one, why in scheduler.submit(2.0, requests)}
    late = DeadlineExceededError
    full = QueueFullError
    assert kinds == {2: full, 3: late, 4: late, 5: full, 6: full}
    assert measured == [0, 1, 2]
    scheduler.begin_drain()
    late_comer = Request(None, None)
    assert reject(scheduler, 2.0, [late_comer]) == [late_comer]
    assert measured == [0, 1, 2]


# Drain and close.


def test_draining_finishes_waiting_requests() -> None:
    scheduler = make(max_batch_size=4)
    busy = run(scheduler, 0.0)
    waiting = submit(scheduler, 0.0, 2)
    scheduler.begin_drain()
    assert poll_batches(scheduler, 0.0) == []
    settle(scheduler, 1.0, busy)
    (batch,) = poll_batches(scheduler, 1.0)
    assert (batch.requests, batch.release) == (waiting, Release.DRAIN)


def test_closing_takes_no_more_requests() -> None:
    scheduler = make()
    requests = [*run(scheduler, 0.0, deadline=9.0).requests, *submit(scheduler, 0.0, deadline=8.0)]
    states = [scheduler.is_closed]
    assert sorted(scheduler.close(), key=lambda request: request.id) == requests
    assert [*states, scheduler.is_closed] == [False, True]
    assert scheduler.poll(100.0) == ([], None)
    refused = Request("too late", None)
    ((request, rejection),) = scheduler.submit(0.0, [refused])
    assert request is refused
    assert rejection.kind is BatcherClosedError


# Times.


def test_batch_begins_after_previous_answer() -> None:
    scheduler = make(max_batch_size=2, workers=0)
    for moment in (1.0, 2.0, 3.0, 4.0):
        submit(scheduler, moment)
    scheduler.worker_ready(5.0, 0)
    batches = poll_batches(scheduler, 5.0)
    for moment, batch in zip((7.0, 9.0), batches, strict=True):
        scheduler.batch_done(moment, 0, batch.id)
    assert [(batch.sent_at, batch.began_at) for batch in batches] == [(5.0, 5.0), (5.0, 7.0)]


# Settings that change.


def reconfigure(
    scheduler: Scheduler,
    *,
    max_batch_size: int = 2,
    max_queue_size: int = 100,
    max_latency: float | None = None,
    policy: Policy | None = None,
) -> None:
    limits = Limits(max_batch_size, max_queue_size, max_latency=max_latency)
    scheduler.reconfigure(limits, policy)


def test_new_target_applies_to_later_requests() -> None:
    scheduler = make(timeout=50.0)
    (first,) = submit(scheduler, 0.0)
    reconfigure(scheduler, max_latency=2.0)
    (second,) = submit(scheduler, 1.0)
    reconfigure(scheduler, max_latency=1.0)
    (third,) = submit(scheduler, 1.5)
    reconfigure(scheduler, max_latency=None)
    (fourth,) = submit(scheduler, 1.6)
    assert [one.target is not None for one in (first, second, third, fourth)] == [
        *(False, True, True, False)
    ]
    assert (second.target, third.target) == (3.0, 2.5)
    assert [one.deadline for one in (first, second, third, fourth)] == [50.0, 51.0, 51.5, 51.6]


def test_ranks_count_after_everybody_was_given_up() -> None:
    scheduler = make(max_batch_size=1, workers=0)
    scheduler.rank_requests()
    waiting = submit(scheduler, 0.0, 3)
    assert scheduler.give_up() == waiting
    low, high = Request("low", None), Request("high", None)
    high.priority = 1
    scheduler.submit(1.0, [low, high])
    scheduler.rank_requests()  # once more changes nothing
    scheduler.worker_ready(1.0, 0)
    assert poll_batches(scheduler, 1.0)[0].requests == [high]


# Warm-ups, where there are costs.


def costly(*costs: float) -> list[Request]:
    return having("cost", costs)


def test_first_costs_set_costs_of_warm_up() -> None:
    packer = PaddedPacker(None)
    scheduler = make(max_batch_size=4, max_latency=3.0, packer=packer, workers=0)
    warm_up = [(1, 1.0), (4, 2.5)]
    scheduler.worker_ready(0.0, 0, warm_up)
    assert scheduler.submit(0.0, costly(10.0)) == []
    poll_batches(scheduler, 0.0)
    # No batch has been answered. The one that runs takes a second, and three of 10 two seconds.
    requests = costly(10.0, 10.0, 10.0)
    assert reject(scheduler, 0.0, requests) == requests[2:]
    # What is known stands: another worker's inputs may be like other requests.
    scheduler.worker_ready(0.0, 1, [(1, 100.0)])
    scheduler.submit(0.0, costly(20.0))
    times = [packer.times.median(Shape(size, 10.0, 10.0 * size)) for size in (1, 4)]
    assert times == pytest.approx([1.0, 2.5], rel=0.01)


# What the shell tells between two polls.


def test_poll_is_due_after_answer_with_backlog() -> None:
    scheduler = make(max_batch_size=1)
    batch = run(scheduler, 0.0)
    was_due = scheduler.is_poll_due
    submit(scheduler, 1.0, 1)
    assert (was_due, scheduler.is_poll_due) == (False, True)
    settle(scheduler, 2.0, batch)
    assert len(poll_batches(scheduler, 2.0)) == 1


def test_late_batch_time_starts_when_sent() -> None:
    scheduler = make(infer_timeout=4.0)
    batch = run(scheduler, 0.0)
    scheduler.not_sent_yet(3.0, 0, begun=None)
    assert scheduler.poll(4.0) == ([], 7.0)
    # With stages the worker may have begun with later batches, too.
    for begun in (batch.id, batch.id + 1):
        scheduler.not_sent_yet(6.0, 0, begun=begun)
    actions, _ = scheduler.poll(7.0)
    assert told(actions) == [(ExpiryReason.INFER_TIMEOUT, batch.requests[0]), (Replace, 0)]
    scheduler.not_sent_yet(8.0, 0, begun=None)  # it is being replaced
    assert scheduler.poll(20.0)[0] == []


def test_events_of_removed_workers_change_nothing() -> None:
    scheduler = make()
    batch = run(scheduler, 0.0, 2)
    assert scheduler.batch_done(1.0, 0, batch.id) is batch
    scheduler.cancel(batch.requests[0])
    scheduler.retire(7)
    scheduler.not_sent_yet(1.0, 7, begun=None)
    assert (scheduler.running, scheduler.ready_count) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (BatcherClosedError, "closed"),
        (QueueFullError, "queue full"),
        (DeadlineExceededError, "unreachable"),
        (SessionLostError, "session lost"),
    ],
)
def test_a_rejection_has_a_reason_for_observers(kind: Any, reason: str) -> None:
    error: Any = Rejection(kind, "text", 2.0).to_error()
    assert (read_answer(error).reason, type(error)) == (reason, kind)
    assert error.retry_after == 2.0


# Errors while late requests are found.


def test_an_error_while_requests_expire_leaves_no_late_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They fail at their deadlines, and the next poll has none of them."""

    def fail(*_: object) -> NoReturn:
        raise ValueError("a fault of the library")

    scheduler = make(batches_per_worker=2, timeout=1.0)
    running = submit(scheduler, 0.0, 2)
    later = submit(scheduler, 0.5, 2)
    assert len(poll_batches(scheduler, 0.5)) == 2
    monkeypatch.setattr(WorkerTable, "_find_cause", fail)
    ((found,), wake_at) = scheduler.poll(1.0)
    assert isinstance(found, Fail)
    assert (found.requests, wake_at) == (running, 1.5)
    ((found,), wake_at) = scheduler.poll(1.5)
    assert isinstance(found, Fail)
    assert found.requests == later


def test_costs_of_batches_are_no_reason_for_a_late_call() -> None:
    """Those of streams are, which a step passes over."""
    options: Any = {"cost": float, "max_batch_cost": 3.0, "cost_is_padded": False}
    settings = Settings(max_batch_size=2, timeout=1.0, **options)
    scheduler = BatchKind.make_scheduler(settings, (), GreedyPolicy())
    scheduler.worker_ready(0.0, 0)
    assert scheduler.submit(0.0, having("cost", [2.0, 1.0, 2.0, 1.0])) == []
    assert [len(batch.requests) for batch in poll_batches(scheduler, 0.0)] == [2, 2]
    late, _ = scheduler.poll(1.0)
    assert [one.rejection for one in late if isinstance(one, Expire)] == [None] * 4
