"""The queue of one function, and the decisions which batch its worker computes next.

The engine is a shell around the scheduler: it applies an event, polls, and carries out the actions.
The events are calls and the ends of batches. No request has a deadline, so there is no timer. The
scheduler belongs to one thread at a time, so each event is applied under a lock, which is never
held while code of the user runs. Any thread may call.
"""

import concurrent.futures
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from time import monotonic
from typing import Any, Protocol

from fast_batcher._core.batch_packer import BatchPacker
from fast_batcher._core.limits import Limits
from fast_batcher._core.messages import Batch, Dispatch, Fault, Request
from fast_batcher._core.policy import GreedyPolicy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._local.callers import deliver
from fast_batcher._local.function import FailedOutput, Function, as_error, without_own_frame
from fast_batcher._local.settings import DecoratorSettings
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    OutputMismatchError,
    QueueFullError,
    clear_frames,
    is_out_of_memory,
)
from fast_batcher.stats import Counters

# An engine has one worker: functions written for `batched` are never called twice at a time, and
# may rely on it.
_WORKER = 0


class Worker(Protocol):
    """Computes the batches of one engine."""

    def start(self, batch: Batch) -> None:
        """Compute a batch, and then each one that the engine returns for the last.

        The engine calls this only while the worker has no batch.
        """

    def stop(self) -> None:
        """End, and then resolve the engine's `ended`: no batch will follow.

        A finalizer may call it, so it takes no locks.
        """

    def join(self) -> None:
        """Wait until nothing is left of the worker. Called after `ended`, so the wait is short."""


class Counts:
    """Counts the batches of a function since its first call or `clear()`. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Count from 0."""
        with self._lock:
            self._items = self._batches = 0
            self._seconds = 0.0

    def add(self, items: int, seconds: float) -> None:
        """Count one batch: the number of its items and the time it took."""
        with self._lock:
            self._items += items
            self._batches += 1
            self._seconds += seconds

    def read(self) -> tuple[int, int, float]:
        """The numbers of items and batches, and the seconds that all batches took together."""
        with self._lock:
            return self._items, self._batches, self._seconds


