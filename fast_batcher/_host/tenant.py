"""An API process, in the host: its requests, their values, and its connection.

Host process, on the event loop's thread. The values are bytes to the host: it unpickles no input
and no output but numbers, texts and bytes (`pickling.ATOMS`).
"""

import asyncio
import functools
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple

from fast_batcher._core.values import Batch, Failure, Group, Request, SessionPlace, Share
from fast_batcher._host import messages
from fast_batcher._host.messages import Handlers, dispatch
from fast_batcher._host.protocol import (
    FRAME_SIZE,
    MOST_IN_FRAME,
    OpaqueError,
    OpaqueRefusal,
    Pickled,
    measure_packed,
    pack_outcome,
)
from fast_batcher._observers import Carried, restore_context
from fast_batcher._opening.streams import ChunkSink
from fast_batcher._parent.sending import BatchSender, FrameWorker
from fast_batcher._parent.staging import CopyState, StagedInput
from fast_batcher._shared_memory.inputs import Slab
from fast_batcher._transport.channels import Kind, LoopChannel
from fast_batcher._transport.pickling import (
    Measured,
    OutOfBandPickler,
    SerializedError,
    dump_atoms,
    dumps,
    loads,
)
from fast_batcher.errors import UnsendableValueError

if TYPE_CHECKING:
    from fast_batcher._opening.opening import LocalOpening


class RowInput(Measured):
    """An input that lies in shared memory alone, or whose API process is being asked for it."""

    def __init__(self, staged: StagedInput, ask: Callable[["RowInput"], None]) -> None:
        self.staged = staged
        self.nbytes = staged.end - staged.start
        self._ask = ask
        self._is_asked = False
        # Called when the input has come, or will not come.
        self._waiting: list[Callable[[], None]] = []

    def fetch(self, done: Callable[[], None]) -> None:
        """Ask for the input, and call `done` when it has come or will not come."""
        self._waiting.append(done)
        if not self._is_asked:
            self._is_asked = True
            self._ask(self)

    def finish(self) -> None:
        """Call the waiting callbacks."""
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()


class OpaquePickler(OutOfBandPickler):
    """Returns the pickles that API processes have made."""

    def pickle(self, values: Sequence[Any], may_share: Callable[[], bool]) -> list[bytes]:
        """Return the pickle of each value."""
        return [self.dumps(value) for value in values]

    def dumps(self, value: Any) -> bytes:
        """Return the pickle of one value."""
        if type(value) is Pickled:
            return value.data
        if type(value) is RowInput:
            raise UnsendableValueError(
                "the process of the input has exited, or has not sent the input again"
            )
        return dumps(value)


def decode_opaquely(item: Any) -> Any:
    """Leave an output to its caller, who unpickles it, and an error as well."""
    if isinstance(item, bytes):
        return Pickled(item)
    error = SerializedError(*item)
    return Failure((OpaqueRefusal if error.is_refusal else OpaqueError)(error))


class CallerContext(NamedTuple):
    """The context of a caller in an API process; stands for a `Context` in events of the host."""

    tenant: "Tenant"
    # The context managers, as in `fast_batcher._observers.Carried`.
    managers: list[bytes]
    is_followed: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Be unpickled as a context in which the context managers were entered."""
        return restore_context, (self.managers,)


class HostSender(BatchSender):
    """A `BatchSender` that asks API processes for inputs that it does not have."""

    decode = staticmethod(decode_opaquely)

    def send(self, worker: FrameWorker, batch: Batch, values: list[Any]) -> None:
        """Send a batch to its worker, as soon as all of its inputs are here."""
        requests = batch.requests
        if any(request.staged is None or request.staged.slab is None for request in requests):
            absent = [value for value in values if type(value) is RowInput]
            if absent:
                self._send_later(worker, batch, absent)
                return
        super().send(worker, batch, values)

    def _send_later(self, worker: FrameWorker, batch: Batch, absent: list[RowInput]) -> None:
        """Keep the batch's position among the frames of its worker until the inputs are here."""
        self._release_staged(batch)
        waiting = {id(value) for value in absent}
        send = functools.partial(self._fill_in_band, worker, worker.reserve(), batch)
        for value in absent:
            value.fetch(functools.partial(_note_arrival, waiting, id(value), send))


