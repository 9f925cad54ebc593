"""A test kit for apps with batchers: workers in the test's own process, faults and batches.

    with BatcherKit() as kit:          or the fixture `batcher_kit` of the pytest plugin
        with TestClient(app) as client:
            ...

While a kit is active, the batchers that open compute on threads of this process. The scheduler, the
policies, the deadlines, the errors, and the pickling of inputs and outputs are the same as in
production. No process is started, so tests are fast, `breakpoint()` works in `infer`, coverage
measures it, and `monkeypatch` can patch it.

See docs/testing.md.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Literal, Self, get_args

from fast_batcher._core.policy import Load, Policy
from fast_batcher._core.queue import Queue
from fast_batcher._core.values import Batch, Release, Request, settle
from fast_batcher._parent.pool import MakeWorker
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher._parent.worker_thread import ThreadedWorker
from fast_batcher._process import monotonic
from fast_batcher._session.life import CurrentModel, Status
from fast_batcher._session.outcomes import Ledger
from fast_batcher._session.session import LocalSession
from fast_batcher._transport.pickling import describe
from fast_batcher.batcher import DynBatcher, session_makers
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    ConfigurationError,
    DeadlineExceededError,
    NotReadyError,
    QueueFullError,
)
from fast_batcher.settings import COUNT, SECONDS_OR_ZERO, Settings

__all__ = ["BatcherKit", "FormedBatch", "WorkerKind"]

WorkerKind = Literal["threads", "processes"]
# Errors of calls that a batcher refuses: they are counted as rejected, and others as failed.
_REFUSALS = (BatcherClosedError, DeadlineExceededError, NotReadyError, QueueFullError)


@dataclass(frozen=True)
class FormedBatch:
    """A batch that a batcher has sent to a worker."""

    # Name of the batcher.
    batcher: str
    # The inputs, as the callers gave them.
    inputs: list[Any]
    # Name of the model's method.
    method: str
    # Reason for which it left: "full", "idle", "hold", "window", "deadline", "drain" or "retry".
    reason: str


@dataclass
class _Fault:
    """An error for the next calls."""

    error: BaseException | type[BaseException]
    # Name of the batcher; None for any.
    batcher: str | None
    # Calls that are still to fail.
    count: int


class BatcherKit:
    """Replaces the workers of every batcher that opens while the kit is active.

    Args:
        workers: "threads", one thread of this process per worker; or "processes", as in production.
            With both, the kit records batches, holds them, and lets calls fail.
        timeouts: False lets every call wait without a limit, whatever its timeout: for a debugger.

    Use it as a context manager. At its end the batchers that it has served are closed. Its methods
    may be called on any thread. `shared=True` and workers on a cluster have no effect: each
    batcher has local workers of its own.

    Raises:
        ConfigurationError: `workers` is neither "threads" nor "processes".
    """

    def __init__(self, workers: WorkerKind = "threads", *, timeouts: bool = True) -> None:
        if workers not in get_args(WorkerKind):
            raise ConfigurationError(
                f"workers={workers!r:.100}: give one of {', '.join(get_args(WorkerKind))}"
            )
        self.workers: WorkerKind = workers
        self.timeouts: bool = timeouts
        # Batches in the order in which they left, retries included.
        self.batches: list[FormedBatch] = []
        self._latency = 0.0
        # Requests that must wait before a batch leaves; 0 while nothing is held.
        self._held_until = 0.0
        self._faults: deque[_Fault] = deque()
        self._lock = threading.Lock()
        self._sessions: list[tuple[DynBatcher[Any, Any], _KitSession]] = []

    def __enter__(self) -> Self:
        """Begin to serve the batchers that open."""
        session_makers.append(self._make_session)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the batchers that are still open, and serve no more."""
        session_makers.remove(self._make_session)
        self._hold_until(0)
        for batcher, session in self._sessions:
            if session.is_present:
                batcher.stop()
        self._sessions.clear()

    @property
    def sizes(self) -> list[int]:
        """Sizes of the batches so far."""
        return [len(batch.inputs) for batch in self.batches]

    @property
    def latency(self) -> float:
        """Seconds added to the time of each batch; settable, for workers in threads."""
        return self._latency

    @latency.setter
    def latency(self, seconds: float) -> None:
        SECONDS_OR_ZERO.check("latency", seconds)
        if self.workers != "threads":
            raise ConfigurationError(
                f"latency={seconds!r}: workers in processes take the time that their model takes; "
                'use BatcherKit(workers="threads")'
            )
        self._latency = seconds

    @contextmanager
    def hold(self, until: int | None = None) -> Iterator[None]:
        """Hold the batches, so that a test decides which requests share one.

        In the body of the `with` statement a batch leaves when `until` requests wait, when it is
        full, and when the batcher drains. A held request ends at its deadline, as every other.
        Afterwards the waiting requests leave as in production.

        Args:
            until: Number of requests, 1 or more; None to hold them to the end of the body.

        Raises:
            ConfigurationError: `until` is wrong.
        """
        if until is not None:
            COUNT.check("until", until)
        self._hold_until(inf if until is None else until)
        try:
            yield
        finally:
            self._hold_until(0)

    def fail_next(
        self,
        error: BaseException | type[BaseException],
        count: int = 1,
        *,
        batcher: str | None = None,
    ) -> None:
        """Make the next calls fail with this error, before they are queued.

        Args:
            error: An error of this library, as `QueueFullError("full", retry_after=2)`, or of the
                model: its callers get it as from `infer`, as an `InferenceError` as well.
            count: Number of calls, 1 or more.
            batcher: Name of the batcher whose calls fail; None for the next calls of any.

        Raises:
            ConfigurationError: `count` is invalid, or `error` is not an exception.
        """
        COUNT.check("count", count)
        kind = error if isinstance(error, type) else type(error)
        if not issubclass(kind, BaseException):
            raise ConfigurationError(f"error={error!r:.100}: give an exception or its class")
        with self._lock:
            self._faults.append(_Fault(error, batcher, count))

    def reset(self) -> None:
        """Clear the batches, the faults and the latency for the next test."""
        with self._lock:
            self._faults.clear()
        self.batches.clear()
        self._latency = 0.0

    def _hold_until(self, count: float) -> None:
        self._held_until = count
        for _, session in self._sessions:
            session.wake()

    def _make_session(self, batcher: DynBatcher[Any, Any], *parts: Any) -> LocalSession:
        session = _KitSession(self, *parts)
        self._sessions.append((batcher, session))
        return session

    def _take_fault(self, batcher: str) -> BatcherError | None:
        """Return the error of a call that is to fail."""
        with self._lock:
            for fault in self._faults:
                if fault.batcher in (None, batcher):
                    fault.count -= 1
                    if not fault.count:
                        self._faults.remove(fault)
                    return _make_error(fault.error)
        return None


