"""The frame, the unit of the pipes' protocol: a fixed header and a body.

    header  magic u32 | kind u32 | body length u64 | batch id u64 | seconds f64     little endian
    body    pickles, see `codec`

Pure: `FrameReader` cuts a stream into frames, and does no I/O itself. Runs on the event loop's
thread of the API process and on the main thread of workers. One frame usually carries one batch. A
header with another magic number, or with a length above `max_frame_bytes`, is refused before memory
is allocated for its body.
"""

import functools
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

from fast_batcher.errors import TransportError

_HEADER: Final = struct.Struct("<IIQQd")
HEADER_SIZE: Final = _HEADER.size
# "fbt1": garbage passes for a header with a probability of 2**-32, before kind and length.
_MAGIC: Final = int.from_bytes(b"fbt1", "little")
# Most bytes of one read, into a buffer that is reused. A batch of 128 short strings is 3 KiB. A
# larger body gets its own buffer.
READ_SIZE: Final = 256 * 1024
# Longest body that is copied behind its header. The copy takes 5 us; a second system call takes
# longer.
MAX_JOINED: Final = 64 * 1024


class Kind(IntEnum):
    """Kind of a frame, which determines the format of its body."""

    # The hash of an enumeration is a Python function, and kinds are looked up once per frame.
    __hash__ = int.__hash__

    # parent to worker
    LOAD = 1  # the first frame: the pickled model class and its arguments
    INPUT_ATOMS = 2  # a batch: one pickle of a list of inputs whose types are in `codec.ATOMS`
    INPUTS = 3  # a batch, or its last fragment: a list of separately pickled inputs
    INPUTS_FRAGMENT = 4  # a fragment of a batch that is larger than one frame; more follow
    STOP = 5  # finish what has arrived, then end
    PING = 6  # answer with PONG
    SHARED_INPUTS = 7  # a batch that lies in a slab: pickled (start, length, sizes, items)
    ROWS = 8  # a batch of staged inputs: a pickled list of (layout, start, count)
    # The pickled list of pickled context managers of the observers that follow batches; the batch
    # with this id comes next.
    CONTEXTS = 9
    METHOD = 10  # the name of the method that computes the batch with this id, which comes next
    # worker to parent
    READY = 16  # the model is loaded and warm: the pickled times of the warm-up, and its stages
    STARTUP_FAILED = 17  # one pickled SerializedError
    OUTPUT_ATOMS = 18  # one pickle of the list of outputs, whose types are in `codec.ATOMS`
    OUTPUTS = 19  # the list of separately pickled outputs and errors, or its last fragment
    OUTPUTS_FRAGMENT = 20  # a fragment of a list that is larger than one frame; more follow
    # Outputs that lie in the outbox: pickled (start, sizes of stream and buffers, which buffers are
    # read-only, items, errors by position).
    SHARED_OUTPUTS = 21
    PONG = 22
    FREED = 27  # a pickled list: ids of batches that have no view left
    # Each of these is one pickled SerializedError, for every request of the batch.
    FAILED = 23  # a retry cannot succeed
    RAISED = 24  # `infer` raised
    OUT_OF_MEMORY = 25  # `infer` ran out of memory
    SKIPPED = 28  # the batch was not computed, because no caller waits for it
    FATAL = 26  # `infer` raised, and the process cannot use its device any more
    # API process to host; see `_host/protocol.py`
    HELLO = 32  # the first frame: the pickled fields of a `Hello`
    CALLS = 33  # requests whose inputs are all in `codec.ATOMS`
    ITEM_CALLS = 34  # requests with inputs pickled separately, or in shared memory
    ABANDON = 35  # a pickled list: ids of requests whose callers have gone
    RESENT = 36  # pickled (id, pickled input or None)
    RECONFIGURE = 37  # the pickled changes of the settings
    OBSERVE = 38  # send events from now on
    PRIORITY = 40  # pickled (id of a request, its higher priority)
    STATE_READ = 41  # the answer to STATE
    GOODBYE = 39  # the batcher is closed
    # host to API process
    WELCOME = 48  # the first frame: the pickled fields of a `Welcome`
    REFUSED = 54  # instead of a welcome: the text of an error
    ANSWERS = 49  # outputs that are all in `codec.ATOMS`
    ITEM_ANSWERS = 50  # outputs pickled separately, and errors
    STATE = 51  # the pickled fields of a `HostState`
    RESEND = 52  # a pickled list: ids of requests whose inputs are needed once more
    FREED_INPUTS = 53  # a pickled list: ids of requests whose shared memory is free
    LOG = 54  # a log record
    EVENT = 55  # a pickled event for observers
    REPORT = 57  # pickled: whether this process reports for all from now on
    FAREWELL = 56  # the answer to GOODBYE, the last frame: as STATE


