"""The queue of one function and the worker that computes its batches. Any thread may call.

The shell around the core: *apply the event, poll, do the actions*. The events are calls and the
ends of batches; there is nothing to wait for besides, so there is no timer. The scheduler belongs
to one thread at a time, so every event is applied under a lock, which is never held while code of
the user runs.
"""

import concurrent.futures
import sys
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

from fast_batcher._core.batch_packer import BatchPacker
from fast_batcher._core.limits import Limits
from fast_batcher._core.messages import Batch, Dispatch, Fault, Request
from fast_batcher._core.policy import GreedyPolicy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._local.callers import deliver
from fast_batcher._local.function import Failure, Function, as_error, without_own_frame
from fast_batcher._local.settings import LocalSettings
from fast_batcher.errors import (
    BatcherClosedError,
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
    """Where batches are computed."""

    def start(self, batch: Batch) -> None:
        """Compute a batch while it has none, and then those that `Engine.finish` gives."""

    def stop(self) -> None:
        """Nothing more will come; ends, and then resolves `Engine.ended`.

        A finalizer may call it, so it takes no locks.
        """

    def join(self) -> None:
        """Wait until nothing of it is left, after `Engine.ended`: for no time worth mentioning."""


class Counts:
    """What a function was given, since its first call or `clear()`. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Count from 0."""
        with self._lock:
            self._items = self._batches = 0
            self._seconds = 0.0

    def add(self, items: int, seconds: float) -> None:
        """Count a batch of so many items, which took so many seconds."""
        with self._lock:
            self._items += items
            self._batches += 1
            self._seconds += seconds

    def read(self) -> tuple[int, int, float]:
        """Items, batches, and seconds altogether."""
        with self._lock:
            return self._items, self._batches, self._seconds


class Engine:
    """Takes requests from any thread and sees to it that each of them is settled once.

    Args:
        function: What computes a batch.
        settings: Of the batches and the queue.
        counts: Where it counts.
    """

    def __init__(self, function: Function, settings: LocalSettings, counts: Counts) -> None:
        self.function = function
        length = settings.max_batch_length
        self._max_queue_size = settings.max_queue_size
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
        self._lock = threading.Lock()
        self._is_closing = False
        self._has_ended = False
        self._counts = counts
        # Set by `LocalBatcher`; the worker needs the engine and the engine the worker.
        self.worker: Worker
        # Resolved when it is closed, everything is settled and its worker has ended.
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def waiting(self) -> int:
        """Requests that no batch has yet."""
        with self._lock:
            return self._scheduler.waiting

    def rank_requests(self) -> None:
        """From now on priorities count. Not before the first, for that costs every call."""
        with self._lock:
            self._scheduler.rank_requests()

    def submit(self, requests: list[Request]) -> None:
        """Take each request for itself; those for which there is no room are told."""
        with self._lock:
            now = monotonic()
            refused = [request for request, _ in self._scheduler.submit(now, requests)]
            for request in refused:
                request.is_settled = True
            batch = self._poll(now)
        if batch is not None:
            self.worker.start(batch)
        if refused:
            deliver(refused, [Failure(self._refusal(1)) for _ in refused])

    def submit_together(self, requests: list[Request]) -> None:
        """Take all of them or none.

        Raises:
            QueueFullError: There is not room for all; nothing was queued.
            BatcherClosedError: It has been shut down.
        """
        with self._lock:
            self._require_room(len(requests))
            now = monotonic()
            self._scheduler.submit(now, requests)
            batch = self._poll(now)
        if batch is not None:
            self.worker.start(batch)

    def require_room(self, count: int, *, behind: int) -> None:
        """Raise as `submit_together` does if so many requests have no room behind so many others.

        Other threads may take the room before they are submitted.
        """
        with self._lock:
            self._require_room(count, behind)

    def _require_room(self, count: int, behind: int = 0) -> None:
        if self._is_closing or not self._scheduler.has_room(count + behind):
            raise self._refusal(count, behind)

    def _refusal(self, count: int, behind: int = 0) -> BatcherClosedError | QueueFullError:
        if self._is_closing:
            return BatcherClosedError(f"{self.function.name} was shut down and takes no calls")
        size = self._scheduler.queue.size
        return QueueFullError(
            f"{self.function.name}: no room for {count} more, {size + behind} wait already "
            f"(max_queue_size={self._max_queue_size})"
        )

    def cancel(self, requests: Sequence[Request]) -> None:
        """Their callers have gone; what runs is computed and dropped."""
        with self._lock:
            for request in requests:
                self._scheduler.cancel(request)
        self._end_if_done()

    def finish(self, batch: Batch, result: Any, seconds: float) -> Batch | None:
        """The function has returned for a batch; returns the next one, if there is one."""
        try:
            outcomes = self.function.outcomes(result, len(batch.requests))
        except OutputMismatchError as error:
            outcomes = [Failure(OutputMismatchError(*error.args)) for _ in batch.requests]
        except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
            return self.fail(batch, error, seconds)
        self._counts.add(len(batch.requests), seconds)
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id)
            for request in batch.requests:
                request.is_settled = True
            following = self._poll(now)
        # Those who have gone are told too, and do not hear it.
        deliver(batch.requests, outcomes)
        self._end_if_done()
        return following

    def fail(self, batch: Batch, raised: BaseException, seconds: float) -> Batch | None:
        """The function raised for a batch; returns the next one, which may be half of this one."""
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
        deliver(failed, [Failure(as_error(raised)) for _ in failed])
        self._end_if_done()
        return following

    def drop(self, batch: Batch) -> Batch | None:
        """Nobody waits for a batch that is to be computed; returns the next one."""
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id)
            following = self._poll(now)
        self._end_if_done()
        return following

    def close(self, *, cancel: bool) -> None:
        """Take nothing more; what waits is computed first, or with `cancel` told that it is over.

        Args:
            cancel: Which of the two.
        """
        with self._lock:
            self._is_closing = True
            self._scheduler.begin_drain()
            rest = self._scheduler.give_up() if cancel else []
        closed = f"{self.function.name} was shut down before it had answered"
        deliver(rest, [Failure(BatcherClosedError(closed)) for _ in rest])
        self._end_if_done()

    def abandon(self) -> None:
        """The loop that its worker runs on is gone: nothing that it has will ever be answered."""
        with self._lock:
            self._is_closing = True
            rest = self._scheduler.close()
        closed = f"{self.function.name}: the event loop that computed it has ended"
        deliver(rest, [Failure(BatcherClosedError(closed)) for _ in rest])
        self._end_if_done()

    def _poll(self, now: float) -> Batch | None:
        """The batch to compute now, if the worker is free and something waits."""
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
            # While anything waits the worker is not idle, nor while a batch runs whose callers have
            # all gone.
            is_done = scheduler.is_closed or scheduler.workers.idle_workers
            if not is_done or self._has_ended:
                return
            self._has_ended = True
        self.worker.stop()
