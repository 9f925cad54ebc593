"""Values of the core: states of a batcher, limits, requests, batches and actions. Pure.

These classes hold data and decide nothing; the messages between processes are in
`_transport/channels.py`. The life of a request, by its `phase`:

    phase        it is ...                           it goes on to ...
    QUEUED       in the queue, or arriving           SENT with its batch
    SENT         with a worker, in a batch           answered; COPYING_OUT; RETRYING
    COPYING_OUT  answered, the output is being       answered
                 copied out of shared memory
    RETRYING     waiting for another try             SENT, with its group alone

From any phase it can be *settled*: the caller has its outcome, or has gone. That happens once.
`is_settled` is then True for ever; a settled request may stay in the queue, in a retry group or in
a batch until that part of the scheduler reaches it, and is skipped there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from math import inf
from typing import Any, Final, NamedTuple

from fast_batcher.errors import BatcherError


class State(StrEnum):
    """State of a batcher, as `DynBatcher.state` shows it."""

    NEW = "new"  # constructed, nothing started
    OPENING = "opening"  # workers are loading; requests are queued
    OPEN = "open"  # every worker has been ready once
    DRAINING = "draining"  # no new requests; the queue is being finished
    CLOSED = "closed"  # nothing is left; it can be opened again
    BROKEN = "broken"  # no worker can be started for now; every call fails at once


class Event(StrEnum):
    """Cause of a change of state."""

    OPEN = "open"
    ALL_READY = "all workers ready"
    START_FAILED = "start failed"
    GIVEN_UP = "restart budget spent"
    RECOVERED = "worker ready again"
    DRAIN = "drain"
    CLOSE = "close"
    TEST_ENDED = "test kit ended"


MOVES: Final[dict[tuple[State, Event], State]] = {
    (State.NEW, Event.OPEN): State.OPENING,
    (State.NEW, Event.DRAIN): State.DRAINING,
    (State.NEW, Event.CLOSE): State.CLOSED,
    (State.OPENING, Event.ALL_READY): State.OPEN,
    (State.OPENING, Event.START_FAILED): State.BROKEN,
    (State.OPENING, Event.GIVEN_UP): State.BROKEN,
    (State.OPENING, Event.DRAIN): State.DRAINING,
    (State.OPENING, Event.CLOSE): State.CLOSED,
    (State.OPEN, Event.GIVEN_UP): State.BROKEN,
    (State.OPEN, Event.DRAIN): State.DRAINING,
    (State.OPEN, Event.CLOSE): State.CLOSED,
    (State.DRAINING, Event.CLOSE): State.CLOSED,
    (State.BROKEN, Event.RECOVERED): State.OPEN,
    (State.BROKEN, Event.OPEN): State.OPENING,
    (State.BROKEN, Event.DRAIN): State.DRAINING,
    (State.BROKEN, Event.CLOSE): State.CLOSED,
    # An app is started once per test: `with TestClient(app)` runs its lifespan each time.
    (State.CLOSED, Event.OPEN): State.OPENING,
    # A batcher that its first call opened is opened again by the first call of the next test.
    (State.CLOSED, Event.TEST_ENDED): State.NEW,
}


# A busy worker gets one batch ahead, and only a full one: it hides the hand-over at saturation and
# costs no latency below it. Source: a second batch that was not full cost 60 % of the median
# latency at part load, a full one nothing.
BATCHES_PER_WORKER: Final = 2


@dataclass(frozen=True)
class Limits:
    """Settings and limits of a scheduler. Durations are in seconds; None is no limit.

    A field with the name of an option has its value, unless the session derives another one.
    """

    max_batch_size: int
    # Most requests waiting, and most bytes of them together.
    max_queue_size: int
    max_queue_bytes: int | None = None
    # Seconds from arrival to deadline, for callers that name none. A worker counts as stalled if it
    # has run a batch for this time and no caller waits for the batch.
    timeout: float | None = None
    # Seconds from arrival to target: see `Admission`.
    max_latency: float | None = None
    # Longest run of a batch; then its worker is replaced.
    infer_timeout: float | None = None
    # Whether a request may be computed twice.
    idempotent: bool = True
    # Whether a batch for which `infer` raised is divided to find the culprit.
    isolate_errors: bool = True
    # Most batches of a worker with one stage: one that runs, and above 1 full ones that wait behind
    # it. See `most_batches`.
    batches_per_worker: int = BATCHES_PER_WORKER
    # Most streams that a worker runs, and most that they cost together: see `StreamTable`.
    places: int = 1
    most_stream_cost: float = inf
    # Most sessions of a worker.
    max_sessions: int = 1


def most_streams(size: int) -> int:
    """Return the most streams that are sent to a worker of which `size` run.

    The others wait there for the next place, which would be empty while the next stream travels.
    Source: with streams of 20 steps and 32 places, 3 % of the places are empty without them. Of
    several workers none gets more than it can begin: see `StreamTable`.
    """
    return size + -(-size // 8)


def most_batches(stages: int, batches_per_worker: int = BATCHES_PER_WORKER) -> int:
    """Return the most batches of a worker: each stage but the first runs one more."""
    return batches_per_worker + stages - 1


def or_infinite(limit: float | None) -> float:
    """Return the limit, infinity for None."""
    return inf if limit is None else limit


class Rejection(NamedTuple):
    """Reason for a rejection. Requests that arrive together may share one object."""

    # A class whose errors have `retry_after`.
    kind: Callable[..., BatcherError]
    text: str
    # Seconds until a retry makes sense, None if unknown.
    retry_after: float | None = None

    def to_error(self) -> BatcherError:
        """Make an error for one caller: an error raised for several would collect tracebacks."""
        return self.kind(self.text, retry_after=self.retry_after)


class Order(IntEnum):
    """Orders to a worker; the values are those of `Kind` in `_transport`."""

    STOP = 5  # finish what has arrived, then end
    PING = 6
    # The orders below name a stream, which is the batch with this id.
    LEAVE = 12  # no caller waits for it any more: it is skipped, unless it has ended; or a session
    PAUSE = 13  # its caller does not keep up: leave it out of the steps
    RESUME = 14  # its caller has read


class Failed(Enum):
    """Consequence of an error of a whole batch."""

    FOR_GOOD = 1  # a retry cannot succeed
    RAISED = 2  # `infer` raised
    OUT_OF_MEMORY = 3  # `infer` ran out of memory
    FATAL = 4  # `infer` raised, and the process cannot use its device any more
    EVICTED = 5  # a stream has made room for older ones, and may begin again
    SKIPPED = 6  # not computed, because no caller waits for it; there is no error


class Failure(NamedTuple):
    """Outcome that is an error, made for one caller: a shared one would collect tracebacks.

    A class of its own, because an output may be any object.
    """

    error: BaseException


# What a worker gets beside the inputs of a batch: the name of its method, the ids of its sessions,
# the pickled context managers of the observers that follow it, and the cost of a stream.
BatchNote = tuple[str, list[int], Sequence[bytes], float]

# Batch ids after a step of a `SteppedModel`: streams that get a chunk, streams that have ended, and
# the new costs of streams.
Step = tuple[list[int], list[int], dict[int, float]]


class Report(NamedTuple):
    """Facts that a worker sends beside outcomes, if one of them differs from its default."""

    # The whole batch has failed so; its one outcome is the error.
    failed: Failed | None = None
    # Elements of the inputs, and of the batches of a collation; 0 where nothing is filled.
    elements: tuple[int, int] = (0, 0)
    # The step whose chunks the outcomes are.
    step: Step | None = None
    # Ids of batches whose inputs in shared memory have no view left.
    freed: Sequence[int] = ()


class Group:
    """Requests with the same `Group` object may share a batch.

    It holds the key that `group_by` returned. The core never compares keys: they are the user's
    objects, and comparing them may raise.
    """

    __slots__ = ("__weakref__", "key", "method")

    def __init__(self, key: Any, method: Any = None) -> None:
        self.key: Final = key
        # A `Method`, None for the model's first.
        self.method: Final = method


class SessionPlace:
    """The session of a caller, and its place in the worker that holds its state."""

    __slots__ = (
        "__weakref__",
        "began_at",
        "end",
        "ends_at",
        "id",
        "may_begin",
        "timeout",
        "was_answered",
        "worker",
    )

    def __init__(self, timeout: float) -> None:
        # Seconds without a request after which it ends.
        self.timeout: Final = timeout
        # Its worker, and its number there; None and -1 before its first request is accepted.
        self.worker: int | None = None
        self.id = -1
        self.began_at = 0.0
        # False if its API process drains: without a place it gets none.
        self.may_begin = True
        # Whether its worker has answered a request of it; before that it has no claim to its place.
        self.was_answered = False
        # The moment at which it has been idle for its timeout.
        self.ends_at = inf
        # The reason for its end, None while it lives.
        self.end: str | None = None


# Phases of a request: see the table in this module's docstring. Integers, because on Python 3.11 a
# member of an enumeration costs as much as a call.
QUEUED: Final = 0
SENT: Final = 1
COPYING_OUT: Final = 2
RETRYING: Final = 3


# Name of the caller, or of its kind, whose requests are served in turn with those of other shares.
Share = str | int | None


# The reason for the end of the sessions of a failed batch.
CALL_FAILED: Final = "a batch with a call of it has failed, so its state is unknown"


class Request:
    """Input of one call, with its deadline, cost and phase, from the queue to the answer."""

    # Each call makes a request, so fields that most requests never need are defaults of the class,
    # and lie in the dict of the requests that need them.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "arrival",
        "batch_id",
        "caller",
        "deadline",
        "has_deadline",
        "id",
        "is_ranked",
        "is_settled",
        "phase",
        "value",
    )
    # The moment at which the scheduler accepted it.
    arrival: float
    # The id of the batch that carries it, while it is SENT or COPYING_OUT. A reference to the batch
    # would make every batch a cycle that only the garbage collector can free.
    batch_id: int
    # The seconds that the caller named, None if it named none: from the call, and for a stream
    # again from each chunk. A named timeout is a target, and the batcher's is not.
    timeout: float | None = None
    # Higher priorities go first; within one, shares are served in turn: see `RankedQueue`.
    priority = 0
    share: Share = None
    # Requests with different groups never share a batch; None where there is no `group_by`.
    group: Group | None = None
    cost = 1.0
    # Bytes of the input; -1 until it is measured, which happens only where there is a
    # `max_queue_bytes`.
    size = -1
    # The moment by which the answer is wanted, at most the deadline; unlike the deadline it ends
    # nothing: see `Admission`. None until the scheduler sets one, unless an API process has.
    target: float | None = None
    # The end of the hold of the batch of which it is the oldest request, None without one.
    held_until: float | None = None
    # The context variables of the caller, None if no observer needs them. The shell sets them.
    context: Any = None
    # The copy of the input in shared memory, or None. The shell sets it, and the core never reads
    # it.
    staged: Any = None
    # Number of earlier arrivals in its lane of a `RankedQueue`.
    lane_position = 0
    # Workers that died with this request, and how many of these had begun to compute it: see
    # `Retries`.
    losses = 0
    deaths = 0
    # Whether its caller has got a chunk of its stream, so that it cannot be tried again.
    has_chunks = False
    # The chunks of a stream whose caller waits for the whole answer, since its last dispatch. The
    # shell sets it, and the core never reads it.
    chunks: Any = None
    # The session of its caller, None for most callers.
    session: SessionPlace | None = None
    # The `ChunkTimes` of a stream, from its dispatch. The core never reads it.
    chunk_times: Any = None

    def __init__(self, value: Any, caller: Any) -> None:
        self.value = value
        # The object that the shell settles with the outcome. The core never reads it.
        self.caller = caller
        # See the module's docstring.
        self.phase: int = QUEUED
        # Whether it has a priority or a share.
        self.is_ranked = False
        self.is_settled = False
        # The moment at which it expires, and whether `fix_deadline` has set it. Otherwise the
        # scheduler does so for all arrivals of a turn, which is faster.
        self.has_deadline = False
        self.deadline = inf
        # The scheduler sets it when it accepts the request. Ids rise with the order of arrival.
        self.id = -1

    def fix_deadline(self, now: float, timeout: float | None, default: float | None) -> None:
        """Count the timeout that the caller named, None for the default, from the call."""
        self.timeout = timeout
        # A float, because one of NumPy with 32 bits would round the moment.
        self.deadline = now + float(or_infinite(default if timeout is None else timeout))
        self.has_deadline = True

    def rank(self, priority: int, share: Share) -> None:
        """Set the priority and the share."""
        self.priority, self.share = priority, share
        self.is_ranked = priority != 0 or share is not None


def target_of(request: Request) -> float:
    """Return the moment by which the answer is wanted, infinite without a target."""
    return inf if request.target is None else request.target


def settle(request: Request) -> bool:
    """Claim a request for its end; False if that has been done before."""
    if request.is_settled:
        return False
    request.is_settled = True
    return True


def settle_open(requests: Iterable[Request]) -> list[Request]:
    """Settle and return the requests that are not settled yet, each of them once."""
    return [request for request in requests if settle(request)]


class Release(StrEnum):
    """Reason for dispatching a batch at this moment."""

    # The hash of an enumeration is a Python function, and each batch is counted by its reason.
    __hash__ = str.__hash__

    FULL = "full"  # `max_batch_size` requests were waiting
    IDLE = "idle"  # a worker was free
    HOLD = "hold"  # it was held, and waiting longer is not expected to pay
    WINDOW = "window"  # `max_delay` had passed, under policy="fixed" or a rule of the user's
    DEADLINE = "deadline"  # waiting longer would have made its oldest request late
    DRAIN = "drain"  # the batcher accepts no more requests, so there is nothing to wait for
    RETRY = "retry"  # its requests are tried again: see `Retries`


# Members that every request or batch needs: on Python 3.11 a look-up in an enumeration costs as
# much as a call.
STATE_OPEN: Final = State.OPEN
RELEASE_FULL: Final = Release.FULL
RELEASE_IDLE: Final = Release.IDLE
RELEASE_RETRY: Final = Release.RETRY


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were sent to a worker together."""

    id: int
    worker: int
    requests: list[Request]
    release: Release
    # Earliest deadline, and number, of the requests whose caller still waits.
    deadline: float
    open_count: int
    # When it was given to its worker, and, once it is answered, when the worker began with it. With
    # a stream that has waited there for a place, when it got one.
    sent_at: float
    began_at: float = 0.0
    # Seconds in the model, as the worker has measured them; those of a stream in its place.
    infer_seconds: float = 0.0
    # Requests in the queue that it left behind.
    left_waiting: int = 0
    # The index of its worker, which outlives the worker: replacements have the same.
    worker_index: int = 0
    # The `Method` that computes it.
    method: Any = None
    # Time from which the batch is not divided if `infer` raises; infinite before it has raised.
    isolate_until: float = inf
    # The event of its dispatch, None if no observer follows batches. The shell sets it.
    dispatched: Any = None
    # The pickled context managers of the observers that follow it. The shell sets them.
    contexts: Sequence[bytes] = ()
    # Whether a chunk of this stream has come from its worker; and whether the stream is paused.
    has_stepped: bool = False
    is_paused: bool = False

    @property
    def call(self) -> Request:
        """The one request of a stream, or of a batch that is tried again alone."""
        return self.requests[0]

    @property
    def chunk_times(self) -> Any:
        """The `ChunkTimes` of a stream, None for another batch."""
        return self.call.chunk_times if self.requests else None

    @property
    def joined_at(self) -> float:
        """The moment at which a stream has got a place in its worker."""
        return self.began_at or self.sent_at

    @property
    def is_on_trial(self) -> bool:
        """Whether it is a stream that may be what another worker has died of."""
        return self.call.deaths > 0 and not self.has_stepped

    def make_note(self) -> BatchNote:
        """Return what its worker gets beside the inputs."""
        group, cost = self.requests[0].group, self.requests[0].cost
        method = "infer" if group is None or group.method is None else group.method.name
        # All requests of a batch have a session, or none.
        places = [request.session for request in self.requests if request.session is not None]
        return method, [place.id for place in places], self.contexts, cost

    def settle_open(self) -> list[Request]:
        """Settle the requests whose callers still wait, and return them."""
        self.open_count = 0
        return settle_open(self.requests)