_find_kind: Final = {int(kind): kind for kind in Kind}.get


class Frame(NamedTuple):
    """A frame that was read. `body` is valid until the next read."""

    kind: Kind
    batch_id: int
    # Seconds that `infer` took, in frames that answer a batch.
    seconds: float
    body: memoryview | bytearray | bytes


# Makes a frame of a tuple; the constructor of a named tuple is a Python function.
_make_frame: Final = functools.partial(tuple.__new__, Frame)
# Packs a header: kind, body length, batch id, seconds.
pack_header: Final = functools.partial(_HEADER.pack, _MAGIC)


def unpack_header(header: bytes) -> tuple[Kind, int]:
    """Return the kind and the length of the body of a frame that was read apart.

    Raises:
        TransportError: The bytes are not the header of a frame.
    """
    magic, number, length, _, _ = _HEADER.unpack(header)
    kind = _find_kind(number)
    if magic != _MAGIC or kind is None:
        raise TransportError("the channel carries something that is not a message of ours")
    return kind, length


class FrameReader:
    """Cuts a stream of bytes, which may arrive in any pieces, into frames.

    Args:
        max_frame_bytes: Longest body that is accepted.
        recv_into: Reads into a buffer and returns the number of bytes, 0 at the end of the stream,
            None if no bytes are available.
    """

    def __init__(self, max_frame_bytes: int, recv_into: Callable[[memoryview], int | None]) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._recv_into = recv_into
        self._view = memoryview(bytearray(READ_SIZE))
        # Space for the next read, which overwrites the bodies of returned frames.
        self._space = self._view
        # Number and start of the bytes in the buffer that were not returned in a frame yet.
        self.rest = 0
        self._start = 0
        # A frame that is larger than the buffer, while its body arrives.
        self._large: Frame | None = None

    def read(self) -> Frame | None:
        """Read once; return the first complete frame, or None until more bytes come.

        While there is a `rest`, `next_frame` may return more.

        Raises:
            BlockingIOError: No bytes are available.
            EOFError: The stream has ended.
            TransportError: The bytes are not a frame; the stream cannot be read any further.
            OSError: An error of `recv_into`.
        """
        count = self._recv_into(self._space)
        if count is None:
            raise BlockingIOError
        if count == 0:
            raise EOFError
        if self._large is not None:
            self._space = self._space[count:]
            if self._space:
                return None
            frame, self._large, self._space = self._large, None, self._view
            return frame
        self.rest += count
        return self.next_frame()

    def next_frame(self) -> Frame | None:
        """Return the next complete frame that has been read, or None until more bytes come.

        Raises:
            TransportError: The bytes are not a frame; the stream cannot be read any further.
        """
        start, rest = self._start, self.rest
        if rest < HEADER_SIZE:
            self._make_space()
            return None
        magic, number, length, batch_id, seconds = _HEADER.unpack_from(self._view, start)
        kind = _find_kind(number)
        if magic != _MAGIC or kind is None:
            raise TransportError("the channel carries something that is not a message of ours")
        if length > self._max_frame_bytes:
            raise TransportError(
                f"a frame of {length} bytes was announced, more than max_frame_bytes="
                f"{self._max_frame_bytes}"
            )
        size = HEADER_SIZE + length
        if size > READ_SIZE:
            self._begin_large(Frame(kind, batch_id, seconds, memoryview(bytearray(length))))
            return None
        if size > rest:
            self._make_space()
            return None
        if size == rest:  # the next read starts at the beginning of the buffer
            self._start = self.rest = 0
            self._space = self._view
        else:
            self._start += size
            self.rest -= size
        body = self._view[start + HEADER_SIZE : start + size]
        return _make_frame((kind, batch_id, seconds, body))

    @property
    def missing(self) -> int | None:
        """Number that falls while more of a frame arrives; None if no frame has arrived in part."""
        return len(self._space) if self.rest or self._large is not None else None

    def _make_space(self) -> None:
        """Move the beginning of a frame to the beginning of the buffer."""
        if self._start:
            self._view[: self.rest] = bytes(self._view[self._start : self._start + self.rest])
            self._start = 0
        self._space = self._view[self.rest :]

    def _begin_large(self, frame: Frame) -> None:
        begun = self.rest - HEADER_SIZE
        body, body_start = memoryview(frame.body), self._start + HEADER_SIZE
        body[:begun] = self._view[body_start : body_start + begun]
        self._large, self._space = frame, body[begun:]
        self._start = self.rest = 0
