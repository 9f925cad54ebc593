"""Large outputs of real workers: that they come back whole, whatever happens meanwhile."""

import asyncio
import logging
import os
import signal
import sys
from time import monotonic
from typing import Any

import numpy as np
import pytest
from desk import MEBI, SMALL, copier_held, free, no_threads, opened, wait_until_copied
from inside import pids_of, session_of
from packing import pack
from sample_models import (
    LARGE,
    AnswersStacked,
    BreaksInParent,
    BrokenOnArrival,
    Echo,
    GivesViews,
    MakesLarge,
    Miscounts,
    TalksNonsense,
    fingerprint,
    make_large,
)
from waits import LIMIT, call, outcome, turns, until

from fast_batcher import DynBatcher
from fast_batcher._parent.input_arena import MOST_AT_ONCE
from fast_batcher._shared_memory.outbox_reader import OutboxReader
from fast_batcher._transport.codec import dumps
from fast_batcher._transport.frames import Kind
from fast_batcher.errors import (
    BatcherClosedError,
    DeadlineExceededError,
    InferenceError,
    PoisonRequestError,
    TransportError,
)

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

# An answer that is copied at once, and one that is copied aside.
ASIDE = MOST_AT_ONCE + 1
# Around everything that makes a difference.
SIZES = sorted(
    size + more
    for size in (0, 4096, 16384, 65536, 262_144, MOST_AT_ONCE, 3 * MEBI)
    for more in (-1, 0, 1)
    if size + more >= 0
)


def outboxes_of(batcher: DynBatcher[Any, Any]) -> list[OutboxReader]:
    return [
        one.outbox for one in session_of(batcher).pool._serving.values() if one.outbox is not None
    ]


def is_used(batcher: DynBatcher[Any, Any]) -> bool:
    """Whether an answer came by an outbox."""
    return any(outbox.is_used for outbox in outboxes_of(batcher))


async def until_answered(batcher: DynBatcher[Any, Any], count: int = 1) -> None:
    """So many answers have come and wait to be copied."""
    await until(lambda: len(session_of(batcher).scheduler.workers.copying_out) == count)


