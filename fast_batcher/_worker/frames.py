"""The port of a worker process: from frames to batches, and from batches to frames. Main thread.

Each output is pickled separately, unless all are atoms: an output that cannot be pickled fails
alone, and no two callers get the same object.
"""

import ctypes
import logging
from collections.abc import Sequence
from itertools import groupby
from time import monotonic
from typing import Any

from fast_batcher._arrays.stacking import Piece, make_piece
from fast_batcher._core.values import Failed, Order, Report
from fast_batcher._shared_memory.inputs import SlabViews, SpareMemory, unpack_layout, view_rows
from fast_batcher._shared_memory.outbox import OutboxWriter
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import BlockingChannel, Frame, Kind
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
from fast_batcher._transport.progress import GPU_BYTES, TAKEN, WorkerProgress
from fast_batcher._worker.model import find_gpu
from fast_batcher._worker.port import PING_ID, BatchJob, Errors, Told, describe_errors
from fast_batcher.errors import InferenceError, WorkerStartupError, forget_frames
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

    def pack(self, outputs: list[Any], errors: Errors, report: Report | None = None) -> Reply:
        """Return the frames that answer a batch."""
        body = None if errors else dump_atoms(outputs, LEAST_SHARED)
        if body is not None and report is not None:
            body = dumps((body, report))
        if body is not None and len(body) <= self._max_frame_bytes:
            return [(Kind.ATOMS if report is None else Kind.ITEMS, body)]
        return self._pack_apart(outputs, errors, report)

    def _pack_apart(self, outputs: list[Any], errors: Errors, report: Report | None) -> Reply:
        """Return the frames for outputs that are pickled one by one."""
        describe_errors(outputs, errors)
        if errors:
            outputs = [None if at in errors else output for at, output in enumerate(outputs)]
        pickled = self._pickle(outputs)
        if isinstance(pickled, OutOfBandPickle):
            start = self._put(pickled, errors)
            if start is not None:
                where = (start, pickled.sizes, pickled.find_frozen(), pickled.items, errors)
                return [(Kind.SHARED, dumps((where, report)))]
            pickled = [pickle_output(output) for output in outputs]
        return self._pack_items([errors.get(at, item) for at, item in enumerate(pickled)], report)

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
            return [pickle_output(output) for output in outputs]

    def _pack_items(self, items: Sequence[bytes | SerializedError], report: Report | None) -> Reply:
        """Return the frames for outputs that have been pickled one by one."""
        most = self._max_frame_bytes
        body = dumps((items, report))
        if len(body) <= most:
            return [(Kind.ITEMS, body)]
        parts = pickling.fragment([limit_output(item, most) for item in items], most)
        return [*((Kind.PART, part) for part in parts), (Kind.ITEMS, dumps(([], report)))]

    def _has_outbox(self) -> bool:
        """Return whether there is an outbox; warn once if it could not be made."""
        if self._no_outbox is not None:
            self._warn(f"{self._no_outbox}")
        return self._outbox is not None

    def _put(self, pickled: OutOfBandPickle, errors: Errors) -> int | None:
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


def pickle_output(output: Any) -> bytes | SerializedError:
    """Pickle one output, or describe the error of an output that cannot be pickled."""
    try:
        return dumps(output)
    except BaseException as error:  # noqa: BLE001  pickling is the user's code too
        unsendable = InferenceError(
            f"the output, a {type(output).__qualname__}, cannot be pickled: "
            f"{pickling.one_line(error)}; return plain data, arrays or tensors"
        )
        unsendable.__cause__ = error
        failure = pickling.describe(unsendable)
        forget_frames(error)
        return failure


def limit_output(item: bytes | SerializedError, max_frame_bytes: int) -> bytes | SerializedError:
    """Describe an error in place of an output that does not fit into a frame."""
    if isinstance(item, SerializedError) or pickling.fits(len(item), max_frame_bytes):
        return item
    return pickling.describe(
        InferenceError(
            f"the output takes {len(item)} bytes, more than max_frame_bytes={max_frame_bytes} "
            "allows; return less or raise max_frame_bytes"
        )
    )


