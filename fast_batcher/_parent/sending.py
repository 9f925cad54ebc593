"""Batches to workers and their answers, as frames or in shared memory. Parent, event loop's thread.

    opening --compute--> FrameWorker --> BatchSender --frames--> worker
    opening <--BatchEvents-- FrameWorker <--frames-- worker

A batch is usually one frame. The other paths of `BatchSender` serve a batch with an input that
cannot be pickled, a batch larger than a frame, and large inputs, which go through memory that is
shared with the workers. The sender does not choose batches, which the scheduler does.
"""

import functools
import io
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from fast_batcher._core.values import Batch, Failure, Order, Report, most_batches
from fast_batcher._parent.staging import (
    LARGEST_COPY_ON_LOOP,
    CopyState,
    InputArena,
    MemoryService,
    StagedInput,
)
from fast_batcher._parent.worker_handle import Outcomes, Unsendable, WorkerHandle, WorkerState
from fast_batcher._process import SLOW, monotonic
from fast_batcher._shared_memory import outbox
from fast_batcher._shared_memory.inputs import Section, Slab, Slabs
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import KIND_NAMES, Frame, Frames, Kind, Reservation
from fast_batcher._transport.pickling import (
    LEAST_SHARED,
    OutOfBandPickle,
    OutOfBandPickler,
    SerializedError,
    dump_atoms,
    dumps,
    loads,
    one_line,
)
from fast_batcher.errors import (
    BatcherError,
    InferenceError,
    RequestTooLargeError,
    TransportError,
    UnsendableValueError,
)
from fast_batcher.model import ModelKind
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

# Sends a batch once its inputs are copied; the argument says whether a copy has failed.
Fill = Callable[[bool], None]


def decode(item: Any) -> Any:
    """Return the output, or the `Failure`, that a worker has pickled for one request."""
    try:
        if isinstance(item, bytes):
            return loads(item)
        return Failure(SerializedError(*item).to_error())
    except BaseException as error:  # noqa: BLE001  unpickling is the user's code
        return _unreadable(error)


def _unreadable(error: BaseException) -> Failure:
    return Failure(InferenceError(f"the output cannot be unpickled: {one_line(error)}"))


