"""Streams of a shared batcher: chunks on their way from the host to an API process.

    host          give_chunks --put--> HostStream --> Tenant --ITEMS--> API process
    API process   RemoteStreams --put--> ChunkQueue --read--> Stream --StreamsRead--> host

The host counts the chunks that were not read, and pauses a stream, as a session does in a process
of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

from fast_batcher._core.host import OpenCalls
from fast_batcher._core.values import Failure, Request
from fast_batcher._host.protocol import unpack_failure
from fast_batcher._session.ledger import set_result
from fast_batcher._session.streams import ChunkQueue, ChunkSink


class HostStream(ChunkSink):
    """The caller of a stream in an API process, in the host."""

    def __init__(self, request_id: int, give: Callable[[int, Any], None], end: Any) -> None:
        super().__init__()
        self._give = functools.partial(give, request_id)
        self._end = functools.partial(end, request_id)

    def _add(self, chunk: Any) -> None:
        self._give(chunk)

    def set_result(self, _: object) -> None:
        """Send the end of the stream."""
        self._end(None)

    def set_exception(self, error: BaseException) -> None:
        """Send the end of the stream, with an error."""
        self._end(error)


class WholeAnswer:
    """The caller of a whole answer in an API process, in the host: its chunks are sent at once."""

    def __init__(self, request_id: int, give: Callable[[int, Any], None], end: Any) -> None:
        self._give = functools.partial(give, request_id)
        self.set_exception = self._end = functools.partial(end, request_id)

    def set_result(self, chunks: list[Any]) -> None:
        """Send the chunks, and the end."""
        for chunk in chunks:
            self._give(chunk)
        self._end(None)


class RemoteStreams:
    """The streams of an API process whose worker is in the host."""

    def __init__(self, calls: OpenCalls, on_read: Callable[[], None]) -> None:
        self._calls = calls
        self._on_read = on_read
        # Chunks of whole answers, by request.
        self._whole: dict[Request, list[Any]] = {}
        # Chunks that were read since the last `StreamsRead`, by the request's id.
        self._reads: dict[int, int] = {}

    def put(self, request: Request, chunk: Any) -> None:
        """Give a request its next chunk."""
        queue = request.caller
        if type(queue) is not ChunkQueue:
            self._whole.setdefault(request, []).append(chunk)
            return
        if not request.has_chunks:
            request.has_chunks = True
            self._calls.begin_stream(request)
            queue.watch(functools.partial(self._note_read, request.id))
        queue.put(chunk)

    def end(self, request: Request, packed: Any) -> Failure | None:
        """End a settled request; return its failure, if it has one."""
        chunks = self._whole.pop(request, [])
        if packed is not None:
            return unpack_failure(packed)
        set_result(request, chunks)
        return None

    def _note_read(self, request_id: int, _: bool) -> None:
        self._reads[request_id] = self._reads.get(request_id, 0) + 1
        self._on_read()

    def take_reads(self) -> dict[int, int]:
        """Return the numbers of chunks that were read since the last call."""
        reads, self._reads = self._reads, {}
        return reads

    def drop(self, request: Request) -> None:
        """Drop what has come for a request that ends otherwise, or begins again."""
        self._whole.pop(request, None)
        self._reads.pop(request.id, None)
