"""One end of the duplex pipe between the parent and one worker, for each side.

`LoopChannel` is the parent's end: it belongs to the event loop's thread and never blocks; what the
socket does not take is kept and written when it can be. `BlockingChannel` is the worker's end: its
main thread reads and writes, and waiting is what it is for. Neither knows what a batch is.
"""

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from fast_batcher._transport.frames import MAX_JOINED, Frame, FrameReader, Kind, pack_header
from fast_batcher.errors import TransportError

if TYPE_CHECKING:  # the worker imports this module, and has no event loop
    from asyncio import AbstractEventLoop
    from multiprocessing.connection import Connection


class LoopChannel:
    """The parent's end; all methods are called on the loop's thread.

    Args:
        connection: One end of a duplex pipe; the channel takes it over.
        max_frame_bytes: Longest body that is accepted.
        on_frame: Called with each frame; its body is valid during the call only. May be replaced.
        on_end: Called once when the worker's end is gone, with None, or with the error that makes
            the channel useless: what arrived is not a frame.
    """

    def __init__(
        self,
        connection: "Connection[object, object]",
        max_frame_bytes: int,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._socket = _take_socket(connection)
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        self._reader = FrameReader(max_frame_bytes, self._socket.recv_into)
        self._send_bytes = self._socket.send
        self.on_frame = on_frame
        self._on_end = on_end
        self._loop: AbstractEventLoop | None = None
        # What the socket has not taken yet. Bounded by the batches a worker is given at once.
        self._backlog: deque[memoryview] = deque()
        self._is_over = False

    def attach(self, loop: "AbstractEventLoop") -> None:
        """Let this loop watch the socket; a loop that did so before is closed by now."""
        self._loop = loop
        loop.add_reader(self._fd, self._read)
        if self._backlog:
            loop.add_writer(self._fd, self._on_writable)

    def send(self, kind: Kind, batch_id: int = 0, body: bytes = b"") -> None:
        """Send a frame now or as soon as the socket takes it. A channel that is over drops it."""
        if self._is_over:
            return
        first = pack_header(kind, len(body), batch_id, 0.0)
        is_whole = len(body) <= MAX_JOINED
        if is_whole:
            first += body
        sent = 0
        if not self._backlog:
            try:
                sent = self._send_bytes(first)
            except BlockingIOError:
                pass
            except OSError:  # the worker is gone: its death is noticed where deaths are
                return
            if sent == len(first) and is_whole:
                return
            assert self._loop is not None, "nothing is sent before a loop is attached"
            self._loop.add_writer(self._fd, self._on_writable)
        self._backlog.append(memoryview(first)[sent:])
        if not is_whole:
            self._backlog.append(memoryview(body))

    def drain(self) -> None:
        """Hand on what has arrived: a reply may be read after the death of its writer."""
        while self._read():
            pass

    def close(self) -> None:
        """Forget everything that has not been sent and close the socket; may be called again."""
        if self._fd < 0:
            return
        self._stop_watching()
        self._backlog.clear()
        self._socket.close()
        self._fd = -1

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

    def _on_writable(self) -> None:
        try:
            while self._backlog:
                sent = self._socket.send(self._backlog[0])
                if sent < len(self._backlog[0]):
                    self._backlog[0] = self._backlog[0][sent:]
                    return
                self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._backlog.clear()
        if self._loop is not None:
            self._loop.remove_writer(self._fd)

    def _finish(self, error: Exception | None) -> None:
        self._stop_watching()
        self._on_end(error)

    def _stop_watching(self) -> None:
        self._is_over = True
        # A closed loop watches nothing, and refuses to be told so.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self._loop = None


class BlockingChannel:
    """The worker's end; used by the worker's main thread.

    Args:
        connection: One end of a duplex pipe; the channel takes it over.
        max_frame_bytes: Longest body that is accepted, and sent.
    """

    def __init__(self, connection: "Connection[object, object]", max_frame_bytes: int) -> None:
        self._socket = _take_socket(connection)
        self._socket.setblocking(True)
        self.send_bytes = self._socket.sendall
        self.reader = FrameReader(max_frame_bytes, self._socket.recv_into)
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

    def send(self, kind: Kind, batch_id: int = 0, body: bytes = b"", seconds: float = 0.0) -> None:
        """Send a frame; returns when the socket has taken all of it.

        Raises:
            OSError: The parent has closed its end.
        """
        header = pack_header(kind, len(body), batch_id, seconds)
        if len(body) <= MAX_JOINED:
            self.send_bytes(header + body)
        else:
            self.send_bytes(header)
            self.send_bytes(body)

    def close(self) -> None:
        """Close this end: the other side reads an end of file."""
        self._socket.close()

    def detach(self) -> None:
        """Leave it to the end of the process to close this end.

        The parent takes a closed end for a worker that is of no use, and kills it: libraries of the
        model would not come to their exit hooks.
        """
        self._socket.detach()


def _take_socket(connection: "Connection[object, object]") -> socket.socket:
    """The socket under a duplex pipe. A frame of ours in one call needs no second read or copy."""
    try:
        return socket.socket(fileno=os.dup(connection.fileno()))
    finally:
        connection.close()
