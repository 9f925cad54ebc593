"""`Engine`: runs the scheduler of one decorated function.

The engine applies an event to the scheduler, polls it, and carries out the actions. The events are
calls and the ends of batches. No request has a deadline, so there is no timer. The scheduler
belongs to one thread at a time, so each event is applied under a lock, which is never held while
code of the user runs. Any thread may call.
"""

import concurrent.futures
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from fast_batcher._core.late_errors import LateErrors
from fast_batcher._core.policy import GreedyPolicy
from fast_batcher._core.queue import BatchPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Batch, Dispatch, Fail, Failure, Limits, Request, settle_open
from fast_batcher._late_error_log import log_late_error
from fast_batcher._local.callers import deliver, has_failed
from fast_batcher._local.function import Function, as_error, drop_own_frame
from fast_batcher._local.settings import DecoratorSettings
from fast_batcher._observers import BatchContexts, Observers, describe_answer
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    OutputMismatchError,
    QueueFullError,
    can_be_shown,
    clear_frames,
    is_kind,
    is_out_of_memory,
)
from fast_batcher.observing import Outcome, RequestEnded

logger = logging.getLogger("fast_batcher")

# An engine has one worker: functions written for `batched` are never called concurrently, and may
# rely on that.
_WORKER = 0


class Worker(Protocol):
    """Computes the batches of one engine."""

    def compute(self, batch: Batch) -> None:
        """Compute a batch, then each next batch that the engine returns.

        The engine calls this only while the worker has no batch.
        """

    def stop(self) -> None:
        """End the worker, and then resolve the engine's `ended`: no batch will follow.

        A finalizer may call it, so it takes no locks.
        """

    def join(self) -> None:
        """Wait until the worker has ended. Called after `ended`, so the wait is short."""


@dataclass
class Counts:
    """Counts of a function since its first call or the last `clear_stats()`."""

    items: int = 0
    batches: int = 0
    # Total time of all batches.
    seconds: float = 0.0
    late_errors: LateErrors = field(default_factory=LateErrors)


