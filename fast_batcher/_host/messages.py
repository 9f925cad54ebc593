"""Messages between API processes and their host, as frames over one socket.

    API process                                   host
    Hello: settings, model                  -->   starts the workers, unless it has them
                                            <--   Welcome: its process, a range of shared memory
    ITEMS: ids, inputs, options, contexts   -->
                                            <--   ITEMS: ids, outcomes, ends, free inputs, room
    Abandon, EndSessions, StreamsRead       -->
    Observe; PING                           -->
                                            <--   StateSent, Log, Told, Followed
                                            <--   ReporterChosen; PONG
    StateRead                               -->
    Reconfigure: changes                    -->
                                            <--   Reconfigure, to each API process
    ReloadCall: number, model               -->
                                            <--   ReloadBegun, to each API process
                                            <--   ReloadEnded, to each: the model of all workers
                                            <--   Reloaded: number, error
                                            <--   Unplaced: ids and ends of sessions
                                            <--   Resend: id
    Resent: id, input                       -->
    Goodbye                                 -->
                                            <--   StateSent, the last message

The requests of one turn of an event loop are one frame, and so are the outcomes, which are chunks
if the model is stepped. Inputs and outcomes are one pickle of a list of `pickling.ATOMS`, or a list
of packed values. PING, which asks whether the host's event loop runs, and PONG are an empty tuple.
Every other message is a pickled named tuple, and its type names it. `dispatch` calls the handler
of a frame on both sides.

Both processes run the same version of the library, with the same settings. The host unpickles only
what this module defines, and `pickling.ATOMS`: other inputs and outputs, and exceptions of the app,
are bytes to it. Pure; API process and host.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fast_batcher._host.identity import ProcessIdentity
from fast_batcher._opening.life import Changes
from fast_batcher._transport.channels import Frame, Kind, pack_frame
from fast_batcher._transport.pickling import dumps, loads
from fast_batcher.model import ModelKind
from fast_batcher.observing import (
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    RequestEnded,
    WorkerChanged,
)
from fast_batcher.stats import BatcherStats, Explanation

# Functions that handle what arrives, by the kind of a frame and by the type of a message. Each is
# called with the parts of the frame or the fields of the message.
Handlers = Mapping[int | type, Callable[..., object]]


def pack_message(message: tuple[Any, ...]) -> bytes:
    """Pack a message as a whole frame, for a socket that has no channel yet."""
    return pack_frame(Kind.MESSAGE, dumps(message))


def dispatch(frame: Frame, handlers: Handlers) -> None:
    """Call the handler of a frame; raise KeyError if the sender broke the protocol."""
    parts = loads(frame.body)
    handlers[type(parts) if frame.kind == Kind.MESSAGE else frame.kind](*parts)


class Generation(NamedTuple):
    """A model that all workers have loaded, or shall load.

    Each API process remembers the last one, and tells it to the next host. Of two the one with the
    higher number is used by all.
    """

    # Number of the reload that has brought it; 0 for the model given to the constructor.
    number: int
    # `ModelSpec.pickled` and `ModelSpec.identity`.
    model: bytes
    identity: str
    # Texts and paths in the model's arguments, which may name files.
    named_paths: list[str]


class Hello(NamedTuple):
    """An API process introduces itself."""

    # The batcher's as constructed, plain values only; and their changes, as in `LiveSettings`.
    settings: dict[str, Any]
    changes: Changes
    # Whether the settings have a function for costs, and one for groups.
    has_costs: bool
    has_groups: bool
    name: str
    model_name: str
    generation: Generation
    # The methods, as in `ModelSpec`.
    methods: tuple[tuple[str, int | None], ...]
    kind: ModelKind
    sys_path: list[str]
    # Levels of the root logger and of the library's, and `logging.captureWarnings`.
    root_level: int
    library_level: int
    captures_warnings: bool
    # Whether events are wanted.
    observes: bool
    # Whether the batcher was open before, with another host.
    was_open: bool
    # The process after whose death no further API process will come, or None.
    supervisor: int | None
    # Whether other processes may share the host.
    is_shared: bool


class Welcome(NamedTuple):
    """The host accepts an API process.

    With a range of memory, two descriptors come with the frame: the memory, and the writing end of
    the range's *lifeline*. The host reads the end of that pipe once no process has the range
    mapped any more, neither this API process nor a forked child of it.
    """

    process: ProcessIdentity
    # The range of the memory that the API process may write, in bytes; no range if the length is 0.
    start: int
    length: int
    # Requests for which the queue has room.
    room: int


# API process to host.


class Abandon(NamedTuple):
    """The callers of these requests have gone."""

    request_ids: list[int]


class EndSessions(NamedTuple):
    """The callers of these sessions have ended them, or the answer to `Unplaced`."""

    session_ids: list[int]


class StreamsRead(NamedTuple):
    """The numbers of chunks that were read, by the id of the stream's request."""

    counts: dict[int, int]


class Resent(NamedTuple):
    """The answer to `Resend`."""

    request_id: int
    # None if the request has ended, or its input cannot be sent.
    pickled: bytes | None


class Observe(NamedTuple):
    """The API process has observers: it may get events."""


class ReloadCall(NamedTuple):
    """A call of `reload`."""

    number: int
    generation: Generation


class StateRead(NamedTuple):
    """The API process has read a `StateSent`."""


class Goodbye(NamedTuple):
    """The batcher is closed."""


# Both ways.


class Reconfigure(NamedTuple):
    """The settings have changed, in this process or in others."""

    changes: Changes


# Host to API process.


class HostState(NamedTuple):
    """State and statistics of a host."""

    # A `State` of the batcher in the host.
    state: str
    workers_ready: int
    stats: BatcherStats
    explanation: Explanation
    # The error and the traceback of a failed start; the reason and the seconds until the next try
    # after all restarts were spent. Both None otherwise.
    start_error: tuple[bytes, str] | None = None
    given_up: tuple[str, float] | None = None
    # Missing resources of workers without a place in a cluster; "" if none are missing.
    waits_for: str = ""


class StateSent(NamedTuple):
    """The present state of the host."""

    host: HostState
    # Whether the host ends now, and hangs up when it is dead.
    is_last: bool = False


class Unplaced(NamedTuple):
    """These sessions have no place in a worker; sent again until `EndSessions` is the answer."""

    # Reasons for their ends, by id; None for a session that has got no place yet.
    ends: dict[int, str | None]


class Resend(NamedTuple):
    """The input of a request is needed once more: the worker that had it is dead."""

    request_id: int


class Log(NamedTuple):
    """A log record of the host."""

    packed: bytes


class Told(NamedTuple):
    """An event for the observers of the process that reports."""

    event: BatchAnswered | RequestEnded | WorkerChanged
    # False for observers that do not follow batches; None for all.
    follow: bool | None


class Followed(NamedTuple):
    """A batch has ended that the observers of this process follow."""

    # The host's contexts of callers become contexts of this process.
    dispatched: BatchDispatched
    end: BatchAnswered | BatchLost


class ReporterChosen(NamedTuple):
    """This process reports for all from now on, or not any more."""

    is_reporter: bool


class ReloadBegun(NamedTuple):
    """Workers with another model are being started."""


class ReloadEnded(NamedTuple):
    """All workers have this model, a new one or the one of before."""

    generation: Generation


class Reloaded(NamedTuple):
    """The outcome of a `ReloadCall`."""

    number: int
    # As `pack_error` packs it.
    error: tuple[bytes, str] | None
