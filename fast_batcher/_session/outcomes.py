"""Outcomes of requests: rejected inputs, settled callers, counts, and the words of errors and logs.

    CostEvaluator  calls the user's `cost` and `group_by` for each input
    read_outcomes  reads the outcomes of a batch from a worker's frame
    Ledger         gives callers their outcomes, and counts the ends of all requests
    Reports        makes errors and log lines

Any process with a session, on the event loop's thread. A caller waits for an `asyncio.Future`. It
may leave at any moment, which is counted and affects no other caller. The scheduler and the
workers' answers decide which requests end.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from fast_batcher._core.explanation import BatchSample
from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Batch, Expire, ExpiryReason, Failure, Group, Request, settle
from fast_batcher._late_errors import LateErrors, log_late_error
from fast_batcher._observers import Observers, describe_answer
from fast_batcher._process import SLOW, monotonic
from fast_batcher._shared_memory.outbox import Answer, OutboxReader
from fast_batcher._transport.channels import KIND_NAMES, Frame, Kind
from fast_batcher._transport.pickling import SerializedError, loads, one_line, to_cause
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    DeadlineExceededError,
    InferenceError,
    NotReadyError,
    RequestTooLargeError,
    TransportError,
    forget_frames,
)
from fast_batcher.observing import CacheResult, CacheUsed, Observer, Outcome, RequestEnded
from fast_batcher.settings import Settings
from fast_batcher.stats import SAMPLED_BATCHES, BatcherStats, weighted_quantiles

logger = logging.getLogger("fast_batcher")

# Sums and products of costs over a whole queue must stay finite. No useful unit of cost reaches
# this value.
MOST_COST = 1e15


class CostEvaluator:
    """Sets the cost and the group of requests with the user's functions."""

    def __init__(self, settings: Settings, name: str, methods: Sequence[Method] = ()) -> None:
        self._cost = settings.cost
        self._group_by = settings.group_by
        self._max_request_cost = settings.max_request_cost
        self._name = name
        # The method of calls that name none, if the model has it; and the names of the others.
        self._infer = next((method for method in methods if method.name == "infer"), None)
        self._others = [method.name for method in methods if method is not self._infer]
        # Whether a function of the user, or the choice of a method, changes any request.
        has_function = self._cost is not None or self._group_by is not None
        self.is_needed = has_function or bool(self._others)
        # Groups by key, each as long as a request refers to it.
        self._groups: WeakValueDictionary[object, Group] = WeakValueDictionary()
        self._has_warned = False

    def evaluate(self, request: Request) -> BatcherError | None:
        """Set the request's cost and group; return an error if the request must be rejected."""
        if self._others and request.group is None:
            if self._infer is None:
                names = ", ".join(f"methods.{name}" for name in self._others)
                return ConfigurationError(
                    f"{self._name}: the model has no infer; call process_batched of {names}"
                )
            request.group = self._infer.group
        began_at = monotonic()
        try:
            if self._cost is not None:
                request.cost = self._checked_cost(_call("cost", self._cost, request.value))
            if self._group_by is not None:
                key = _call("group_by", self._group_by, request.value)
                request.group = self._group_of(key, request.group)
        except BatcherError as error:
            return error
        except BaseException as error:  # noqa: BLE001  even the repr of a result may raise
            return ConfigurationError(
                f"cost or group_by returned something that raises {type(error).__name__} when it "
                "is looked at"
            )
        seconds = monotonic() - began_at
        if seconds > SLOW and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: cost or group_by took %.3g seconds for one input, and the event loop with all "
                "its requests waited; work it out before the call and make it part of the input",
                self._name,
                seconds,
            )
        return None

    def _checked_cost(self, cost: object) -> float:
        is_number = isinstance(cost, Real) and not isinstance(cost, bool)
        try:
            number = float(cost) if is_number else math.nan  # type: ignore[arg-type]
        except (OverflowError, ValueError, TypeError):
            number = math.nan
        if not 0 < number <= MOST_COST:
            # Anything but a number may be the input itself, which must not be logged.
            shown = f"{cost!r:.100}" if is_number else f"a {type(cost).__qualname__}"
            raise ConfigurationError(
                f"cost returned {shown}: it must return a number above 0, at most {MOST_COST:g}, "
                "for every input"
            )
        if self._max_request_cost is not None and number > self._max_request_cost:
            raise RequestTooLargeError(
                f"the input costs {number:.6g}, more than max_request_cost="
                f"{self._max_request_cost:.6g}"
            )
        return number

    def _group_of(self, key: Any, own: Group | None) -> Group:
        method = None if own is None else own.method
        # The key's own methods run here, and when the group is removed.
        try:
            is_itself = bool(key == key)  # NaN is not
            group = self._groups.get((method, key)) if is_itself else None
            if is_itself and group is None:
                group = self._groups[method, key] = Group(key, method)
        except BaseException as error:  # noqa: BLE001  the caller gets it
            raise ConfigurationError(
                f"group_by returned a {type(key).__name__} that cannot be a key "
                f"({type(error).__name__}: {error!s:.100}): return a string, a number or a tuple"
            ) from to_cause(error)
        if group is None:
            raise ConfigurationError(
                f"group_by returned a {type(key).__qualname__} that is not equal to itself: no "
                "other request could ever share its batch"
            )
        return group