@pytest.mark.parametrize("kind", LARGE)
async def test_every_kind_and_size_comes_back_whole(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind in ("tensor", "bfloat16"):
        pytest.importorskip("torch")
    sizes = [size for size in SIZES if size < MEBI or kind != "numbers"]
    asked = [(kind, size, number) for number, size in enumerate([*sizes, *reversed(sizes)])]
    expected = [fingerprint(make_large(*one)) for one in asked]
    for max_batch_size in (1, 8):
        async with opened(MakesLarge, max_batch_size=max_batch_size) as batcher:
            got = await asyncio.gather(*map(batcher.process_batched, asked))
            assert [fingerprint(one) for one in got] == expected
            assert is_used(batcher)
    assert "through a pipe" not in caplog.text


async def test_whatever_dies_and_whoever_leaves_answers_are_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random kills and cancellations, and an outbox that is too small for all."""
    random = np.random.default_rng(2)
    caplog.set_level(logging.ERROR)
    kinds = ["array", "bytes", "strided", "nested", "dataclass"]
    sizes = np.exp(random.uniform(0, np.log(3 * MEBI), 400)).astype(int)
    asked = [(kinds[number % 5], int(size), number) for number, size in enumerate(sizes)]
    settings: dict[str, Any] = {
        "max_batch_size": 4,
        "num_workers": 2,
        "max_shared_bytes": 6 * MEBI,
        "max_restarts": None,
        "restart_backoff": 0.01,
    }
    async with opened(MakesLarge, **settings) as batcher:
        tasks = []
        for number, one in enumerate(asked):
            tasks.append(call(batcher, one))
            if number % 40 == 39:
                os.kill(await batcher.process_batched("pid"), 9)
            if number % 7 == 3:
                tasks[random.integers(len(tasks))].cancel()
            await turns(int(random.integers(1, 4)))
        for one, task in zip(asked, tasks, strict=True):
            got = await outcome(task)
            if not isinstance(got, asyncio.CancelledError | PoisonRequestError):
                assert fingerprint(got) == fingerprint(make_large(*one))


async def test_results_that_are_kept_do_not_fill_the_outbox(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened(MakesLarge, max_shared_bytes=4 * MEBI) as batcher:
        kept = await batcher.process_many([("array", 20_000, number) for number in range(3000)])
        assert is_used(batcher)
        # And it is not as if they were written over.
        for number, array in enumerate(kept):
            assert fingerprint(array) == fingerprint(make_large("array", 20_000, number))
            array += 1  # they are the caller's
    assert "through a pipe" not in caplog.text


@pytest.mark.parametrize("size", [SMALL, ASIDE])
async def test_outputs_may_be_views_of_inputs(size: int) -> None:
    async with opened(GivesViews, max_batch_size=4) as batcher:
        arrays = [np.random.default_rng(number).bytes(size) for number in range(8)]
        values = [np.frombuffer(one, np.uint8) for one in arrays]
        for value, (all_of_it, every_other, end) in zip(
            values, await batcher.process_many(values), strict=True
        ):
            assert np.array_equal(all_of_it, value)
            assert np.array_equal(every_other, value[::2])
            assert np.array_equal(end, value[5:])
        # The inputs' memory is free again.
        await free(batcher)


@pytest.mark.parametrize("library", ["numpy", "torch"])
async def test_rows_of_one_array_are_outputs(library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    async with opened(AnswersStacked, max_batch_size=4) as batcher:
        arrays = [np.full((3, 50_000), number, np.float32) for number in range(8)]
        values: list[Any] = arrays
        if library == "torch":
            values = [sys.modules["torch"].from_numpy(one) for one in arrays]
        got = await batcher.process_many(values)
        assert is_used(batcher)
        assert all(np.array_equal(one, array) for one, array in zip(got, arrays, strict=True))
        # Each has memory of its own: to keep one is not to keep all.
        first, second = (np.asarray(one) for one in got[:2])
        assert not np.shares_memory(first, second)
        if library == "torch":
            assert got[0].untyped_storage().nbytes() == arrays[0].nbytes


async def test_one_that_cannot_be_unpickled_harms_no_other() -> None:
    async with opened(BreaksInParent) as batcher:
        large = "x" * ASIDE
        for _ in range(2):
            got = [
                await outcome(task)
                for task in [call(batcher, one) for one in (large, "bad", large + "y")]
            ]
            assert got[0] == large
            assert "cannot be unpickled" in str(got[1])
            assert got[2] == large + "y"


async def test_an_exception_among_large_outputs_is_its_callers_alone() -> None:
    async with opened(MakesLarge) as batcher:
        asked = [("array", ASIDE, 1), ValueError("this one"), ("array", SMALL, 2), KeyError("x")]
        got = [await outcome(task) for task in [call(batcher, one) for one in asked]]
        assert is_used(batcher)
        assert fingerprint(got[0]) == fingerprint(make_large("array", ASIDE, 1))
        assert isinstance(got[1], ValueError)
        assert isinstance(got[1], InferenceError)
        assert fingerprint(got[2]) == fingerprint(make_large("array", SMALL, 2))
        assert isinstance(got[3], KeyError)


@pytest.mark.parametrize("size", [SMALL, ASIDE])
async def test_what_finds_no_room_goes_through_the_pipe(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(MakesLarge, max_batch_size=1, max_shared_bytes=size) as batcher:
        for number in range(5):
            got = await batcher.process_batched(("array", size, number))
            assert fingerprint(got) == fingerprint(make_large("array", size, number))
        assert not is_used(batcher)
    assert caplog.text.count("large outputs go through a pipe") == 1


async def test_an_outbox_that_is_full_is_empty_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [("array", ASIDE, number) for number in range(12)]
    async with opened(MakesLarge, max_batch_size=1, max_shared_bytes=6 * MEBI) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, one) for one in asked]
            # The others find no room, and overtake those that wait.
            await until(lambda: batcher.stats.completed > 0)
            assert 1 <= len(session_of(batcher).scheduler.workers.copying_out) < 6
        for one, task in zip(asked, tasks, strict=True):
            assert fingerprint(await outcome(task)) == fingerprint(make_large(*one))
        assert caplog.text.count("large outputs go through a pipe") == 1


async def test_without_shared_memory_there_is_the_pipe(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(MakesLarge, max_shared_bytes=0) as batcher:
        assert outboxes_of(batcher) == []
        asked = [("array", size, 1) for size in SIZES]
        got = await batcher.process_many(asked)
        assert [*map(fingerprint, got)] == [fingerprint(make_large(*one)) for one in asked]
    assert "through a pipe" not in caplog.text


async def test_an_answer_that_is_being_copied_outlives_its_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [("array", ASIDE, number) for number in range(3)]
    async with opened(MakesLarge, max_batch_size=1, restart_backoff=0.01) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, one) for one in asked]
            await until_answered(batcher, 3)
            (old,) = outboxes_of(batcher)
            os.kill(pids_of(batcher)[0], 9)
            await until(lambda: batcher.stats.restarts == 1)
            assert outboxes_of(batcher) != [old]
            assert batcher.stats.running == 3
        for one, task in zip(asked, tasks, strict=True):
            assert fingerprint(await outcome(task)) == fingerprint(make_large(*one))
        assert not old.is_open
        # They were computed once.
        assert batcher.stats.batches == 3
    assert "signal 9" in caplog.text


@pytest.mark.parametrize("size", [SMALL, ASIDE])
async def test_a_worker_may_die_right_after_its_answer(size: int) -> None:
    """The answer is read from the pipe of a dead worker."""
    settings: dict[str, Any] = {"max_restarts": None, "restart_backoff": 0.01}
    async with opened(MakesLarge, max_batch_size=1, **settings) as batcher:
        for number in range(3):
            one = ("array", size, number)
            answered, killed = call(batcher, one), call(batcher, "killed")
            await turns(1)
            assert fingerprint(await outcome(answered)) == fingerprint(make_large(*one))
            assert isinstance(await outcome(killed), PoisonRequestError)


async def test_answers_that_are_copied_come_in_their_order() -> None:
    order: list[asyncio.Task[Any]] = []
    async with opened(MakesLarge, max_batch_size=1) as batcher:
        tasks = [call(batcher, ("array", ASIDE, number)) for number in range(20)]
        for task in tasks:
            task.add_done_callback(order.append)
        await asyncio.gather(*tasks)
    assert order == tasks


async def test_the_worker_goes_on_while_its_answer_is_copied_and_small_ones_overtake_it() -> None:
    async with opened(MakesLarge, max_batch_size=1) as batcher:
        with copier_held(batcher):
            task = call(batcher, ("array", ASIDE, 1))
            await until_answered(batcher)
            assert len(await outcome(call(batcher, ("array", SMALL, 2)))) == SMALL
            assert batcher.stats.running == 1
            assert not task.done()
        assert len(await outcome(task)) == ASIDE


async def test_no_deadline_counts_while_an_answer_is_copied() -> None:
    """It has come in time."""
    async with opened(MakesLarge, max_batch_size=1) as batcher:
        with copier_held(batcher):
            task = call(batcher, ("array", ASIDE, 1), timeout=LIMIT)
            await until_answered(batcher)
            # It is brought forward: one that was so near before might have come first.
            (batch,) = session_of(batcher).scheduler.workers.copying_out.values()
            batch.deadline = batch.requests[0].deadline = monotonic()
            session_of(batcher).scheduler.workers.next_expiry = batch.deadline
            # It is behind the other in every queue, and so is what follows from it.
            with pytest.raises(DeadlineExceededError):
                await batcher.process_batched(("array", ASIDE, 2), timeout=1e-9)
            assert not task.done()
        assert len(await outcome(task)) == ASIDE


async def test_a_caller_may_leave_while_an_answer_is_copied() -> None:
    async with opened(MakesLarge, max_batch_size=2) as batcher:
        with copier_held(batcher):
            leaving, staying = [call(batcher, ("array", ASIDE, one)) for one in (1, 2)]
            await until_answered(batcher)
            leaving.cancel()
            assert isinstance(await outcome(leaving), asyncio.CancelledError)
            assert batcher.stats.running == 1
        expected = fingerprint(make_large("array", ASIDE, 2))
        assert fingerprint(await outcome(staying)) == expected


async def test_an_answer_that_nobody_wants_any_more_is_not_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And its memory is free, or there would be no room for the next ones."""
    async with opened(MakesLarge, max_batch_size=1, max_shared_bytes=3 * MEBI) as batcher:
        (worker,) = pids_of(batcher)
        for number in range(4):
            os.kill(worker, signal.SIGSTOP)  # no answer comes before the caller leaves
            task = call(batcher, ("array", 2 * MEBI, number))
            await until(lambda: batcher.stats.running == 1)
            task.cancel()
            assert isinstance(await outcome(task), asyncio.CancelledError)
            os.kill(worker, signal.SIGCONT)
            assert await batcher.process_batched("next") == "next"
        assert not session_of(batcher).scheduler.workers.copying_out
        assert len(await batcher.process_batched(("array", 2 * MEBI, 9))) == 2 * MEBI
    assert "through a pipe" not in caplog.text


async def test_the_batcher_ends_when_what_is_being_copied_has_been_delivered() -> None:
    asked = [("array", ASIDE, number) for number in range(6)]
    async with opened(
        MakesLarge, max_batch_size=2, timeout=None, drain_timeout=10 * LIMIT
    ) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, one) for one in asked]
            await until_answered(batcher, 3)
            closing = asyncio.create_task(batcher.aclose())
            await turns()
            assert not closing.done()
        await asyncio.wait_for(closing, LIMIT)
        for one, task in zip(asked, tasks, strict=True):
            assert fingerprint(await outcome(task)) == fingerprint(make_large(*one))