class BatchProgress(Enum):
    """Progress of a worker with a batch."""

    SENT = 0  # the worker has not reported that it read the batch
    TAKEN = 1  # the worker has read it, and is unpickling or preparing it
    BEGUN = 2  # `infer` is computing it, or has computed it


class RetryGroup(NamedTuple):
    """Requests that are tried again as one batch."""

    requests: list[Request]
    # Time from which the batch is not divided if `infer` raises.
    isolate_until: float


@dataclass(slots=True)
class Dispatch:
    """Action: send this batch to its worker."""

    batch: Batch


class ExpiryReason(StrEnum):
    """Circumstance in which a request expired."""

    WAITING = "waiting"  # it was in the queue behind others
    NOT_READY = "not ready"  # it was in the queue and no worker was ready
    RUNNING = "running"  # a worker has it; the late result will be dropped
    INFER_TIMEOUT = "infer timeout"  # its batch has been running for `infer_timeout`
    RETIRED = "retired"  # a stream, whose worker has been replaced or removed
    UNREACHABLE = "unreachable"  # it was in the queue, and was dropped as too late


@dataclass(slots=True)
class Expire:
    """Action: fail this request, because its deadline has passed or its target will be missed."""

    request: Request
    reason: ExpiryReason
    # The error's text and kind; set with UNREACHABLE, and for a stream that costs have held back.
    rejection: Rejection | None = None


@dataclass(slots=True)
class Stall:
    """Action: report that this worker has stalled.

    It has run a batch for the batcher's `timeout`, and no caller waits for that batch any more. The
    worker counts as not ready until it answers.
    """

    worker: int


@dataclass(slots=True)
class Replace:
    """Action: end this worker, whose batch has run for `infer_timeout`, and start another."""

    worker: int


@dataclass(slots=True)
class Skip:
    """Action: tell the worker not to compute this batch, for which no caller waits any more.

    The worker has another batch first. If it has begun with this one meanwhile, it goes on. A
    stream ends with the present step.
    """

    batch: Batch


class EndSession(NamedTuple):
    """Action: let the worker release the state of a session, behind the batches that it has."""

    worker: int
    session_id: int


@dataclass(slots=True)
class Fail:
    """Action: log an error in the scheduler, and fail these requests, which have left the queue."""

    error: Exception
    requests: list[Request]


Action = Dispatch | Expire | Stall | Replace | Skip | EndSession | Fail