def _note_arrival(waiting: set[int], arrived: int, send: Callable[[], None]) -> None:
    waiting.discard(arrived)
    if not waiting:
        send()


logger = logging.getLogger("fast_batcher")


# Seconds for which a batch waits for an input that an API process sends once more: a stopped
# process must not keep a worker from the others.
ANSWER_TIMEOUT = 5.0
# Frames of news that wait for an API process that does not read; further ones are dropped.
MOST_NEWS = 256


class HostCaller:
    """The caller of a request in an API process, for the ledger."""

    __slots__ = ("_id", "_tenant")

    def __init__(self, tenant: "Tenant", id: int) -> None:
        self._tenant = tenant
        self._id = id

    def set_result(self, outcome: Any) -> None:
        """Send the output with the answers of this turn."""
        self._tenant.answer(self._id, outcome)

    def set_exception(self, error: BaseException) -> None:
        """Send the error with the answers of this turn."""
        self._tenant.answer(self._id, error)


class SteppedCaller(HostCaller):
    """The caller of a whole answer of a `SteppedModel`, whose chunks are sent at once."""

    __slots__ = ()

    def set_result(self, chunks: list[Any]) -> None:
        """Send the chunks, and the end."""
        for chunk in chunks:
            self._tenant.put(self._id, chunk)
        self._tenant.end_stream(self._id)


class HostStream(SteppedCaller, ChunkSink):
    """The caller of a stream in an API process, whose chunks are sent as they come."""

    def __init__(self, tenant: "Tenant", id: int) -> None:
        ChunkSink.__init__(self)
        SteppedCaller.__init__(self, tenant, id)

    def add(self, chunk: Any) -> None:
        """Send the next chunk with the answers of this turn."""
        self._tenant.put(self._id, chunk)


