"""The ledger: gives callers their outcomes, and counts how requests end.

    Ledger      the one place that settles callers, for `DynBatcher` and for decorated functions
    Counters    the counts behind `BatcherStats`
    LateErrors  errors of batches that no caller gets, because the callers have left

Any process with an opening. A `DynBatcher` uses it on the event loop's thread, a decorated function
on the thread that has the outcomes. A caller is an object with the methods `set_result` and
`set_exception` of a future. It may leave at any moment, which is counted and affects no other
caller. The scheduler and the workers' answers decide which requests end.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from fast_batcher._core.explanation import BatchSample
from fast_batcher._core.values import Batch, Failure, Request, settle
from fast_batcher._observers import Observers, describe_answer
from fast_batcher._opening.loop_watch import blame_loop
from fast_batcher._opening.streams import StreamFigures
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import (
    BatcherError,
    InputError,
    can_be_shown,
    forget_frames,
    read_answer,
)
from fast_batcher.observing import CacheResult, CacheUsed, Observer, Outcome, RequestEnded
from fast_batcher.stats import SAMPLED_BATCHES, BatcherStats, weighted_quantiles

logger = logging.getLogger("fast_batcher")

# Raised by a future whose caller has gone.
GONE = (asyncio.InvalidStateError, concurrent.futures.InvalidStateError)

# Seconds between two log records of one batcher: a model that always fails late must not fill the
# log, and an operator reads one record a minute.
LOG_INTERVAL: Final = 60.0


class LateErrors:
    """Count of late errors, and the decision which of them are logged."""

    def __init__(self) -> None:
        self.count = 0
        # The next error from this moment on is logged.
        self._log_at = -inf
        # Errors since the last logged one.
        self._omitted = 0

    def add(self, now: float) -> tuple[bool, int]:
        """Count an error; return whether it is to be logged, and the errors omitted before it."""
        self.count += 1
        omitted = self._omitted
        if now < self._log_at:
            self._omitted += 1
            return False, omitted
        self._log_at, self._omitted = now + LOG_INTERVAL, 0
        return True, omitted


def log_late_error(name: str, error: BaseException, omitted: int) -> None:
    """Log an error that no caller has got, with its traceback."""
    before = f" (and {omitted} errors before it)" if omitted else ""
    # An exception of a log handler must not end the loop or the thread.
    with contextlib.suppress(Exception):
        logger.warning(
            "%s: no caller got this error%s, because they had left; stats.late_errors counts such "
            "errors, and one a minute is logged: %s",
            name,
            before,
            one_line(error),
            exc_info=error if can_be_shown(error) else None,
        )


def give_outcome(name: str, give: Callable[[Any], object], outcome: Any) -> bool:
    """Call `set_result` or `set_exception` of a caller; return whether it has the outcome."""
    try:
        give(outcome)
    except GONE:  # it has left in this turn of the loop, or has an outcome
        return False
    except Exception:  # an event loop may have futures of its own
        logger.exception("%s: the future of a caller has refused its outcome", name)
        return False
    return True


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
    # Seconds for which the event loop was blocked.
    loop_blocked: float = 0.0
    # Calls of a batcher with a cache, by a `CacheResult`.
    cache_results: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    # Seconds of all batches of a decorated function.
    infer_seconds: float = 0.0
    # The last answered batches: the fields of a `BatchSample`, which takes 0.2 us to make.
    samples: deque[Any] = field(default_factory=lambda: deque(maxlen=SAMPLED_BATCHES))
    streams: StreamFigures = field(default_factory=StreamFigures)

    def count_batch(self, size: int, release: str) -> None:
        """Count a batch that is sent."""
        self.batch_sizes[size] += 1
        self.releases[release] += 1

    def list_samples(self) -> list[BatchSample]:
        """Return the last answered batches, oldest first."""
        return [*map(BatchSample._make, self.samples)]

    def snapshot(
        self,
        state: str,
        num_workers: int,
        load: tuple[int, int, int],
        backlog: float | None = None,
        places: int | None = None,
    ) -> BatcherStats:
        """Copy the present counts, completed by the batcher's state and the load of an opening."""
        workers_ready, waiting, running = load
        # A wait counts for all requests of its batch.
        samples = self.list_samples()
        waits = [(sample.waited, sample.size) for sample in samples]
        waits = [(waited, 1) for _, waited in self.streams.waits] or waits
        infer_times = [(sample.infer_seconds, 1) for sample in samples]
        queue_wait_p50, queue_wait_p95 = weighted_quantiles(waits, (0.50, 0.95))
        infer_p50, infer_p95 = weighted_quantiles(infer_times, (0.50, 0.95))
        return BatcherStats(
            state=str(state),
            workers_ready=workers_ready,
            num_workers=num_workers,
            waiting=waiting,
            running=running,
            submitted=self.submitted,
            completed=self.outcomes["completed"],
            failed=self.outcomes["failed"],
            refused=self.outcomes["refused"],
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
            backlog=backlog,
            places=places,
            loop_blocked=self.loop_blocked,
            **self.streams.describe(),
        )


