"""Frames on pipes and sockets: their format, and the channels that read and write them. Both sides.

    header  magic u32 | kind u32 | body length u64 | batch id u64 | seconds f64     little endian
    body    pickles, see `pickling`

`FrameReader` cuts a stream into frames, and does no I/O itself. One frame usually carries one
batch. A header with another magic number, or with a length above `max_frame_bytes`, is refused
before memory is allocated for its body.

`BlockingChannel` is a worker's end, on its main thread. `LoopChannel` is the end of a parent
process, on the event loop's thread, and never blocks: bytes that the pipe does not take at once
are kept, and written when it is writable again. The loop calls it back in an empty context,
whatever context of a caller was active when the channel was attached. Channels do not know batches,
and do not pickle.

Between parent and worker are two pipes, not a socket pair: a round trip costs half as much. See
docs/decisions/0009.
"""

import contextlib
import functools
import io
import os
import select
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol

from fast_batcher._core.values import Order
from fast_batcher._process import at_fork, occupy_stdio
from fast_batcher.errors import TransportError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

# The read end and the write end of one side.
Ends = tuple["Connection[object, object]", "Connection[object, object]"]

# Capacity of a pipe in bytes, the most that Linux grants every user. With the default of 64 KiB a
# batch of large inputs takes one turn of the loop per 64 KiB.
PIPE_SIZE = 1024 * 1024


def open_pipes(context: "BaseContext") -> tuple[Ends, Ends]:
    """Open two pipes, and return the ends of each side."""
    occupy_stdio()
    first, into_first = context.Pipe(duplex=False)
    second, into_second = context.Pipe(duplex=False)
    if sys.platform == "linux":
        import fcntl

        for end in (first, second):
            # Linux limits all pipes of a user to 64 MiB; further pipes stay at 64 KiB.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    for end in (first, into_first, second, into_second):
        # A worker reads no end of file while a forked child of the app has a copy of an end. The
        # child closes only the descriptor: it shares the loop's selector with the parent.
        at_fork(end, in_child=methodcaller("close"))
    return (first, into_second), (second, into_first)


_HEADER: Final = struct.Struct("<IIQQd")
HEADER_SIZE: Final = _HEADER.size
# "fbt1": garbage passes for a header with a probability of 2**-32, before kind and length.
_MAGIC: Final = int.from_bytes(b"fbt1", "little")
# Most bytes of one read, into a buffer that is reused. A batch of 128 short strings is 3 KiB. A
# larger body gets its own buffer.
READ_SIZE: Final = 256 * 1024
# Bytes of one turn of the event loop, unless one frame is longer. Of steps that give few chunks a
# turn has a hundred frames, which take 20 ms; `READ_SIZE` took 0.3 s, in which nothing else ran.
TURN_SIZE: Final = 16 * 1024
# Longest body that is copied behind its header. The copy takes 5 us; a second system call takes
# longer.
MAX_JOINED: Final = 64 * 1024


class Kind:
    """Kinds of frames between a parent and its worker; a kind determines the format of the body.

    Integers, because they are compared several times per frame: on Python 3.11 reading a member of
    an enumeration costs as much as a call.
    """

    # parent to worker
    LOAD = 1  # the first frame: the pickled model class and its arguments
    STOP, PING, LEAVE, PAUSE, RESUME = Order  # without a body; PING is answered with PONG
    # The values of a batch, inputs or outputs. Those of all kinds but the first two are pickled
    # with their `BatchNote`, as (values, note), or with the `Report` of their worker or None.
    ATOMS = 2  # one pickle of a list of values whose types are in `pickling.ATOMS`
    PART = 4  # a part of a list of items that is larger than one frame; more follow
    # A list of separately pickled values, or its last part; of outputs also errors, and None beside
    # a report that is about no batch. Also the pickle of `ATOMS`.
    ITEMS = 3
    # Values that lie in shared memory. Of inputs (start, length, sizes, items); of outputs (start,
    # sizes of stream and buffers, which buffers are read-only, items, errors by position).
    SHARED = 7
    ROWS = 8  # inputs that were staged: a list of (layout, start, count)
    # worker to parent
    READY = 16  # the model is loaded and warm: the pickled times of the warm-up, and its stages
    STARTUP_FAILED = 17  # one pickled SerializedError
    PONG = 22
    # Between an API process and its host, besides ITEMS, PING and PONG: one pickled object, whose
    # type tells what it is; see `_host/messages.py`.
    MESSAGE = 35


