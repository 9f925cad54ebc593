"""Requests of the callers of a decorated function, and the delivery of outcomes to them.

Requests are made on the callers' threads; `deliver` runs on the thread that has the outcomes.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fast_batcher._core.values import Failure, Request
from fast_batcher._local.settings import DecoratorSettings, length_of

logger = logging.getLogger("fast_batcher")

# The future of a caller: an event loop's, or one for a caller that blocks its thread.
CallerFuture = asyncio.Future[Any] | concurrent.futures.Future[Any]


@dataclass(slots=True, eq=False)
class Call:
    """Collects the outcomes of the items of one call."""

    # The caller waits for this.
    future: CallerFuture
    # Number of items without an outcome.
    missing: int
    # The outputs by position, or the failure of an item.
    outcome: list[Any] | Failure

    def put(self, position: int, outcome: Any) -> bool:
        """Store the outcome of one item; return whether this ends the call."""
        if type(outcome) is Failure:
            self.outcome = outcome
            return True
        outputs = self.outcome  # read once: another thread may put a failure there
        if type(outputs) is list:
            outputs[position] = outcome
        self.missing -= 1
        return not self.missing


def make_requests(
    items: Sequence[Any], future: CallerFuture, settings: DecoratorSettings
) -> list[Request]:
    """Make the requests of a call, each with its cost and priority if the settings use them.

    A request's `caller` is the call and the item's position in it.
    """
    call = Call(future, len(items), [None] * len(items))
    requests = [Request(item, (call, position)) for position, item in enumerate(items)]
    if settings.max_batch_length is not None:
        for request in requests:
            request.cost = max(1, length_of(request.value))
    if len(items) > settings.ranks_above:
        for request in requests:
            request.priority = settings.priority(request.value)
    return requests


def has_failed(request: Request) -> bool:
    """Return whether the call of a request has a failure, of another of its items."""
    caller = request.caller
    return type(caller) is tuple and type(caller[0].outcome) is Failure


def deliver(requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
    """Give the caller of each request its outcome, an output or a `Failure`.

    A future belongs to the thread of its event loop, so each loop is woken once for all its
    futures.
    """
    resolved: defaultdict[Any, list[tuple[CallerFuture, Any]]] = defaultdict(list)
    for request, outcome in zip(requests, outcomes, strict=True):
        future = request.caller
        if type(future) is tuple:
            call, position = future
            if not call.put(position, outcome):
                continue
            future, outcome = call.future, call.outcome
        blocks = type(future) is concurrent.futures.Future
        resolved[None if blocks else future.get_loop()].append((future, outcome))
    here = running_loop()
    for loop, pairs in resolved.items():
        if loop is None or loop is here:
            _set_outcomes(pairs)
        else:
            # The loop is closed, and its callers are gone.
            with contextlib.suppress(Exception):
                loop.call_soon_threadsafe(_set_outcomes, pairs)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def is_cancelled() -> bool:
    """Return whether the current task is being cancelled; else a CancelledError is an error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _set_outcomes(pairs: list[tuple[CallerFuture, Any]]) -> None:
    for future, outcome in pairs:
        try:
            if type(outcome) is Failure:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome)
        except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            pass  # the caller has gone, or another item failed first
        except Exception:
            # The event loop may have its own class of futures. The other callers must not wait.
            logger.exception("the future of a caller has refused its outcome")
