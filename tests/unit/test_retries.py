"""Retries, by example: requests, batches and limits; every time is an argument."""

import hypothesis.strategies as st
from hypothesis import given
from schedulers import NOTHING, Lost, make, poll_batches, run, settle, submit, told

from fast_batcher._core.retries import ISOLATION_SECONDS
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Batch, BatchProgress, ExpiryReason, Release, Request

# After a death.


def lose(scheduler: Scheduler, batch: Batch, progress: BatchProgress = BatchProgress.BEGUN) -> Lost:
    taken = batch.id if progress is not BatchProgress.SENT else None
    return scheduler.worker_lost(
        batch.worker, taken, batch.id if progress is BatchProgress.BEGUN else None
    )


def test_begun_batch_is_retried_one_by_one() -> None:
    scheduler = make(max_batch_size=3, workers=2)
    batch = run(scheduler, 0.0, 3)
    assert lose(scheduler, batch) == NOTHING
    submit(scheduler, 1.0)
    (first,) = poll_batches(scheduler, 1.0)
    assert (first.worker, first.requests) == (1, batch.requests[:1])
    settle(scheduler, 2.0, first)
    (second,) = poll_batches(scheduler, 2.0)
    assert second.requests == batch.requests[1:2]
    assert second.release is Release.RETRY


def lose_again(scheduler: Scheduler, now: float, progress: BatchProgress) -> Lost:
    """A new worker gets what waits, and is lost."""
    scheduler.worker_ready(now, int(now))
    (batch,) = poll_batches(scheduler, now)
    return lose(scheduler, batch, progress)


def test_a_request_is_poisonous_at_its_second_death() -> None:
    scheduler = make()
    batch = run(scheduler, 0.0)
    assert lose(scheduler, batch) == NOTHING
    assert lose_again(scheduler, 1.0, BatchProgress.BEGUN) == ([], batch.requests)
    assert batch.requests[0].is_settled
    assert scheduler.waiting == 0


def test_untaken_request_is_always_retried() -> None:
    scheduler = make(idempotent=False)
    batch = run(scheduler, 0.0)
    lose(scheduler, batch, BatchProgress.SENT)
    for number in range(1, 50):
        assert lose_again(scheduler, float(number), BatchProgress.SENT) == NOTHING


def test_suspect_request_runs_alone_with_stages() -> None:
    scheduler = make(max_batch_size=1, workers=0)
    scheduler.worker_ready(0.0, 0, stages=3)
    batch = run(scheduler, 0.0)
    assert lose(scheduler, batch) == NOTHING
    scheduler.worker_ready(1.0, 1, stages=3)
    behind = submit(scheduler, 1.0)
    (again,) = poll_batches(scheduler, 1.0)
    assert again.requests == batch.requests
    # With stages it would be prepared now, and could kill the worker before the other is answered.
    scheduler.worker_ready(1.0, 2, stages=3)
    (apart,) = poll_batches(scheduler, 1.0)
    assert (apart.worker, apart.requests) == (2, behind)
    waiting = submit(scheduler, 1.0, 4)
    assert {one.worker for one in poll_batches(scheduler, 1.0)} == {2}
    settle(scheduler, 2.0, again)
    (last,) = poll_batches(scheduler, 2.0)
    assert (last.worker, last.requests) == (1, waiting[3:])


# A model that raises.


def fail(scheduler: Scheduler, now: float, batch: Batch, **how: bool) -> list[Request]:
    assert scheduler.batch_done(now, batch.worker, batch.id, has_raised=True) is batch
    failed = scheduler.batch_raised(
        now, batch, **{"out_of_memory": False, "is_fatal": False, **how}
    )
    for request in failed:
        request.is_settled = True
    return failed


def find_culprits(scheduler: Scheduler, batch: Batch, guilty: set[int]) -> tuple[set[int], int]:
    """Answer until nothing is left: the positions that failed, and how many batches it took."""
    failed, batches, waiting = set(), 0, [batch]
    while waiting:
        current = waiting.pop(0)
        batches += 1
        if guilty & {request.id for request in current.requests}:
            failed |= {request.id for request in fail(scheduler, 1.0, current)}
        else:
            settle(scheduler, 1.0, current)
        waiting += poll_batches(scheduler, 1.0)
    return failed, batches