class Tenant:
    """An API process that the host serves."""

    def __init__(
        self,
        id: int,
        connection: socket.socket,
        max_frame_bytes: int,
        loop: asyncio.AbstractEventLoop,
        *,
        on_end: Callable[["Tenant"], None],
        find_group: Callable[[str | None, bytes | None], Group],
        find_room: Callable[[], int],
    ) -> None:
        self.id = id
        self.connection = connection
        self._loop = loop
        self._on_end = on_end
        self._find_group, self._find_room = find_group, find_room
        # None until it has introduced itself.
        self.opening: LocalOpening | None = None
        self._requests: dict[int, Request] = {}
        # The sessions of its callers by id, until it sends `EndSessions`.
        self._sessions: dict[int, SessionPlace] = {}
        # Requests that have arrived; the API process adds the requests that are on their way.
        self._received = 0
        # Inputs that were asked for once more, by the request's id.
        self._asked: dict[int, RowInput] = {}
        # Outcomes and chunks of this turn of the loop, and the streams that end behind them.
        self._ids: list[int] = []
        self._values: list[Any] = []
        self._ended: list[int] = []
        self._is_scheduled = False
        # Ids of requests whose rows no worker views any more; any thread may append.
        self._freed: deque[int] = deque()
        # Rows that workers may view.
        self._rows = 0
        self._handlers: dict[int | type, Callable[..., object]] = {
            Kind.ITEMS: self._submit,
            messages.Abandon: self._abandon,
            messages.EndSessions: self._end_sessions,
            messages.StreamsRead: self._note_reads,
            messages.Resent: self._take_resent,
        }
        take = functools.partial(dispatch, handlers=self._handlers)
        ends = (connection, connection)
        self._channel = LoopChannel(ends, max_frame_bytes, take, self._hung_up)
        self._channel.attach(loop)
        self.is_gone = False

    def handle(self, handlers: Handlers) -> None:
        """Use these handlers from now on; each is called with this process, too."""
        for kind, handle in handlers.items():
            self._handlers[kind] = functools.partial(handle, self)

    # Requests.

    def _submit(
        self,
        ids: list[int],
        inputs: bytes | list[Any],
        options: dict[int, Any],
        contexts: dict[int, Carried] | None,
    ) -> None:
        opening = self.opening
        assert opening is not None, "`Hello` is the first message"
        values = (
            loads(inputs)
            if isinstance(inputs, bytes)
            else [self._unpack(*pair) for pair in zip(ids, inputs, strict=True)]
        )
        self._received += len(ids)
        make_caller = SteppedCaller if opening.kind.gives_chunks else HostCaller
        for position, (request_id, value) in enumerate(zip(ids, values, strict=True)):
            request = Request(value, make_caller(self, request_id))
            if position in options:
                self._apply(request_id, request, *options[position])
            if type(value) is RowInput:
                request.staged = value.staged
            self._requests[request_id] = request
            opening.accept(request)
        if contexts:
            self._note_contexts(ids, contexts)

    def _note_contexts(self, ids: list[int], contexts: dict[int, Carried]) -> None:
        """Give requests that have just arrived the contexts of their callers."""
        for position, (managers, is_followed) in contexts.items():
            request = self._requests.get(ids[position])
            if request is not None:
                request.context = CallerContext(self, managers, is_followed)

    def _abandon(self, ids: list[int]) -> None:
        for request_id in ids:
            request = self._requests.pop(request_id, None)
            if request is not None and self.opening is not None:
                self.opening.abandon(request)

    def _end_sessions(self, session_ids: list[int]) -> None:
        for session_id in session_ids:
            session = self._sessions.pop(session_id, None)
            if session is not None and self.opening is not None:
                self.opening.end_session(session)

    def report_unplaced(self) -> None:
        """Tell the API process which sessions have no place: only the host knows."""
        places = self._sessions.items()
        ends = [(key, place.end) for key, place in places if place.end or place.worker is None]
        for begin in range(0, len(ends), MOST_IN_FRAME):
            self.tell_news(messages.Unplaced(dict(ends[begin : begin + MOST_IN_FRAME])))

    def _apply(
        self,
        request_id: int,
        request: Request,
        deadline: float | None,
        timeout: float | None,
        target: float | None,
        priority: int,
        share: Share,
        cost: float,
        group: tuple[str | None, bytes | None] | None,
        size: int,
        is_stream: bool,
        session: tuple[int, float, bool] | None,
    ) -> None:
        """Set what makes a request differ from an ordinary one."""
        if deadline is not None:
            request.deadline, request.has_deadline = deadline, True
        request.timeout = timeout
        request.target = target
        request.rank(priority, share)
        request.size = size
        request.cost = cost
        if group is not None:
            request.group = self._find_group(*group)
        if session is not None and self.opening is not None:
            session_id, idle_timeout, may_begin = session
            place = self._sessions.setdefault(session_id, SessionPlace(idle_timeout))
            request.session, place.may_begin = place, may_begin
            self.opening.begin_session()
        if is_stream:
            request.caller = HostStream(self, request_id)

    def _unpack(self, request_id: int, packed: Any) -> Any:
        if isinstance(packed, bytes):
            return Pickled(packed)
        layout, start, end = packed
        self._rows += 1
        staged = StagedInput(Slab(request_id, self._freed), start, end, layout, CopyState.COPIED)
        return RowInput(staged, functools.partial(self._ask, request_id))

    def _ask(self, request_id: int, value: RowInput) -> None:
        self._asked[request_id] = value
        self.tell(messages.Resend(request_id))
        seconds = 0.0 if self.is_gone else ANSWER_TIMEOUT
        self._loop.call_later(seconds, self._take_resent, request_id, None, context=Context())

    def _take_resent(self, request_id: int, item: bytes | None) -> None:
        """Go on with the batches that wait for an input, which need not have come."""
        value = self._asked.pop(request_id, None)
        # It may have ended meanwhile; the batches still wait.
        request = self._requests.get(request_id)
        if request is not None and item is not None:
            request.value = Pickled(item)
        if value is not None:
            value.finish()

    def _note_reads(self, counts: dict[int, int]) -> None:
        """Count the chunks that were read: a stream that is paused may go on."""
        for request_id, count in counts.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.caller.note_read(count)

    # Answers.

    def answer(self, request_id: int, outcome: Any) -> None:
        """Send an outcome with the others of this turn of the loop."""
        self._requests.pop(request_id, None)
        self.put(request_id, outcome)

    def put(self, request_id: int, value: Any) -> None:
        """Send an outcome or a chunk with the others of this turn of the loop."""
        self._ids.append(request_id)
        self._values.append(value)
        self._flush_soon()

    def end_stream(self, request_id: int) -> None:
        """Send the end of a stream, behind its chunks."""
        self._requests.pop(request_id, None)
        self._ended.append(request_id)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush, context=Context())

    def _flush(self) -> None:
        """Send frames that are not longer than necessary."""
        self._is_scheduled = False
        ids, values, ended, freed = self._ids, self._values, self._ended, self.take_freed()
        self._ids, self._values, self._ended = [], [], []
        # The room in the queue, and the requests that had arrived by then.
        room = self._find_room(), self._received
        body = dump_atoms(values, FRAME_SIZE)
        if body is not None:
            self.send(Kind.ITEMS, dumps((ids, body, ended, freed, room)))
            return
        packed = [pack_outcome(value) for value in values]
        begin = size = 0
        for position, value in enumerate(packed, 1):
            size += measure_packed(value)
            is_last = position == len(packed)
            if is_last or size >= FRAME_SIZE:
                part = ids[begin:position], packed[begin:position], ended if is_last else []
                self.send(Kind.ITEMS, dumps((*part, freed, room)))
                begin, size, freed = position, 0, []

    def take_freed(self) -> list[int]:
        """Return the requests whose rows are free since the last call."""
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        self._rows -= len(freed)
        return freed

    def report_freed(self) -> None:
        """Tell the API process which rows are free, with the outcomes of this turn."""
        if self._freed:
            self._flush_soon()

    @property
    def has_rows(self) -> bool:
        """Whether a worker may view its rows."""
        return self._rows > 0

    # The connection.

    @property
    def is_stalled(self) -> bool:
        """Whether the process does not read, perhaps because it is stopped: it gets no news."""
        return self._channel.backlog >= MOST_NEWS

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame without waiting; dropped if the process is gone."""
        self._channel.send(kind, 0, body)

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message without waiting; dropped if the process is gone."""
        self.send(Kind.MESSAGE, dumps(message))

    def tell_soon(self, message: tuple[Any, ...]) -> None:
        """Send a message after the answers of this turn of the loop."""
        self._loop.call_soon(self.tell, message, context=Context())

    def tell_news(self, message: tuple[Any, ...]) -> None:
        """Send a message that the process may miss: a state, an event or a log record."""
        if not self.is_stalled:
            self.tell(message)

    def leave(self) -> None:
        """Cancel its requests, and end its sessions; the connection stays open for the farewell."""
        self._abandon([*self._requests])
        self._end_sessions([*self._sessions])
        for request_id in [*self._asked]:
            self._take_resent(request_id, None)

    def close(self) -> None:
        """Close the connection; its process waits for that after its goodbye."""
        self.is_gone = True
        self._channel.close()

    def _hung_up(self, error: Exception | None) -> None:
        if error is not None:
            logger.error("a server process broke the protocol", exc_info=error)
        self.is_gone = True
        self._channel.close()
        self._on_end(self)
