"""The two pipes between the parent and one worker, one each way: their ends on each side.

`LoopChannel` is the parent's side: it belongs to the event loop's thread and never blocks; what the
pipe does not take is kept and written when it can be. `BlockingChannel` is the worker's side: its
main thread reads and writes, and waiting is what it is for. Neither knows what a batch is.

Pipes, not a socket pair: a message there and back costs half as much. See docs/decisions/0009.
"""

import contextlib
import io
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import methodcaller
from typing import TYPE_CHECKING

from fast_batcher._fork import at_fork
from fast_batcher._transport.descriptors import occupy_stdio
from fast_batcher._transport.frames import MAX_JOINED, Frame, FrameReader, Kind, pack_header
from fast_batcher.errors import TransportError

if TYPE_CHECKING:  # the worker imports this module, and has no event loop
    from asyncio import AbstractEventLoop
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    # Where one side reads, and where it writes.
    Ends = tuple["Connection[object, object]", "Connection[object, object]"]

# Of a pipe, in bytes. With the usual 64 KiB a batch of large inputs is passed on in as many turns
# of the loop as it has 64 KiB. It is the most that Linux lets everybody have.
PIPE_SIZE = 1024 * 1024


def open_pipes(context: "BaseContext") -> "tuple[Ends, Ends]":
    """Two pipes: the ends of one side, and those of the other.

    Args:
        context: Of `multiprocessing`; its connections can be passed to a process that it starts.
    """
    occupy_stdio()
    first, into_first = context.Pipe(duplex=False)
    second, into_second = context.Pipe(duplex=False)
    if sys.platform == "linux":
        import fcntl

        for end in (first, second):
            # Every user has 64 MiB for all pipes together; beyond, they stay as small as they are.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    for end in (first, into_first, second, into_second):
        # While a child that the app forks has a copy, a worker never reads an end of file. Only the
        # descriptor is closed: the child shares the loop's selector with the parent, which goes on.
        at_fork(end, in_child=methodcaller("close"))
    return (first, into_second), (second, into_first)


class Reservation:
    """The place of frames that are not ready yet, among those that are sent."""

    __slots__ = ("frames",)

    def __init__(self) -> None:
        # None until they are known.
        self.frames: Iterable[tuple[Kind, int, bytes]] | None = None


