"""Those who wait for an outcome, and telling them. Runs on the thread that has the outcome.

A request's caller is an `asyncio.Future`, or a `Place` in a `Call`. A future belongs to the thread
of its event loop, so every loop is woken once per batch, with all that is for it.
"""

import asyncio
import contextlib
from _thread import LockType, allocate_lock
from asyncio import Future, InvalidStateError
from collections.abc import Callable, Sequence
from typing import Any

from fast_batcher._core.messages import Request
from fast_batcher._local.function import Failure
from fast_batcher._local.settings import LocalSettings, cost_of


class Call:
    """A call with several items, or from a thread that blocks.

    Args:
        count: Of its items, at least one.
        future: Who waits; None for the thread that calls `wait`.
    """

    __slots__ = ("_lock", "_missing", "_waiters", "outcome")

    def __init__(self, count: int, future: "Future[Any] | None" = None) -> None:
        # The outputs by position, or the failure of the first item that has one; None when that
        # has been raised.
        self.outcome: list[Any] | Failure | None = [None] * count
        self._missing = count
        self._lock: LockType | None = None
        waiter: Any = future
        if future is None:
            waiter = self._lock = allocate_lock()
            self._lock.acquire()
        # A list for its `pop`, which two threads cannot both succeed with.
        self._waiters = [waiter]

    def put(self, position: int, outcome: Any) -> bool:
        """Note the outcome of one item; whether the call is over with it."""
        if type(outcome) is Failure:
            self.outcome = outcome
            return True
        outputs = self.outcome  # looked at once: another thread may put a failure there
        if type(outputs) is list:
            outputs[position] = outcome
        self._missing -= 1
        return not self._missing

    def take_waiter(self) -> Any:
        """Who is to be told that it is over; None if that has been done."""
        try:
            return self._waiters.pop()
        except IndexError:
            return None

    def wait(self) -> list[Any]:
        """Block this thread until all outputs are there, or raise the error of one."""
        assert self._lock is not None, "a call of a thread"
        self._lock.acquire()
        if isinstance(self.outcome, Failure):
            try:
                raise self.outcome.error
            finally:
                # Else the error would hold this frame, and this call the error.
                self.outcome = None
        assert self.outcome is not None, "asked once"
        return self.outcome


class Place:
    """One item's place in a call."""

    __slots__ = ("call", "position")

    def __init__(self, call: Call, position: int) -> None:
        self.call = call
        self.position = position


def requests_of(
    call: Call, items: Sequence[Any], settings: LocalSettings, rank: Callable[[], None]
) -> list[Request]:
    """The requests of a call, with what the queue goes by; `rank` is called if they have ranks."""
    requests = [Request(item, Place(call, position)) for position, item in enumerate(items)]
    if settings.max_batch_length is not None:
        for request in requests:
            request.cost = cost_of(request.value)
    if settings.is_ranked and len(items) > settings.small_batch_threshold:
        rank()
        for request in requests:
            request.priority = settings.priority(request.value)
    return requests


def deliver(requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
    """Give each caller its outcome: an output or a `Failure`."""
    told: dict[asyncio.AbstractEventLoop, list[tuple[Future[Any], Any]]] = {}
    last_loop: asyncio.AbstractEventLoop | None = None
    bucket: list[tuple[Future[Any], Any]] = []
    for request, outcome in zip(requests, outcomes, strict=True):
        future = request.caller
        if type(future) is Place:
            call = future.call
            if not call.put(future.position, outcome):
                continue
            future, outcome = call.take_waiter(), call.outcome
            if future is None:
                continue
            if type(future) is LockType:
                future.release()
                continue
        loop = future.get_loop()
        if loop is not last_loop:
            bucket = told.setdefault(loop, [])
            last_loop = loop
        bucket.append((future, outcome))
    for loop, pairs in told.items():
        _settle_on(loop, pairs)


def _settle_on(loop: asyncio.AbstractEventLoop, pairs: list[tuple["Future[Any]", Any]]) -> None:
    # Documented for those who implement event loops; `get_running_loop` would raise.
    if asyncio._get_running_loop() is loop:  # noqa: SLF001
        _settle(pairs)
        return
    # A closed loop has nobody left who could be told.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, pairs)


def _settle(pairs: list[tuple["Future[Any]", Any]]) -> None:
    for future, outcome in pairs:
        try:
            if type(outcome) is Failure:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome)
        except InvalidStateError:  # cancelled
            pass
        except RuntimeError:  # its loop has been closed, and with it all who waited there
            pass