def _call(name: str, function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except BaseException as error:  # noqa: BLE001  the caller gets it
        # Also SystemExit and KeyboardInterrupt, which would end the turn of all other callers.
        raise ConfigurationError(
            f"{name} raised {type(error).__name__} for an input: {error!s:.200}"
        ) from to_cause(error)


# Frames that are one failure for every request of their batch.
FAILURE_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL, Kind.FAILED})


class OutcomeReader:
    """Turns what a worker has pickled for one request into its outcome."""

    def read_item(self, item: bytes) -> Any:
        """Return the output in a separate pickle, or the `Failure` of one that cannot be read."""
        try:
            return loads(item)
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code
            return _unreadable(error)

    def read_error(self, error: SerializedError) -> Failure:
        """Return the failure for one request."""
        return Failure(error.to_error())


def read_outcomes(
    frame: Frame, earlier: list[Any] | None, count: int, reader: OutcomeReader
) -> list[Any]:
    """Read the outcomes of a batch, by position."""
    outcomes: list[Any]
    if frame.kind == Kind.OUTPUT_ATOMS:
        outcomes = loads(frame.body)
    elif frame.kind == Kind.OUTPUTS:
        outcomes = [
            reader.read_item(item)
            if isinstance(item, bytes)
            else reader.read_error(_read_error(item))
            for item in (earlier or []) + loads(frame.body)
        ]
    elif frame.kind in FAILURE_KINDS:
        error = SerializedError(*loads(frame.body))
        outcomes = [reader.read_error(error) for _ in range(count)]
    else:
        raise TransportError(f"a worker answered with {KIND_NAMES[frame.kind]}")
    if len(outcomes) != count:
        raise _wrong_count(len(outcomes), count)
    return outcomes


class SharedOutcomes(NamedTuple):
    """Outcomes of a batch that are still in an outbox."""

    # The outputs; ignored at the positions of errors.
    answer: Answer
    # The errors by position.
    errors: dict[int, SerializedError]

    def read(self, count: int) -> list[Any]:
        """Copy the outcomes out, unless that was done before, and free their memory."""
        outcomes = self.answer.load(_unreadable)
        if len(outcomes) != count:
            raise _wrong_count(len(outcomes), count)
        for position, failure in self.read_errors().items():
            if position >= count:
                raise TransportError(f"an error came back for input {position} of {count}")
            outcomes[position] = failure
        return outcomes

    def read_errors(self) -> dict[int, Failure]:
        """Return the failures by position."""
        try:
            return {
                int(position): Failure(SerializedError(*error).to_error())
                for position, error in self.errors.items()
            }
        except (AttributeError, TypeError, ValueError) as raised:
            text = f"errors came back that are not errors: {one_line(raised)}"
            raise TransportError(text) from raised


def read_shared_outcomes(frame: Frame, outbox: OutboxReader | None) -> SharedOutcomes:
    """Find the outcomes that a worker has left in its outbox."""
    start, sizes, frozen, items, errors = loads(frame.body)
    if outbox is None:
        raise TransportError("a worker without an outbox announced an answer in its outbox")
    return SharedOutcomes(outbox.find(start, sizes, frozen, items), errors)


def _read_error(item: Any) -> SerializedError:
    try:
        return SerializedError(*item)
    except TypeError:
        text = f"the output cannot be unpickled: it is a {type(item).__name__}"
        return SerializedError(text, "", None)


def _wrong_count(found: int, count: int) -> TransportError:
    return TransportError(f"{found} outcomes came back for {count} requests")


def _unreadable(error: BaseException) -> Failure:
    text = f"the output cannot be unpickled: {one_line(error)}"
    return Failure(InferenceError(text))


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
            self.outcomes.update(outcome for outcome in ended if outcome != "completed")

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
    ) -> BatcherStats:
        """Copy the present counts, completed by the batcher's state and the load of a session."""
        workers_ready, waiting, running = load
        # A wait counts for all requests of its batch.
        samples = self.list_samples()
        waits = [(sample.waited, sample.size) for sample in samples]
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
        )


