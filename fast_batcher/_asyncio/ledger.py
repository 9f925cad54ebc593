"""Ledger: delivers one outcome to each caller, counts it, and reports it to observers.

Runs in the API process, on the event loop's thread. A caller waits for an `asyncio.Future`, or in
another thread for a `ThreadCaller`. It may leave at any moment, which is counted and affects no
other caller. The ledger does not decide which requests end: the scheduler and the workers' answers
do.
"""

import asyncio
import concurrent.futures
from collections import Counter, deque
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from fast_batcher._core.explanation import BatchSample
from fast_batcher._core.late_errors import LateErrors
from fast_batcher._core.values import Batch, Failure, Request, settle
from fast_batcher._late_error_log import log_late_error
from fast_batcher._observers import Observers, describe_answer
from fast_batcher._process import monotonic
from fast_batcher.errors import BatcherError, forget_frames
from fast_batcher.observing import CacheResult, CacheUsed, Observer, Outcome, RequestEnded
from fast_batcher.stats import SAMPLED_BATCHES, BatcherStats, weighted_quantiles


class ThreadCaller:
    """Adapter of a `concurrent.futures.Future` to the two methods that settling needs.

    Made in the caller's thread.
    """

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future
        # The caller's context variables, for the functions `cost` and `group_by`.
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
        # Another thread may cancel the future until this call succeeds.
        if not self._future.set_running_or_notify_cancel():
            raise asyncio.InvalidStateError("cancelled")


@dataclass
class Counters:
    """The running counts behind `BatcherStats`."""

    # Requests that were accepted, and how requests ended: by an `Outcome`.
    submitted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    late_errors: LateErrors = field(default_factory=LateErrors)
    # Successful calls of `reload`.
    generation: int = 0
    # Calls of a batcher with a cache, by a `CacheResult`.
    cache_results: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    # The last answered batches: the fields of a `BatchSample`, which takes 0.2 us to make.
    samples: deque[Any] = field(default_factory=lambda: deque(maxlen=SAMPLED_BATCHES))

    def count_outcomes(self, ended: list[Outcome]) -> None:
        """Count how the requests of a batch have ended; most have completed."""
        completed = ended.count("completed")
        self.outcomes["completed"] += completed
        if completed != len(ended):
            self.outcomes.update(one for one in ended if one != "completed")

    def count_batch(self, size: int, release: str) -> None:
        """Count a batch that is sent."""
        self.batch_sizes[size] += 1
        self.releases[release] += 1

    def list_samples(self) -> list[BatchSample]:
        """Return the last answered batches, oldest first."""
        return [*map(BatchSample._make, self.samples)]

    def snapshot(
        self, *, state: str, workers_ready: int, num_workers: int, waiting: int, running: int
    ) -> BatcherStats:
        """Copy the present counts, completed by the batcher's state and load."""
        # A wait counts for all requests of its batch.
        samples = self.list_samples()
        waits = [(one.waited, one.size) for one in samples]
        infer_times = [(one.infer_seconds, 1) for one in samples]
        queue_wait_p50, queue_wait_p95 = weighted_quantiles(waits, (0.50, 0.95))
        infer_p50, infer_p95 = weighted_quantiles(infer_times, (0.50, 0.95))
        return BatcherStats(
            state=state,
            workers_ready=workers_ready,
            num_workers=num_workers,
            waiting=waiting,
            running=running,
            submitted=self.submitted,
            completed=self.outcomes["completed"],
            failed=self.outcomes["failed"],
            expired=self.outcomes["expired"],
            cancelled=self.outcomes["cancelled"],
            rejected=self.outcomes["rejected"],
            batches=sum(self.batch_sizes.values()),
            batch_sizes=dict(sorted(self.batch_sizes.items())),
            releases={str(release): count for release, count in self.releases.items()},
            restarts=self.restarts,
            late_errors=self.late_errors.count,
            generation=self.generation,
            queue_wait_p50=queue_wait_p50,
            queue_wait_p95=queue_wait_p95,
            infer_p50=infer_p50,
            infer_p95=infer_p95,
            cache_hits=self.cache_results["hit"],
            cache_misses=self.cache_results["miss"],
            cache_coalesced=self.cache_results["coalesced"],
        )