class BatchSender:
    """Sends the batches of an opening to its ready workers."""

    # Makes the outcome of one request. A host leaves it to the caller.
    decode = staticmethod(decode)

    def __init__(
        self,
        settings: Settings,
        memory: MemoryService,
        workers: Mapping[int, Any],
        name: str,
        pickler: OutOfBandPickler | None = None,
    ) -> None:
        self._max_frame_bytes = settings.max_frame_bytes
        self._memory = memory
        # The pool's records of workers, by id: each is a `FrameWorker`.
        self._workers = workers
        self._name = name
        self._has_warned = False
        # Copies large inputs into shared memory on arrival.
        self.arena = InputArena(memory, settings, self._warn)
        self._pickler = pickler or make_pickler(settings)
        self._watch = PicklingWatch(name)

    def send(self, worker: "FrameWorker", batch: Batch, values: list[Any]) -> None:
        """Send a batch that is not of atoms; report the inputs that cannot be sent."""
        if batch.requests[0].staged is None or not self._send_staged(batch, worker):
            self._send_apart(batch, values, worker)

    def _send_apart(self, batch: Batch, values: list[Any], worker: "FrameWorker") -> None:
        """Pickle the inputs one by one, and send them through the pipe or shared memory."""
        self._release_staged(batch)
        pickled: list[bytes] | OutOfBandPickle | None
        began_at = monotonic()
        try:
            pickled = self._pickler.pickle(values, self._has_shared_memory)
        except BaseException:  # noqa: BLE001  user code; `_pack_items` finds the input that raised
            pickled = None
        self._watch.check(began_at)
        if isinstance(pickled, OutOfBandPickle):
            self.arena.enable()
            # The limit of a single output: a model may return its input.
            fits = pickling.fits(pickled.size, self._max_frame_bytes)
            if fits and self._send_shared(batch, pickled, worker):
                return
            pickled.release()
        elif pickled is not None:
            body = dumps((pickled, batch.make_note()))
            if len(body) <= self._max_frame_bytes:
                worker.send(Kind.ITEMS, batch.id, body)
                return
        for frame in self._pack_items(batch, worker):
            worker.send(*frame)

    def _release_staged(self, batch: Batch) -> None:
        """Free the staged inputs of a batch, which are used only if all inputs are staged."""
        for request in batch.requests:
            if request.staged is not None:
                request.staged.release()

    def _pack_items(self, batch: Batch, worker: "FrameWorker") -> Frames:
        """Pack a batch for the pipe as one or more frames, none if no input can be sent."""
        items, unsendable = dump_inputs(self._pickler, batch, self._max_frame_bytes)
        if unsendable:
            worker.listener.inputs_unsendable(batch, unsendable)
        if not items:
            return []
        parts = [
            (Kind.PART, batch.id, part) for part in pickling.fragment(items, self._max_frame_bytes)
        ]
        return [*parts, (Kind.ITEMS, batch.id, dumps(([], batch.make_note())))]

    # Shared memory.

    def _has_shared_memory(self) -> bool:
        """Return whether there is shared memory; warn once if it could not be made."""
        slabs = self._memory.slabs
        if isinstance(slabs, OSError):
            self._warn(slabs)
        return isinstance(slabs, Slabs)

    def _send_staged(self, batch: Batch, worker: "FrameWorker") -> bool:
        """Send a batch if all of its inputs are staged; otherwise return False and do nothing."""
        inputs: list[StagedInput] = []
        leased: list[Slab] = []
        for request in batch.requests:
            staged: StagedInput | None = request.staged
            slab = None if staged is None else staged.slab
            if staged is None or slab is None:
                return False
            inputs.append(staged)
            leased.append(slab)
        frame = (Kind.ROWS, batch.id, dumps((_name_runs(inputs), batch.make_note())))
        pending = [staged for staged in inputs if staged.state is not CopyState.COPIED]
        if pending:
            fill = functools.partial(self._fill, worker, worker.reserve(), batch, frame)
            for staged in pending:
                staged.when_copied = functools.partial(_fill_if_copied, pending, fill)
        else:
            worker.send(*frame)
        # This comes after the send, so that the worker wakes up meanwhile.
        worker.leases[batch.id] = leased
        for staged in inputs:
            if staged.opened is not None:
                self._memory.close_slab(staged.opened)
            staged.release()
        return True

    def _send_shared(self, batch: Batch, pickled: OutOfBandPickle, worker: "FrameWorker") -> bool:
        """Send a batch; if there is no room for it, return False and do nothing."""
        slabs = self._memory.slabs
        assert isinstance(slabs, Slabs), "`_has_shared_memory` was True"
        whole = slabs.take(pickled.size)
        if whole is None:
            self._warn(self._describe_no_room(slabs, pickled.size))
            return False
        named = (whole.start, whole.length, pickled.sizes, pickled.items)
        frame = (Kind.SHARED, batch.id, dumps((named, batch.make_note())))
        if pickled.size > LARGEST_COPY_ON_LOOP:
            fill = functools.partial(self._fill, worker, worker.reserve(), batch, frame)
            self._memory.run_in_thread(
                functools.partial(_write_pickle, slabs, whole, pickled),
                functools.partial(self._finish, fill),
            )
        else:
            try:
                slabs.write(whole, pickled, releases_gil=False)
            except OSError as error:
                self._warn(error)
                return False
            pickled.release()
            worker.send(*frame)
        worker.leases[batch.id] = [whole.slab]
        return True

    def _finish(self, fill: Fill, error: BaseException | None) -> None:
        """Send a batch after its copy on the copier thread. Loop's thread."""
        if error is not None:
            self._warn(error)
        fill(error is not None)

    def _fill(
        self,
        worker: "FrameWorker",
        reservation: Reservation,
        batch: Batch,
        frame: tuple[int, int, bytes],
        has_failed: bool,
    ) -> None:
        """Send a batch at its reserved position; through the pipe if a copy has failed."""
        if not worker.is_alive:  # and its leases have ended
            return
        if has_failed:
            del worker.leases[batch.id]
            self._fill_in_band(worker, reservation, batch)
        else:
            worker.fill(reservation, [frame])

    def _fill_in_band(self, worker: "FrameWorker", reservation: Reservation, batch: Batch) -> None:
        """Send a batch through the pipe, at its reserved position."""
        worker.fill(reservation, self._pack_items(batch, worker))

    def _describe_no_room(self, slabs: Slabs, size: int) -> str:
        text = (
            f"{size} bytes find no room, {slabs.taken_bytes} of max_shared_bytes={slabs.size} are "
            "taken"
        )
        kept = max(
            len(worker.leases) - most_batches(worker.stages) for worker in self._workers.values()
        )
        if kept > 0:
            text += (
                "; the model, or a process that it has forked in infer, keeps views of the inputs "
                f"of at least {kept} batches: keep copies (array.copy(), tensor.clone()) instead, "
                "and fork in the constructor"
            )
        return text

    def _warn(self, reason: BaseException | str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs go through a pipe, which is slower, while there is no shared "
                "memory for them: %s",
                self._name,
                # The reason is a text: a record that is kept would keep the error's frames, and
                # their slabs.
                str(reason),
            )


