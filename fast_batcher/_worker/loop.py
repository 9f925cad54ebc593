"""The worker's main loop: receives batches, calls the model, sends the answers. Main thread.

One batch at a time; `stages` runs the same steps on several threads. It makes no decisions about
requests: the parent forms batches, and decides what follows from a failure. Each output is pickled
separately, so that an output that cannot be pickled fails alone, and no two callers get the same
object.
"""

import ctypes
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, Protocol

from fast_batcher._arrays.joining import list_outputs
from fast_batcher._arrays.stacking import Piece, lend, make_piece
from fast_batcher._observers import BatchContexts
from fast_batcher._shared_memory.inputs import SlabViews, unpack_layout, view_rows
from fast_batcher._shared_memory.outbox import OutboxWriter
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import Frame, Kind, pack_header
from fast_batcher._transport.pickling import (
    LEAST_SHARED,
    OutOfBandPickle,
    OutOfBandPickler,
    SerializedError,
    dump_atoms,
    dumps,
    load_items,
    view_pickle,
)
from fast_batcher._transport.progress import BEGUN, TAKEN, WorkerProgress
from fast_batcher._worker.model import free_memory
from fast_batcher.errors import (
    InferenceError,
    cuda_message,
    forget_frames,
    is_out_of_memory,
)
from fast_batcher.settings import SHARED_MEMORY_THRESHOLD

# The frames that answer a batch, as kinds and bodies; one or more.
Reply = list[tuple[int, Any]]

logger = logging.getLogger("fast_batcher.worker")


class ReplyEncoder:
    """Encodes the outputs of batches as frames."""

    def __init__(self, outbox: OutboxWriter | OSError | None, max_frame_bytes: int) -> None:
        self._outbox = outbox if isinstance(outbox, OutboxWriter) else None
        # The error that prevented an outbox, if the settings ask for one.
        self._no_outbox = outbox if isinstance(outbox, OSError) else None
        self._max_frame_bytes = max_frame_bytes
        self._pickler = OutOfBandPickler(
            self._outbox.least if self._outbox else SHARED_MEMORY_THRESHOLD
        )
        self._has_warned = False

    def pack(self, outputs: list[Any], errors: dict[int, SerializedError]) -> Reply:
        """Return the frames that answer a batch."""
        body = None if errors else dump_atoms(outputs, LEAST_SHARED)
        if body is not None and len(body) <= self._max_frame_bytes:
            return [(Kind.OUTPUT_ATOMS, body)]
        # By `type`: `isinstance` asks `__class__`, which is the user's code, and types are few.
        if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
            for position, output in enumerate(outputs):
                if issubclass(type(output), BaseException):
                    errors.setdefault(position, pickling.describe(output))
        if errors:
            outputs = [None if at in errors else output for at, output in enumerate(outputs)]
        pickled = self._pickle(outputs)
        if isinstance(pickled, OutOfBandPickle):
            start = self._put(pickled, errors)
            if start is not None:
                where = (start, pickled.sizes, pickled.find_frozen(), pickled.items)
                return [(Kind.SHARED_OUTPUTS, dumps((*where, errors)))]
            pickled = [self._pickle_item(output) for output in outputs]
        return self._pack_items(pickled, errors)

    def give_back_unused(self) -> None:
        """Return memory that no answer has used recently to the system. Call it while idle."""
        if self._outbox is not None:
            self._outbox.rest()

    def _pickle(self, outputs: list[Any]) -> Sequence[bytes | SerializedError] | OutOfBandPickle:
        """Pickle outputs for the pipe or, if they are large, for the outbox."""
        try:
            return self._pickler.pickle(outputs, self._has_outbox)
        except BaseException as error:  # noqa: BLE001  user code; each output is tried separately
            # A frame often keeps the error, and its frames keep the outputs.
            forget_frames(error)
            return [self._pickle_item(output) for output in outputs]

    def _pickle_item(self, output: Any) -> bytes | SerializedError:
        try:
            return dumps(output)
        except BaseException as error:  # noqa: BLE001  pickling is the user's code too
            failure = pickling.describe(_unsendable(output, error))
            forget_frames(error)
            return failure

    def _pack_items(
        self, items: Sequence[bytes | SerializedError], errors: dict[int, SerializedError]
    ) -> Reply:
        """Return the frames for outputs that have been pickled one by one."""
        if not errors:
            body = dumps(items)
            if len(body) <= self._max_frame_bytes:
                return [(Kind.OUTPUTS, body)]
        outcomes = [
            errors[at] if at in errors else self._limited(item) for at, item in enumerate(items)
        ]
        bodies = list(pickling.fragment(outcomes, self._max_frame_bytes))
        earlier = [(Kind.OUTPUTS_FRAGMENT, body) for body in bodies[:-1]]
        return [*earlier, (Kind.OUTPUTS, bodies[-1])]

    def _limited(self, item: bytes | SerializedError) -> bytes | SerializedError:
        if isinstance(item, SerializedError) or pickling.fits(len(item), self._max_frame_bytes):
            return item
        return pickling.describe(
            InferenceError(
                f"the output takes {len(item)} bytes, more than max_frame_bytes="
                f"{self._max_frame_bytes} allows; return less or raise max_frame_bytes"
            )
        )

    def _has_outbox(self) -> bool:
        """Return whether there is an outbox; warn once if it could not be made."""
        if self._no_outbox is not None:
            self._warn(f"{self._no_outbox}")
        return self._outbox is not None

    def _put(self, pickled: OutOfBandPickle, errors: dict[int, SerializedError]) -> int | None:
        """Put pickled outputs into the outbox; return their start, or None if there is no room."""
        assert self._outbox is not None, "the caller has asked"
        # The errors go into the frame, next to the location of the outputs.
        most = self._max_frame_bytes
        if pickled.size > most or len(dumps(errors)) > most // 2:
            return None
        try:
            start = self._outbox.put(pickled)
        except OSError as error:
            self._warn(f"{error}")
            return None
        if start is None:
            self._warn(
                f"{pickled.size} bytes find no room, {self._outbox.describe_room()} by answers "
                "that the app has not copied yet"
            )
        return start

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "large outputs go through a pipe, which is slower, while there is no shared "
                "memory for them: %s",
                reason,
            )