async def test_a_batcher_may_be_stopped_while_it_copies() -> None:
    async with opened(MakesLarge, max_batch_size=2) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, ("array", ASIDE, number)) for number in range(4)]
            await until_answered(batcher, 2)
        # The loop does not turn before the end, and so hears of no copy.
        batcher.stop()
        for task in tasks:
            assert isinstance(await outcome(task), BatcherClosedError)


def test_another_loop_goes_on_with_answers_that_were_being_copied() -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher(MakesLarge, max_batch_size=1)
    future: list[Any] = []

    async def begin() -> None:
        task = call(batcher, ("array", ASIDE, 1))
        future.append(batcher.submit(("array", ASIDE, 2)))
        await until_answered(batcher, 2)
        task.cancel()
        await asyncio.wait([task])

    async def go_on() -> None:
        # Nothing more is copied, which would tell of those.
        assert await batcher.process_batched("small") == "small"
        (submitted,) = future
        got = await asyncio.wait_for(asyncio.wrap_future(submitted), LIMIT)
        assert fingerprint(got) == fingerprint(make_large("array", ASIDE, 2))
        assert not session_of(batcher).scheduler.workers.copying_out
        await batcher.aclose()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(batcher.open())
    with copier_held(batcher):
        loop.run_until_complete(begin())
        loop.close()
    # Nobody tells that loop, or the next one, that they have been copied.
    wait_until_copied(batcher)
    asyncio.run(go_on())


