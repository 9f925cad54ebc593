"""Decorated functions whose batches cannot be settled as usual: every caller gets an outcome."""

import asyncio
import concurrent.futures
import logging
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_policy import FaultyPolicy
from gated_functions import VARIANTS, InThread, Variant, every_variant
from recorder import Recorder
from waits import outcome, until

from fast_batcher import dynamically
from fast_batcher._core.values import Batch, Limits, Release, Request
from fast_batcher._local.opening import LoopCaller, LoopCalls
from fast_batcher._opening.ledger import Ledger
from fast_batcher.errors import BatcherError, InferenceError
from fast_batcher.observing import BatchAnswered, BatchDispatched, Observer, RequestEnded

pytestmark = pytest.mark.anyio


def echo(items: list[Any]) -> list[Any]:
    return items


class RefusingFuture(asyncio.Future[Any]):
    """A future as an event loop may make it, with a fault."""

    def set_result(self, result: Any) -> None:
        raise OSError("no result")


class AbortedError(BaseException):
    """Not an `Exception`, so that code for errors of observers does not catch it."""


class Aborts(Observer):
    """Raises `AbortedError` in one of its methods."""

    needs_context = True

    def __init__(self, where: str) -> None:
        self._where = where

    def batch_dispatched(self, event: BatchDispatched) -> None:
        """Raise if this is the method."""
        self._raise_in("batch_dispatched")

    def batch_answered(self, event: BatchAnswered) -> None:
        """Raise if this is the method."""
        self._raise_in("batch_answered")

    def _raise_in(self, where: str) -> None:
        if where == self._where:
            raise AbortedError(where)


async def test_future_in_odd_state_affects_no_other() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.new_event_loop()
    cancelled, resolved, good = loop.create_future(), loop.create_future(), loop.create_future()
    blocking: concurrent.futures.Future[Any] = concurrent.futures.Future()
    cancelled.cancel()
    resolved.set_result("before")
    blocking.cancel()
    session: Any = SimpleNamespace(function=SimpleNamespace(name="function"))
    settings: Any = None
    elsewhere = LoopCalls(session, ended, settings)
    there = LoopCaller(ended.create_future(), elsewhere.given)
    callers = [there, cancelled, resolved, blocking, RefusingFuture(), good]
    ended.close()
    requests = [Request(0, caller) for caller in callers]
    batch = Batch(0, 0, requests, Release.IDLE, 0.0, len(requests), 0.0)
    Ledger("function").answer(batch, requests, [0] * len(callers))
    elsewhere.wake()
    assert (await resolved, await good, elsewhere.given) == ("before", 0, deque())

    here = LoopCalls(session, loop, settings)
    again = loop.create_future()
    for future in (cancelled, resolved, RefusingFuture(), again):
        LoopCaller(future, here.given).set_result(1)
    here.wake()
    assert await again == 1


@every_variant
@pytest.mark.parametrize("where", ["batch_dispatched", "batch_answered"])
async def test_aborting_observer_affects_no_later_call(variant: Variant, where: str) -> None:
    async with variant.batched(echo, observers=[Aborts(where)], batch_size=2) as function:
        for _ in range(2):
            outcomes = await asyncio.gather(*map(function, range(5)), return_exceptions=True)
            for item, found in enumerate(outcomes):
                assert found == item or isinstance(found, BatcherError)
            # Callers that were answered before keep their answers.
            assert where == "batch_dispatched" or outcomes == [*range(5)]


