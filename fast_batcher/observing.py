"""The `Observer` protocol: events of a batcher for metrics, traces and pages.

An observer is called in the process that schedules the batches: on the event loop's thread for a
`DynBatcher`, on the thread that computes the batch for a decorated function. The calls run in
an empty context (`contextvars`), after the callers have their outcomes. An observer must be quick
and must not wait; an exception that it raises is logged once, and harms no request.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["completed", "failed", "refused", "expired", "cancelled", "rejected"]
WorkerChange = Literal["started", "ready", "restarted", "lost", "recycled", "removed"]
CacheResult = Literal["hit", "miss", "coalesced"]


@dataclass(slots=True)
class ChunkTimes:
    """The chunks of a stream, which is a request of a `SteppedModel` in a batch of its own."""

    # Moments of `time.monotonic`: the request arrived, and its first and its last chunk came; 0.0
    # before the first.
    arrived_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    # Chunks that came. If the stream begins again on another worker, the count begins again.
    count: int = 0

    @property
    def first_seconds(self) -> float | None:
        """Seconds from the arrival to the first chunk, None before it."""
        return self.first_at - self.arrived_at if self.count else None

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds between two chunks, None before the second."""
        return (self.last_at - self.first_at) / (self.count - 1) if self.count > 1 else None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BatchDispatched:
    """A batch is about to be sent to its worker, or to be computed by the decorated function.

    Events are compared by identity: the event that ends the batch refers to this object.
    """

    # These fields have the same meaning in `BatchAnswered`.
    model: str
    worker: int
    batch_id: int
    size: int
    cost: float
    release: str
    dispatched_at: float
    # The context variables of the caller of each request; None for a request that is older than the
    # observer.
    contexts: Sequence[Context | None]
    # Whether it is a stream: a request of a `SteppedModel`, which is a batch of its own.
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class BatchLost:
    """A batch has ended without an answer; its requests may be tried again in other batches."""

    dispatched: BatchDispatched
    # The cause, for example "worker lost", "not sendable", "closed", "skipped".
    reason: str
    # The chunks of a stream until then; None for other batches.
    chunks: ChunkTimes | None = None


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request that ended with the answer to its batch."""

    # "completed", "failed", "refused", or "cancelled" if its caller left in the same turn of the
    # event loop.
    outcome: Outcome
    # Seconds from its arrival until its worker began with its batch, and until its outcome.
    queue_wait: float
    total: float
    # The context variables of its caller, where an observer needs them: see `Observer`.
    context: Context | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswered:
    """A worker has answered a batch, or a stream has ended; no event tells of its steps and chunks.

    Requests that ended before, because they expired or their callers left, were reported as
    `RequestEnded` and are not in `requests`.
    """

    # The name of the batcher or of the decorated function.
    model: str
    # Index of the worker, from 0; a replacement has its predecessor's index.
    worker: int
    # Increases with each batch of the batcher.
    batch_id: int
    # Requests in the batch when it was sent, and the sum of their costs: 1 each without costs.
    size: int
    cost: float
    # Why it left: "full", "idle", "hold", "window", "deadline", "drain" or "retry".
    release: str
    # Moments of `time.monotonic`: it was sent; its worker began with it; it was answered.
    dispatched_at: float
    began_at: float
    answered_at: float
    # Seconds that the model took, as the worker measured them; those of a stream in its place.
    infer_seconds: float
    requests: Sequence[AnsweredRequest]
    # Requests that will be tried again in other batches, because the model has raised.
    retried: int = 0
    # The event of its dispatch, where an observer follows batches: see `Observer`.
    dispatched: BatchDispatched | None = None
    # The chunks of a stream, whose end this is; None for other batches.
    chunks: ChunkTimes | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request has ended without the answer of a batch, or a stream before its last chunk."""

    model: str
    outcome: Outcome
    # The cause, for example "queue full", "waiting", "running", "worker lost".
    reason: str
    # Seconds since its arrival; 0.0 if it was rejected on arrival.
    wait: float
    context: Context | None = None
    # The chunks of a stream that a worker had; None for other requests.
    chunks: ChunkTimes | None = None


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker was started, became ready, was lost, or was replaced because it was due."""

    model: str
    worker: int
    # A worker that replaces a lost or recycled worker is "restarted" after it is "ready":
    # `BatcherStats.restarts` counts these. A worker is "recycled" before it is "lost" if another
    # has taken its place, and "removed" if the number of workers is reduced.
    change: WorkerChange
    # Id of its process; None for a worker without a process.
    pid: int | None
    # Exit status, as "exit code 3" or "signal 9 (SIGKILL)"; "" while it lives.
    exit_text: str = ""
    # Address of its node in a Ray cluster; "" for this machine.
    node: str = ""
    # Number of the process or thread, among all that the batcher has started since it opened.
    worker_id: int = 0


@dataclass(frozen=True, slots=True)
class CacheUsed:
    """A call of a `DynBatcher` with a cache was a hit or a miss, or joined an equal call.

    Reported in the process of the call, also with `shared=True`. Only a miss becomes a request.
    """

    model: str
    # "coalesced" if it joined the look-up or the computation of an equal input.
    result: CacheResult


@dataclass(frozen=True, slots=True)
class CollectionPaused:
    """The garbage collector has paused this process."""

    # 0 is the youngest.
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReporterChanged:
    """This process started or stopped reporting a batcher with `shared`.

    One server process at a time reports: its observers get the events of all server processes, and
    its gauges apply to all. Without a host process each server process reports for itself.
    """

    model: str
    is_reporter: bool


@dataclass(frozen=True, slots=True)
class CarriedContext:
    """The part of a caller's context that other processes need with `shared`."""

    # Makes the context current while it is entered; it is pickled.
    manager: AbstractContextManager[Any]
    # Whether the process of this caller may be the one whose observers follow the batch.
    is_followed: bool = True