def _unsendable(output: Any, error: BaseException) -> InferenceError:
    result = InferenceError(
        f"the output, a {type(output).__qualname__}, cannot be pickled: "
        f"{pickling.one_line(error)}; "
        "return plain data, arrays or tensors"
    )
    result.__cause__ = error
    return result


# The inputs of a batch: the unpickled inputs, in their order; unpickling errors, by position in
# the batch; and the shared memory of the inputs, for `stack`.
Inputs = tuple[list[Any], dict[int, SerializedError], list[Piece]]


class InputReader:
    """Reads the inputs of batches, and reports batches whose shared memory is free."""

    def __init__(self, slabs: SlabViews | None) -> None:
        self._slabs = slabs
        # While both are empty, no shared memory is to be reported as free.
        self.freed: list[int] = [] if slabs is None else slabs.freed
        self.forks: list[Any] = [] if slabs is None else slabs.forks
        # Inputs from INPUTS_FRAGMENT frames, by batch id, until the last frame of the batch.
        self._fragments: dict[int, list[bytes]] = {}

    def keep_fragment(self, frame: Frame) -> None:
        """Keep a fragment of a batch that is larger than one frame, until the last one comes."""
        self._fragments.setdefault(frame.batch_id, []).extend(pickling.loads(frame.body))

    def read(self, frame: Frame) -> Inputs:
        """Return the inputs of a batch."""
        pieces: list[Piece] = []
        if frame.kind == Kind.INPUT_ATOMS:
            return pickling.loads(frame.body), {}, pieces
        if frame.kind == Kind.VALUES:
            return frame.body, {}, pieces
        if frame.kind == Kind.INPUTS:
            items = self._fragments.pop(frame.batch_id, []) + pickling.loads(frame.body)
            values = [_unpickle_item(item) for item in items]
        else:
            values = self._load_shared(frame, pieces)
        errors = {at: value for at, value in enumerate(values) if type(value) is SerializedError}
        if errors:
            values = [value for value in values if type(value) is not SerializedError]
        return values, errors, pieces

    def pack_freed(self) -> bytes:
        """Return a FREED frame with the batches that have no view left; empty without any."""
        slabs = self._slabs
        freed = [] if slabs is None else slabs.take_freed()
        if not freed:  # a child that the model has forked still has views
            return b""
        body = pickling.dumps(freed)
        return pack_header(Kind.FREED, len(body), 0, 0.0) + body

    def _load_shared(self, frame: Frame, pieces: list[Piece]) -> list[Any]:
        """Return views of inputs in shared memory; a `SerializedError` for an unreadable one."""
        slabs = self._slabs
        assert slabs is not None, "the parent knows that it shares no memory"
        named = pickling.loads(frame.body)
        memory = slabs.view(frame.batch_id)
        if frame.kind == Kind.SHARED_INPUTS:
            start, length, sizes, items = named
            view = memory[start : start + length]
            pieces.append(make_piece(_address_of(view), view))
            stream, buffers = view_pickle(view, sizes)
            return load_items(stream, buffers, items, pickling.describe)
        inputs: list[Any] = []
        for packed, start, count in named:
            layout = unpack_layout(packed)
            view = memory[start : start + count * layout.nbytes]
            if layout.is_original:
                view = slabs.view_apart(view, start)
            rows, whole = view_rows(layout, view)
            inputs += rows
            known_rows = () if whole is None else rows
            pieces.append(make_piece(_address_of(view), view, whole, known_rows))
        return inputs


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def _unpickle_item(item: bytes) -> Any:
    try:
        return pickling.loads(item)
    except BaseException as error:  # noqa: BLE001  unpickling is the user's code
        return pickling.describe(error)


