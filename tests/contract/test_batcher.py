"""`DynBatcher` on one event loop: calls, cancellation, deadlines, life, with real workers."""

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import anyio
import numpy as np
import psutil
import pytest
from models.base import Echo
from models.collated import Compiles, FillsItself, SetsCollation, SumsKinds
from models.crashing import Stuck
from models.loading import NeverLoads
from models.methods import Both
from models.ordinary import (
    BatchSize,
    Closes,
    Gated,
    GatedOnLoad,
    GatedStages,
    Holds,
    Slow,
    Whereabouts,
)
from models.raising import FailsPositions
from models.returning import TellsArrival
from pydantic import BaseModel
from tables import Frame
from waits import (
    LIMIT,
    SOON,
    SOON_IN_WORKER,
    Gate,
    Visit,
    Watch,
    assert_balance,
    both_loops,
    call,
    order_of_ends,
    outcome,
    turns,
    until,
)

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DeadlineExceededError,
    DynBatcher,
    NotReadyError,
    QueueFullError,
)
from fast_batcher._process import SLOW
from fast_batcher.policy import LearnedTimes, QueueSummary

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def begin(
    batcher: DynBatcher[Any, Any], gate: Gate, *values: Any
) -> tuple[list["asyncio.Task[Any]"], Visit]:
    """Call with these values; the calls, and the visit of their batch, which has begun."""
    calls = [call(batcher, value) for value in values]
    return calls, await gate.visit()


async def test_no_request_waits_for_the_compilation_of_an_allowed_size() -> None:
    """A worker that compiled during a request would be replaced, and its successor, too."""
    async with DynBatcher(Compiles, 16, infer_timeout=0.3) as batcher:
        for count in (1, 2, 5, 16):
            values = [np.full(3, number) for number in range(count)]
            outputs = await asyncio.gather(*map(batcher.process_batched, values))
            assert [int(output[0]) for output in outputs] == [*range(count)]
        assert batcher.stats.restarts == 0


@pytest.mark.parametrize(
    "model", [Compiles, FillsItself, SetsCollation, "models.collated:FillsItself"]
)
async def test_scheduler_learns_one_time_for_each_allowed_size(model: Any) -> None:
    """The worker tells the sizes, which a model may set in its constructor."""
    async with DynBatcher(model, 32) as batcher:
        for count in (1, 3, 7, 7, 40):
            await asyncio.gather(*map(batcher.process_batched, [np.zeros(3)] * count))
        assert [size for size, *_ in batcher.explain().service_times] == [1, 4, 16]
        assert batcher.stats.padding > 0
        assert max(batcher.stats.batch_sizes) <= 16


@pytest.mark.parametrize("workers", ["processes", "threads"])
async def test_padding_counts_the_elements_of_all_calls(workers: Any) -> None:
    """Each batch of a long row and a short one is computed as 4 rows of 2 and 4 of 3 elements."""
    rows = [np.ones(2), np.ones(3)]
    options = {"policy": "fixed", "max_delay": 60.0, "workers": workers}
    async with DynBatcher(SumsKinds, 2, **options) as batcher:
        for _ in range(3):
            assert await batcher.process_many(rows) == [2.0, 3.0]
        assert batcher.stats.padding == pytest.approx(1 - 5 / 20)


class WaitsForFour:
    """A rule that holds every batch, until four requests wait or a minute has passed."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def hold(self, queue: QueueSummary, times: LearnedTimes) -> float:
        if self.fault:
            raise LookupError(self.fault)
        return 60.0 if queue.size < 4 else 0.0


async def test_a_rule_of_the_user_forms_the_batches() -> None:
    options: dict[str, Any] = {"policy": WaitsForFour(), "workers": "threads"}
    async with DynBatcher(BatchSize, **options) as batcher:
        for _ in range(2):  # before a batch was measured; the first of a worker is not
            assert await batcher.process_batched(0) == 1
        sizes = await asyncio.gather(*[batcher.process_batched(0) for _ in range(3)], late(batcher))
    assert sizes == [4] * 4
    assert batcher.stats.releases == {"idle": 2, "hold": 1}


async def late(batcher: DynBatcher[Any, Any]) -> Any:
    await until(lambda: batcher.stats.waiting == 3)
    return await batcher.process_batched(0)


async def test_a_rule_that_raises_is_logged_and_holds_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"policy": WaitsForFour("no rule"), "workers": "threads"}
    async with DynBatcher(BatchSize, **options) as batcher:
        assert [await batcher.process_batched(0) for _ in range(3)] == [1] * 3
    (record,) = [one for one in caplog.records if "policy.hold raised" in one.message]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)


# --- settings that change -------------------------------------------------------------------------


async def test_invalid_setting_changes_no_setting() -> None:
    wrong: list[dict[str, Any]] = [
        {"max_batch_size": 0},
        {"max_batch_size": 8, "max_latency": -1.0},
        {"max_latency": 0.1, "max_queue_size": 1.5},
        {"max_batch_size": 8, "max_delay": math.nan},
        {"max_batch_size": 8, "num_workers": 0},
        {"max_batch_size": 8, "infer_timeout": 2.0},
    ]
    async with DynBatcher(BatchSize, 4) as batcher:
        for changes in wrong:
            with pytest.raises(ConfigurationError):
                batcher.reconfigure(**changes)
            calls = [call(batcher, number) for number in range(8)]
            assert await asyncio.gather(*calls) == [4] * 8


async def test_disabled_batching_sends_each_request_alone(gate: Gate) -> None:
    options: dict[str, Any] = {"enabled": False, "policy": "fixed", "max_delay": 60.0}
    async with DynBatcher(BatchSize, 4, **options) as batcher:
        assert await batcher.process_many(range(9)) == [1] * 9
        batcher.reconfigure(max_batch_size=8)
        calls = [call(batcher, number) for number in range(9)]
        assert await asyncio.gather(*calls) == [1] * 9
        assert batcher.stats.batch_sizes == {1: 18}
        assert batcher.explain().cause == "disabled"
    async with DynBatcher(Holds, model_args=(gate.path,), enabled=False) as batcher:
        many = asyncio.create_task(batcher.process_many(["hold", *range(9)]))
        visit = await gate.visit()
        # One that runs, and one behind it.
        assert batcher.stats.submitted == 2
        visit.let_on()
        assert await many == ["hold", *range(9)]


# --- calls ----------------------------------------------------------------------------------------


class SlowToPickle:
    """Works while it is pickled, as an image that is read and decoded only then."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(1.5 * SLOW)
        return list, ()