KIND_NAMES: Final[dict[int, str]] = {
    number: name for name, number in vars(Kind).items() if isinstance(number, int)
}


class Frame(NamedTuple):
    """A frame that was read. `body` is valid until the next read."""

    # A value of `Kind`.
    kind: int
    batch_id: int
    # Seconds that `infer` took, in frames that answer a batch.
    seconds: float
    body: Any


# Makes a frame of a tuple; the constructor of a named tuple is a Python function.
_make_frame: Final = functools.partial(tuple.__new__, Frame)
# Packs a header: kind, body length, batch id, seconds.
pack_header: Final = functools.partial(_HEADER.pack, _MAGIC)


def pack_frame(kind: int, body: bytes) -> bytes:
    """Pack a frame that belongs to no batch."""
    return pack_header(kind, len(body), 0, 0.0) + body


def unpack_header(header: bytes) -> tuple[int, int]:
    """Return the kind and the length of the body of a frame that was read apart."""
    magic, kind, length, _, _ = _HEADER.unpack(header)
    if magic != _MAGIC or kind not in KIND_NAMES:
        raise TransportError("the channel carries bytes that are not a message of fast_batcher")
    return kind, length


class FrameReader:
    """Cuts a stream of bytes, which may arrive in any pieces, into frames.

    A read takes at most `most` bytes, or the rest of a longer frame.
    """

    def __init__(
        self,
        max_frame_bytes: int,
        recv_into: Callable[[memoryview], int | None],
        most: int = READ_SIZE,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._recv_into = recv_into
        self._view = memoryview(bytearray(READ_SIZE))
        self._most = most
        self._begin = self._view[:most]
        # Space for the next read, which overwrites the bodies of returned frames.
        self._space = self._begin
        # Number and start of the bytes in the buffer that were not returned in a frame yet.
        self.rest = 0
        self._start = 0
        # A frame that is larger than the buffer, while its body arrives.
        self._large: Frame | None = None
        # Whether the last read has taken all that had arrived by then.
        self.took_all = True

    def read(self) -> Frame | None:
        """Read once; return the first complete frame, or None until more bytes come.

        While there is a `rest`, `next_frame` may return more.
        """
        count = self._recv_into(self._space)
        if count is None:
            raise BlockingIOError
        if count == 0:
            raise EOFError
        self.took_all = count < len(self._space)
        if self._large is not None:
            self._space = self._space[count:]
            if self._space:
                return None
            frame, self._large, self._space = self._large, None, self._begin
            return frame
        self.rest += count
        return self.next_frame()

    def next_frame(self) -> Frame | None:
        """Return the next complete frame that has been read, or None until more bytes come."""
        start, rest = self._start, self.rest
        if rest < HEADER_SIZE:
            self._make_space()
            return None
        magic, kind, length, batch_id, seconds = _HEADER.unpack_from(self._view, start)
        if magic != _MAGIC or kind not in KIND_NAMES or length > self._max_frame_bytes:
            self._refuse(magic, kind, length)
        size = HEADER_SIZE + length
        if size > READ_SIZE:
            self._begin_large(Frame(kind, batch_id, seconds, memoryview(bytearray(length))))
            return None
        if size > rest:
            self._make_space(size)
            return None
        if size == rest:  # the next read starts at the beginning of the buffer
            self._start = self.rest = 0
            self._space = self._begin
        else:
            self._start += size
            self.rest -= size
        body = self._view[start + HEADER_SIZE : start + size]
        return _make_frame((kind, batch_id, seconds, body))

    def _refuse(self, magic: int, kind: int, length: int) -> NoReturn:
        if magic != _MAGIC or kind not in KIND_NAMES:
            raise TransportError("the channel carries bytes that are not a message of fast_batcher")
        raise TransportError(
            f"a frame of {length} bytes was announced, more than max_frame_bytes="
            f"{self._max_frame_bytes}"
        )

    @property
    def missing(self) -> int | None:
        """Number that falls while more of a frame arrives; None if no frame has arrived in part."""
        if self._large is not None:
            return len(self._space)
        return READ_SIZE - self.rest if self.rest else None

    def _make_space(self, size: int = 0) -> None:
        """Move the beginning of a frame of this size to the beginning of the buffer."""
        if self._start:
            self._view[: self.rest] = bytes(self._view[self._start : self._start + self.rest])
            self._start = 0
        self._space = self._view[self.rest : max(size, self.rest + self._most)]

    def _begin_large(self, frame: Frame) -> None:
        begun = self.rest - HEADER_SIZE
        body, body_start = memoryview(frame.body), self._start + HEADER_SIZE
        body[:begun] = self._view[body_start : body_start + begun]
        self._large, self._space = frame, body[begun:]
        self._start = self.rest = 0


class BlockingChannel:
    """Receives frames from the parent, and sends frames to it."""

    def __init__(self, ends: Ends, max_frame_bytes: int) -> None:
        self._ends = ends
        source, sink = (end.fileno() for end in ends)
        self._reader = FrameReader(max_frame_bytes, io.FileIO(source, closefd=False).readinto)
        self._write = io.FileIO(sink, "w", closefd=False).write
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def has_arrived(self) -> bool:
        """Return whether a frame, or a part of one, can be received."""
        return bool(self._reader.rest or self._poll.poll(0))

    def receive(self) -> Frame | None:
        """Wait for the next frame; None when the parent has closed its end."""
        reader = self._reader
        frame = reader.next_frame() if reader.rest else None
        try:
            while frame is None:
                frame = reader.read()
        except (EOFError, ConnectionError):
            return None
        return frame

    def send(
        self,
        kind: int,
        batch_id: int = 0,
        body: bytes = b"",
        seconds: float = 0.0,
    ) -> None:
        """Send a frame; block until the pipe has taken all of it."""
        header = pack_header(kind, len(body), batch_id, seconds)
        if len(body) <= MAX_JOINED:
            self.send_packed(header + body)
        else:
            self.send_packed(header)
            self.send_packed(body)

    def send_packed(self, data: bytes) -> None:
        """Send bytes: a whole frame, or the next piece of a frame."""
        written = self._write(data)
        # A signal handler of the model may have interrupted the call.
        while written < len(data):
            written += self._write(memoryview(data)[written:])

    def close(self) -> None:
        """Close both ends: the parent reads an end of file; may be called again."""
        for end in self._ends:
            end.close()


# Each is a kind, a batch id and a body.
Frames = Iterable[tuple[int, int, bytes]]


class End(Protocol):
    """An end of a pipe, or a socket."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def close(self) -> None:
        """Close the descriptor; may be called again."""


class Reservation:
    """Position in the order of sent frames, for frames that are not ready yet."""

    __slots__ = ("frames",)

    def __init__(self) -> None:
        # The frames; None until `fill`.
        self.frames: Frames | None = None


class LoopChannel:
    """Sends frames to one worker, and dispatches the frames from it."""

    def __init__(
        self,
        ends: tuple[End, End],
        max_frame_bytes: int,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._ends = ends
        self._source, self._sink = (end.fileno() for end in ends)
        os.set_blocking(self._source, False)
        os.set_blocking(self._sink, False)
        recv_into = io.FileIO(self._source, closefd=False).readinto
        self._reader = FrameReader(max_frame_bytes, recv_into, TURN_SIZE)
        # Returns how many bytes the pipe has taken, None for none.
        self._write = io.FileIO(self._sink, "w", closefd=False).write
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop: AbstractEventLoop | None = None
        # `FrameReader.missing` at the last call of `drain`.
        self._missing: int | None = None
        # Bytes that the pipe has not taken yet. Bounded, because a worker has few batches at once.
        self._backlog: deque[memoryview | Reservation] = deque()
        # Whether a part of the backlog was written since the last call of `is_sending`.
        self._has_sent = False
        self._is_over = False

    def attach(self, loop: "AbstractEventLoop") -> None:
        """Watch the pipes from this event loop."""
        self._loop = loop
        Context().run(loop.add_reader, self._source, self._read)
        if self._backlog:
            self._write_later()

    def send(self, kind: int, batch_id: int = 0, body: bytes = b"") -> None:
        """Send a frame now, or as soon as the pipe takes it. A channel that has ended drops it."""
        if self._is_over:
            return
        first = pack_header(kind, len(body), batch_id, 0.0)
        is_whole = len(body) <= MAX_JOINED
        if is_whole:
            first += body
        sent = 0
        if not self._backlog:
            try:
                sent = self._write(first) or 0
            except OSError:  # the worker is gone; `death_fd` tells the pool
                return
            if sent == len(first) and is_whole:
                return
            self._write_later()
        self._backlog.append(memoryview(first)[sent:])
        if not is_whole:
            self._backlog.append(memoryview(body))

    def reserve(self) -> Reservation:
        """Reserve a position for frames that are not ready yet; later frames wait behind it.

        The caller must pass the reservation to `fill`.
        """
        reservation = Reservation()
        if not self._is_over:
            self._backlog.append(reservation)
        return reservation

    def fill(self, reservation: Reservation, frames: Frames) -> None:
        """Send zero or more frames at the position that was reserved for them."""
        reservation.frames = frames
        # The backlog is empty if the worker is dead and the channel has not noticed its end.
        if self._is_over or not self._backlog or self._backlog[0] is not reservation:
            return
        if not self._write_some():
            self._write_later()

    def is_sending(self) -> bool:
        """Return whether delayed frames were sent since the last call, or are not ready yet."""
        if self._backlog and self._loop is not None:
            self._write_backlog()
        has_sent, self._has_sent = self._has_sent, False
        return has_sent or (bool(self._backlog) and isinstance(self._backlog[0], Reservation))

    @property
    def backlog(self) -> int:
        """Number of frames, or parts of them, that the other side has not taken yet."""
        return len(self._backlog)

    def drain(self) -> bool:
        """Dispatch the arrived frames; return whether another is in the middle of its arrival.

        Of what arrives meanwhile one more read is made, which may find the end of the file, and no
        more than a pipe holds is read: a worker may send faster than this process reads. Do not
        call it from `on_frame`: the frame there would be overwritten.
        """
        has_all = False
        for _ in range(PIPE_SIZE // TURN_SIZE + 1):
            if not self._read() or has_all:
                break
            has_all = self._reader.took_all
        missing = None if self._is_over else self._reader.missing
        before, self._missing = self._missing, missing
        return missing is not None and missing != before

    def close(self) -> None:
        """Drop unsent frames and close the ends; may be called again."""
        self._stop_watching()
        self._backlog.clear()
        for end in self._ends:
            end.close()

    def _read(self) -> bool:
        """Read once and dispatch the frames; False if the pipe was empty or has ended."""
        if self._is_over:
            return False
        reader = self._reader
        try:
            frame = reader.read()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # a reset counts as an end of file
            self._finish(None)
            return False
        except TransportError as error:
            self._finish(error)
            return False
        try:
            while frame is not None:
                self._on_frame(frame)
                frame = reader.next_frame() if reader.rest and not self._is_over else None
        except Exception as error:  # noqa: BLE001  after any error the stream cannot be read
            self._finish(error)
            return False
        return True

    def _write_later(self) -> None:
        """Let the loop write the backlog when the pipe is writable."""
        assert self._loop is not None, "nothing is sent before a loop is attached"
        Context().run(self._loop.add_writer, self._sink, self._write_backlog)

    def _write_backlog(self) -> None:
        """Write as much as the pipe takes; the loop calls this until the backlog is empty."""
        assert self._loop is not None, "the loop calls this"
        if self._write_some():
            self._loop.remove_writer(self._sink)

    def _write_some(self) -> bool:
        """Write as much as the pipe takes; return True if no ready frame is left."""
        backlog = self._backlog
        try:
            while backlog:
                head = backlog[0]
                if isinstance(head, Reservation):
                    if head.frames is None:  # `fill` goes on
                        break
                    backlog.popleft()
                    backlog.extendleft(reversed([*_cut(head.frames)]))
                    continue
                sent = self._write(head)
                if sent is None:
                    return False
                self._has_sent = True
                if sent < len(head):
                    backlog[0] = head[sent:]
                    return False
                backlog.popleft()
        except OSError:
            backlog.clear()
        return True

    def _finish(self, error: Exception | None) -> None:
        self._stop_watching()
        self._on_end(error)

    def _stop_watching(self) -> None:
        self._is_over = True
        # A closed loop watches nothing, and raises when it is asked to stop.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._sink)
        self._loop = None


def _cut(frames: Frames) -> Iterator[memoryview]:
    """Yield the headers and bodies of frames separately, so that no body is copied."""
    for kind, batch_id, body in frames:
        yield memoryview(pack_header(kind, len(body), batch_id, 0.0))
        if body:
            yield memoryview(body)