# Frames that are a batch, or its last fragment.
BATCHES = frozenset(
    {Kind.INPUT_ATOMS, Kind.INPUTS, Kind.SHARED_INPUTS, Kind.STAGED_INPUTS, Kind.VALUES}
)

# Texts of CUDA errors after which the process cannot use its device any more.
_FATAL_SIGNS = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "CUDA error",
)


_NO_CONTEXTS: AbstractContextManager[None] = nullcontext()


class BatchJob:
    """A batch in the worker, from its frame to its answer."""

    __slots__ = (
        "batch_id",
        "contexts",
        "errors",
        "inputs",
        "is_fatal",
        "method",
        "outputs",
        "pieces",
        "reply",
        "seconds",
    )

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.method = "infer"
        # The context managers of the observers that follow the batch.
        self.contexts: AbstractContextManager[None] = _NO_CONTEXTS
        # Of the positions that have no error, in their order. The model takes the inputs away.
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        # By position in the batch.
        self.errors: dict[int, SerializedError] = {}
        # Shared memory of the inputs, for `stack`.
        self.pieces: list[Piece] = []
        # The frames that answer the batch; None while it is not known to have failed.
        self.reply: Reply | None = None
        # Whether the process cannot use its device any more.
        self.is_fatal = False
        # Seconds in the method.
        self.seconds = 0.0

    def fail(self, kind: int, failure: SerializedError) -> None:
        """Answer all requests of the batch with an error."""
        self.inputs, self.outputs, self.errors = [], [], {}
        self.reply = [(kind, pickling.dumps(failure))]
        self.is_fatal = kind == Kind.FATAL

    def skip(self) -> None:
        """Answer that the batch was not computed."""
        self.inputs, self.errors, self.pieces = [], {}, []
        self.reply = [(Kind.SKIPPED, b"")]

    def list_open(self, count: int) -> list[int]:
        """Return the positions of the `count` inputs or outputs that have no error."""
        positions = range(count + len(self.errors))
        return [position for position in positions if position not in self.errors]


class WorkerChannel(Protocol):
    """The frames to a worker and from it: a `BlockingChannel`, or the calls of an actor."""

    def receive(self) -> Frame | None:
        """Return the next frame; None after the last one."""

    def send(
        self,
        kind: int,
        batch_id: int = 0,
        body: bytes = b"",
        seconds: float = 0.0,
        ahead: bytes = b"",
    ) -> None:
        """Send a frame, behind the frames `ahead`."""

    def send_packed(self, data: bytes) -> None:
        """Send a whole frame."""


class PolledChannel(WorkerChannel, Protocol):
    """A channel to a worker that has other work than to wait for the next frame."""

    def has_arrived(self) -> bool:
        """Return whether a frame, or a part of one, can be received."""