class Nameless(type):
    """A class that refuses to tell its name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # a type has it as an attribute
        raise ValueError("no name")


class NamelessError(Exception, metaclass=Nameless):
    """An error that cannot be examined."""


@every_variant
async def test_unreadable_error_fails_its_batch(variant: Variant) -> None:
    def fail_for_negative(items: list[int]) -> list[int]:
        if min(items) < 0:
            raise NamelessError
        return items

    ended = Recorder()
    async with variant.batched(fail_for_negative, observers=[ended]) as function:
        outcomes = await asyncio.gather(function(-1), function(-2), return_exceptions=True)
        assert [type(one) for one in outcomes] == [BatcherError] * 2
        assert await function([3, 4]) == [3, 4]
        with pytest.raises(BatcherError, match="ValueError: no name"):
            await function([-3, 4])
        assert await function(5) == 5
    assert ended.of(RequestEnded) == [], "no request was cancelled"


@every_variant
async def test_scheduler_fault_affects_no_later_call(
    variant: Variant, caplog: pytest.LogCaptureFixture
) -> None:
    async with variant.batched(echo, batch_size=2) as function:
        assert await function(1) == 1
        decorated = function if variant.is_aio else function._function
        (session,) = decorated._batcher._openings.values()
        limits = Limits(max_batch_size=2, max_queue_size=100)
        session._scheduler.reconfigure(limits, FaultyPolicy("decide"))
        with pytest.raises(BatcherError, match="IndexError: a fault of ours"):
            await function(2)
        assert await function([3, 4, 5]) == [3, 4, 5]
        session._scheduler.reconfigure(limits, FaultyPolicy("batch_done"))
        assert await function([6, 7, 8]) == [6, 7, 8]
    records = [one for one in caplog.records if one.name == "fast_batcher"]
    assert [one.exc_info[0] for one in records if one.exc_info] == [IndexError] * 2


def test_exiting_task_delays_no_shutdown() -> None:
    """The thread cancels it when it closes its event loop."""
    tasks: list[asyncio.Task[Any]] = []

    async def wait_and_exit() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit

    @dynamically
    async def leave_task(items: list[Any]) -> list[Any]:
        tasks.append(asyncio.create_task(wait_and_exit()))
        await asyncio.sleep(0)
        return items

    assert leave_task(1) == 1
    InThread(leave_task.shutdown).result()
    assert [type(task.exception()) for task in tasks] == [SystemExit]


def test_error_with_odd_text_is_delivered() -> None:
    class Text(str):
        __slots__ = ()

        def __format__(self, spec: str) -> str:
            raise ValueError("no format")

        def startswith(self, *_: Any) -> bool:
            raise ValueError("no start")

    class OddError(RuntimeError):
        def __str__(self) -> str:
            return Text("odd")

    @dynamically
    def fail(items: list[Any]) -> list[Any]:
        raise OddError

    with fail, pytest.raises(InferenceError):
        fail(1)


@every_variant
async def test_an_error_after_the_callers_left_is_logged(
    variant: Variant, caplog: pytest.LogCaptureFixture
) -> None:
    gated = variant.gated()
    async with variant.batched(gated, batch_size=1) as function:
        for count in (1, 2):
            left = asyncio.create_task(function(None))  # which cannot be doubled
            await until(lambda: len(gated.batches) == count)  # noqa: B023
            left.cancel()
            await outcome(left)
            gated.let_on()
            await until(lambda: function.stats.late_errors == count)  # noqa: B023
        function.clear_stats()
        assert function.stats.late_errors == 0
    (record,) = [one for one in caplog.records if "no caller got" in one.getMessage()]
    assert (record.name, record.levelname) == ("fast_batcher", "WARNING")
    assert "TypeError: unsupported operand" in record.getMessage()
    assert "in __call__" in logging.Formatter().format(record)


@every_variant
async def test_failed_call_counts_as_a_caller(variant: Variant) -> None:
    gated = variant.gated()
    async with variant.batched(gated, batch_size=1) as function:
        failed = asyncio.create_task(function([None, None]))
        await until(lambda: len(gated.batches) == 1)
        gated.let_on(2)
        assert isinstance(await outcome(failed), TypeError)
    assert function.stats.late_errors == 0


async def test_late_output_is_ignored() -> None:
    gated = VARIANTS["aio task"].gated()
    async with VARIANTS["aio task"].batched(gated) as function:
        left = asyncio.create_task(function(1))
        await until(lambda: len(gated.batches) == 1)
        left.cancel()
        await outcome(left)
        gated.let_on()
    assert function.stats.late_errors == 0
