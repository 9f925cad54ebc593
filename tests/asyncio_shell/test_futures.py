"""Telling callers, whoever they are and wherever they have gone: each outcome is counted once."""

import asyncio
import concurrent.futures
from typing import Any

import pytest

from fast_batcher._asyncio.futures import ThreadCaller, fail, is_beyond_reach, set_exception, settle
from fast_batcher._core.messages import Request
from fast_batcher._parent.batch_sender import Failure
from fast_batcher.errors import InferenceError, WorkerLostError
from fast_batcher.stats import Counters

pytestmark = pytest.mark.anyio


def requests_of(*callers: Any) -> list[Request]:
    return [Request(None, caller) for caller in callers]


def counts(counters: Counters) -> tuple[int, int, int]:
    return counters.completed, counters.failed, counters.cancelled


async def test_each_caller_gets_its_outcome() -> None:
    loop = asyncio.get_running_loop()
    here, there = loop.create_future(), concurrent.futures.Future[Any]()
    failed = loop.create_future()
    requests = requests_of(here, ThreadCaller(there), failed)
    counters = Counters()
    settle(counters, requests, ["one", None, Failure(lambda: InferenceError("three"))])
    assert (here.result(), there.result()) == ("one", None)
    assert isinstance(failed.exception(), InferenceError)
    assert counts(counters) == (2, 1, 0)
    assert all(request.is_settled for request in requests)


async def test_a_caller_that_has_gone_harms_nobody_and_is_counted_as_cancelled() -> None:
    loop = asyncio.get_running_loop()
    gone, stays = loop.create_future(), loop.create_future()
    thread_gone = concurrent.futures.Future[Any]()
    gone_failing = loop.create_future()
    for future in (gone, thread_gone, gone_failing):
        future.cancel()
    counters = Counters()
    requests = requests_of(gone, ThreadCaller(thread_gone), gone_failing, stays)
    settle(counters, requests, [1, 2, Failure(lambda: InferenceError("three")), 4])
    assert stays.result() == 4
    assert counts(counters) == (1, 0, 3)


async def test_a_request_that_has_left_is_neither_told_nor_counted() -> None:
    future = asyncio.get_running_loop().create_future()
    (request,) = requests_of(future)
    request.is_settled = True
    counters = Counters()
    settle(counters, [request], ["late"])
    assert not future.done()
    assert counts(counters) == (0, 0, 0)


async def test_an_output_that_looks_like_an_error_is_an_output() -> None:
    future = asyncio.get_running_loop().create_future()
    output = ValueError("an output")
    settle(Counters(), requests_of(future), [output])
    assert future.result() is output


async def test_failing_counts_those_that_heard_of_it() -> None:
    loop = asyncio.get_running_loop()
    here, gone = loop.create_future(), loop.create_future()
    gone.cancel()
    counters = Counters()
    for request in requests_of(here, gone):
        fail(counters, request, WorkerLostError("dead"))
    assert isinstance(here.exception(), WorkerLostError)
    assert counts(counters) == (0, 1, 1)


async def test_telling_says_whether_somebody_listened() -> None:
    future = asyncio.get_running_loop().create_future()
    (request,) = requests_of(future)
    assert set_exception(request, WorkerLostError("dead"))
    assert not set_exception(request, WorkerLostError("dead again"))
    assert str(future.exception()) == "dead"


def test_a_thread_cannot_cancel_what_is_being_told() -> None:
    future = concurrent.futures.Future[Any]()
    cancelled_while_told: list[bool] = []
    future.add_done_callback(lambda done: cancelled_while_told.append(done.cancel()))
    ThreadCaller(future).set_result(1)
    assert cancelled_while_told == [False]
    assert future.result() == 1


@pytest.mark.parametrize("method", ["set_result", "set_exception"])
def test_a_cancelled_thread_is_told_nothing(method: str) -> None:
    future = concurrent.futures.Future[Any]()
    future.cancel()
    with pytest.raises(asyncio.InvalidStateError):
        getattr(ThreadCaller(future), method)(WorkerLostError("dead"))
    assert future.cancelled()


def test_only_a_future_of_a_closed_loop_is_beyond_reach() -> None:
    loop = asyncio.new_event_loop()
    (here,) = requests_of(loop.create_future())
    (there,) = requests_of(ThreadCaller(concurrent.futures.Future()))
    assert not is_beyond_reach(here)
    loop.close()
    assert is_beyond_reach(here)
    assert not is_beyond_reach(there)