async def test_slow_pickling_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with DynBatcher(Echo) as batcher:
        for _ in range(2):
            assert await batcher.process_batched(SlowToPickle()) == []
    (message,) = [one for one in caplog.messages if "pickling inputs took" in one]
    assert message.startswith("Echo: ")


async def test_invalid_timeout_is_rejected_unqueued() -> None:
    async with DynBatcher(Echo) as batcher:
        for timeout in [0, -1, math.nan, "1", True, [1]]:
            wrong: Any = {"timeout": timeout}
            with pytest.raises(ConfigurationError, match=r"timeout=.*more than 0"):
                await batcher.process_batched(1, **wrong)
            with pytest.raises(ConfigurationError, match="timeout="):
                await batcher.process_many([1], **wrong)
            with pytest.raises(ConfigurationError, match="timeout="):
                batcher.submit(1, **wrong)
        assert batcher.stats.submitted == 0
        assert await batcher.process_batched(1, timeout=math.inf) == 1


# --- cancellation ---------------------------------------------------------------------------------


def task_cancel(batcher: DynBatcher[Any, Any], value: Any) -> tuple["asyncio.Task[Any]", Any]:
    task = call(batcher, value)
    return task, task.cancel


def cancel_scope(batcher: DynBatcher[Any, Any], value: Any) -> tuple["asyncio.Task[Any]", Any]:
    scope = anyio.CancelScope()

    async def run() -> Any:
        with scope:
            return await batcher.process_batched(value)
        return asyncio.CancelledError()

    return asyncio.create_task(run()), scope.cancel


def task_group(batcher: DynBatcher[Any, Any], value: Any) -> tuple["asyncio.Task[Any]", Any]:
    """A sibling's failure cancels it, and anyio goes on cancelling at every wait."""
    ended = asyncio.Event()

    async def fail() -> None:
        await ended.wait()
        raise ZeroDivisionError

    async def run() -> Any:
        with contextlib.suppress(ExceptionGroup):
            async with anyio.create_task_group() as group:
                group.start_soon(fail)
                output = await batcher.process_batched(value)
                group.cancel_scope.cancel()
                return output
        return asyncio.CancelledError()

    return asyncio.create_task(run()), ended.set


Cancellable = Callable[[DynBatcher[Any, Any], Any], tuple["asyncio.Task[Any]", Any]]
ways_to_cancel = pytest.mark.parametrize("start", [task_cancel, cancel_scope, task_group])


@both_loops
@ways_to_cancel
@pytest.mark.parametrize("victims", [{1}, {0, 2}, {0, 1, 2}], ids=str)
async def test_cancelled_requests_affect_no_others_of_batch(
    gate: Gate, start: Cancellable, victims: set[int]
) -> None:
    async with DynBatcher(Gated, model_args=(gate.path,)) as batcher:
        started = [start(batcher, number) for number in range(3)]
        visit = await gate.visit()
        assert visit.note == [0, 1, 2]
        for victim in victims:
            started[victim][1]()
        for victim in victims:
            assert isinstance(await outcome(started[victim][0]), asyncio.CancelledError)
        stats = assert_balance(batcher)
        assert (stats.cancelled, stats.running) == (len(victims), 3 - len(victims))
        late = call(batcher, "late")
        visit.let_on()
        for number in {0, 1, 2} - victims:
            assert await outcome(started[number][0]) == number
        visit = await gate.visit()
        assert visit.note == ["late"]
        visit.let_on()
        assert await outcome(late) == "late"
        stats = assert_balance(batcher)
        assert (stats.completed, stats.cancelled) == (4 - len(victims), len(victims))