async def test_a_worker_is_recycled_behind_its_large_answers() -> None:
    asked = [("array", ASIDE, number) for number in range(30)]
    async with opened(MakesLarge, max_batch_size=2, max_batches_per_worker=3) as batcher:
        for one, got in zip(asked, await batcher.process_many(asked), strict=True):
            assert fingerprint(got) == fingerprint(make_large(*one))


async def test_where_no_thread_can_be_started_the_loop_copies() -> None:
    async with opened(MakesLarge) as batcher:
        with no_threads():
            got = await batcher.process_batched(("array", ASIDE, 1))
            assert fingerprint(got) == fingerprint(make_large("array", ASIDE, 1))


GARBAGE: dict[str, Any] = {
    "not a pickle": b"garbage",
    "not five": dumps(5),
    "before the start": dumps((-64, [100], [], [(100, 0)], {})),
    "behind the end": dumps((2**40, [100], [], [(100, 0)], {})),
    "too long": dumps((0, [2**50], [], [(2**50, 0)], {})),
    "negative": dumps((0, [-5], [], [(-5, 0)], {})),
    "no numbers": dumps(("0", ["5"], [], [("5", 0)], {})),
    "nothing": dumps((0, [], [], [(0, 0)], {})),
    "nothing read-only": dumps((0, [100], 5, [(100, 0)], {})),
    "no items": dumps((0, [100], [], 5, {})),
    "items of something else": dumps((0, [100], [], [(99, 0)], {})),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_worker_that_says_something_else_lies_in_the_outbox_is_replaced(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(TalksNonsense, restart_backoff=0.01) as batcher:
        got = await outcome(call(batcher, pack(Kind.SHARED_OUTPUTS, 0, garbage)))
        assert isinstance(got, TransportError)
        assert await batcher.process_batched(b"") == b""
        assert "is replaced" in caplog.text
        # For what it has said, and not for the answer that follows.
        assert "which it does not have" not in caplog.text
        assert batcher.stats.restarts == 1


@pytest.mark.parametrize("size", [SMALL, ASIDE])
async def test_what_is_no_pickle_in_the_outbox_is_the_models_error(size: int) -> None:
    """It reads zeros there."""
    async with opened(TalksNonsense, isolate_errors=False) as batcher:
        forged = pack(Kind.SHARED_OUTPUTS, 0, dumps((0, [size], [], [(size, 0)], {})))
        got = await outcome(call(batcher, forged))
        assert type(got) is InferenceError
        assert "cannot be unpickled" in str(got)


@pytest.mark.parametrize("size", [SMALL, ASIDE])
async def test_answers_for_other_requests_are_for_nobody(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(Miscounts, restart_backoff=0.01) as batcher:
        tasks = [call(batcher, ("array", size, number)) for number in range(2)]
        for task in tasks:
            got = await outcome(task)
            assert isinstance(got, TransportError)
            assert "1 outcomes came back for 2 requests" in str(got)
        await until(lambda: batcher.stats.restarts == 1)
        assert len(await batcher.process_batched(b"small")) == 5
    assert "is replaced" in caplog.text


async def test_an_input_that_breaks_on_arrival_harms_no_large_answer() -> None:
    bad = BrokenOnArrival("worker", ValueError("broken"))
    array = np.full(ASIDE, 1, np.uint8)
    async with opened(Echo) as batcher:
        first, second = [await outcome(task) for task in [call(batcher, v) for v in (array, bad)]]
        assert first.sum() == ASIDE
        assert isinstance(second, ValueError)