class Ledger:
    """Ends and counts the requests of one batcher, from its first session to its last.

    Args:
        name: The batcher's name.
        num_workers: Workers of the batcher.
        observers: Told about each end.
    """

    def __init__(self, name: str, num_workers: int = 1, observers: Sequence[Observer] = ()) -> None:
        self._name = name
        self._num_workers = num_workers
        self.counters = Counters()
        self.observers = Observers(name, observers)

    def answer(self, batch: Batch, requests: list[Request], outcomes: list[Any]) -> None:
        """Give the callers of an answered batch their outcomes.

        Args:
            batch: The batch.
            requests: The batch's requests, without those that are tried again. Settled requests
                are skipped.
            outcomes: An output or a `Failure` for each request.
        """
        is_observed = bool(self.observers.active)
        waiting = [one for one in requests if not one.is_settled] if is_observed else []
        ended: list[Outcome] = []
        # The lengths were compared when the answer was read.
        for request, outcome in zip(requests, outcomes):  # noqa: B905
            if request.is_settled:
                continue
            request.is_settled = True
            try:
                if outcome.__class__ is Failure:
                    request.caller.set_exception(outcome.error)
                    ended.append("failed")
                else:
                    request.caller.set_result(outcome)
                    ended.append("completed")
            except asyncio.InvalidStateError:  # cancelled, in this turn of the loop
                ended.append("cancelled")
        self.counters.count_outcomes(ended)
        if ended.count("completed") != len(requests) and "failed" not in ended:
            failure = next((one for one in outcomes if one.__class__ is Failure), None)
            if failure is not None:
                self.note_late_error(failure.error)
        if is_observed:
            worker = batch.worker % self._num_workers
            told = list(zip(waiting, ended, strict=True))
            self.observers.tell(describe_answer(self._name, batch, told, worker))

    def note_late_error(self, error: BatcherError) -> None:
        """Count and log an error of a batch that no caller has got, because they had left."""
        is_logged, omitted = self.counters.late_errors.add(monotonic())
        if is_logged:
            log_late_error(self._name, error, omitted)

    def complete_batch(self, now: float, batch: Batch) -> None:
        """Record an answered batch, whose requests need not have ended."""
        began_at = batch.began_at
        waited, size = batch.wait_until(began_at)
        left, seconds = batch.left_waiting, batch.infer_seconds
        self.counters.samples.append((began_at, now, size, batch.release, left, waited, seconds))

    def fail(self, request: Request, error: BaseException, reason: str) -> None:
        """Give one caller an error; the request is settled already."""
        self._end(request, "failed" if set_exception(request, error) else "cancelled", reason)

    def expire(self, request: Request, error: BaseException, reason: str) -> None:
        """Give one caller the error of an expired request, which is settled already."""
        set_exception(request, error)
        self._end(request, "expired", reason)

    def cancel(self, request: Request, reason: str) -> None:
        """Count a request whose caller has gone; the request is settled already."""
        if request.staged is not None:  # a queue may keep the request for some time
            request.staged.release()
        self._end(request, "cancelled", reason)

    def reject(self, request: Request, error: BaseException, reason: str) -> None:
        """Settle a request that was not accepted, and give its caller the error."""
        settle(request)
        set_exception(request, error)
        self._end(request, "rejected", reason)

    def reject_call(self, reason: str) -> None:
        """Count a call for which no request was made."""
        self.counters.outcomes["rejected"] += 1
        if self.observers.active:
            self.observers.tell(RequestEnded(self._name, "rejected", reason, 0.0))

    def count_cached(self, result: CacheResult) -> None:
        """Count a call that used the cache."""
        self.counters.cache_results[result] += 1
        if self.observers.active:
            self.observers.tell(CacheUsed(self._name, result))

    def _end(self, request: Request, outcome: Outcome, reason: str) -> None:
        self.counters.outcomes[outcome] += 1
        if self.observers.active:
            wait = 0.0 if outcome == "rejected" else monotonic() - request.arrival
            self.observers.tell(RequestEnded(self._name, outcome, reason, wait, request.context))


def set_exception(request: Request, error: BaseException) -> bool:
    """Give one caller an error; return False if the caller has gone."""
    if request.staged is not None:  # a task that never runs again keeps the request
        request.staged.release()
    # Those of a function of the user hold the input, the caller's future, and so the error itself.
    forget_frames(error)
    try:
        request.caller.set_exception(error)
    except asyncio.InvalidStateError:
        return False
    return True


def is_beyond_reach(request: Request) -> bool:
    """Return whether the caller waits on a closed loop, where settling its future would raise."""
    caller = request.caller
    return isinstance(caller, asyncio.Future) and caller.get_loop().is_closed()