@ways_to_cancel
@pytest.mark.parametrize("stages", [False, True])
async def test_cancelled_batch_behind_another_is_not_computed(
    gate: Gate, start: Cancellable, *, stages: bool
) -> None:
    model = GatedStages if stages else Gated
    async with DynBatcher(model, 1, model_args=(gate.path,)) as batcher:
        (first,), visit = await begin(batcher, gate, "first")
        second, cancel = start(batcher, "second")
        await until(lambda: batcher.stats.running == 2)
        cancel()
        assert isinstance(await outcome(second), asyncio.CancelledError)
        third = call(batcher, "third")
        await turns()
        visit.let_on()
        visit = await gate.visit()
        assert visit.note == ["third"]
        visit.let_on()
        assert [await outcome(one) for one in (first, third)] == ["first", "third"]
        stats = assert_balance(batcher)
        assert (stats.completed, stats.cancelled) == (2, 1)


async def test_answer_and_cancellation_in_the_same_turn(gate: Gate) -> None:
    """The caller is cancelled after its future was settled, before it could look."""
    async with DynBatcher(Gated, model_args=(gate.path,)) as batcher:
        calls = [call(batcher, number) for number in range(2)]
        (await gate.visit()).let_on()
        await until(lambda: batcher.stats.completed == 2)
        calls[0].cancel()
        assert await outcome(calls[1]) == 1
        await asyncio.gather(calls[0], return_exceptions=True)
        assert_balance(batcher)


@both_loops
async def test_a_storm_of_cancellations_harms_no_other_call() -> None:
    async with DynBatcher(
        Slow, 8, model_args=(0.0001,), num_workers=2, max_queue_size=2000
    ) as batcher:
        calls = []
        victims = set()
        for number in range(2000):
            calls.append(call(batcher, number))
            if random.random() < 0.3:
                victim = random.randrange(len(calls))
                if calls[victim].cancel():
                    victims.add(victim)
            if random.random() < 0.1:
                await turns(random.randrange(3))
                assert_balance(batcher)
        outcomes = [await outcome(task) for task in calls]
        for number, result in enumerate(outcomes):
            if number in victims:
                assert isinstance(result, asyncio.CancelledError) or result == number
            else:
                assert result == number
        stats = assert_balance(batcher)
        assert (stats.waiting, stats.running, stats.failed, stats.expired) == (0, 0, 0, 0)


# --- deadlines ------------------------------------------------------------------------------------


