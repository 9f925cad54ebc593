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

    arrived_at: float
    """Moment of `time.monotonic` at which the request arrived."""
    first_at: float = 0.0
    """Moment of its first chunk, 0.0 before it."""
    last_at: float = 0.0
    """Moment of its last chunk, 0.0 before the first."""
    count: int = 0
    """Chunks that came. If the stream begins again on another worker, the count begins again."""

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

    model: str
    """Name of the batcher or of the decorated function."""
    worker: int
    """Index of the worker, from 0; a replacement has its predecessor's index."""
    batch_id: int
    """Number of the batch, which increases with each batch of the batcher."""
    size: int
    """Requests in the batch."""
    cost: float
    """Sum of their costs: 1 each without costs."""
    release: str
    """Reason for which it left: "full", "idle", "hold", "window", "deadline", "drain" or "retry".
    """
    dispatched_at: float
    """Moment of `time.monotonic` at which it was sent."""
    contexts: Sequence[Context | None]
    """The context variables of the caller of each request; None for a request that is older than
    the observer.
    """
    is_stream: bool = False
    """Whether it is a stream: a request of a `SteppedModel`, which is a batch of its own."""


@dataclass(frozen=True, slots=True)
class BatchLost:
    """A batch has ended without an answer; its requests may be tried again in other batches."""

    dispatched: BatchDispatched
    """Event of its dispatch."""
    reason: str
    """The cause, for example "worker lost", "not sendable", "closed", "skipped"."""
    chunks: ChunkTimes | None = None
    """The chunks of a stream until then; None for other batches."""


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request that ended with the answer to its batch."""

    outcome: Outcome
    """"completed", "failed", "refused", or "cancelled" if its caller left in the same turn of the
    event loop.
    """
    queue_wait: float
    """Seconds from its arrival until its worker began with its batch."""
    total: float
    """Seconds from its arrival until its outcome."""
    context: Context | None = None
    """The context variables of its caller, where an observer needs them: see `Observer`."""


@dataclass(frozen=True, slots=True)
class BatchAnswered:
    """A worker has answered a batch, or a stream has ended; no event tells of its steps and chunks.

    Requests that ended before, because they expired or their callers left, were reported as
    `RequestEnded` and are not in `requests`.
    """

    model: str
    """Name of the batcher or of the decorated function."""
    worker: int
    """Index of the worker, from 0; a replacement has its predecessor's index."""
    batch_id: int
    """Increases with each batch of the batcher."""
    size: int
    """Requests in the batch when it was sent."""
    cost: float
    """Sum of their costs: 1 each without costs."""
    release: str
    """Reason to leave: "full", "idle", "hold", "window", "deadline", "drain" or "retry"."""
    dispatched_at: float
    """Moment of `time.monotonic` at which it was sent."""
    began_at: float
    """Moment at which its worker began with it."""
    answered_at: float
    """Moment at which it was answered."""
    infer_seconds: float
    """Seconds that the model took, as the worker measured them; those of a stream in its place."""
    requests: Sequence[AnsweredRequest]
    """Requests that ended with this answer."""
    retried: int = 0
    """Requests that will be tried again in other batches, because the model has raised."""
    dispatched: BatchDispatched | None = None
    """The event of its dispatch, where an observer follows batches: see `Observer`."""
    chunks: ChunkTimes | None = None
    """The chunks of a stream, whose end this is; None for other batches."""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request has ended without the answer of a batch, or a stream before its last chunk."""

    model: str
    """Name of the batcher or of the decorated function."""
    outcome: Outcome
    """Outcome of the request."""
    reason: str
    """The cause, for example "queue full", "waiting", "running", "worker lost"."""
    wait: float
    """Seconds since its arrival; 0.0 if it was rejected on arrival."""
    context: Context | None = None
    """Context variables of its caller, where an observer needs them: see `Observer`."""
    chunks: ChunkTimes | None = None
    """The chunks of a stream that a worker had; None for other requests."""


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker was started, became ready, was lost, or was replaced because it was due."""

    model: str
    """Name of the batcher."""
    worker: int
    """Index of the worker, from 0; a replacement has its predecessor's index."""
    change: WorkerChange
    """A worker that replaces a lost or recycled worker is "restarted" after it is "ready":
    `BatcherStats.restarts` counts these. A worker is "recycled" before it is "lost" if another has
    taken its place, and "removed" if the number of workers is reduced.
    """
    pid: int | None
    """Id of its process; None for a worker without a process."""
    exit_text: str = ""
    """Exit status, as "exit code 3" or "signal 9 (SIGKILL)"; "" while it lives."""
    node: str = ""
    """Address of its node in a Ray cluster; "" for this machine."""
    worker_id: int = 0
    """Number of the process or thread, among all that the batcher has started since it opened."""


@dataclass(frozen=True, slots=True)
class CacheUsed:
    """A call of a `DynBatcher` with a cache was a hit or a miss, or joined an equal call.

    Reported in the process of the call, also with `shared=True`. Only a miss becomes a request.
    """

    model: str
    """Name of the batcher."""
    result: CacheResult
    """"coalesced" if it joined the look-up or the computation of an equal input."""


@dataclass(frozen=True, slots=True)
class CollectionPaused:
    """The garbage collector has paused this process."""

    generation: int
    """Generation that was collected; 0 is the youngest."""
    seconds: float
    """Length of the pause."""


@dataclass(frozen=True, slots=True)
class ReporterChanged:
    """This process started or stopped reporting a batcher with `shared`.

    One server process at a time reports: its observers get the events of all server processes, and
    its gauges apply to all. Without a host process each server process reports for itself.
    """

    model: str
    """Name of the batcher."""
    is_reporter: bool
    """Whether this process reports from now on."""


@dataclass(frozen=True, slots=True)
class CarriedContext:
    """The part of a caller's context that other processes need with `shared`."""

    manager: AbstractContextManager[Any]
    """Makes the context current while it is entered; it is pickled."""
    is_followed: bool = True
    """Whether the process of this caller may be the one whose observers follow the batch."""


class Observer:
    """Base class of observers; each method does nothing unless it is overridden.

    Every request is reported once: in the `requests` of its batch, or as a `RequestEnded`. With
    `shared` it is reported in one of the server processes. With `needs_context`, a batch is
    reported in the process of its first caller whose context is followed: see `carry_context`.
    """

    needs_context = False
    """Whether it follows requests and batches, for traces: the events carry the context of each
    caller, which costs each call a copy, and every batch is told when it is dispatched (with
    `shared`, when it has ended) and, without an answer, when it is lost.
    """

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