class Ledger:
    """Ends and counts the requests of one batcher, from its first session to its last."""

    def __init__(self, name: str, observers: Sequence[Observer] = ()) -> None:
        self._name = name
        self.counters = Counters()
        self.observers = Observers(name, observers)

    def answer(self, batch: Batch, requests: list[Request], outcomes: list[Any]) -> None:
        """Give the callers of an answered batch their outcomes."""
        is_observed = bool(self.observers.active)
        waiting = [request for request in requests if not request.is_settled] if is_observed else []
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
            failure = next((outcome for outcome in outcomes if outcome.__class__ is Failure), None)
            if failure is not None:
                self.note_late_error(failure.error)
        if is_observed:
            outcome_of = list(zip(waiting, ended, strict=True))
            self.observers.tell(describe_answer(self._name, batch, outcome_of))

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
        self.end(request, "failed" if set_exception(request, error) else "cancelled", reason)

    def expire(self, request: Request, error: BaseException, reason: str) -> None:
        """Give one caller the error of an expired request, which is settled already."""
        set_exception(request, error)
        self.end(request, "expired", reason)

    def cancel(self, request: Request, reason: str) -> None:
        """Count a request whose caller has gone; the request is settled already."""
        if request.staged is not None:  # a queue may keep the request for some time
            request.staged.release()
        self.end(request, "cancelled", reason)

    def reject(self, request: Request, error: BaseException, reason: str) -> None:
        """Settle a request that was not accepted, and give its caller the error."""
        settle(request)
        set_exception(request, error)
        self.end(request, "rejected", reason)

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

    def end(self, request: Request, outcome: Outcome, reason: str) -> None:
        """Count the end of a settled request."""
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


def timeout_of(request: Request, settings: Settings) -> float | None:
    """Return the seconds that a request has from its arrival, for messages."""
    return settings.timeout if request.timeout is None else request.timeout


class Reports:
    """Builds the error messages and log lines of one batcher; workers are named by their index."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._settings = settings

    def expiry_error(self, action: Expire) -> BatcherError:
        """Make the error for the caller of an expired request."""
        if action.rejection is not None:
            return action.rejection.to_error()
        limit = f"its timeout of {timeout_of(action.request, self._settings)} seconds"
        if action.reason is ExpiryReason.NOT_READY:
            return NotReadyError(f"no worker was ready for the call within {limit}")
        if action.reason is ExpiryReason.WAITING:
            return DeadlineExceededError(f"the request was still waiting after {limit}")
        if action.reason is ExpiryReason.RUNNING:
            return DeadlineExceededError(f"the model had not answered within {limit}")
        return DeadlineExceededError(
            f"the batch ran longer than infer_timeout={self._settings.infer_timeout} seconds"
        )

    def log_stall(self, worker: int) -> None:
        """Log that a worker computes for longer than any caller waits."""
        limit = self._settings.infer_timeout
        logger.warning(
            "%s: worker %d is not ready: it has computed one batch for timeout=%s seconds, and no "
            "caller waits for it any more; it gets no other batch before it answers, and is "
            "replaced %s",
            self._name,
            worker,
            self._settings.timeout,
            "by infer_timeout alone, which is not set"
            if limit is None
            else f"after infer_timeout={limit} seconds",
        )

    def log_infer_timeout(self, worker: int) -> None:
        """Log that a worker is replaced because its batch takes too long."""
        limit = self._settings.infer_timeout
        reason = f"its batch took longer than infer_timeout={limit} seconds"
        self._log_replacement(logging.WARNING, worker, reason)

    def log_fatal_error(self, worker: int) -> None:
        """Log that a worker is replaced because its device is lost."""
        self._log_replacement(logging.ERROR, worker, "its device cannot be used any more")

    def _log_replacement(self, level: int, worker: int, reason: str) -> None:
        logger.log(level, "%s: worker %d is replaced: %s", self._name, worker, reason)

    def internal_error(self, error: Exception) -> Callable[[], BatcherError]:
        """Log an internal error, and return a function that makes an error for each caller."""
        # An exception of a log handler must not end the loop.
        with contextlib.suppress(Exception):
            logger.error(
                "%s: an internal error; the calls that it hits fail, and the batcher goes on",
                self._name,
                exc_info=error,
            )
        return functools.partial(
            BatcherError,
            f"{self._name}: an internal error of fast_batcher ({one_line(error)}); its traceback "
            "is in the log. Please report it",
        )
