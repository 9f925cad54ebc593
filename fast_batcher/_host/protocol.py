"""Messages between API processes and their host, as frames over one socket.

    API process                                   host
    HELLO: settings, model                  -->   starts the workers, unless it has them
                                            <--   WELCOME: its process, a range of shared memory
    CALLS, ITEM_CALLS: ids, inputs,
    options, contexts                       -->
                                            <--   ANSWERS, ITEM_ANSWERS: ids, outcomes, room
    ABANDON, OBSERVE, PING               -->
                                            <--   STATE, FREED_INPUTS, LOG, EVENT, REPORT, PONG
                                            <--   FOLLOW: batch
    BATCH_CONTEXTS: context managers        -->
                                            <--   FOLLOWED: its answer or loss
    RECONFIGURE: changes                    -->
                                            <--   RECONFIGURED: changes, to each API process
    RELOAD: number, model                   -->
                                            <--   GENERATION, to each API process: a reload begins
                                            <--   GENERATION, to each: the model of all workers
                                            <--   RELOADED: number, error
    STATE_READ                              -->
                                            <--   RESEND: ids
    RESENT: id, input                       -->
    GOODBYE                                 -->
                                            <--   FAREWELL

Both processes run the same version of the library, with the same settings. The requests of one turn
of an event loop are one frame, and so are the answers. The host unpickles only what this module
defines: inputs, outputs and exceptions of the app are bytes to it. Pure; API process and host.
"""

import hashlib
import io
import pickle
from typing import Any, NamedTuple

from fast_batcher._core.values import Failure, Group, Request
from fast_batcher._host.identity import ProcessIdentity
from fast_batcher._transport.pickling import ATOMS, PROTOCOL, SerializedError, dumps, loads
from fast_batcher.errors import BatcherError, InputError, RemoteTraceback
from fast_batcher.settings import MAX_FRAME_BYTES
from fast_batcher.stats import BatcherStats, Explanation

# Bytes of inputs or outputs after which another frame begins. Frames of other batchers' processes
# wait behind it.
FRAME_SIZE = 1024 * 1024
# Room in a frame for ids, options and smaller values besides `max_frame_bytes` of one value.
FRAME_ROOM = 4 * FRAME_SIZE
# Most requests in a frame: the options of one take up to 200 bytes.
MOST_IN_FRAME = 4096
# Bytes of a group's pickled key from which on its digest is sent instead.
MOST_OF_KEY = 64
# An API process gets this much of the setting `max_shared_bytes`, and this many API processes get
# shared memory at all: the host and every worker map all of it.
SHARED_PART = 4
MAX_RANGES = 16
# Most descriptors that come with a welcome.
MAX_DESCRIPTORS = 2

assert MAX_FRAME_BYTES > FRAME_SIZE, "one value may be a frame"


class Generation(NamedTuple):
    """A model that all workers have loaded, or shall load.

    Each API process remembers the last one, and tells it to the next host. Of two the one with the
    higher number is used by all.
    """

    # Number of the reload that has brought it; 0 for the model given to the constructor.
    number: int
    # `ModelSpec.pickled` and `ModelSpec.weights`.
    model: bytes
    weights: str
    # Texts and paths in the model's arguments, which may name files.
    named_paths: list[str]


class Hello(NamedTuple):
    """An API process introduces itself."""

    # The batcher's as constructed, plain values only; and their changes, as in `LiveSettings`.
    settings: dict[str, Any]
    changes: dict[str, tuple[float, Any]]
    # Whether the settings have a function for costs, and one for groups.
    has_costs: bool
    has_groups: bool
    name: str
    model_name: str
    generation: Generation
    # The methods, as in `ModelSpec`.
    methods: tuple[tuple[str, int | None], ...]
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


class Pickled:
    """A value of the app, which the host does not unpickle."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


class OpaqueError(BatcherError):
    """An error of the app, which the host does not unpickle."""

    def __init__(self, serialized: SerializedError) -> None:
        super().__init__(serialized.text)
        self.serialized = serialized
        self.__cause__ = RemoteTraceback(serialized.traceback)


class OpaqueRefusal(OpaqueError, InputError):
    """An `InputError` of the app, which the host does not unpickle."""


# Requests. Of an input in shared memory: its layout, start and end.
Row = tuple[bytes, int, int]


def pack_options(requests: list[Request]) -> dict[int, tuple[Any, ...]]:
    """Describe the requests that differ from an ordinary one, by position."""
    # The timeout may be of NumPy, which the host must not import.
    return {
        position: (
            float(request.deadline)
            if request.has_explicit_deadline or request.target is not None
            else None,
            None if request.timeout is None else float(request.timeout),
            request.target,
            request.priority,
            request.cost,
            None if request.group is None else name_group(request.group),
            request.size,
        )
        for position, request in enumerate(requests)
        if request.has_explicit_deadline
        or request.target is not None
        or request.priority
        or request.group is not None
        or request.cost != 1.0
        or request.size >= 0
    }


def name_group(group: Group) -> tuple[str | None, bytes | None]:
    """Return the method and the packed key of a group, None for none."""
    return None if group.method is None else group.method.name, group.key


def pack_key(key: Any) -> bytes:
    """Pickle the key of a group, so that equal keys of any two processes are equal bytes."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, PROTOCOL)
    # The memo would tell whether two parts of the key are one object.
    pickler.fast = True
    pickler.dump(key)
    packed = buffer.getvalue()
    return packed if len(packed) < MOST_OF_KEY else hashlib.sha256(packed).digest()


# Outcomes.


def measure_packed(packed: bytes | tuple[Any, ...]) -> int:
    """Return about how many bytes a packed outcome takes in a frame."""
    parts = (packed,) if isinstance(packed, bytes) else packed
    return sum([16 + len(part) if isinstance(part, bytes | str) else 16 for part in parts])


def pack_outcome(outcome: Any) -> bytes | tuple[Any, ...]:
    """Pack an outcome of any kind for ITEM_ANSWERS."""
    if type(outcome) is Pickled:
        return outcome.data
    if isinstance(outcome, OpaqueError):
        return (*outcome.serialized,)
    if isinstance(outcome, BaseException):
        return (dumps(outcome),)
    return dumps(outcome)


def is_atom(outcome: Any) -> bool:
    """Return whether an outcome may be in ANSWERS."""
    return type(outcome) in ATOMS


def unpack_failure(packed: tuple[Any, ...]) -> Failure:
    """Make the failure for one caller from a tuple of `pack_outcome`."""
    if len(packed) == 1:
        error: BatcherError = loads(packed[0])
        return Failure(error)
    return Failure(SerializedError(*packed).to_error())


def pack_error(error: BatcherError) -> tuple[bytes, str]:
    """Pack an error that is not about a request, and the traceback that is its cause."""
    cause = error.__cause__
    return dumps(error), cause.args[0] if isinstance(cause, RemoteTraceback) else ""


def unpack_error(packed: tuple[bytes, str]) -> BatcherError:
    """Make the error that `pack_error` has packed."""
    error: BatcherError = loads(packed[0])
    if packed[1]:
        error.__cause__ = RemoteTraceback(packed[1])
    return error