class LoopChannel:
    """The parent's side; all methods are called on the loop's thread.

    Args:
        ends: Of this side; the channel takes them over.
        max_frame_bytes: Longest body that is accepted.
        on_frame: Called with each frame; its body is valid during the call only. May be replaced.
        on_end: Called once when the worker's end is gone, with None, or with the error that makes
            the channel useless: what arrived is not a frame.
    """

    def __init__(
        self,
        ends: "Ends",
        max_frame_bytes: int,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._ends = ends
        self._source, self._sink = (end.fileno() for end in ends)
        os.set_blocking(self._source, False)
        os.set_blocking(self._sink, False)
        self._reader = FrameReader(max_frame_bytes, io.FileIO(self._source, closefd=False).readinto)
        # Returns how many bytes the pipe has taken, None for none.
        self._write = io.FileIO(self._sink, "w", closefd=False).write
        self.on_frame = on_frame
        self._on_end = on_end
        self._loop: AbstractEventLoop | None = None
        # Of a frame that had arrived in part when `drain` was called last: see `FrameReader`.
        self._missing: int | None = None
        # What the pipe has not taken yet. Bounded by the batches a worker is given at once.
        self._backlog: deque[memoryview | Reservation] = deque()
        # Whether some of it has been sent since `is_sending` was called last.
        self._has_sent = False
        self._is_over = False

    def attach(self, loop: "AbstractEventLoop") -> None:
        """Let this loop watch the pipes; a loop that did so before is closed by now."""
        self._loop = loop
        loop.add_reader(self._source, self._read)
        if self._backlog:
            loop.add_writer(self._sink, self._write_backlog)

    def send(self, kind: Kind, batch_id: int = 0, body: bytes = b"") -> None:
        """Send a frame now or as soon as the pipe takes it. A channel that is over drops it."""
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
            except OSError:  # the worker is gone: its death is noticed where deaths are
                return
            if sent == len(first) and is_whole:
                return
            assert self._loop is not None, "nothing is sent before a loop is attached"
            self._loop.add_writer(self._sink, self._write_backlog)
        self._backlog.append(memoryview(first)[sent:])
        if not is_whole:
            self._backlog.append(memoryview(body))

    def reserve(self) -> Reservation:
        """A place for frames that are not ready: what is sent from now on stays behind them.

        It has to be given to `fill`.
        """
        place = Reservation()
        if not self._is_over:
            self._backlog.append(place)
        return place

    def fill(self, place: Reservation, frames: Iterable[tuple[Kind, int, bytes]]) -> None:
        """Send frames in the place that was reserved for them; none gives it up."""
        place.frames = frames
        # It is nowhere if the worker has been found dead, and the channel is not over yet.
        if self._is_over or not self._backlog or self._backlog[0] is not place:
            return
        if not self._write_some():
            assert self._loop is not None, "nothing is sent before a loop is attached"
            self._loop.add_writer(self._sink, self._write_backlog)

    def is_sending(self) -> bool:
        """Whether something that had to wait has been sent since the last call, or is not ready."""
        if self._backlog and self._loop is not None:
            self._write_backlog()
        has_sent, self._has_sent = self._has_sent, False
        return has_sent or (bool(self._backlog) and isinstance(self._backlog[0], Reservation))

    def drain(self) -> bool:
        """Hand on what has arrived: a reply may be read after the death of its writer.

        Not while a frame is handed on: it would be written over.

        Returns:
            Whether a frame has arrived in part, and more of it since the last call.
        """
        while self._read():
            pass
        missing = None if self._is_over else self._reader.missing
        before, self._missing = self._missing, missing
        return missing is not None and missing != before

    def close(self) -> None:
        """Forget everything that has not been sent and close the ends; may be called again."""
        self._stop_watching()
        self._backlog.clear()
        for end in self._ends:
            end.close()
        # It is a method of who has this channel: a cycle, which would keep the buffer until the
        # garbage collector has looked at everything, and that is once in many minutes.
        self._on_end = drop

    def _read(self) -> bool:
        """Read and hand on what one call gives; False if there was nothing or it was the end."""
        if self._is_over:
            return False
        reader = self._reader
        try:
            frame = reader.read()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # a reset is an end like another
            self._finish(None)
            return False
        except TransportError as error:
            self._finish(error)
            return False
        try:
            while frame is not None:
                self.on_frame(frame)
                frame = reader.next_frame() if reader.rest and not self._is_over else None
        except Exception as error:  # noqa: BLE001  whatever it is, this stream cannot be read on
            self._finish(error)
            return False
        return True

    def _write_backlog(self) -> None:
        """The loop calls this when the pipe takes more, as long as there is more to write."""
        assert self._loop is not None, "it calls this"
        if self._write_some():
            self._loop.remove_writer(self._sink)

    def _write_some(self) -> bool:
        """Write what the pipe takes; whether that is all that can be written by now."""
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
        # A closed loop watches nothing, and refuses to be told so.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._sink)
        self._loop = None


def _cut(frames: Iterable[tuple[Kind, int, bytes]]) -> Iterator[memoryview]:
    """The bytes of frames, in pieces that nothing is copied for."""
    for kind, batch_id, body in frames:
        yield memoryview(pack_header(kind, len(body), batch_id, 0.0))
        if body:
            yield memoryview(body)


def drop(_: object) -> None:
    """In place of who would be told: nobody wants to know any more."""


class BlockingChannel:
    """The worker's side; used by the worker's main thread.

    Args:
        ends: Of this side; the channel takes them over.
        max_frame_bytes: Longest body that is accepted, and sent.
    """

    def __init__(self, ends: "Ends", max_frame_bytes: int) -> None:
        self._ends = ends
        source, sink = (end.fileno() for end in ends)
        self.reader = FrameReader(max_frame_bytes, io.FileIO(source, closefd=False).readinto)
        # Bytes written: all, unless a signal handler of the model has interrupted it.
        self.write = io.FileIO(sink, "w", closefd=False).write
        self.max_frame_bytes = max_frame_bytes

    def receive(self) -> Frame | None:
        """Wait for the next frame; None when the parent has closed its end.

        Raises:
            TransportError: What arrived is not a frame.
        """
        reader = self.reader
        frame = reader.next_frame() if reader.rest else None
        try:
            while frame is None:
                frame = reader.read()
        except (EOFError, ConnectionError):
            return None
        return frame

    def send(
        self,
        kind: Kind,
        batch_id: int = 0,
        body: bytes = b"",
        seconds: float = 0.0,
        ahead: bytes = b"",
    ) -> None:
        """Send a frame, and `ahead`, a whole one, before it; returns when the pipe has it all.

        Raises:
            OSError: The parent has closed its end.
        """
        header = ahead + pack_header(kind, len(body), batch_id, seconds)
        if len(body) <= MAX_JOINED:
            data = header + body
            written = self.write(data)
            if written != len(data):
                self.write_rest(data, written)
        else:
            self.write_rest(header, 0)
            self.write_rest(body, 0)

    def write_rest(self, data: bytes, written: int) -> None:
        """Write what has not been written yet.

        Raises:
            OSError: The parent has closed its end.
        """
        while written < len(data):
            written += self.write(memoryview(data)[written:])

    def close(self) -> None:
        """Close both ends: the other side reads an end of file; may be called again."""
        for end in self._ends:
            end.close()
