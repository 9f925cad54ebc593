"""Telling callers, whoever they are and wherever they have gone: each outcome is counted once."""

import asyncio
import concurrent.futures
from typing import Any

import pytest

from fast_batcher._core.values import Batch, Failure, Release, Request
from fast_batcher._session.outcomes import Ledger, ThreadCaller
from fast_batcher.errors import InferenceError

pytestmark = pytest.mark.anyio


def counts(ledger: Ledger) -> tuple[int, int, int]:
    outcomes = ledger.counters.outcomes
    return outcomes["completed"], outcomes["failed"], outcomes["cancelled"]


async def test_each_remaining_caller_gets_its_outcome() -> None:
    """Callers wait on the loop or in a thread; some of them have gone."""
    loop = asyncio.get_running_loop()
    here, failed, looks_like_an_error = (loop.create_future() for _ in range(3))
    gone, gone_failing, settled = (loop.create_future() for _ in range(3))
    there, gone_there = (concurrent.futures.Future[Any]() for _ in range(2))
    for future in (gone, gone_there, gone_failing):
        future.cancel()
    failure = Failure(InferenceError("failed"))
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
    ledger = Ledger("model")
    batch = Batch(0, 0, requests, Release.IDLE, 0.0, len(requests), 0.0)
    ledger.answer(batch, requests, [outcome for _, outcome in outcomes])
    assert (here.result(), there.result(), looks_like_an_error.result()) == ("one", None, output)
    assert isinstance(failed.exception(), InferenceError)
    assert not settled.done()
    assert counts(ledger) == (3, 1, 3)
    assert all(request.is_settled for request in requests)


def test_thread_cannot_cancel_during_settlement() -> None:
    future = concurrent.futures.Future[Any]()
    cancelled_while_told: list[bool] = []
    future.add_done_callback(lambda done: cancelled_while_told.append(done.cancel()))
    ThreadCaller(future).set_result(1)
    assert cancelled_while_told == [False]
    assert future.result() == 1


@pytest.mark.parametrize(
    ("gone", "outcomes", "late"),
    [
        ([True, False], ["failure", "output"], 1),
        ([True, False], ["failure", "failure"], 0),
        ([True, True], ["failure", "failure"], 1),
        ([True, True], ["output", "output"], 0),
        ([False, False], ["failure", "output"], 0),
    ],
)
async def test_error_is_late_without_a_caller(
    gone: list[bool], outcomes: list[str], late: int
) -> None:
    loop = asyncio.get_running_loop()
    requests = [Request(None, loop.create_future()) for _ in gone]
    for request, is_gone in zip(requests, gone, strict=True):
        request.is_settled = is_gone
    told = [Failure(InferenceError("failed")) if one == "failure" else one for one in outcomes]
    ledger = Ledger("model")
    ledger.answer(Batch(0, 0, requests, Release.IDLE, 0.0, len(requests), 0.0), requests, told)
    assert ledger.counters.late_errors.count == late
    for request in requests:
        if request.caller.done():
            request.caller.exception()