@both_loops
async def test_result_of_expired_request_is_dropped(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault F36; and its short timeout does not make the worker not ready."""
    async with DynBatcher(Gated, model_args=(gate.path,)) as batcher:
        patient = call(batcher, "patient")
        hasty = call(batcher, "hasty", timeout=SOON)
        visit = await gate.visit()
        error = await outcome(hasty)
        assert isinstance(error, DeadlineExceededError)
        assert str(error) == f"the model had not answered within its timeout of {SOON} seconds"
        next_call = call(batcher, "next")
        assert_balance(batcher)
        await turns()
        assert batcher.is_ready
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
        visit.let_on()
        assert await outcome(patient) == "patient"
        (await gate.visit()).let_on()
        assert await outcome(next_call) == "next"
        stats = assert_balance(batcher)
        assert (stats.expired, stats.completed) == (1, 2)


async def test_overdue_worker_is_not_ready_until_it_answers(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with DynBatcher(Gated, model_args=(gate.path,), timeout=SOON) as batcher:
        hasty, visit = await begin(batcher, gate, *range(2))
        for task in hasty:
            assert isinstance(await outcome(task), DeadlineExceededError)
        await until(lambda: not batcher.is_ready)
        assert batcher.stats.workers_ready == 0
        with pytest.raises(NotReadyError, match=rf"within its timeout of {SOON} seconds"):
            await batcher.process_batched("not ready")
        warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert f"it has computed one batch for timeout={SOON} seconds" in warnings[0].getMessage()
        assert "infer_timeout alone, which is not set" in warnings[0].getMessage()
        waiting = call(batcher, "waiting", timeout=LIMIT)
        visit.let_on()
        (await gate.visit()).let_on()
        assert await outcome(waiting) == "waiting"
        assert batcher.stats.workers_ready == 1
        assert_balance(batcher)


@both_loops
async def test_infer_timeout_replaces_worker_and_keeps_queue(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault F20."""
    async with DynBatcher(Holds, model_args=(gate.path,), infer_timeout=SOON_IN_WORKER) as batcher:
        stuck = [call(batcher, "hold") for _ in range(2)]
        visit = await gate.visit()
        waiting = [call(batcher, number) for number in range(3)]
        with Watch([visit.pid]) as worker:
            for task in stuck:
                error = await outcome(task)
                assert isinstance(error, DeadlineExceededError)
                assert f"longer than infer_timeout={SOON_IN_WORKER} seconds" in str(error)
            await worker.until_dead()
        assert [await outcome(task) for task in waiting] == [0, 1, 2]
        stats = assert_balance(batcher)
        assert (stats.expired, stats.completed, stats.restarts) == (2, 3, 1)
        assert stats.late_errors == 0, "the callers know why the worker has ended"
    assert f"took longer than infer_timeout={SOON_IN_WORKER}" in caplog.text


@pytest.mark.parametrize("how", ["holding the GIL", "ignoring SIGTERM"])
async def test_infer_timeout_ends_any_stuck_worker(gate: Gate, how: str) -> None:
    """Fault F21."""
    async with DynBatcher(
        Stuck, model_args=(gate.path, how), infer_timeout=SOON_IN_WORKER, stop_timeout=0.2
    ) as batcher:
        (stuck,), visit = await begin(batcher, gate, "stuck")
        with Watch([visit.pid]) as worker:
            assert isinstance(await outcome(stuck), DeadlineExceededError)
            await worker.until_dead()
        (following,), visit = await begin(batcher, gate, "following")
        assert visit.note == ["following"]
        following.cancel()


# --- the queue's limit ----------------------------------------------------------------------------


async def test_full_queue_rejects_until_there_is_room(gate: Gate) -> None:
    """Fault F62."""
    async with DynBatcher(Holds, model_args=(gate.path,), max_queue_size=3) as batcher:
        (first,), visit = await begin(batcher, gate, "hold")
        waiting = [call(batcher, number) for number in range(3)]
        await turns()
        with pytest.raises(QueueFullError, match=r"3 requests wait already \(max_queue_size=3\)"):
            await batcher.process_batched(3)
        with pytest.raises(QueueFullError):
            await batcher.process_many([3, 4])
        stats = assert_balance(batcher)
        assert (stats.rejected, stats.waiting, stats.submitted) == (2, 3, 4)
        waiting.pop().cancel()
        await turns()
        room = call(batcher, "room")
        visit.let_on()
        assert [await outcome(task) for task in (first, *waiting, room)] == ["hold", 0, 1, "room"]
        assert await batcher.process_batched("more room") == "more room"
        assert_balance(batcher)


class Weighed:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.times += 1
        return str, ("an input",)


async def test_full_byte_queue_rejects_at_once(gate: Gate) -> None:
    """Fault F62."""
    settings: dict[str, Any] = {"max_queue_bytes": 1000, "max_queue_size": 2}
    async with DynBatcher(Gated, 1, model_args=(gate.path,), **settings) as batcher:
        running = [call(batcher, "x" * 900)]
        visit = await gate.visit()
        # One that runs, one that is sent behind it, and one that waits.
        running.append(call(batcher, "x" * 900))
        await turns()
        waiting = call(batcher, "x" * 900)
        error = await outcome(call(batcher, "x" * 101))
        assert isinstance(error, QueueFullError)
        assert "max_queue_bytes=1000" in str(error)
        assert not waiting.done()
        fitting = call(batcher, "x" * 50)
        await turns()
        assert batcher.stats.waiting == 2
        # For which there is no room in any case.
        unweighed = Weighed()
        assert isinstance(await outcome(call(batcher, unweighed)), QueueFullError)
        assert unweighed.times == 0
        visit.let_on()
        gate.close()
        for task in (*running, waiting, fitting):
            assert isinstance(await outcome(task), str)


# --- many -----------------------------------------------------------------------------------------


async def test_process_many_keeps_order() -> None:
    """Fault F70; the queue has room for less than a call has in flight."""
    async with DynBatcher(Echo, 4, max_queue_size=2) as batcher:
        assert await batcher.process_many([]) == []
        assert batcher.stats.submitted == 0
        assert await batcher.process_many(range(101)) == list(range(101))
        assert await batcher.process_many(iter("abc")) == ["a", "b", "c"]
        assert assert_balance(batcher).completed == 104
    # Two callers share a queue that has room for less than they have.
    async with DynBatcher(Echo, 2, max_queue_size=8) as batcher:
        starts = [0, 50]
        calls = [asyncio.create_task(batcher.process_many(range(n, n + 50))) for n in starts]
        assert [await outcome(one) for one in calls] == [[*range(n, n + 50)] for n in starts]
        assert assert_balance(batcher).rejected == 0


class Point(NamedTuple):
    """An input with two fields."""

    x: int
    y: int


class Body(BaseModel):
    """The same as the body of a request."""

    x: int = 1


@pytest.mark.parametrize(
    "value",
    ["abc", b"abc", bytearray(3), memoryview(b"abc"), {"a": 1}, Frame(2), Point(1, 2), Body()],
    ids=lambda value: type(value).__name__,
)
async def test_process_many_rejects_a_single_value(value: Any) -> None:
    """Fault F71."""
    batcher: DynBatcher[Any, Any] = DynBatcher(Both)
    for process_many in (batcher.process_many, batcher.methods.text.process_many):
        with pytest.raises(ConfigurationError, match=r"of type .*: give a list of inputs"):
            await process_many(value)
    await batcher.aclose()


class Pages:
    """A sequence without `__iter__`."""

    def __getitem__(self, index: int) -> int:
        return [10, 20, 30][index]


async def test_process_many_takes_a_sequence_without_iter() -> None:
    async with DynBatcher(Echo) as batcher:
        assert await batcher.process_many(cast("Any", Pages())) == [10, 20, 30]


async def test_process_many_with_default_timeout_is_not_rejected() -> None:
    async with DynBatcher(Slow, 1, model_args=(0.02,), timeout=SOON) as batcher:
        await batcher.process_many(range(4), timeout=LIMIT)
        calls = [call(batcher, number, timeout=LIMIT) for number in range(100)]
        await turns()
        with pytest.raises(DeadlineExceededError, match="the answer would take") as caught:
            await batcher.process_batched("in a hurry", timeout=SOON)
        assert caught.value.retry_after is not None
        with pytest.raises(DeadlineExceededError) as caught:
            await batcher.process_many(["patient"])
        assert caught.value.retry_after is None
        assert (batcher.stats.rejected, batcher.stats.expired) == (1, 1)
        for one in calls:
            one.cancel()


async def test_many_are_cancelled_together(gate: Gate) -> None:
    async with DynBatcher(Gated, 2, model_args=(gate.path,)) as batcher:
        many = asyncio.create_task(batcher.process_many(range(20)))
        await gate.visit()
        other = call(batcher, "other")
        await turns()
        many.cancel()
        assert isinstance(await outcome(many), asyncio.CancelledError)
        stats = assert_balance(batcher)
        assert (stats.running, stats.waiting) == (0, 1)
        gate.close()
        assert await outcome(other) == "other"
        stats = assert_balance(batcher)
        assert (stats.completed, stats.cancelled) == (1, stats.submitted - 1)


async def test_first_error_of_many_cancels_the_others() -> None:
    async with DynBatcher(FailsPositions, 2) as batcher:
        with pytest.raises(ValueError, match="this one is bad"):
            await batcher.process_many(["one", "two", "three", "bad", "bad", *"x" * 50])
        assert await batcher.process_many(["four", "five"]) == ["four", "five"]
        stats = assert_balance(batcher)
        assert (stats.running, stats.waiting) == (0, 0)
        # No more than the two batches that may be under way were ever queued behind the bad one.
        assert stats.submitted <= 4 + 2 * 2 + 2


@pytest.mark.parametrize("before", [0, 1, 40])
async def test_an_error_of_many_names_the_position_of_its_input(before: int) -> None:
    async with DynBatcher(FailsPositions, 2, workers="threads") as batcher:
        with pytest.raises(ValueError, match="this one is bad") as caught:
            await batcher.process_many([*"x" * before, "bad", *"x" * 5])
        note = f"input {before} of process_many failed (counted from 0)"
        assert caught.value.__notes__ == [note]
        with pytest.raises(ValueError, match="this one is bad") as caught:
            await batcher.process_batched("bad")
        assert not getattr(caught.value, "__notes__", [])


async def test_errors_of_many_stand_in_their_places() -> None:
    async with DynBatcher(FailsPositions, 2) as batcher:
        inputs = ["one", "bad", "three", *"x" * 50, "bad"]
        outcomes = await batcher.process_many(inputs, return_exceptions=True)
        assert [type(outcome) is str for outcome in outcomes] == [text != "bad" for text in inputs]
        assert isinstance(outcomes[1], ValueError)
        assert await batcher.process_many([], return_exceptions=True) == []

        def draining() -> Iterator[str]:
            yield from ("a", "bad", "b")
            batcher.begin_drain()
            yield "c"

        a, bad, b, closed = await batcher.process_many(draining(), return_exceptions=True)
        assert (a, b, type(closed)) == ("a", "b", BatcherClosedError)
        assert isinstance(bad, ValueError)
        assert_balance(batcher)


class Bad(str):
    """An input that fails, and can be seen to go."""

    def __reduce__(self) -> Any:
        return str, ("bad",)


async def test_failed_call_releases_its_input() -> None:
    async with DynBatcher(FailsPositions) as batcher:
        gc.disable()
        try:
            value = Bad("bad")
            reference = weakref.ref(value)
            with pytest.raises(ValueError, match="this one is bad"):
                await batcher.process_batched(value)
            del value
            await until(lambda: reference() is None)
        finally:
            gc.enable()


# --- submit ---------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        yield executor


Threads = concurrent.futures.ThreadPoolExecutor


def _errors_of(future: "concurrent.futures.Future[Any]") -> "concurrent.futures.Future[Any]":
    """A future for the error of a future, None if it has a result."""
    errors: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.add_done_callback(lambda done: errors.set_result(done.exception()))
    return errors


async def test_a_submitted_request_is_cancelled_from_its_thread(
    threads: Threads, gate: Gate
) -> None:
    """Two that run and three that wait; the second of each is cancelled."""
    loop = asyncio.get_running_loop()
    async with DynBatcher(Gated, model_args=(gate.path,)) as batcher:
        running = [batcher.submit(number) for number in range(2)]
        visit = await gate.visit()
        waiting = [batcher.submit(number) for number in range(2, 5)]
        await turns()
        for future in (running[1], waiting[1]):
            assert await loop.run_in_executor(threads, future.cancel)
        # And one before the loop has seen it, which is never a call.
        assert batcher.submit("unseen").cancel()
        await turns()
        stats = assert_balance(batcher)
        assert (stats.submitted, stats.waiting, stats.cancelled) == (5, 2, 2)
        visit.let_on()
        visit = await gate.visit()
        assert visit.note == [2, 4]
        visit.let_on()
        results = [await asyncio.wrap_future(one) for one in (running[0], *waiting[::2])]
        assert results == [0, 2, 4]


async def test_two_open_batchers_of_one_name_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> int:
        return sum('name="..."' in text for text in caplog.messages)

    first, second = (DynBatcher(Echo, workers="threads") for _ in range(2))
    async with first, DynBatcher(Echo, workers="threads", name="other"):
        assert told() == 0
        async with second:
            assert told() == 1
        first.begin_drain()
        async with second:  # takes its place
            assert told() == 1
    async with first:
        assert told() == 1


async def test_waiting_for_a_submitted_call_on_the_loop_is_an_error() -> None:
    """It would wait for ever: the loop that computes the answer is the one that waits."""
    async with DynBatcher(Echo) as batcher:
        future = batcher.submit("a")
        for wait in (future.result, future.exception, partial(future.result, LIMIT)):
            with pytest.raises(RuntimeError, match="use `await batcher"):
                wait()
        with pytest.raises(TimeoutError):
            future.result(0)  # a look, which does not wait
        assert await asyncio.wrap_future(future) == "a"
        assert (future.result(), future.exception()) == ("a", None)


async def test_the_timeout_of_a_submitted_request_counts_from_its_call(gate: Gate) -> None:
    """The event loop is blocked meanwhile."""
    async with DynBatcher(Holds, model_args=(gate.path,), drain_timeout=0.0) as batcher:
        submitted = asyncio.wrap_future(batcher.submit("hold", timeout=0.5))
        time.sleep(0.3)
        later = call(batcher, "later", timeout=0.4)
        assert await order_of_ends(submitted, later) == [0, 1]


@pytest.mark.parametrize("others", [0, 1])
async def test_submitted_request_is_cancelled_during_its_answer(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with DynBatcher(Echo) as batcher:
        futures = [batcher.submit(TellsArrival()) for _ in range(1 + others)]
        monkeypatch.setattr(TellsArrival, "listeners", [futures[0].cancel])
        for future in futures[1:]:
            assert isinstance(await asyncio.wrap_future(future), TellsArrival)
        await until(futures[0].cancelled)
        assert await batcher.process_batched("next") == "next"
        stats = assert_balance(batcher)
        # Its task had the output already.
        assert (stats.completed, stats.cancelled, stats.restarts) == (2 + others, 0, 0)


def test_stop_after_closed_loop_fails_submitted_calls() -> None:
    loop = asyncio.new_event_loop()
    batcher = DynBatcher(Echo)
    loop.run_until_complete(batcher.open())
    # The loop will never have the turn in which it would see this.
    future = batcher.submit(1)
    loop.close()
    with pytest.raises(NotReadyError, match="the event loop that served it is closed"):
        batcher.submit(2)
    batcher.stop()
    with pytest.raises(BatcherClosedError):
        future.result(LIMIT)


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "aclose"])
async def test_construction_starts_nothing(end: str) -> None:
    """Fault F50."""
    process = psutil.Process()

    def construct() -> DynBatcher[Any, Any]:
        before = process.children(), threading.active_count()
        batcher = DynBatcher(Echo)
        assert (process.children(), threading.active_count()) == before
        return batcher

    batcher = await asyncio.to_thread(construct)
    children = process.children()
    assert (batcher.state, batcher.is_ready) == ("new", False)
    if end == "stop":
        batcher.stop()
    else:
        await batcher.aclose()
    assert batcher.state == "closed"
    with pytest.raises(BatcherClosedError):
        await batcher.process_batched(1)
    assert process.children() == children


