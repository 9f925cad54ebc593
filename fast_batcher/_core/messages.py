"""What goes into the core and what comes out of it. Pure values; they live where it does."""

from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple

from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    DeadlineExceededError,
    QueueFullError,
)


class Refusal(NamedTuple):
    """Why requests were not taken: one for all those of a turn that have the same reason."""

    kind: type[BatcherClosedError] | type[QueueFullError] | type[DeadlineExceededError]
    text: str
    # Seconds until another try makes sense, None if that is not known.
    retry_after: float | None = None

    def to_error(self) -> BatcherError:
        """A new error for one caller: tracebacks grow on shared ones."""
        if issubclass(self.kind, BatcherClosedError):
            return self.kind(self.text)
        return self.kind(self.text, retry_after=self.retry_after)


class Group:
    """What requests have in common that may share a batch: the same object for all of them.

    The user's key is in it and never looked at again: it may raise whenever it is compared.
    """

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: Any) -> None:
        self.key: Final = key


class Request:
    """One caller's input on its way through the queue and a worker.

    One is made per call, so what most requests never need is a default of the class, and only the
    requests that need it store a value: its construction is a measurable part of a call's cost
    (`benchmarks/overhead.py`).
    """

    # The seconds that the caller named, None if it named none: an error repeats them.
    timeout: float | None = None
    # Higher goes first: see `RankedQueue`.
    priority = 0
    # Requests with different groups never share a batch; None where there is no `group_by`.
    group: Group | None = None
    cost = 1.0
    # Bytes of the input; -1 until the shell measures it, which it does where there is
    # `max_queue_bytes`.
    size = -1
    # The moment by which the answer is wanted, at most the deadline. Unlike the deadline it ends
    # nothing: see `Admission`. None if nobody asked for one; infinite if the deadline is not to
    # become one.
    target: float | None = None
    # The copy of the input in shared memory, None if there is none. The shell sets it, and the core
    # never looks at it.
    staged: Any = None
    # The scheduler sets these when it accepts the request. Ids rise with the order of arrival.
    id = -1
    arrival = 0.0
    # How many requests came before it to its part of a `RankedQueue`.
    place = 0
    # The `Refusal` that says why the request was rejected, None if it was not.
    refusal: Any = None
    # Workers that died while they had it, and how many of them had begun with it: see `Retries`.
    losses = 0
    deaths = 0

    def __init__(self, value: Any, caller: Any, deadline: float | None = None) -> None:
        self.value = value
        # Who waits for the outcome. The core never looks at it.
        self.caller = caller
        # The moment after which the caller does not want the answer. None becomes the default when
        # the scheduler accepts the request; nothing reads it before.
        self.deadline: float = deadline  # type: ignore[assignment]
        # The id of the batch that carries it, None while it is queued, RETRYING while it waits for
        # another try. A reference to the batch would make every batch a cycle that only the garbage
        # collector can free.
        self.batch_id: int | None = None
        # True once it has left the core: answered, failed, expired or cancelled.
        self.is_settled = False


# In place of a batch id, which is 0 or more.
RETRYING: Final = -1


class Release(StrEnum):
    """Why a batch left when it did."""

    FULL = "full"  # it holds `max_batch_size` requests
    IDLE = "idle"  # a worker was free
    HOLD = "hold"  # it was held, and is worth no more waiting
    WINDOW = "window"  # `max_delay` had passed under policy="fixed"
    DEADLINE = "deadline"  # waiting longer would have been in vain for its oldest request
    DRAIN = "drain"  # no more requests are taken, so there is nothing to wait for
    RETRY = "retry"  # its requests have been on a worker before: see `retries`

    # That of an enumeration is a Python function, and releases are counted once per batch.
    __hash__ = str.__hash__


class Batch:
    """Requests that were sent to a worker together."""

    __slots__ = ("deadline", "id", "open_count", "release", "requests", "sent_at", "worker")

    def __init__(
        self,
        id: int,
        worker: int,
        requests: list[Request],
        release: Release,
        now: float,
        deadline: float,
    ) -> None:
        self.id: Final = id
        self.worker: Final = worker
        self.requests = requests
        self.release: Final = release
        self.sent_at: Final = now
        # Requests whose caller still waits.
        self.open_count = len(requests)
        # The earliest deadline among those.
        self.deadline = deadline


class Stage(Enum):
    """How far a worker has come with a batch."""

    SENT = 0  # it is in the pipe, for all we know
    TAKEN = 1  # it has been read, and is being unpickled
    BEGUN = 2  # `infer` has it


class RetryBatch(Batch):
    """Requests that a worker has had before."""

    __slots__ = ("isolate_until",)

    # Until when it is divided if it fails.
    isolate_until: float


class Dispatch:
    """Send this batch to its worker."""

    __slots__ = ("batch",)

    def __init__(self, batch: Batch) -> None:
        self.batch: Final = batch


class ExpiryReason(StrEnum):
    """What a request was doing when its time was over."""

    WAITING = "waiting"  # it was in the queue behind others
    NOT_READY = "not ready"  # it was in the queue and no worker was ready
    RUNNING = "running"  # a worker has it; the late result will be dropped
    INFER_TIMEOUT = "infer timeout"  # its batch has been running for `infer_timeout`
    UNREACHABLE = "unreachable"  # it was in the queue, and its answer would have come too late


class Expire:
    """Tell the caller that the deadline of this request has passed, or cannot be met any more."""

    __slots__ = ("reason", "refusal", "request")

    def __init__(
        self, request: Request, reason: ExpiryReason, refusal: Refusal | None = None
    ) -> None:
        self.request: Final = request
        self.reason: Final = reason
        # With UNREACHABLE: what to tell.
        self.refusal: Final = refusal


class Stall:
    """This worker has run a batch for the batcher's `timeout`, and no caller waits for it any more.

    The worker counts as not ready until it answers.
    """

    __slots__ = ("worker",)

    def __init__(self, worker: int) -> None:
        self.worker: Final = worker


class Replace:
    """This worker's batch has run for `infer_timeout`: end the worker and start another."""

    __slots__ = ("worker",)

    def __init__(self, worker: int) -> None:
        self.worker: Final = worker


class Fault:
    """Deciding has raised: log the error, and tell these requests, which have left the core."""

    __slots__ = ("error", "requests")

    def __init__(self, error: Exception, requests: list[Request]) -> None:
        self.error: Final = error
        self.requests: Final = requests


Action = Dispatch | Expire | Stall | Replace | Fault
