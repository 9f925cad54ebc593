"""The ends of requests: one outcome for each caller, counted and told to observers.

Runs on the event loop's thread. A caller waits for an `asyncio.Future`, or in another thread for a
`ThreadCaller`. It may leave at any moment: that is counted, and harms no other caller. Which
requests end is decided elsewhere: by the scheduler, or by the answer of a worker.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from fast_batcher._clock import monotonic
from fast_batcher._core.messages import Batch, Request, settle
from fast_batcher._observers import Observers, describe_answer
from fast_batcher.errors import BatcherError
from fast_batcher.observing import Observer, Outcome, RequestEnded
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


class Ledger:
    """Ends and counts the requests of one batcher, from its first session to its last.

    Args:
        name: The batcher's name.
        observers: Told about each end.
    """

    def __init__(self, name: str, observers: Sequence[Observer] = ()) -> None:
        self._name = name
        self.counters = Counters()
        self.observers = Observers(name, observers)

    def answer(
        self,
        batch: Batch,
        requests: list[Request],
        outcomes: list[Any],
        worker: int,
        seconds: float,
    ) -> None:
        """Give the callers of an answered batch their outcomes.

        Args:
            batch: The batch.
            requests: Of the batch, without what is tried again. A settled one has ended before.
            outcomes: An output or a `Failure` for each.
            worker: Index of the worker.
            seconds: That the model took.
        """
        # Both have been compared in length when the answer was read.
        ended = [
            (request, _deliver(request, outcome))
            for request, outcome in zip(requests, outcomes)  # noqa: B905
            if settle(request)
        ]
        self.counters.outcomes.update([outcome for _, outcome in ended])
        if self.observers:
            self.observers.tell(describe_answer(self._name, batch, ended, worker, seconds))

    def complete_batch(self, batch: Batch, seconds: float) -> None:
        """Count the seconds of an answered batch: those of its wait, and those in the model."""
        self.counters.queue_waits.append(batch.wait_until(batch.began_at))
        self.counters.infer_times.append((seconds, 1))

    def fail(self, request: Request, error: BaseException, reason: str) -> None:
        """Give one caller an error; the request has been settled."""
        self._end(request, "failed" if set_exception(request, error) else "cancelled", reason)

    def expire(self, request: Request, error: BaseException, reason: str) -> None:
        """Tell one caller that the request is late; it has been settled."""
        set_exception(request, error)
        self._end(request, "expired", reason)

    def cancel(self, request: Request, reason: str) -> None:
        """Count a request whose caller has gone; it has been settled."""
        if request.staged is not None:  # a queue may keep the request for some time
            request.staged.release()
        self._end(request, "cancelled", reason)

    def reject(self, request: Request, error: BaseException, reason: str) -> None:
        """Tell one caller that the request was not accepted."""
        settle(request)
        set_exception(request, error)
        self._end(request, "rejected", reason)

    def refuse(self, reason: str) -> None:
        """Count a call for which no request was made."""
        self.counters.outcomes["rejected"] += 1
        if self.observers:
            self.observers.tell(RequestEnded(self._name, "rejected", reason, 0.0))

    def _end(self, request: Request, outcome: Outcome, reason: str) -> None:
        self.counters.outcomes[outcome] += 1
        if self.observers:
            wait = 0.0 if outcome == "rejected" else monotonic() - request.arrival
            self.observers.tell(RequestEnded(self._name, outcome, reason, wait, request.context))


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


def _deliver(request: Request, outcome: Any) -> Outcome:
    """Give one caller the outcome of its input."""
    try:
        if outcome.__class__ is Failure:
            request.caller.set_exception(outcome.to_error())
            return "failed"
        request.caller.set_result(outcome)
    except asyncio.InvalidStateError:  # cancelled, in this turn of the loop
        return "cancelled"
    return "completed"