async def test_call_without_auto_open_names_the_remedy() -> None:
    pytest.importorskip("fastapi")  # with it, the message has the remedy of an app
    batcher = DynBatcher(Echo, auto_open=False)
    await asyncio.sleep(0)
    assert batcher.state == "new"
    remedy = r"opened.*FastAPI\(lifespan=batcher.lifespan\).*TestClient"
    with pytest.raises(NotReadyError, match=remedy):
        await batcher.process_batched(1)
    with pytest.raises(NotReadyError, match=remedy):
        await batcher.process_many([1])
    with pytest.raises(NotReadyError, match=remedy):
        batcher.submit(1)
    async with batcher:
        assert await batcher.process_batched(1) == 1
        assert await asyncio.wrap_future(batcher.submit(1)) == 1
        batcher.begin_drain()
        with pytest.raises(BatcherClosedError, match="draining"):
            batcher.submit(2)
    with pytest.raises(BatcherClosedError, match="closed"):
        batcher.submit(3)


async def test_first_call_opens_the_batcher_once() -> None:
    batcher = await asyncio.to_thread(DynBatcher, Whereabouts)
    assert batcher.state == "new"
    pid = await batcher.process_batched(None)
    await asyncio.gather(batcher.open(), batcher.open())
    assert await batcher.process_batched(None) == pid
    await batcher.open()
    async with batcher:
        assert await batcher.process_batched(None) == pid
    assert batcher.state == "closed"


