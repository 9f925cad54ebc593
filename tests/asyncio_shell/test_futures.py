"""Telling callers, whoever they are and wherever they have gone: each outcome is counted once."""

import asyncio
import concurrent.futures
from typing import Any

import pytest

from fast_batcher._asyncio.futures import Failure, ThreadCaller, fail, is_beyond_reach, settle
from fast_batcher._core.messages import Request
from fast_batcher.errors import InferenceError, WorkerLostError
from fast_batcher.stats import Counters

pytestmark = pytest.mark.anyio


def counts(counters: Counters) -> tuple[int, int, int]:
    return counters.completed, counters.failed, counters.cancelled


async def test_each_caller_that_is_still_there_gets_its_outcome() -> None:
    """Callers wait on the loop or in a thread; some of them have gone."""
    loop = asyncio.get_running_loop()
    here, failed, looks_like_an_error = (loop.create_future() for _ in range(3))
    gone, gone_failing, settled = (loop.create_future() for _ in range(3))
    there, gone_there = (concurrent.futures.Future[Any]() for _ in range(2))
    for future in (gone, gone_there, gone_failing):
        future.cancel()
    failure = Failure(lambda: InferenceError("failed"))
    output = ValueError("an output")
    outcomes: list[tuple[Any, Any]] = [
        (gone, 1),
        (ThreadCaller(gone_there), 2),
        (gone_failing, failure),
        (here, "one"),
        (ThreadCaller(there), None),
        (failed, failure),
        (looks_like_an_error, output),
        (settled, "late"),
    ]
    requests = [Request(None, caller) for caller, _ in outcomes]
    requests[-1].is_settled = True
    counters = Counters()
    settle(counters, requests, [outcome for _, outcome in outcomes])
    assert (here.result(), there.result(), looks_like_an_error.result()) == ("one", None, output)
    assert isinstance(failed.exception(), InferenceError)
    assert not settled.done()
    assert counts(counters) == (3, 1, 3)
    assert all(request.is_settled for request in requests)


async def test_failing_counts_the_callers_that_heard_of_it() -> None:
    loop = asyncio.get_running_loop()
    here, gone = loop.create_future(), loop.create_future()
    gone.cancel()
    counters = Counters()
    for future in (here, gone):
        fail(counters, Request(None, future), WorkerLostError("dead"))
    assert isinstance(here.exception(), WorkerLostError)
    assert counts(counters) == (0, 1, 1)


def test_a_thread_cannot_cancel_what_is_being_told() -> None:
    future = concurrent.futures.Future[Any]()
    cancelled_while_told: list[bool] = []
    future.add_done_callback(lambda done: cancelled_while_told.append(done.cancel()))
    ThreadCaller(future).set_result(1)
    assert cancelled_while_told == [False]
    assert future.result() == 1


def test_only_a_future_of_a_closed_loop_is_beyond_reach() -> None:
    loop = asyncio.new_event_loop()
    here = Request(None, loop.create_future())
    there = Request(None, ThreadCaller(concurrent.futures.Future()))
    assert not is_beyond_reach(here)
    loop.close()
    assert is_beyond_reach(here)
    assert not is_beyond_reach(there)
