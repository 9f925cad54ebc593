"""The worker's side of its pipes. Its main thread reads and writes, and waits in both."""

import io

from fast_batcher._transport.frames import MAX_JOINED, Frame, FrameReader, Kind, pack_header
from fast_batcher._transport.pipes import Ends


class BlockingChannel:
    """Receives frames from the parent and sends it frames.

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
            TransportError: What arrived is not a frame.
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
        """Send a frame; returns when the pipe has all of it.

        Args:
            kind: What the frame means.
            batch_id: The batch that it is about.
            body: What comes after the header.
            seconds: How long the batch took.
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
        """Send bytes that are a whole frame, or the next piece of one.

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
