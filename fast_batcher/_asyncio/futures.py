"""Settling the futures that callers wait for. API process, the event loop's thread.

A caller waits for an `asyncio.Future`, or in another thread for a `ThreadCaller`. It may leave at
any moment: that is counted, and harms no other caller.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from fast_batcher._core.messages import Request
from fast_batcher.errors import BatcherError
from fast_batcher.stats import Counters


@dataclass(frozen=True, slots=True)
class Failure:
    """An outcome that is an error."""

    # Makes an error for each caller, as tracebacks grow on shared ones.
    to_error: Callable[[], BatcherError]


class ThreadCaller:
    """A `concurrent.futures.Future` behind the two methods that settling needs.

    It is made in the caller's thread.
    """

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future
        # Its context variables, for the functions `cost` and `group_by`.
        self.context = copy_context()

    def set_result(self, output: Any) -> None:
        """Give the caller its output, unless it has cancelled."""
        self._claim()
        self._future.set_result(output)

    def set_exception(self, error: BaseException) -> None:
        """Give the caller an error, unless it has cancelled."""
        self._claim()
        self._future.set_exception(error)

    def _claim(self) -> None:
        # Its thread may cancel it at any moment; from here on it cannot.
        if not self._future.set_running_or_notify_cancel():
            raise asyncio.InvalidStateError("cancelled")


def settle(counters: Counters, requests: list[Request], outcomes: list[Any]) -> None:
    """Give each caller of an answered batch its outcome, and count it.

    Args:
        counters: Where it is counted.
        requests: The batch. A request that is settled has left and been counted.
        outcomes: An output or a `Failure` for each.
    """
    completed = 0
    # Both have been compared in length when the answer was read.
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
        except asyncio.InvalidStateError:  # cancelled, in this turn of the loop
            counters.cancelled += 1
    counters.completed += completed


def fail(counters: Counters, request: Request, error: BaseException) -> None:
    """Give one caller an error, and count the request as failed."""
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
    """Whether the caller waits on a closed loop, where settling its future would raise."""
    caller = request.caller
    return isinstance(caller, asyncio.Future) and caller.get_loop().is_closed()
