"""Streams: requests whose callers get chunks before they end. Event loop's thread.

    reported --give_chunks--> ChunkQueue <--read-- Stream, the user's
       '--note_step--> StreamFigures

A `ChunkQueue` stands in the place of the future of a request, so that a stream is settled once, as
every request: at its end, or with an error. A request with a future gets the list of all chunks,
which `add_chunk` gathers. `give_chunks` and `ChunkSink` also run in the host, whose sinks pass the
chunks on: the process that schedules a stream counts its unread chunks.
"""

import asyncio
import weakref
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

from fast_batcher._core.values import Batch, Failure, Request
from fast_batcher._transport.pickling import measure_known
from fast_batcher.errors import InferenceError
from fast_batcher.stats import SAMPLED_BATCHES, weighted_quantiles

ChunkT = TypeVar("ChunkT")

# Chunks that may wait for a reader before its stream pauses. A stream that pauses keeps its place
# in the worker, so most streams should never do it: a whole answer would take this memory, too.
MOST_BUFFERED = 1024
# Bytes of the chunks that may wait, for chunks that know their size: texts, bytes, arrays, tensors.
# A few large chunks would fill the memory otherwise; a stream of 16 KiB chunks meets both limits.
MOST_BUFFERED_BYTES = 16 * 1024 * 1024
# The error of a read behind the end of a stream that has not ended normally: a reader that goes on
# after an error must not take a part of the answer for the whole.
ENDED_EARLY = "nothing can be read: the stream was closed before its end, or has raised its error"


class ChunkSink:
    """The receiver of the chunks of one stream; counts the unread ones."""

    def __init__(self) -> None:
        # Bytes of each chunk that was not read, 0 if unknown, and their sum.
        self._sizes: deque[int] = deque()
        self._bytes = 0
        # Whether the stream waits for its reader.
        self.is_paused = False
        # Called when chunks of a paused stream are read, with True to resume it.
        self._on_read: Callable[[bool], None] | None = None

    def add(self, chunk: Any) -> None:
        """Take the next chunk."""
        raise NotImplementedError

    def count(self, chunk: Any) -> bool:
        """Count an unread chunk; return whether the stream is to pause."""
        size = measure_known(chunk) or 0
        self._sizes.append(size)
        self._bytes += size
        is_full = len(self._sizes) >= MOST_BUFFERED or self._bytes >= MOST_BUFFERED_BYTES
        return is_full and not self.is_paused

    def pause(self, on_read: Callable[[bool], None]) -> None:
        """Note that the stream is paused until half of the chunks were read."""
        self.is_paused, self._on_read = True, on_read

    def note_read(self, count: int) -> None:
        """Note that counted chunks were read."""
        for _ in range(count):
            self._bytes -= self._sizes.popleft()
        on_read = self._on_read
        if on_read is not None:
            is_half_read = len(self._sizes) <= MOST_BUFFERED // 2
            resumes = is_half_read and self._bytes <= MOST_BUFFERED_BYTES // 2
            if resumes:
                self.is_paused, self._on_read = False, None
            on_read(resumes)


class ChunkQueue(ChunkSink):
    """The chunks of one stream that have come and are not read, and its outcome."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.chunks: deque[Any] = deque()
        # Called for each chunk that is read; None if they are counted here.
        self.tell_read: Callable[[], None] | None = None
        # Set once no further chunk comes; the error is raised behind the chunks.
        self.is_over = False
        self.error: BaseException | None = None
        # The future of the reader, while it waits.
        self._waiter: Future[None] | None = None

    # The opening's side.

    def add(self, chunk: Any) -> None:
        """Keep the next chunk for the reader."""
        self.chunks.append(chunk)
        self._wake()

    def set_result(self, _: object) -> None:
        """End the stream."""
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """End the stream with an error."""
        self._end()
        self.error = error

    def _end(self) -> None:
        if self.is_over:
            raise asyncio.InvalidStateError("the caller has gone")
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # The reader's side.

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits for a chunk; one that was cancelled does not."""
        return self._waiter is not None and not self._waiter.cancelled()

    def wait(self) -> Future[None]:
        """Return a future for the next chunk, or the end."""
        self._waiter = Future(loop=self.loop)
        return self._waiter

    def take(self) -> Any:
        """Remove and return the next chunk."""
        chunk = self.chunks.popleft()
        if self.tell_read is None:
            self.note_read(1)
        else:
            self.tell_read()
        return chunk

    def leave(self) -> None:
        """Drop what is not read; a further read raises, unless the stream was read to its end."""
        if self.chunks or not self.is_over:
            self.error = RuntimeError(ENDED_EARLY)
        self.chunks.clear()
        self.is_over = True
        self._wake()