@both_loops
async def test_cancelling_open_leaves_the_workers_loading(gate: Gate) -> None:
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,))
    opening = asyncio.create_task(batcher.open())
    visit = await gate.visit()
    opening.cancel()
    assert isinstance(await outcome(opening), asyncio.CancelledError)
    visit.let_on()
    await batcher.open()
    assert await batcher.process_batched(1) == 1
    await batcher.aclose()


@both_loops
async def test_earlier_close_does_not_close_reopened_batcher(gate: Gate) -> None:
    batcher = DynBatcher(Holds, model_args=(gate.path,), stop_timeout=SOON)
    await batcher.open()
    held = call(batcher, "hold")
    await gate.visit()
    closing = asyncio.create_task(batcher.aclose())
    await turns()
    batcher.stop()
    await batcher.open()
    assert await outcome(closing) is None
    assert isinstance(await outcome(held), BatcherClosedError)
    assert await batcher.process_batched("open") == "open"
    await batcher.aclose()


@both_loops
@pytest.mark.parametrize("end", ["stop", "aclose"])
async def test_open_fails_if_batcher_is_closed_meanwhile(gate: Gate, end: str) -> None:
    batcher = DynBatcher(NeverLoads, model_args=(gate.path,), stop_timeout=SOON)
    opening = asyncio.create_task(batcher.open())
    visit = await gate.visit()
    with Watch([visit.pid]) as worker:
        if end == "stop":
            batcher.stop()
        else:
            await batcher.aclose()
        assert worker.survivors(0.0) == []
    with pytest.raises(BatcherClosedError, match="told to stop before it was ready"):
        await opening
    assert batcher.stats.rejected == 0


