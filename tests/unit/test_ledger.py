"""Telling callers, whoever they are and wherever they have gone: each outcome is counted once."""

import asyncio
from typing import Any

import pytest

from fast_batcher._core.values import Batch, Failure, Release, Request
from fast_batcher._session.ledger import Ledger
from fast_batcher.errors import InferenceError

pytestmark = pytest.mark.anyio


def counts(ledger: Ledger) -> tuple[int, int, int]:
    outcomes = ledger.counters.outcomes
    return outcomes["completed"], outcomes["failed"], outcomes["cancelled"]


async def test_each_remaining_caller_gets_its_outcome() -> None:
    """Some callers have gone."""
    loop = asyncio.get_running_loop()
    here, failed, looks_like_an_error = (loop.create_future() for _ in range(3))
    gone, gone_failing, settled = (loop.create_future() for _ in range(3))
    for future in (gone, gone_failing):
        future.cancel()
    failure = Failure(InferenceError("failed"))
    output = ValueError("an output")
    outcomes: list[tuple[Any, Any]] = [
        (gone, 1),
        (gone_failing, failure),
        (here, "one"),
        (failed, failure),
        (looks_like_an_error, output),
        (settled, "late"),
    ]
    requests = [Request(None, caller) for caller, _ in outcomes]
    requests[-1].is_settled = True
    ledger = Ledger("model")
    batch = Batch(0, 0, requests, Release.IDLE, 0.0, len(requests), 0.0)
    ledger.answer(batch, requests, [outcome for _, outcome in outcomes])
    assert (here.result(), looks_like_an_error.result()) == ("one", output)
    assert isinstance(failed.exception(), InferenceError)
    assert not settled.done()
    assert counts(ledger) == (2, 1, 2)
    assert all(request.is_settled for request in requests)


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