class Stream(Generic[ChunkT]):
    """The chunks of one request, as an async iterator for one reader: see `DynBatcher.stream`.

    Chunks come as the model computes them; a reader that is slower finds them waiting. When the
    iteration ends, or the stream is closed or dropped, the request leaves the model's next step.
    Also an async context manager, which closes it.

    Cancellation: a cancelled read loses no chunk, and the next read continues. So
    `asyncio.wait_for(anext(stream), 15)` can be repeated, for example after a ping to the client.
    A task that is cancelled in an `async for` over the stream, and ends by that, leaves it.
    """

    # Without a dict: FastAPI would answer with the attributes of a stream that an endpoint returns.
    __slots__ = ("__weakref__", "_abandon", "_call", "_iterator", "_queue", "_request")

    def __init__(
        self, request: Any, queue: Any, abandon: Callable[[Any], None], call: Callable[..., object]
    ) -> None:
        self._request: Request = request
        self._queue: ChunkQueue = queue
        self._abandon = abandon
        # Calls a function on the loop's thread, from any.
        self._call = call
        # The task of the last `async for`.
        self._iterator: asyncio.Task[Any] | None = None

    if not TYPE_CHECKING:  # type checkers have an error of their own for the mistake

        def __iter__(self) -> NoReturn:
            """Name the remedy for a stream that is returned by an endpoint, or read by `for`."""
            raise TypeError(
                "a stream is read by `async for`; an endpoint returns StreamingResponse(stream)"
            )

    def __aiter__(self) -> Self:
        self._iterator = asyncio.current_task(self._queue.loop)
        return self

    async def __anext__(self) -> ChunkT:
        """Return the next chunk.

        Raises:
            DeadlineExceededError: No chunk came for `timeout` seconds.
            SlowReaderError: The stream was paused, and was not read for `timeout` seconds.
            WorkerLostError: The worker died; a stream with chunks is not begun again.
            InferenceError: The model raised, or its chunk cannot be sent.
            BatcherClosedError: The batcher was closed.
            RuntimeError: Another task waits for a chunk of this stream; or the stream was closed
                before its end, or has raised one of these errors before.
        """
        await self.wait()
        if not self._queue.chunks:
            raise StopAsyncIteration
        chunk: ChunkT = self._queue.take()
        return chunk

    async def wait(self) -> None:
        """Wait until the next chunk has come, or the stream has ended.

        Raises as the iteration does, if no chunk is left.
        """
        queue = self._queue
        while not (queue.chunks or queue.is_over):
            if queue.is_awaited:
                raise RuntimeError("another task waits for a chunk of this stream")
            try:
                await queue.wait()
            except BaseException:  # cancelled
                self._leave_with_iterator()
                raise
        if queue.error is not None and not queue.chunks:
            self._raise()

    def _leave_with_iterator(self) -> None:
        """Leave if the task that iterates ends by this cancellation.

        Starlette cancels the task when a client disconnects, and the cycle of an exception and its
        traceback then keeps the stream until the next collection.
        """
        task, find = self._iterator, weakref.WeakMethod(self._note_end)
        if task is not None and task is asyncio.current_task(self._queue.loop):
            task.add_done_callback(
                lambda task: None if (note_end := find()) is None else note_end(task),
                context=Context(),
            )

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        if self._iterator is task and task.cancelled():
            self._leave()

    def _raise(self) -> None:
        error, self._queue.error = self._queue.error, RuntimeError(ENDED_EARLY)
        try:
            assert error is not None, "the caller has looked"
            if isinstance(error, StopAsyncIteration):  # the reader would take it for the end
                raise InferenceError(f"{error}") from error.__cause__
            raise error
        finally:
            del error  # it holds this frame

    def _leave(self) -> None:
        self._iterator = None
        self._queue.leave()
        if not self._request.is_settled:
            self._abandon(self._request)

    async def aclose(self) -> None:
        """Let the request leave, if it has not ended; may be called again."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def __del__(self) -> None:
        # The app has dropped it, as Starlette does when a client disconnects; on any thread.
        if not self._request.is_settled:
            self._call(self._abandon, self._request)


class StreamCall(Coroutine[Any, Any, Stream[ChunkT]]):
    """A call of `DynBatcher.stream`: a coroutine that says what is missing if it is iterated."""

    def __init__(self, call: Coroutine[Any, Any, Stream[ChunkT]]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, Any, Stream[ChunkT]]:
        return self._call.__await__()

    def send(self, value: Any) -> Any:
        """Resume the call, as a task does."""
        return self._call.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the call, as the cancellation of its task does."""
        return self._call.throw(*error)

    def close(self) -> None:
        """End the call."""
        self._call.close()

    if not TYPE_CHECKING:  # as above

        def __aiter__(self) -> NoReturn:
            """Name the remedy, as in `StreamingResponse(batcher.stream(value))`."""
            self.close()
            raise TypeError("batcher.stream(value) must be awaited: `await batcher.stream(value)`")