class Observer:
    """Base class of observers; each method does nothing unless it is overridden.

    Every request is reported once: in the `requests` of its batch, or as a `RequestEnded`. With
    `shared` it is reported in one of the server processes. With `needs_context`, a batch is
    reported in the process of its first caller whose context is followed: see `carry_context`.
    """

    # Whether it follows requests and batches, for traces: the events carry the context of each
    # caller, which costs each call a copy, and every batch is told when it is dispatched (with
    # `shared`, when it has ended) and, without an answer, when it is lost.
    needs_context = False

    def batch_dispatched(self, event: BatchDispatched) -> AbstractContextManager[Any] | None:
        """Take note of a batch before it is sent; called if `needs_context` is True.

        With `shared` the call comes when the batch has ended, immediately before `batch_answered`
        or `batch_lost`, and what it returns is not used.

        Returns:
            None, or a context manager that is entered around the computation of the batch: in the
            worker process, for which it is pickled, or on the decorated function's thread.
        """

    def carry_context(self, context: Context) -> CarriedContext | None:
        """Return the part of a caller's context that other processes need.

        Called if `needs_context` is True, for each request of a batcher with `shared`. In the
        process that gets the batch's events, the contexts of callers are new ones in which
        `CarriedContext.manager` was entered. The manager of the first followed caller of a batch,
        or of its first caller if none is followed, is entered around its computation.

        Returns:
            None if the observer ignores this caller. By default every caller is followed,
            and nothing of its context reaches other processes.
        """
        return CarriedContext(nullcontext())

    def batch_lost(self, event: BatchLost) -> None:
        """Take note of a batch that ends without an answer; called if `needs_context` is True."""

    def batch_answered(self, event: BatchAnswered) -> None:
        """Take note of an answered batch; called once per batch."""

    def request_ended(self, event: RequestEnded) -> None:
        """Take note of a request that was rejected, expired, was cancelled or lost its worker."""

    def worker_changed(self, event: WorkerChanged) -> None:
        """Take note of a worker."""

    def cache_used(self, event: CacheUsed) -> None:
        """Take note of a call that used the cache."""

    def reporter_changed(self, event: ReporterChanged) -> None:
        """Take note that this process started or stopped reporting; see the event."""

    def collection_paused(self, event: CollectionPaused) -> None:
        """Take note of a garbage collection of this process."""
