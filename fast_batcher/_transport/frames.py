"""The frame: a fixed header and a body. Pure; runs on both sides of the process boundary.

    header  magic u32 | kind u32 | body length u64 | batch id u64 | seconds f64     little endian
    body    one or more pickles, as `codec` says

One frame carries one batch each way. A header that is not ours, or that announces more than
`max_frame_bytes`, is refused before anything is allocated for it.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from fast_batcher.errors import TransportError

_HEADER: Final = struct.Struct("<IIQQd")
HEADER_SIZE: Final = _HEADER.size
# "fbt1": makes the chance that garbage passes for a header 1 in 2**32, before kind and length.
_MAGIC: Final = int.from_bytes(b"fbt1", "little")
# What one read takes at most: a batch of 128 short strings is 3 KiB, and a reused buffer of this
# size costs nothing. Larger bodies get a buffer of their own.
READ_SIZE: Final = 256 * 1024
# Up to this length a body is copied behind its header: 64 KiB are copied in about 5 us.
MAX_JOINED: Final = 64 * 1024


class Kind(IntEnum):
    """What a frame means."""

    # parent to worker
    LOAD = 1  # the first frame: the pickled model class and its arguments
    INPUTS = 2  # a batch: one pickle of the list of inputs
    INPUT_ITEMS = 3  # a batch, or the last part of one: a list of separately pickled inputs
    INPUT_ITEMS_PART = 4  # a part of a batch that is larger than one frame; more follow
    STOP = 5  # finish what has arrived, then end
    # worker to parent
    READY = 16  # the model is loaded and warm
    STARTUP_FAILED = 17  # one pickled RemoteFailure
    OUTPUTS = 18  # one pickle of the list of outputs
    OUTPUT_ITEMS = 19  # the list of outcomes, or its last part
    OUTPUT_ITEMS_PART = 20  # a part of outcomes that are larger than one frame; more follow
    FAILED = 21  # one pickled RemoteFailure, for every request of the batch
    UNREADABLE = 22  # INPUTS could not be unpickled: send the batch as INPUT_ITEMS


_KINDS: Final = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One message. `body` is valid until the reader is given more bytes."""

    kind: Kind
    batch_id: int
    # Seconds that `infer` took, in frames that answer a batch.
    seconds: float
    body: memoryview | bytearray | bytes


def pack(kind: Kind, batch_id: int, body: bytes, seconds: float = 0.0) -> tuple[bytes, ...]:
    """The bytes of a frame, in pieces to be sent one after the other."""
    header = _HEADER.pack(_MAGIC, kind, len(body), batch_id, seconds)
    # One call into the kernel costs more than copying a few pages.
    return (header + body,) if len(body) <= MAX_JOINED else (header, body)


class FrameReader:
    """Cuts a stream of bytes into frames, whatever pieces it arrives in.

    Read into `space()`, say how much it was with `received()`, then call `next_frame()` until it
    returns None.

    Args:
        max_frame_bytes: Longest body that is accepted.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._view = memoryview(bytearray(READ_SIZE))
        # Unread bytes of the buffer.
        self._start = 0
        self._end = 0
        # A body that does not fit into the buffer, and how much of it is there.
        self._large: memoryview | None = None
        self._large_filled = 0
        self._large_header: tuple[Kind, int, float] | None = None

    def space(self) -> memoryview:
        """Where the next bytes go; invalidates the body of every frame given out so far."""
        if self._large is not None:
            return self._large[self._large_filled :]
        if self._start:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes have been written to the start of `space()`."""
        if self._large is not None:
            self._large_filled += count
        else:
            self._end += count

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None until more bytes come.

        Raises:
            TransportError: The bytes are not a frame of ours; nothing after them can be read.
        """
        if self._large is not None:
            return self._finish_large()
        available = self._end - self._start
        if available < HEADER_SIZE:
            return None
        magic, number, length, batch_id, seconds = _HEADER.unpack_from(self._view, self._start)
        kind = self._check_header(magic, number, length)
        body_start = self._start + HEADER_SIZE
        if HEADER_SIZE + length <= available:
            self._start = body_start + length
            return Frame(kind, batch_id, seconds, self._view[body_start : self._start])
        if HEADER_SIZE + length > READ_SIZE:
            self._large = memoryview(bytearray(length))
            self._large_header = (kind, batch_id, seconds)
            self._large_filled = self._end - body_start
            self._large[: self._large_filled] = self._view[body_start : self._end]
            self._start = self._end = 0
        return None

    def _check_header(self, magic: int, number: int, length: int) -> Kind:
        kind = _KINDS.get(number)
        if magic != _MAGIC or kind is None:
            raise TransportError("the channel carries something that is not a message of ours")
        if length > self._max_frame_bytes:
            raise TransportError(
                f"a frame of {length} bytes was announced, more than max_frame_bytes="
                f"{self._max_frame_bytes}"
            )
        return kind

    def _finish_large(self) -> Frame | None:
        assert self._large is not None
        assert self._large_header is not None, "set together with the buffer"
        if self._large_filled < len(self._large):
            return None
        body, self._large = self._large, None
        return Frame(*self._large_header, body)
