"""Telling callers what became of their requests. Runs on the event loop's thread of the parent.

A caller is an `asyncio.Future`, or a `ThreadCaller` for one that waits in another thread. It may
have gone at any moment: that is its right, is counted, and never harms anybody else.
"""

import asyncio
import concurrent.futures
from typing import Any

from fast_batcher._core.messages import Request
from fast_batcher._parent.batch_sender import Failure
from fast_batcher.stats import Counters


class ThreadCaller:
    """A `concurrent.futures.Future` behind the two methods that settling needs."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def set_result(self, output: Any) -> None:
        """Give it its output, unless it has been cancelled."""
        self._claim()
        self._future.set_result(output)

    def set_exception(self, error: BaseException) -> None:
        """Give it an error, unless it has been cancelled."""
        self._claim()
        self._future.set_exception(error)

    def _claim(self) -> None:
        # Its thread may cancel it at any moment; from here on it cannot.
        if not self._future.set_running_or_notify_cancel():
            raise asyncio.InvalidStateError("cancelled")


def settle(counters: Counters, requests: list[Request], outcomes: list[Any]) -> None:
    """Settle the requests of an answered batch: give each caller its outcome and count it.

    Args:
        counters: Where it is counted.
        requests: One that is settled already has left and been counted.
        outcomes: An output or a `Failure` for each.
    """
    completed = 0
    # `BatchSender.read` has compared the lengths.
    for request, outcome in zip(requests, outcomes):  # noqa: B905
        if request.is_settled:
            continue
        request.is_settled = True
        try:
            if outcome.__class__ is Failure:
                request.caller.set_exception(outcome.to_error())
                counters.failed += 1
            else:
                request.caller.set_result(outcome)
                completed += 1
        except asyncio.InvalidStateError:  # cancelled, and has not come round to saying so
            counters.cancelled += 1
    counters.completed += completed


def fail(counters: Counters, request: Request, error: BaseException) -> None:
    """Give one caller an error and count it as failed."""
    if set_exception(request, error):
        counters.failed += 1
    else:
        counters.cancelled += 1


def set_exception(request: Request, error: BaseException) -> bool:
    """Give one caller an error; False if it has gone."""
    if request.staged is not None:  # a task that never runs again keeps the request
        request.staged.release()
    try:
        request.caller.set_exception(error)
    except asyncio.InvalidStateError:
        return False
    return True


def is_beyond_reach(request: Request) -> bool:
    """Whether its caller waits on a closed loop: settling would raise, and nobody would hear it."""
    caller = request.caller
    return isinstance(caller, asyncio.Future) and caller.get_loop().is_closed()