class StreamFigures:
    """Figures of the streams of one batcher, for its statistics."""

    def __init__(self) -> None:
        self.chunks = 0
        self._steps = 0
        # The last streams with a chunk: the moment of the first chunk, the seconds that the
        # stream had waited for its place, and the seconds from its arrival to that chunk.
        self.waits: deque[tuple[float, float]] = deque(maxlen=SAMPLED_BATCHES)
        self._first_chunks: deque[float] = deque(maxlen=SAMPLED_BATCHES)
        # Seconds between two chunks of a stream, one of each of the last steps.
        self._gaps: deque[float] = deque(maxlen=SAMPLED_BATCHES)

    def note_step(self, now: float, streams: list[Batch], outcomes: list[Any]) -> None:
        """Record the chunks of a step."""
        self.chunks += len(streams)
        self._steps += 1
        sampled = streams[self._steps % len(streams)].call.chunk_times
        if sampled.count:
            self._gaps.append(now - sampled.last_at)
        for batch, outcome in zip(streams, outcomes, strict=True):
            request = batch.call
            # An observer may have the times of a request that is settled.
            if request.is_settled or type(outcome) is Failure:
                continue
            times = request.chunk_times
            if not times.count:
                times.first_at = now
                self.waits.append((now, batch.joined_at - request.arrival))
                self._first_chunks.append(now - request.arrival)
            times.count += 1
            times.last_at = now

    def describe(self) -> dict[str, Any]:
        """Return fields of `BatcherStats`."""
        fields: dict[str, Any] = {"chunks": self.chunks}
        for name, samples in (("first_chunk", self._first_chunks), ("chunk_gap", self._gaps)):
            found = weighted_quantiles([(seconds, 1) for seconds in samples], (0.50, 0.95))
            fields[f"{name}_p50"], fields[f"{name}_p95"] = found
        return fields


def add_chunk(request: Request, chunk: Any) -> bool:
    """Give a request its next chunk; return False if its caller waits for the whole answer."""
    if not isinstance(request.caller, ChunkSink):
        request.chunks.append(chunk)
        return False
    request.has_chunks = True
    request.caller.add(chunk)
    return True


def give_chunks(
    streams: list[Batch], outcomes: list[Any], deadline_of: Callable[[Request], float]
) -> tuple[dict[int, Failure], list[Batch]]:
    """Give the requests of a step their chunks.

    Returns:
        The failures of streams by batch id, and the streams that are to pause.
    """
    failures: dict[int, Failure] = {}
    full: list[Batch] = []
    for batch, outcome in zip(streams, outcomes, strict=True):
        request = batch.call
        if request.is_settled:
            continue
        if type(outcome) is Failure:
            failures[batch.id] = outcome
        elif add_chunk(request, outcome):
            # The batch keeps its earlier deadline, at which the scheduler looks at the request's.
            request.deadline = deadline_of(request)
            if request.caller.count(outcome):
                full.append(batch)
    return failures, full