class BatchLoop:
    """Main loop of a worker: answers batches with a model until the parent sends STOP."""

    def __init__(
        self,
        channel: WorkerChannel,
        models: Mapping[str, Any],
        progress: WorkerProgress,
        inputs: InputReader,
        encoder: ReplyEncoder,
        *,
        copies: bool = False,
    ) -> None:
        self._channel = channel
        self._models = models
        # Whether outputs must not be views of an array that the model may fill again.
        self._copies = copies
        self._progress = progress.numbers
        self._is_skipped = progress.is_skipped
        self._inputs = inputs
        self._encoder = encoder
        self._contexts = BatchContexts()
        # The contexts that came last, by the id of their batch, which may not come: it is withdrawn
        # if its inputs turn out not to be sendable.
        self._given: dict[int, AbstractContextManager[None]] = {}
        # The method of the next batch by its id, of a model that has several.
        self._method: dict[int, str] = {}

    def run(self) -> None:
        """Answer batches until STOP, until the parent closes its end, or until a fatal error."""
        while True:
            # Batches whose last view the model has dropped since the last answer.
            if self._inputs.freed or self._inputs.forks:
                self.report_freed()
            job = self.receive()
            if isinstance(job, BatchJob):
                self.compute(job)
                self.answer(job)
                if job.is_fatal:
                    return
            elif job == Kind.STOP:
                return
            else:
                self.answer_ping()

    def receive(self) -> BatchJob | int:
        """Wait for a batch, and read its inputs; return PING for a ping, and STOP for the end."""
        while True:
            frame = self._channel.receive()
            if frame is None:
                return Kind.STOP
            if frame.kind in BATCHES:
                return self.read(frame)
            if frame.kind in (Kind.STOP, Kind.PING):
                return frame.kind
            self.note(frame)

    def note(self, frame: Frame) -> None:
        """Note what precedes a batch."""
        if frame.kind == Kind.INPUTS_FRAGMENT:
            self._inputs.keep_fragment(frame)
        elif frame.kind == Kind.METHOD:
            self._method = {frame.batch_id: bytes(frame.body).decode()}
        else:
            contexts = self._contexts.join_pickled(pickling.loads(frame.body))
            self._given = {frame.batch_id: contexts}

    def read(self, frame: Frame) -> BatchJob:
        """Read the inputs of a batch."""
        batch_id = frame.batch_id
        self._progress[TAKEN] = batch_id + 1
        job = BatchJob(batch_id)
        if self._method or self._given:
            job.method = self._method.pop(batch_id, job.method)
            job.contexts = self._given.pop(batch_id, job.contexts)
        try:
            job.inputs, job.errors, job.pieces = self._inputs.read(frame)
        except BaseException as error:  # noqa: BLE001  a dtype may be the user's code, too
            job.fail(Kind.FAILED, pickling.describe(error))
            forget_frames(error)
        return job

    def compute(self, job: BatchJob) -> None:
        """Call the model's method on a batch that has not failed."""
        if job.reply is not None:
            return
        if self._is_skipped(job.batch_id):
            job.skip()
            return
        self._progress[BEGUN] = job.batch_id + 1
        inputs = job.inputs
        # Read now: the method may change the list that it is given.
        count = len(inputs)
        # From here on the model alone has the inputs.
        job.inputs = []
        if job.pieces:
            lend(job.pieces)
        started = monotonic()
        try:
            with job.contexts:
                outputs = self._models[job.method].infer(inputs) if inputs else []
        except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
            job.seconds = monotonic() - started
            job.fail(*judge(error))
            # A frame often keeps the error, and its frames keep the inputs.
            forget_frames(error)
            return
        finally:
            if job.pieces:
                lend(())
                job.pieces = []
        job.seconds = monotonic() - started
        try:
            job.outputs = list_outputs(
                outputs, count, f"{job.method} returned", copies=self._copies
            )
        except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
            job.fail(Kind.FAILED, pickling.describe(error))

    def answer(self, job: BatchJob) -> None:
        """Send the outputs of a batch, or its error."""
        frames = job.reply
        if frames is None:
            outputs, job.outputs = job.outputs, []
            if job.errors:
                found = dict(zip(job.list_open(len(outputs)), outputs, strict=True))
                outputs = [found.get(at) for at in range(len(found) + len(job.errors))]
            frames = self._encoder.pack(outputs, job.errors)
        # If the model keeps no view of the batch, its memory is free when the answer arrives.
        inputs = self._inputs
        ahead = inputs.pack_freed() if inputs.freed or inputs.forks else b""
        for kind, body in frames:
            self._channel.send(kind, job.batch_id, body, job.seconds, ahead)
            ahead = b""

    def report_freed(self) -> None:
        """Report the batches whose shared memory has no view left."""
        freed = self._inputs.pack_freed()
        if freed:
            self._channel.send_packed(freed)

    def answer_ping(self) -> None:
        """Answer a ping, which comes while no batch is there."""
        self._channel.send(Kind.PONG)
        self._encoder.give_back_unused()


def judge(error: BaseException) -> tuple[int, SerializedError]:
    """Return the kind of frame that reports an error of `infer`, and the error as data."""
    failure = pickling.describe(error)
    kind = Kind.RAISED
    if is_out_of_memory(error):
        kind = Kind.OUT_OF_MEMORY
        free_memory(error)
    elif breaks_device(error):
        kind = Kind.FATAL
    return kind, failure


def breaks_device(error: BaseException) -> bool:
    """Return whether the process cannot use its device any more after this error."""
    if is_out_of_memory(error):  # also with the text "CUDA error: out of memory"
        return False
    return any(sign in cuda_message(error) for sign in _FATAL_SIGNS)
