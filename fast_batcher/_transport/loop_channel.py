"""Non-blocking reads and writes of frames: the parent's side of a worker's pipes, or a socket.

Runs in the API process or the host, on the event loop's thread, and never blocks: bytes that the
pipe does not take at once are kept, and written when it is writable again. A channel does not know
batches, and does not pickle. The loop calls it back in an empty context, whatever context of a
caller was active when the channel was attached.
"""

import io
import os
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from typing import Protocol

from fast_batcher._transport.frames import MAX_JOINED, Frame, FrameReader, Kind, pack_header
from fast_batcher.errors import TransportError

# Each is a kind, a batch id and a body.
Frames = Iterable[tuple[Kind, int, bytes]]


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
        # None until `fill`.
        self.frames: Frames | None = None


class LoopChannel:
    """Sends frames to one worker, and dispatches the frames from it.

    Args:
        ends: Ends to read from and to write to, which may be one socket; the channel owns them from
            now on.
        max_frame_bytes: Longest body that is accepted.
        on_frame: Called with each frame, whose body is valid during the call only.
        on_end: Called once: with None if the worker has closed its end, or with the error that ends
            reading, which is invalid bytes or an exception of `on_frame`.
    """

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
        self._reader = FrameReader(max_frame_bytes, io.FileIO(self._source, closefd=False).readinto)
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

    def attach(self, loop: AbstractEventLoop) -> None:
        """Watch the pipes from this event loop; the previous loop, if any, is closed."""
        self._loop = loop
        Context().run(loop.add_reader, self._source, self._read)
        if self._backlog:
            self._write_later()

    def send(self, kind: Kind, batch_id: int = 0, body: bytes = b"") -> None:
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
        """Dispatch the frames that have arrived, also after the worker has died.

        Do not call it from `on_frame`: the frame there would be overwritten.

        Returns:
            Whether a frame has arrived in part, and more of it than at the last call.
        """
        while self._read():
            pass
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