class Engine:
    """Accepts requests from any thread, and settles each of them once.

    Args:
        function: What computes a batch.
        settings: The options of the function.
        counts: Where it counts its batches.
        make_worker: Makes the worker of this engine.
    """

    def __init__(
        self,
        function: Function,
        settings: DecoratorSettings,
        counts: Counts,
        make_worker: Callable[["Engine"], Worker],
    ) -> None:
        self.function = function
        self._settings = settings
        length = settings.max_batch_length
        self._scheduler = Scheduler(
            GreedyPolicy(),
            Counters(),
            Limits(
                max_batch_size=settings.batch_size,
                max_queue_size=settings.max_queue_size or sys.maxsize,
                isolate_errors=settings.isolate_errors,
                batches_per_worker=1,
            ),
            packer=None if length is None else BatchPacker(length, is_padded=False),
        )
        self._scheduler.worker_ready(monotonic(), _WORKER)
        # Protects the scheduler and the two below.
        self._lock = threading.Lock()
        self._is_closing = False
        self._has_ended = False
        self._counts = counts
        # Resolved when the engine is closed, everything is settled and the worker has ended.
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.worker = make_worker(self)

    @property
    def waiting(self) -> int:
        """Number of requests that are in no batch yet."""
        with self._lock:
            return self._scheduler.waiting

    def submit(self, calls: Sequence[list[Request]]) -> None:
        """Accept the requests of each call. A call fails as a whole if there is no room for all."""
        refused: list[Request] = []
        errors: list[FailedOutput] = []
        with self._lock:
            if self._is_closing or not self._scheduler.has_room(sum(map(len, calls))):
                calls, refused, errors = self._refuse_without_room(calls)
            if max(map(len, calls), default=0) > self._settings.ranks_above:
                # Not before the first: a ranked queue costs every request some microseconds.
                self._scheduler.rank_requests()
            now = monotonic()
            self._scheduler.submit(now, list(chain.from_iterable(calls)))
            batch = self._poll(now)
        if batch is not None:
            self.worker.start(batch)
        deliver(refused, errors)

    def _refuse_without_room(
        self, calls: Sequence[list[Request]]
    ) -> tuple[list[list[Request]], list[Request], list[FailedOutput]]:
        """The calls that there is room for, and one request of each other call with its error."""
        accepted: list[list[Request]] = []
        refused: list[Request] = []
        errors: list[FailedOutput] = []
        waiting, taken = self._scheduler.queue.size, 0
        name, limit = self.function.name, self._settings.max_queue_size
        error: BatcherError
        for requests in calls:
            count = len(requests)
            if self._scheduler.has_room(taken + count) and not self._is_closing:
                accepted.append(requests)
                waiting += count
                taken += count
                continue
            for request in requests:
                request.is_settled = True
            refused.append(requests[0])
            if self._is_closing:
                error = BatcherClosedError(f"{name} was shut down and takes no calls")
            else:
                error = QueueFullError(
                    f"{name}: no room for {count} more, {waiting} wait already "
                    f"(max_queue_size={limit})"
                )
            errors.append(FailedOutput(error))
        return accepted, refused, errors

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget requests whose caller has gone; one that runs is computed, its output dropped."""
        with self._lock:
            for request in requests:
                self._scheduler.cancel(request)
        self._end_if_done()

    def finish(self, batch: Batch, result: Any, seconds: float) -> Batch | None:
        """Settle a batch for which the function has returned; returns the next batch, if any."""
        try:
            outcomes = self.function.outcomes(result, len(batch.requests))
        except OutputMismatchError as error:
            outcomes = [FailedOutput(OutputMismatchError(*error.args)) for _ in batch.requests]
        except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
            return self.fail(batch, error, seconds)
        self._counts.add(len(batch.requests), seconds)
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id)
            for request in batch.requests:
                request.is_settled = True
            following = self._poll(now)
        deliver(batch.requests, outcomes)
        self._end_if_done()
        return following

    def fail(self, batch: Batch, raised: BaseException, seconds: float) -> Batch | None:
        """Settle a batch for which the function has raised, or divide it; returns the next batch.

        With `isolate_errors` the next batch may be half of this one.
        """
        without_own_frame(raised)
        out_of_memory = is_out_of_memory(raised)
        if out_of_memory:  # its frames hold the batch that was too large
            clear_frames(raised)
        self._counts.add(len(batch.requests), seconds)
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=True)
            failed = self._scheduler.batch_raised(
                now, batch, out_of_memory=out_of_memory, is_fatal=not isinstance(raised, Exception)
            )
            for request in failed:
                request.is_settled = True
            following = self._poll(now)
        deliver(failed, [FailedOutput(as_error(raised)) for _ in failed])
        self._end_if_done()
        return following

    def drop(self, batch: Batch) -> Batch | None:
        """Skip a batch that has no callers left; returns the next batch, if any."""
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id)
            following = self._poll(now)
        self._end_if_done()
        return following

    def close(self, *, cancel: bool) -> None:
        """Accept no more requests.

        Args:
            cancel: Whether requests that wait fail at once; else they are computed first.
        """
        with self._lock:
            self._is_closing = True
            self._scheduler.begin_drain()
            unanswered = self._scheduler.give_up() if cancel else []
        self._fail_as_closed(unanswered, "was shut down before it had answered")

    def abandon(self) -> None:
        """Fail all requests: the event loop of the worker has ended, or does not run."""
        with self._lock:
            self._is_closing = True
            unanswered = self._scheduler.close()
        self._fail_as_closed(unanswered, "the event loop that computed it has ended")

    def _fail_as_closed(self, requests: list[Request], why: str) -> None:
        text = f"{self.function.name}: {why}"
        deliver(requests, [FailedOutput(BatcherClosedError(text)) for _ in requests])
        self._end_if_done()

    def _poll(self, now: float) -> Batch | None:
        """The batch to compute now, if the worker is free and a request waits."""
        actions, _ = self._scheduler.poll(now)
        if not actions:
            return None
        (action,) = actions
        if isinstance(action, Fault):
            raise action.error
        assert isinstance(action, Dispatch), "without deadlines nothing expires"
        return action.batch

    def _end_if_done(self) -> None:
        if not self._is_closing:
            return
        with self._lock:
            scheduler = self._scheduler
            # The worker is idle only if no request waits and no batch runs, not even one whose
            # callers have all gone.
            is_done = scheduler.is_closed or scheduler.workers.idle_workers
            if not is_done or self._has_ended:
                return
            self._has_ended = True
        self.worker.stop()