# --- closing --------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("way", ["aclose", "begin_drain"])
async def test_closing_finishes_accepted_and_rejects_new_calls(gate: Gate, way: str) -> None:
    batcher = DynBatcher(Gated, 2, model_args=(gate.path,))
    await batcher.open()
    accepted, visit = await begin(batcher, gate, *range(7))
    assert (batcher.state, batcher.is_ready) == ("open", True)
    batcher.begin_drain()
    batcher.begin_drain()
    closing = asyncio.create_task(batcher.aclose() if way == "aclose" else turns())
    await turns()
    assert (batcher.state, batcher.is_ready) == ("draining", False)
    with pytest.raises(BatcherClosedError, match="draining"):
        await batcher.process_batched("too late")
    with Watch([visit.pid]) as worker:
        gate.close()
        assert [await outcome(task) for task in accepted] == list(range(7))
        assert await outcome(closing) is None
        if way == "begin_drain":
            assert batcher.state == "draining"
            await batcher.aclose()
        assert worker.survivors(0.0) == []
    stats = assert_balance(batcher)
    assert (stats.state, stats.completed, stats.rejected) == ("closed", 7, 1)


@both_loops
@pytest.mark.parametrize("count", [1, 3], ids=["in the turn of aclose", "before"])
async def test_draining_skips_the_fixed_window(count: int) -> None:
    """Calls of the turn in which `aclose` is called are finished, too."""
    batcher = DynBatcher(Echo, policy="fixed", max_delay=2 * LIMIT, timeout=None)
    await batcher.open()
    accepted = [call(batcher, number) for number in range(3)]
    await turns(count)
    assert assert_balance(batcher).waiting == (3 if count > 1 else 0)
    async with asyncio.timeout(LIMIT):
        await batcher.aclose()
    assert [await outcome(task) for task in accepted] == [0, 1, 2]
    assert batcher.stats.releases == {"drain": 1}


@both_loops
@pytest.mark.parametrize("while_it", ["drains", "ends its workers"])
async def test_a_cancelled_aclose_kills_the_workers_at_once(gate: Gate, while_it: str) -> None:
    drain_timeout = 2 * LIMIT if while_it == "drains" else 0.0
    batcher = DynBatcher(
        Stuck,
        model_args=(gate.path, "plainly"),
        drain_timeout=drain_timeout,
        stop_timeout=2 * LIMIT,
    )
    await batcher.open()
    (running,), visit = await begin(batcher, gate, "running")
    closing = asyncio.create_task(batcher.aclose())
    also_closing = asyncio.create_task(batcher.aclose())
    if while_it == "drains":
        await turns()
    else:
        assert isinstance(await outcome(running), BatcherClosedError)
    with Watch([visit.pid]) as worker:
        closing.cancel()
        assert isinstance(await outcome(closing), asyncio.CancelledError)
        assert worker.survivors(0.0) == []
    assert await outcome(also_closing) is None
    assert isinstance(await outcome(running), BatcherClosedError)
    assert batcher.state == "closed"
    assert_balance(batcher)