@given(size=st.integers(1, 40), data=st.data())
def test_only_the_guilty_fail(size: int, data: st.DataObject) -> None:
    scheduler = make(max_batch_size=size)
    guilty = data.draw(st.sets(st.integers(0, size - 1)))
    failed, batches = find_culprits(scheduler, run(scheduler, 0.0, size), guilty)
    assert failed == guilty
    assert batches <= max(1, 2 * size - 1)


def test_the_search_for_culprits_has_an_end() -> None:
    scheduler = make(max_batch_size=4)
    batch = run(scheduler, 0.0, 4)
    assert fail(scheduler, 1.0, batch) == []
    (half,) = poll_batches(scheduler, 1.0)
    end = 1.0 + ISOLATION_SECONDS
    assert fail(scheduler, end, half) == half.requests
    (other,) = poll_batches(scheduler, end)
    settle(scheduler, end, other)
    # A batch that fails later has a time of its own.
    assert fail(scheduler, end, run(scheduler, end, 2)) == []


def test_out_of_memory_makes_batches_smaller() -> None:
    scheduler = make(max_batch_size=8)
    batch = run(scheduler, 0.0, 8)
    submit(scheduler, 0.5, 8)
    assert fail(scheduler, 1.0, batch, out_of_memory=True) == []
    sizes = []
    waiting = poll_batches(scheduler, 1.0)
    while waiting:
        batch = waiting.pop(0)
        sizes.append((len(batch.requests), batch.release))
        settle(scheduler, 1.0, batch)
        waiting += poll_batches(scheduler, 1.0)
    assert sorted(sizes) == [(4, Release.FULL)] * 2 + [(4, Release.RETRY)] * 2


def test_possible_out_of_memory_death_reduces_batches() -> None:
    scheduler = make(max_batch_size=8, workers=2)
    batch = run(scheduler, 0.0, 8)
    scheduler.worker_lost(batch.worker, batch.id, batch.id, out_of_memory=True)
    for _ in range(8):
        (retry,) = poll_batches(scheduler, 1.0)
        settle(scheduler, 1.0, retry)
    submit(scheduler, 2.0, 8)
    assert [len(batch.requests) for batch in poll_batches(scheduler, 2.0)] == [4, 4]


def test_retried_batch_respects_the_memory_cap() -> None:
    scheduler = make(max_batch_size=8, workers=1)
    submit(scheduler, 0.0, 16)
    first, second = poll_batches(scheduler, 0.0)
    scheduler.worker_lost(0, first.id, first.id, out_of_memory=True)
    scheduler.worker_ready(1.0, 1)
    sizes = []
    while batches := poll_batches(scheduler, 1.0):
        for batch in batches:
            sizes.append(len(batch.requests))
            settle(scheduler, 1.0, batch)
    assert sizes == [1] * 8 + [4, 4]
    assert second.requests[0].is_settled


def test_retried_requests_keep_their_deadlines() -> None:
    """A poll between the answer and the news that it has failed."""
    scheduler = make(max_batch_size=2)
    batch = run(scheduler, 0.0, 2, deadline=5.0)
    (waiting,) = submit(scheduler, 0.0, deadline=0.5)
    assert scheduler.batch_done(1.0, 0, batch.id) is batch
    actions, wake_at = scheduler.poll(1.0)
    assert (told(actions), wake_at) == ([(ExpiryReason.WAITING, waiting)], None)
    assert scheduler.batch_raised(1.0, batch, out_of_memory=False, is_fatal=False) == []
    _, wake_at = scheduler.poll(1.0)
    assert wake_at == 5.0


def test_batches_of_retired_workers_are_kept() -> None:
    scheduler = make()
    batch = run(scheduler, 0.0)
    scheduler.retire(0)
    waiting = submit(scheduler, 0.0)
    assert scheduler.give_up() == waiting
    assert settle(scheduler, 1.0, batch) == batch.requests
