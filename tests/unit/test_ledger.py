"""Telling callers, whoever they are and wherever they have gone: each outcome is counted once."""

import asyncio

import pytest

from fast_batcher._core.values import Batch, Failure, Release, Request
from fast_batcher._opening.ledger import Ledger
from fast_batcher.errors import InferenceError

pytestmark = pytest.mark.anyio


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


class RefusingCaller:
    """The future of an event loop that takes no outcome."""

    def set_result(self, _: object) -> None:
        raise TypeError("no result")

    def set_exception(self, _: BaseException) -> None:
        raise TypeError("no error")


async def test_outcome_that_no_caller_takes_is_told_and_counted_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger, loop = Ledger("model"), asyncio.get_running_loop()
    here, gone = loop.create_future(), loop.create_future()
    gone.cancel()
    assert ledger.give(Request(None, here), "output")
    assert await here == "output"
    for caller in (gone, RefusingCaller()):
        assert not ledger.give(Request(None, caller), "output")
        assert not ledger.give(Request(None, caller), Failure(InferenceError("failed")))
    assert not ledger.counters.outcomes
    text = "model: the future of a caller has refused its outcome"
    assert [record.getMessage() for record in caplog.records] == [text, text]