@both_loops
@pytest.mark.parametrize("how", ["plainly", "ignoring SIGTERM"])
@pytest.mark.parametrize("thread", ["this thread", "another thread"])
async def test_stop_fails_running_and_waiting_requests(gate: Gate, how: str, thread: str) -> None:
    batcher = DynBatcher(Stuck, model_args=(gate.path, how), stop_timeout=SOON)
    await batcher.open()
    accepted, visit = await begin(batcher, gate, 0, 1)
    accepted += [call(batcher, number) for number in (2, 3)]
    submitted = [batcher.submit("waiting")]
    await turns()
    accepted.append(call(batcher, "unseen"))
    await turns(1)
    submitted.append(batcher.submit("unseen"))
    with Watch([visit.pid]) as worker:
        if thread == "this thread":
            batcher.stop()
        else:
            await asyncio.to_thread(batcher.stop)
        assert worker.survivors(0.0) == []
    for task in accepted:
        assert isinstance(await outcome(task), BatcherClosedError)
    for future in submitted:
        assert isinstance(await asyncio.wrap_future(_errors_of(future)), BatcherClosedError)
    stats = assert_balance(batcher)
    # The loop's thread may not have taken the last call of the other thread.
    assert stats.submitted == stats.failed
    assert stats.failed + stats.rejected == 7
    batcher.stop()


@both_loops
async def test_stop_works_in_callback_of_an_answer(gate: Gate) -> None:
    """In the middle of settling a batch: the others of it have their answers all the same."""
    batcher = DynBatcher(Holds, 3, model_args=(gate.path,), stop_timeout=SOON)
    await batcher.open()
    futures = [batcher.submit(value) for value in ("hold", 1, 2)]
    futures[0].add_done_callback(lambda _: batcher.stop())
    visit = await gate.visit()
    waiting = call(batcher, "waiting")
    await turns()
    visit.let_on()
    assert [await asyncio.wrap_future(future) for future in futures] == ["hold", 1, 2]
    # It was sent to the worker before the batch was settled.
    assert isinstance(await outcome(waiting), BatcherClosedError)
    assert batcher.state == "closed"
    stats = assert_balance(batcher)
    assert (stats.completed, stats.failed) == (3, 1)


@pytest.mark.parametrize(("end", "answered"), [("stop", 0), ("aclose", 0), ("aclose", 3)])
async def test_closing_closes_the_model_and_is_repeatable(
    tmp_path: Path, end: str, answered: int
) -> None:
    """Fault F50."""
    path = tmp_path / "log"
    batcher = DynBatcher(Closes, model_args=(str(path),), num_workers=2, stop_timeout=LIMIT)
    await batcher.open()
    await batcher.process_many(range(answered))
    if end == "stop":
        batcher.stop()
    else:
        await asyncio.gather(batcher.aclose(), batcher.aclose(), batcher.aclose())
    assert path.read_text() == "closed\nclosed\n"
    await batcher.aclose()
    batcher.stop()
    batcher.stop()
    batcher.begin_drain()
    assert batcher.state == "closed"


@pytest.mark.parametrize("waits", [True, False])
async def test_lifespan_opens_and_closes_the_batcher(gate: Gate, waits: bool) -> None:
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,))
    if waits:
        gate.close()
    async with (batcher.lifespan if waits else batcher.lifespan(wait_ready=False))(object()):
        assert (batcher.state, batcher.is_ready) == ("open" if waits else "opening", waits)
        early = call(batcher, "early")
        if not waits:
            visit = await gate.visit()
            assert assert_balance(batcher).waiting == 1
            visit.let_on()
        assert await outcome(early) == "early"
        assert (batcher.state, batcher.is_ready) == ("open", True)
    assert batcher.state == "closed"


# --- what can be seen of it -----------------------------------------------------------------------


async def test_repr_is_a_status_line(gate: Gate) -> None:
    async with DynBatcher(Holds, model_args=(gate.path,), name="embedder") as batcher:
        (held,), visit = await begin(batcher, gate, "hold")
        waiting = call(batcher, 1)
        await turns()
        busy = "<DynBatcher 'embedder' open workers=1/1 waiting=1 running=1 completed=0 failed=0>"
        assert repr(batcher) == busy
        visit.let_on()
        await asyncio.gather(held, waiting)
    end = "<DynBatcher 'embedder' closed workers=0/1 waiting=0 running=0 completed=2 failed=0>"
    assert repr(batcher) == end


async def test_each_state_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fast_batcher"):
        async with DynBatcher(Echo, name="logged"):
            pass
    moves = [message for message in caplog.messages if "->" in message]
    assert moves == [
        "logged: new -> opening (open)",
        "logged: opening -> open (all workers ready)",
        "logged: open -> draining (drain)",
        "logged: draining -> closed (close)",
    ]