class Ledger:
    """Ends and counts the requests of one batcher, from its first opening to its last."""

    def __init__(self, name: str, observers: Sequence[Observer] = ()) -> None:
        self._name = name
        self.counters = Counters()
        self.observers = Observers(name, observers)

    def answer(self, batch: Batch, requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
        """Settle the requests of an answered batch, and give their callers the outcomes."""
        is_observed = bool(self.observers.active)
        waiting = [request for request in requests if not request.is_settled] if is_observed else []
        ended: list[Outcome] = []
        # The lengths were compared when the answer was read.
        for request, outcome in zip(requests, outcomes):  # noqa: B905
            if request.is_settled:
                continue
            request.is_settled = True
            try:
                if type(outcome) is Failure:
                    request.caller.set_exception(outcome.error)
                    ended.append(_outcome_of(outcome.error))
                else:
                    request.caller.set_result(outcome)
                    ended.append("completed")
            except GONE:  # cancelled, in this turn of the loop
                ended.append("cancelled")
            except Exception:  # an event loop may have futures of its own
                logger.exception("%s: the future of a caller has refused its outcome", self._name)
                ended.append("cancelled")
        completed = ended.count("completed")
        self.counters.outcomes["completed"] += completed
        if completed != len(requests):
            self._count_others(requests, outcomes, ended)
        if is_observed:
            ended_by = list(zip(waiting, ended, strict=True))
            self.observers.tell(describe_answer(self._name, batch, ended_by))

    def _count_others(
        self, requests: Sequence[Request], outcomes: Sequence[Any], ended: list[Outcome]
    ) -> None:
        """Count requests that have not completed; note the first error if no caller got one."""
        self.counters.outcomes.update(outcome for outcome in ended if outcome != "completed")
        if {"failed", "refused"} & {*ended}:
            return
        pairs = zip(requests, outcomes, strict=True)
        failed = [pair for pair in pairs if type(pair[1]) is Failure]
        if failed and not any(getattr(one.caller, "has_failed", False) for one, _ in failed):
            self.note_late_error(failed[0][1].error)

    def note_late_error(self, error: BaseException) -> None:
        """Count and log an error of a batch that no caller has got, because they had left."""
        is_logged, omitted = self.counters.late_errors.add(monotonic())
        if is_logged:
            log_late_error(self._name, error, omitted)

    def complete_batch(self, now: float, batch: Batch, seconds: float) -> None:
        """Record a batch and its seconds in the model; its requests need not have ended."""
        batch.infer_seconds = seconds
        began_at, size = batch.began_at, len(batch.requests)
        # To record the waits of all requests would cost more than to send them. Which one is taken
        # depends on the id, so that in the long run every position counts.
        waited = began_at - batch.requests[batch.id % size].arrival
        left = batch.left_waiting
        self.counters.samples.append((began_at, now, size, batch.release, left, waited, seconds))

    def complete_step(
        self, now: float, streams: list[Batch], outcomes: list[Any], seconds: float, left: int
    ) -> None:
        """Record a step of a stepped model, which counts as a batch of the streams with a chunk."""
        if not streams:
            return
        size = len(streams)
        self.counters.count_batch(size, "step")
        self.counters.samples.append((now - seconds, now, size, "step", left, 0.0, seconds))
        self.counters.streams.note_step(now, streams, outcomes)

    def give(self, request: Request, outcome: Any) -> bool:
        """Give one caller an outcome that is counted elsewhere; the request is settled already.

        Returns False if the caller has gone in this turn of the loop.
        """
        give = request.caller.set_result
        if type(outcome) is Failure:
            give, outcome = request.caller.set_exception, outcome.error
            if request.staged is not None:  # a task that never runs again keeps the request
                request.staged.release()
            blame_loop(outcome, request)
            # The frames of a user's function hold the input, the caller's future, and so the error.
            forget_frames(outcome)
        return give_outcome(self._name, give, outcome)

    def fail(self, request: Request, error: BaseException, reason: str) -> None:
        """Give one caller an error; the request is settled already."""
        is_told = self.give(request, Failure(error))
        self.end(request, _outcome_of(error) if is_told else "cancelled", reason)

    def expire(self, request: Request, error: BaseException, reason: str) -> None:
        """Give one caller the error of an expired request, which is settled already."""
        self.give(request, Failure(error))
        self.end(request, "expired", reason)

    def cancel(self, request: Request, reason: str) -> None:
        """Count a request whose caller has gone; the request is settled already."""
        if request.staged is not None:  # a queue may keep the request for some time
            request.staged.release()
        self.end(request, "cancelled", reason)

    def reject(self, request: Request, error: BatcherError) -> None:
        """Settle a request that was not accepted, and give its caller the error."""
        settle(request)
        self.give(request, Failure(error))
        answer = read_answer(error)
        self.end(request, "rejected", answer.reason or answer.code.replace("_", " "))

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

    def internal_error(self, error: BaseException) -> Callable[[], BatcherError]:
        """Log an internal error, and return a function that makes an error for each caller."""
        # An exception of a log handler must not end the loop or the thread.
        with contextlib.suppress(Exception):
            logger.error(
                "%s: an internal error; the calls that it hits fail, and the others go on",
                self._name,
                exc_info=error if can_be_shown(error) else None,
            )
        return functools.partial(
            BatcherError,
            f"{self._name}: an internal error ({one_line(error)}); its traceback is in the log. If "
            "it ends in fast_batcher, please report it",
        )

    def end(self, request: Request, outcome: Outcome, reason: str) -> None:
        """Count the end of a settled request."""
        self.counters.outcomes[outcome] += 1
        if self.observers.active:
            wait = 0.0 if outcome == "rejected" else monotonic() - request.arrival
            event = RequestEnded(
                self._name, outcome, reason, wait, request.context, request.chunk_times
            )
            self.observers.tell(event)


def _outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a request that ends with this error of the model."""
    return "refused" if isinstance(error, InputError) else "failed"