class InputReader:
    """Reads the inputs of batches, and reports batches whose shared memory is free."""

    def __init__(self, slabs: SlabViews | OSError | None) -> None:
        self._slabs = slabs
        # While both are empty, no shared memory is to be reported as free.
        self.freed: list[int] = slabs.freed if isinstance(slabs, SlabViews) else []
        self.forks: list[Any] = slabs.forks if isinstance(slabs, SlabViews) else []
        # Inputs from PART frames, by batch id, until the last frame of the batch.
        self._fragments: dict[int, list[bytes]] = {}
        # Memory for inputs that have to be copied, or do not lie behind each other.
        self.spare = SpareMemory()

    def begin(self, progress: WorkerProgress) -> None:
        """Prepare for the first batch; raise if the worker has not got the shared memory."""
        if isinstance(self._slabs, OSError):
            raise WorkerStartupError(
                f"the worker cannot map all of max_shared_bytes; lower it: {self._slabs}"
            )
        if self._slabs is not None:
            self._slabs.report_forks(progress)

    def keep_fragment(self, frame: Frame) -> None:
        """Keep a fragment of a batch that is larger than one frame, until the last one comes."""
        self._fragments.setdefault(frame.batch_id, []).extend(pickling.loads(frame.body))

    def read(self, frame: Frame, job: "BatchJob") -> None:
        """Give a job its note, and its inputs, of which an unreadable one is an error."""
        values, note = pickling.loads(frame.body)
        job.take_note(note)
        if frame.kind != Kind.ITEMS:
            job.take_inputs(self._load_shared(frame, values, job.pieces))
        elif isinstance(values, bytes):
            job.inputs = pickling.loads(values)
        else:
            items = self._fragments.pop(frame.batch_id, []) + values
            job.take_inputs([unpickle_item(item) for item in items])

    def take_freed(self) -> list[int]:
        """Return the batches that have no view left since the last call.

        There are none while a child that the model has forked still has views.
        """
        if (self.freed or self.forks) and isinstance(self._slabs, SlabViews):
            return self._slabs.take_freed()
        return []

    def _load_shared(self, frame: Frame, named: Any, pieces: list[Piece]) -> list[Any]:
        """Return views of inputs in shared memory, which is added to `pieces`."""
        slabs = self._slabs
        assert isinstance(slabs, SlabViews), "the parent knows that it shares no memory"
        memory = slabs.view(frame.batch_id)
        if frame.kind == Kind.SHARED:
            start, length, sizes, items = named
            view = memory[start : start + length]
            pieces.append(make_piece(_address_of(view), view))
            stream, buffers = view_pickle(view, sizes)
            return load_items(stream, buffers, items, pickling.describe)
        inputs: list[Any] = []
        for layout, runs in groupby(named, lambda run: unpack_layout(run[0])):
            size = layout.nbytes
            views = [memory[start : start + count * size] for _, start, count in runs]
            is_view = len(views) == 1 and not layout.is_original
            view = views[0] if is_view else self.spare.gather(views)
            rows, whole = view_rows(layout, view)
            inputs += rows
            known_rows = () if whole is None else rows
            pieces.append(make_piece(_address_of(view), view, whole, known_rows))
        return inputs


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def unpickle_item(item: bytes) -> Any:
    """Return an input that was pickled alone, or describe the error of one that is unreadable."""
    try:
        return pickling.loads(item)
    except BaseException as error:  # noqa: BLE001  unpickling is the user's code
        return pickling.describe(error)


# Frames that are a batch, or its last fragment.
BATCHES = frozenset({Kind.ATOMS, Kind.ITEMS, Kind.SHARED, Kind.ROWS})
_ORDERS = frozenset(Order)