class Engine:
    """Accepts requests from any thread, and settles each of them once.

    Args:
        function: Computes a batch.
        settings: The options of the function.
        counts: The function's counts, updated under the lock.
        lock: Protects the scheduler and the counts. The engines of a function share it.
        make_worker: Makes the worker of this engine.
    """

    def __init__(
        self,
        function: Function,
        settings: DecoratorSettings,
        counts: Counts,
        lock: threading.Lock,
        make_worker: Callable[["Engine"], Worker],
    ) -> None:
        self.function = function
        self.observers = Observers(function.name, settings.observers)
        self._contexts = BatchContexts()
        self._settings = settings
        self._most_waiting = settings.max_queue_size or sys.maxsize
        length = settings.max_batch_length
        self._scheduler = Scheduler(
            GreedyPolicy(),
            Limits(
                max_batch_size=settings.batch_size,
                max_queue_size=self._most_waiting,
                isolate_errors=settings.isolate_errors,
                batches_per_worker=1,
            ),
            packer=None if length is None else BatchPacker(length, is_padded=False),
        )
        self._scheduler.worker_ready(monotonic(), _WORKER)
        self._counts = counts
        self._lock = lock
        # Whether the engine accepts no more requests, and whether its worker was told to end.
        self._is_closing = False
        self._has_ended = False
        # Resolved when the engine is closed, everything is settled and the worker has ended.
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.worker = make_worker(self)

    @property
    def waiting(self) -> int:
        """Number of requests that are in no batch yet. Read it under the lock."""
        return self._scheduler.waiting

    def submit(self, calls: Sequence[list[Request]]) -> None:
        """Enqueue the requests of each call; a call is rejected whole if not all of them fit."""
        accepted: list[Request] = []
        # The first requests of rejected calls with the errors of their callers, and all requests.
        first: list[Request] = []
        errors: list[Failure] = []
        rejected: list[Request] = []
        with self._lock:
            if max(map(len, calls)) > self._settings.ranks_above:
                # Only when the first such call comes: a ranked queue costs every request some
                # microseconds.
                self._scheduler.rank_requests()
            waiting = self._scheduler.queue.size
            room = 0 if self._is_closing else self._most_waiting - waiting
            for requests in calls:
                if len(accepted) + len(requests) <= room:
                    accepted += requests
                else:
                    first.append(requests[0])
                    rejected += requests
                    errors.append(self._reject(requests, waiting + len(accepted)))
            now = monotonic()
            self._scheduler.submit(now, accepted)
            batch = self._poll(now)
            reason = "closed" if self._is_closing else "queue full"
        if batch is not None:
            self.worker.compute(batch)
        deliver(first, errors)
        self._tell_ended(rejected, "rejected", reason)

    def keep_context(self, requests: list[Request]) -> None:
        """Keep the context of the caller of requests that are about to be submitted."""
        if self.observers.active:
            context = self.observers.copy_context()
            for request in requests:
                request.context = context

    def _reject(self, requests: list[Request], waiting: int) -> Failure:
        """Settle the requests of one call, and return the error for its caller."""
        settle_open(requests)
        name = self.function.name
        if self._is_closing:
            return Failure(BatcherClosedError(f"{name} was shut down and takes no calls"))
        return Failure(
            QueueFullError(
                f"{name}: no room for {len(requests)} more, {waiting} wait already "
                f"(max_queue_size={self._most_waiting})"
            )
        )

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel requests whose caller has gone; the output of a running request is dropped."""
        with self._lock:
            gone = [request for request in requests if self._scheduler.cancel(request)]
        self._tell_ended(gone, "cancelled", "waiting or running")

    def around(self, batch: Batch) -> AbstractContextManager[None]:
        """Tell observers that a batch begins; return the context manager for its computation."""
        return self._contexts.join(self.observers.follow(batch, lambda context: context))

    def finish(self, batch: Batch, result: Any, seconds: float) -> Batch | None:
        """Settle a batch for which the function has returned; return the next batch, if any."""
        try:
            return self._finish(batch, result, seconds)
        except BaseException as error:  # noqa: BLE001  the worker must go on
            return self._recover(batch, error)

    def fail(self, batch: Batch, raised: BaseException, seconds: float) -> Batch | None:
        """Settle a batch for which the function has raised, or divide it; return the next batch.

        With `isolate_errors` the next batch may be half of this one.
        """
        try:
            return self._fail(batch, raised, seconds)
        except BaseException as error:  # noqa: BLE001  the worker must go on
            return self._recover(batch, error)

    def _finish(self, batch: Batch, result: Any, seconds: float) -> Batch | None:
        try:
            outcomes = self.function.outcomes(result, len(batch.requests))
        except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
            if type(error) is not OutputMismatchError:
                return self._fail(batch, error, seconds)
            outcomes = [Failure(OutputMismatchError(*error.args)) for _ in batch.requests]
        with self._lock:
            now = self._take_back(batch, seconds)
            open_ids = {request.id for request in settle_open(batch.requests)}
            following = self._poll(now)
        if len(open_ids) != len(outcomes):
            self._note_late_error(batch, outcomes, open_ids)
        self._deliver(batch.requests, outcomes)
        self._tell_answered(batch, batch.requests, outcomes, open_ids, seconds)
        return following

    def _fail(self, batch: Batch, raised: BaseException, seconds: float) -> Batch | None:
        drop_own_frame(raised)
        out_of_memory = is_out_of_memory(raised)
        if out_of_memory:  # its frames hold the batch that was too large
            clear_frames(raised)
        with self._lock:
            now = self._take_back(batch, seconds, has_raised=True)
            failed = self._scheduler.batch_raised(
                now, batch, out_of_memory=out_of_memory, is_fatal=not is_kind(raised, Exception)
            )
            open_ids = {request.id for request in settle_open(failed)}
            following = self._poll(now)
        if not batch.open_count:
            unheard = Failure(as_error(raised))
            self._note_late_error(batch, [unheard] * len(batch.requests), open_ids)
        outcomes = [Failure(as_error(raised)) for _ in failed]
        self._deliver(failed, outcomes)
        self._tell_answered(batch, failed, outcomes, open_ids, seconds)
        return following

    def _note_late_error(
        self, batch: Batch, outcomes: Sequence[Any], open_ids: Container[int]
    ) -> None:
        """Count and log a failure of a batch, unless a caller gets one or has got one before.

        Args:
            batch: The batch.
            outcomes: Its outcomes, which are not delivered yet.
            open_ids: Requests whose callers still wait.
        """
        pairs = zip(batch.requests, outcomes, strict=True)
        failed = [(request, one) for request, one in pairs if type(one) is Failure]
        if not failed or any(one.id in open_ids or has_failed(one) for one, _ in failed):
            return
        with self._lock:
            is_logged, omitted = self._counts.late_errors.add(monotonic())
        if is_logged:
            log_late_error(self.function.name, failed[0][1].error, omitted)

    def _recover(self, batch: Batch, error: BaseException) -> Batch | None:
        """Fail the callers of a batch whose settling raised; return the next batch.

        Callers that have an outcome keep it. The error is one of an observer, of a caller's event
        loop, or of this library; it may be of any type, and no caller may wait for ever.
        """
        to_failure = self._log_internal(error)
        with self._lock:
            now = monotonic()
            # It has no effect if the error came after the batch was taken back.
            self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=True)
            batch.settle_open()
            # The next batch has been dispatched if the error came after that.
            dispatched = next(self._scheduler.workers.all_batches(), None)
            following = dispatched or self._poll(now)
        self._deliver(batch.requests, [to_failure() for _ in batch.requests])
        return following

    def _log_internal(self, error: BaseException) -> Callable[[], Failure]:
        """Log an error that is not the function's; return a function that makes failures."""
        name = self.function.name
        # An exception of a log handler must not end the worker.
        with contextlib.suppress(Exception):
            logger.error(
                "%s: settling a batch raised; its callers get an error, and the function goes on",
                name,
                exc_info=error if can_be_shown(error) else None,
            )
        text = f"{name}: settling the batch raised {one_line(error)}; the log has its traceback"
        return lambda: Failure(BatcherError(text))

    def drop(self, batch: Batch) -> Batch | None:
        """Skip a batch that has no callers left; return the next batch, if any."""
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id)
            following = self._poll(now)
        self._end_if_done()
        return following

    def close(self, *, cancel: bool) -> None:
        """Accept no more requests.

        Args:
            cancel: True fails waiting requests at once; False computes them first.
        """
        with self._lock:
            self._is_closing = True
            unanswered = self._scheduler.give_up() if cancel else []
        self._fail_as_closed(unanswered, "was shut down before it had answered")

    def abandon(self) -> None:
        """Fail all requests: the event loop of the worker has ended, or does not run."""
        with self._lock:
            self._is_closing = True
            running = [*self._scheduler.workers.all_batches()]
            unanswered = self._scheduler.close()
        self.observers.lose(running, "closed")
        self._fail_as_closed(unanswered, "the event loop that computed it has ended")

    def _fail_as_closed(self, requests: list[Request], why: str) -> None:
        text = f"{self.function.name}: {why}"
        self._deliver(requests, [Failure(BatcherClosedError(text)) for _ in requests])
        self._tell_ended(requests, "failed", "closed")

    def _tell_ended(self, requests: Sequence[Request], outcome: Outcome, reason: str) -> None:
        """Tell observers of requests that have ended without an answer."""
        if not self.observers.active:
            return
        now = monotonic()
        for request in requests:
            wait = 0.0 if outcome == "rejected" else now - request.arrival
            event = RequestEnded(self.function.name, outcome, reason, wait, request.context)
            self.observers.tell(event)

    def _tell_answered(
        self,
        batch: Batch,
        requests: Sequence[Request],
        outcomes: Sequence[Any],
        open_ids: set[int],
        seconds: float,
    ) -> None:
        """Tell observers of a batch, with the requests whose callers were still waiting."""
        if self.observers.active:
            ended: list[tuple[Request, Outcome]] = [
                (request, "failed" if type(outcome) is Failure else "completed")
                for request, outcome in zip(requests, outcomes, strict=True)
                if request.id in open_ids
            ]
            batch.began_at, batch.infer_seconds = batch.sent_at, seconds
            self.observers.tell(describe_answer(self.function.name, batch, ended))

    def _take_back(self, batch: Batch, seconds: float, *, has_raised: bool = False) -> float:
        """Count a batch that the worker has computed; return the moment."""
        self._counts.items += len(batch.requests)
        self._counts.batches += 1
        self._counts.seconds += seconds
        now = monotonic()
        self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=has_raised)
        return now

    def _poll(self, now: float) -> Batch | None:
        """Return the batch to compute now, if the worker is free and a request waits."""
        actions, _ = self._scheduler.poll(now)
        batch: Batch | None = None
        for action in actions:
            if isinstance(action, Dispatch):
                batch = action.batch
                continue
            assert isinstance(action, Fail), "without deadlines nothing expires"
            to_failure = self._log_internal(action.error)
            deliver(action.requests, [to_failure() for _ in action.requests])
        return batch

    def _deliver(self, requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
        deliver(requests, outcomes)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._is_closing:
            return
        with self._lock:
            scheduler = self._scheduler
            # The worker is idle only if no request waits and no batch runs, including batches whose
            # callers have all gone.
            is_done = scheduler.is_closed or scheduler.workers.idle_workers
            if not is_done or self._has_ended:
                return
            self._has_ended = True
        self.worker.stop()
