"""Observers: each request is told once, and an observer harms no request."""

import asyncio
import gc
import logging
from collections import Counter
from typing import Any

import pytest
from models.base import Echo
from models.crashing import Crashes
from models.ordinary import Gated
from recorder import Recorder, caller
from waits import Gate, both_loops

from fast_batcher import ConfigurationError, DynBatcher, aio, dynamically
from fast_batcher.errors import DeadlineExceededError, QueueFullError
from fast_batcher.observing import (
    BatchAnswered,
    CollectionPaused,
    Observer,
    RequestEnded,
    WorkerChanged,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@both_loops
async def test_batch_event_has_times_of_each_request() -> None:
    recorder, before = Recorder(), [*gc.callbacks]
    caller.set("a caller")
    async with DynBatcher(Echo, max_batch_size=4, observers=[recorder]) as batcher:
        await asyncio.gather(*[batcher.process_batched(number) for number in range(8)])
        stats = batcher.stats
        gc.collect()
        await batcher.process_batched(8)
    batches = recorder.of(BatchAnswered)
    assert sum(one.size for one in batches) == len(recorder.answered) == 9
    assert len(batches) == stats.batches + 1
    for one in batches:
        assert (one.model, one.worker) == ("Echo", 0)
        assert one.dispatched_at <= one.began_at <= one.answered_at
        for request in one.requests:
            assert 0 <= request.queue_wait <= request.total
            assert (request.outcome, request.context) == ("completed", None)
    assert recorder.seen == {"nobody"}
    changes = [(one.change, one.exit_text) for one in recorder.of(WorkerChanged)]
    assert changes == [("started", ""), ("ready", ""), ("lost", "exit code 0")]
    assert max(one.generation for one in recorder.of(CollectionPaused)) == 2
    assert gc.callbacks == before


@both_loops
async def test_each_end_of_request_is_reported_once(gate: Gate) -> None:
    recorder = Recorder()
    options: Any = {"max_queue_size": 2, "observers": [recorder], "model_args": (gate.path,)}
    async with DynBatcher(Gated, 1, **options) as batcher:
        running = asyncio.create_task(batcher.process_batched(1))
        visit = await gate.visit()
        cancelled = asyncio.create_task(batcher.process_batched(0))
        late = asyncio.create_task(batcher.process_batched(0, timeout=0.05))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batcher.process_batched(0)
        cancelled.cancel()
        with pytest.raises(DeadlineExceededError):
            await late
        visit.let_on()
        await running
    told = [(one.outcome, one.reason) for one in recorder.of(RequestEnded)]
    assert told == [("rejected", "queue full"), ("cancelled", "running"), ("expired", "waiting")]
    assert recorder.outcomes() == Counter(completed=1, rejected=1, cancelled=1, expired=1)


@both_loops
async def test_event_sums_equal_statistics_after_deaths() -> None:
    recorder = Recorder()
    options: Any = {"max_restarts": None, "restart_backoff": 0.01, "observers": [recorder]}
    async with DynBatcher(Crashes, 4, num_workers=2, **options) as batcher:
        words = ["exit 3" if number % 8 == 0 else "fine" for number in range(40)]
        calls = [batcher.process_batched(word) for word in words]
        await asyncio.gather(*calls, return_exceptions=True)
        stats = batcher.stats
    found = recorder.outcomes()
    assert found == Counter(completed=stats.completed, failed=stats.failed)
    assert found.total() == 40
    assert {one.reason for one in recorder.of(RequestEnded)} <= {"poison request", "worker lost"}
    assert "lost" in {one.change for one in recorder.of(WorkerChanged)}


@both_loops
async def test_raising_observer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def batch_answered(self, event: BatchAnswered) -> None:
            raise ZeroDivisionError

    recorder = Recorder()
    async with DynBatcher(Echo, observers=[Broken()]) as batcher:
        batcher.add_observer(recorder)
        for number in range(3):
            assert await batcher.process_batched(number) == number
    assert len(recorder.answered) == 3
    logged = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.exc_info is not None for one in logged] == [True]


@both_loops
async def test_caller_contexts_are_kept_on_demand() -> None:
    recorder = Recorder(needs_context=True)

    @aio.dynamically(observers=[recorder])
    async def double(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    async def call(function: Any, number: int) -> None:
        caller.set(f"caller {number}")
        await function(number)

    async with DynBatcher(Echo, observers=[recorder]) as batcher:
        for function in (batcher.process_batched, double):
            await asyncio.gather(*[call(function, number) for number in range(3)])
    seen = [one.context[caller] for one in recorder.answered]
    assert Counter(seen) == {f"caller {number}": 2 for number in range(3)}


def test_a_decorated_function_tells_its_batches_and_failures() -> None:
    recorder = Recorder()

    @dynamically(batch_size=2, observers=[recorder], isolate_errors=False)
    def halve(numbers: list[int]) -> list[float]:
        return [1 / number for number in numbers]

    with halve:
        assert halve([1, 2]) == [1.0, 0.5]
        with pytest.raises(ZeroDivisionError):
            halve(0)
    assert recorder.outcomes() == Counter(completed=2, failed=1)
    assert {one.model.rpartition(".")[2] for one in recorder.of(BatchAnswered)} == {"halve"}


def test_rejected_items_are_reported_in_caller_context() -> None:
    recorder = Recorder(needs_context=True)
    caller.set("a caller")

    @dynamically(observers=[recorder], max_queue_size=2)
    def echo(items: list[int]) -> list[int]:
        return items

    with echo, pytest.raises(QueueFullError):
        echo([1, 2, 3])
    assert recorder.outcomes() == Counter(rejected=3)
    assert {one.context[caller] for one in recorder.of(RequestEnded)} == {"a caller"}


@both_loops
async def test_invalid_input_is_reported_in_caller_context() -> None:
    recorder = Recorder(needs_context=True)
    caller.set("a caller")
    async with DynBatcher(Echo, cost=len, observers=[recorder]) as batcher:
        with pytest.raises(ConfigurationError):
            await batcher.process_batched(5)
    (told,) = recorder.of(RequestEnded)
    assert (told.reason, told.context[caller]) == ("invalid input", "a caller")


@pytest.mark.parametrize("observers", [Recorder, [Recorder], 5, "text"])
def test_non_observer_is_rejected(observers: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"observers=.*fast_batcher\.observing\.Observer"):
        DynBatcher(Echo, observers=observers)
    with pytest.raises(ConfigurationError, match=r"observers=.*fast_batcher\.observing\.Observer"):
        dynamically(observers=observers)(list)