def _fill_if_copied(pending: list[StagedInput], fill: Fill) -> None:
    """Send a batch if none of its staged inputs is still being copied."""
    states = {staged.state for staged in pending}
    if CopyState.COPYING not in states:
        fill(CopyState.FAILED in states)


def _name_runs(inputs: list[StagedInput]) -> list[tuple[bytes, int, int]]:
    """Return layout, start and number of the inputs of each contiguous run."""
    runs: list[tuple[bytes, int, int]] = []
    layout, start, end, count = inputs[0].layout, inputs[0].start, inputs[0].start, 0
    for staged in inputs:
        if staged.start != end or staged.layout != layout:
            runs.append((layout, start, count))
            layout, start, count = staged.layout, staged.start, 0
        count += 1
        end = staged.end
    runs.append((layout, start, count))
    return runs


def _write_pickle(slabs: Slabs, whole: Section, pickled: OutOfBandPickle) -> None:
    """Copy a batch on the copier thread."""
    try:
        slabs.write(whole, pickled, releases_gil=True)
    finally:
        # Released here, not with the last reference, because the inputs are locked until then.
        pickled.release()


class PicklingWatch:
    """Warns once if pickling inputs blocks the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_warned = False

    def check(self, began_at: float) -> None:
        """Warn if pickling that began at this moment has taken too long."""
        seconds = monotonic() - began_at
        if seconds > SLOW and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: pickling inputs took %.3g seconds, and the event loop with all its requests "
                "waited; send bytes or an array instead, for example an image file that is not "
                "decoded yet, and decode it in the model's prepare (docs/stages.md)",
                self._name,
                seconds,
            )


def make_pickler(settings: Settings) -> OutOfBandPickler:
    """Make the pickler of inputs, which arrive in the worker as writable arrays."""
    return OutOfBandPickler(settings.shared_memory_threshold, makes_writable=True)


# Python 3.13 omits the module of an open file: 'TextIOWrapper' instead of '_io.TextIOWrapper'.
_UNPICKLED = re.compile(r"cannot pickle '(?:_io\.)?(\w+)'")


def dump_input(pickler: OutOfBandPickler, value: Any, max_frame_bytes: int) -> bytes | BatcherError:
    """Pickle one input, or return the error of an input that cannot be sent."""
    try:
        item = pickler.dumps(value)
    except BaseException as error:  # noqa: BLE001  pickling is the user's code
        reason = pickling.one_line(error)
        # An open file or a coroutine may be inside of the input.
        named = _UNPICKLED.search(reason)
        culprit = "" if named is None else named[1]
        if hasattr(type(value), "read") or hasattr(io, culprit):
            remedy = "read the file first, as await upload.read(), and send its bytes"
        elif culprit == "coroutine":
            remedy = "await the coroutine, and send its result"
        else:
            remedy = "send plain data instead"
        unsendable_error = UnsendableValueError(
            f"the input, a {type(value).__qualname__}, cannot be pickled ({reason}), so it cannot "
            f"reach the worker process; {remedy}"
        )
        unsendable_error.__cause__ = pickling.to_cause(error)
        return unsendable_error
    if not pickling.fits(len(item), max_frame_bytes):
        return RequestTooLargeError(
            f"the input takes {len(item)} bytes, more than max_frame_bytes={max_frame_bytes} allows"
        )
    return item


def dump_inputs(
    pickler: OutOfBandPickler, batch: Batch, max_frame_bytes: int
) -> tuple[list[bytes], Unsendable]:
    """Pickle the inputs of a batch one by one; return the requests that cannot be sent apart."""
    items: list[bytes] = []
    unsendable: Unsendable = []
    for request in batch.requests:
        item = dump_input(pickler, request.value, max_frame_bytes)
        if isinstance(item, bytes):
            items.append(item)
        else:
            unsendable.append((request, item))
    return items, unsendable


# Answers.


class SharedOutcomes:
    """The `Outcomes` of a batch that a worker has left in its outbox."""

    def __init__(
        self, place: Any, outbox: outbox.OutboxReader | None, decode: Callable[[Any], Any]
    ) -> None:
        self._place = place
        self._decode = decode
        self._outbox = outbox
        self._is_dropped = False

    @cached_property
    def _found(self) -> tuple[outbox.Answer, int, Any]:
        """The outputs, their number, and the errors by position."""
        start, sizes, frozen, items, errors = self._place
        if self._outbox is None:
            raise TransportError("a worker without an outbox announced an answer in its outbox")
        return self._outbox.find(start, sizes, frozen, items), len(items), errors

    @property
    def size(self) -> int:
        """Bytes of the outputs."""
        return self._found[0].size

    def copy(self) -> None:
        """Copy the outputs out of the outbox, before they are read. Any thread."""
        self._found[0].copy(releases_gil=True)

    def drop(self) -> None:
        """Free the memory of the outputs: None is read in their place."""
        self._found[0].release()
        self._is_dropped = True

    def __call__(self) -> list[Any]:
        """Return the outcomes, and free their memory."""
        answer, count, errors = self._found
        outcomes = [None] * count if self._is_dropped else answer.load(_unreadable)
        try:
            for position, error in errors.items():
                outcomes[position] = self._decode(SerializedError(*error))
        except (AttributeError, TypeError, IndexError) as raised:
            text = f"errors came back that are not errors of this batch: {one_line(raised)}"
            raise TransportError(text) from raised
        return outcomes


# Read for each frame: on Python 3.11 a member of an enumeration costs as much as a call.
_READY = WorkerState.READY


class FrameWorker(WorkerHandle):
    """A worker that gets batches, and answers them, in frames."""

    def __init__(self, sender: BatchSender, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sender = sender
        # Slabs that it may still view, by batch id; set by the sender.
        self.leases: dict[int, list[Slab]] = {}
        # Outcomes from PART frames, until the last frame of their batch: a worker
        # answers one batch at a time.
        self._fragments: list[Any] = []
        self._has_steps = self.model_spec.kind is ModelKind.STEPS
        self._has_costs = self._has_steps and self._settings.max_batch_cost is not None

    # Frames to the worker, as in `LoopChannel`; frames to a dead worker are dropped.

    @abstractmethod
    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        """Send a frame without waiting."""

    @abstractmethod
    def reserve(self) -> Reservation:
        """Reserve a position for frames that are not ready yet; later frames wait behind it."""

    @abstractmethod
    def fill(self, reservation: Reservation, frames: Frames) -> None:
        """Send zero or more frames at the position that was reserved for them."""

    def compute(self, batch: Batch) -> None:
        """Send a batch; one of small numbers and texts is a single pickle."""
        first = batch.requests[0]
        is_noted = batch.contexts or first.group or first.session or self._has_costs
        values = [request.value for request in batch.requests]
        body = dump_atoms(values, LEAST_SHARED)
        if body is not None and is_noted:
            body = dumps((body, batch.make_note()))
        if body is not None and len(body) <= self._settings.max_frame_bytes:
            self.send(Kind.ITEMS if is_noted else Kind.ATOMS, batch.id, body)
        else:
            self._sender.send(self, batch, values)

    def order(self, order: Order, batch_id: int = 0) -> None:
        """Send an order."""
        self.send(order, batch_id, b"")

    # Frames from the worker.

    def _dispatch(self, frame: Frame) -> None:
        """Report a frame according to the state: see `WorkerState`."""
        kind, batch_id, seconds, body = frame
        if self.state is not _READY:
            if self.state is WorkerState.LOADING:
                self._finish_loading(kind, body)
        elif kind == Kind.ATOMS:
            self.listener.reported(self.id, batch_id, seconds, functools.partial(loads, body))
        else:
            self._take_other(*frame)

    def _take_other(self, kind: int, batch_id: int, seconds: float, body: Any) -> None:
        """Handle a frame that does not answer a batch with atoms alone."""
        if kind == Kind.PART:
            self._fragments += loads(body)
        elif kind == Kind.PONG:
            self._events.worker_answers(self)
        elif kind in (Kind.ITEMS, Kind.SHARED):
            values, report = loads(body)
            if report is not None:
                self._take_report(batch_id, report)
            if values is not None:
                answer = self._make_answer(kind, values)
                self.listener.reported(self.id, batch_id, seconds, answer, report)
        else:
            raise TransportError(f"a worker answered with {KIND_NAMES[kind]}")

    def _take_report(self, batch_id: int, report: Report) -> None:
        for found in report.freed:
            del self.leases[found]

    def _make_answer(self, kind: int, values: Any) -> Outcomes:
        decode = self._sender.decode
        if kind == Kind.SHARED:
            return SharedOutcomes(values, self.outbox, decode)
        if isinstance(values, bytes):
            return functools.partial(loads, values)
        items, self._fragments = self._fragments + values, []
        return lambda: [decode(item) for item in items]

    def _finish_loading(self, kind: int, body: Any) -> None:
        if kind == Kind.READY:
            self._loaded(*loads(body))
        elif kind == Kind.STARTUP_FAILED:
            self._start_failed(SerializedError(*loads(body)))
        else:
            raise TransportError(f"a worker that is not ready sent {KIND_NAMES[kind]}")

    # End.

    def _end_leases(self, inherited: int | None) -> None:
        """End the leases of the dead worker; its children may view batches up to `inherited`."""
        for batch_id, leased in self.leases.items():
            if inherited is not None and batch_id <= inherited:
                for slab in leased:
                    slab.leak()
        self.leases.clear()
