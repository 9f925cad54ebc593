"""The worker's side of its pipes. The worker's main thread reads and writes, and blocks in both."""

import io

from fast_batcher._transport.frames import MAX_JOINED, Frame, FrameReader, Kind, pack_header
from fast_batcher._transport.pipes import Ends


class BlockingChannel:
    """Receives frames from the parent, and sends frames to it.

    Args:
        ends: The worker's ends of the pipes; the channel owns them from now on.
        max_frame_bytes: Longest body that is accepted.
    """

    def __init__(self, ends: Ends, max_frame_bytes: int) -> None:
        self._ends = ends
        source, sink = (end.fileno() for end in ends)
        self._reader = FrameReader(max_frame_bytes, io.FileIO(source, closefd=False).readinto)
        self._write = io.FileIO(sink, "w", closefd=False).write

    def receive(self) -> Frame | None:
        """Wait for the next frame; None when the parent has closed its end.

        Raises:
            TransportError: The bytes that arrived are not a frame.
        """
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
        kind: Kind,
        batch_id: int = 0,
        body: bytes = b"",
        seconds: float = 0.0,
        ahead: bytes = b"",
    ) -> None:
        """Send a frame; block until the pipe has taken all of it.

        Args:
            kind: The kind of the frame.
            batch_id: The batch that it belongs to.
            body: The bytes after the header.
            seconds: Seconds that `infer` took.
            ahead: Another frame, header and body, which is sent before it in the same write.

        Raises:
            OSError: The parent has closed its end.
        """
        header = ahead + pack_header(kind, len(body), batch_id, seconds)
        if len(body) <= MAX_JOINED:
            self.send_packed(header + body)
        else:
            self.send_packed(header)
            self.send_packed(body)

    def send_packed(self, data: bytes) -> None:
        """Send bytes: a whole frame, or the next piece of a frame.

        Raises:
            OSError: The parent has closed its end.
        """
        written = self._write(data)
        # A signal handler of the model may have interrupted the call.
        while written < len(data):
            written += self._write(memoryview(data)[written:])

    def close(self) -> None:
        """Close both ends: the parent reads an end of file; may be called again."""
        for end in self._ends:
            end.close()