class FramePort:
    """A `WorkerPort` that reads and writes frames."""

    def __init__(
        self,
        channel: BlockingChannel,
        progress: WorkerProgress,
        inputs: InputReader,
        encoder: ReplyEncoder,
    ) -> None:
        self._channel = channel
        self._progress = progress
        self._inputs = inputs
        self._encoder = encoder
        # Moment of the next reading of the memory on the GPU; None if none is in use.
        self._reads_gpu_at: float | None = None

    def receive_model(self) -> Any:
        """Return the body of the first frame; raise if there is no memory for large inputs."""
        first = self._channel.receive()
        self._inputs.begin(self._progress)
        return None if first is None else first.body

    def fail_start(self, error: SerializedError) -> None:
        """Send STARTUP_FAILED."""
        self._channel.send(Kind.STARTUP_FAILED, body=dumps(error))

    def report_ready(self, *course: Any) -> None:
        """Send READY."""
        self._read_gpu()
        self._channel.send(Kind.READY, body=dumps(course))

    def has_arrived(self) -> bool:
        """Return whether a frame, or a part of one, can be received."""
        return self._channel.has_arrived()

    def receive(self) -> BatchJob | Told | None:
        """Wait for a batch or an order; keep the parts of a batch until its last frame comes."""
        while True:
            frame = self._channel.receive()
            if frame is None:
                return None
            kind, batch_id = frame.kind, frame.batch_id
            if kind in BATCHES:
                self._progress.numbers[TAKEN] = batch_id + 1
                job = BatchJob(batch_id)
                if kind == Kind.ATOMS:  # reading them runs no code of the user's
                    job.inputs = pickling.loads(frame.body)
                else:
                    self._read(frame, job)
                return job
            if kind == Kind.PING:
                return BatchJob.make_ping()
            if kind in _ORDERS:
                return Order(kind), batch_id
            self._inputs.keep_fragment(frame)

    def _read(self, frame: Frame, job: BatchJob) -> None:
        try:
            self._inputs.read(frame, job)
        except BaseException as error:  # noqa: BLE001  a dtype may be the user's code, too
            job.fail(Failed.FOR_GOOD, pickling.describe(error))
            forget_frames(error)

    def answer(self, job: BatchJob) -> None:
        """Send the outputs of a batch, or its error; or the answer to a ping."""
        if job.batch_id == PING_ID:
            self._answer_ping()
            return
        inputs, report = self._inputs, None
        # If the model keeps no view of the batch, its memory is free when the answer arrives.
        if job.failed or job.step or job.elements[1] or inputs.freed or inputs.forks:
            report = Report(job.failed, job.elements, job.step, inputs.take_freed())
        outputs, job.outputs = job.outputs, []
        if job.errors:
            outputs = job.spread(outputs)
        frames = self._encoder.pack(outputs, job.errors, report)
        del outputs
        for kind, body in frames:
            self._channel.send(kind, job.batch_id, body, job.seconds)
        # The outputs may have been the last views.
        if inputs.freed or inputs.forks:
            self.report_freed()
        if self._reads_gpu_at is not None and monotonic() >= self._reads_gpu_at:
            self._read_gpu()

    def _read_gpu(self) -> None:
        """Note the memory on the GPU for the parent."""
        self._progress.numbers[GPU_BYTES] = count = find_gpu()[1]
        # Once a second: PyTorch takes up to 0.1 ms.
        self._reads_gpu_at = monotonic() + 1.0 if count else None

    def _answer_ping(self) -> None:
        self._encoder.give_back_unused()
        self._inputs.spare.rest()
        self._read_gpu()
        self._channel.send(Kind.PONG)

    def report_freed(self) -> None:
        """Send a report, if there is something to report."""
        freed = self._inputs.take_freed()
        if freed:
            self._channel.send(Kind.ITEMS, body=dumps((None, Report(freed=freed))))