def _make_error(error: BaseException | type[BaseException]) -> BatcherError:
    made = error("it was asked for by a test") if isinstance(error, type) else error
    # What a model raises reaches the caller as a copy, which is an `InferenceError` as well.
    return made if isinstance(made, BatcherError) else describe(made).to_error()


class _HoldingPolicy(Policy):
    """The policy of the settings, but for batches that a test holds."""

    def __init__(self, kit: BatcherKit, policy: Policy) -> None:
        self._kit = kit
        self._policy = policy

    @property
    def learns(self) -> bool:  # type: ignore[override]  # a policy may change it, too
        """Whether the policy of the settings learns now."""
        return self._policy.learns

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Hold the batch for a test, or ask the policy of the settings."""
        wanted = self._kit._held_until  # noqa: SLF001  of this module
        if wanted:
            return Release.HOLD if load.waiting >= wanted else inf
        return self._policy.decide(now, queue, load) if self._policy.may_hold else Release.IDLE

    def end_hold(self) -> None:
        """Tell the policy of the settings."""
        self._policy.end_hold()

    def arrived(self, now: float, count: int, is_idle: bool) -> None:
        """Tell the policy of the settings."""
        self._policy.arrived(now, count, is_idle)

    def batch_done(self, now: float, size: int, load: Load) -> None:
        """Tell the policy of the settings."""
        self._policy.batch_done(now, size, load)

    def batch_skipped(self) -> None:
        """Tell the policy of the settings."""
        self._policy.batch_skipped()


class _KitSession(LocalSession):
    """A session for tests: it records and holds batches, and lets calls fail."""

    def __init__(
        self,
        kit: BatcherKit,
        model: CurrentModel,
        settings: Settings,
        status: Status,
        ledger: Ledger,
    ) -> None:
        self._kit = kit
        changes: dict[str, Any] = {"shared": False, "shared_version": None, "workers": None}
        if not kit.timeouts:
            changes |= {"timeout": None, "infer_timeout": None}
        if kit.workers == "threads":
            # A thread has the memory of this process, and needs none that is shared.
            changes |= {"max_shared_bytes": 0, "max_rss_bytes": None}
        super().__init__(model, replace(settings, **changes), status, ledger)

    @property
    def is_present(self) -> bool:
        """Whether it has not been ended."""
        return not self.pool.is_closing

    def _make_policy(self, settings: Settings) -> Policy:
        return _HoldingPolicy(self._kit, super()._make_policy(settings))

    def _choose_worker_kind(self) -> MakeWorker:
        if self._kit.workers == "processes":
            return WorkerProcess
        return partial(ThreadedWorker, lambda: self._kit.latency)

    def wake(self) -> None:
        """Decide again about the waiting requests. Any thread."""
        if self.is_present:
            self.binding.call(self.run_soon)

    def accept(self, request: Request) -> None:
        """Let the request fail if a test wants it, or add it to the arrivals."""
        error = self._kit._take_fault(self._name)  # noqa: SLF001  of this module
        if not self._kit.timeouts:
            request.deadline, request.has_explicit_deadline = inf, False
        if error is None:
            super().accept(request)
        elif isinstance(error, _REFUSALS):
            self._ledger.reject(request, error, "test")
        else:
            settle(request)
            request.arrival = monotonic()
            self._ledger.counters.submitted += 1
            self._ledger.fail(request, error, "test")

    def _send(self, batch: Batch) -> None:
        group = batch.requests[0].group
        method = "infer" if group is None or group.method is None else group.method.name
        inputs = [request.value for request in batch.requests]
        formed = FormedBatch(self._name, inputs, method, str(batch.release))
        self._kit.batches.append(formed)
        super()._send(batch)
