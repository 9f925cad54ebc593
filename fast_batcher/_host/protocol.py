"""Requests and outcomes as parts of frames. Pure; API process and host.

The host unpickles no input, output or exception of the app: these are bytes to it, but for `ATOMS`.
"""

import hashlib
import io
import pickle
from typing import Any

from fast_batcher._core.values import Failure, Group, Request, SessionPlace
from fast_batcher._opening.streams import ChunkSink
from fast_batcher._transport.pickling import (
    PROTOCOL,
    Measured,
    SerializedError,
    dumps,
    loads,
)
from fast_batcher.errors import BatcherError, InputError, RemoteTraceback
from fast_batcher.settings import MAX_FRAME_BYTES

# Bytes of inputs or outputs after which another frame begins. Frames of other batchers' processes
# wait behind it.
FRAME_SIZE = 1024 * 1024
# Room in a frame for ids, options and smaller values besides `max_frame_bytes` of one value.
FRAME_ROOM = 4 * FRAME_SIZE
# Most requests in a frame: the options of one take up to 200 bytes, and its share up to 800.
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


class Pickled(Measured):
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
            request.deadline if request.has_deadline else None,
            None if request.timeout is None else float(request.timeout),
            request.target,
            request.priority,
            request.share,
            request.cost,
            None if request.group is None else name_group(request.group),
            request.size,
            isinstance(request.caller, ChunkSink),
            None if request.session is None else name_session(request.session),
        )
        for position, request in enumerate(requests)
        if request.has_deadline
        or request.is_ranked
        or request.group is not None
        or request.cost != 1.0
        or request.size >= 0
        or isinstance(request.caller, ChunkSink)
        or request.session is not None
    }


def name_group(group: Group) -> tuple[str | None, bytes | None]:
    """Return the method and the packed key of a group, None for none."""
    return None if group.method is None else group.method.name, group.key


def name_session(session: SessionPlace) -> tuple[int, float, bool]:
    """Return the id of a session, its timeout, and whether it may begin."""
    return session.id, session.timeout, session.may_begin


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
    """Pack an outcome of any kind."""
    if type(outcome) is Pickled:
        return outcome.data
    if isinstance(outcome, OpaqueError):
        return (*outcome.serialized,)
    if isinstance(outcome, BaseException):
        return (dumps(outcome),)
    return dumps(outcome)


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
