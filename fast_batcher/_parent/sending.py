"""Batches to workers and their answers, as frames or in shared memory. Parent, event loop's thread.

A batch is usually one frame. The other paths in this module serve a batch with an input that cannot
be pickled, a batch larger than a frame, and large inputs, which go through memory that is shared
with the workers. The sender does not choose batches, which the scheduler does. `read_outcomes` and
`read_shared_outcomes` read what comes back.
"""

import functools
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fast_batcher._core.values import Batch, Failure, Request, most_batches
from fast_batcher._parent.staging import (
    MOST_AT_ONCE,
    CopyState,
    InputArena,
    MemoryService,
    StagedInput,
)
from fast_batcher._parent.worker_process import WorkerHandle
from fast_batcher._process import SLOW, monotonic
from fast_batcher._shared_memory.inputs import Section, Slab, Slabs
from fast_batcher._shared_memory.outbox import Answer, OutboxReader
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import KIND_NAMES, Frame, Kind, Reservation
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
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

Send = Callable[[int, int, bytes], None]
# Sends a batch once its inputs are copied; the argument says whether a copy has failed.
Fill = Callable[[bool], None]


class SenderEvents(Protocol):
    """Events that a sender reports to its listener, on the loop's thread."""

    def inputs_unsendable(
        self, batch: Batch, unsendable: list[tuple[Request, BatcherError]], /
    ) -> None:
        """Inputs of a batch that `send` has taken turn out not to be sendable."""


class InputPickler(Protocol):
    """Pickles inputs; see `OutOfBandPickler`."""

    def pickle(
        self, values: list[Any], may_share: Callable[[], bool]
    ) -> list[bytes] | OutOfBandPickle:
        """Pickle the values of a batch, in one of two forms."""

    def dumps(self, value: Any) -> bytes:
        """Pickle one value in-band."""


class BatchSender:
    """Sends batches to ready workers, and keeps the leases on shared inputs."""

    def __init__(
        self,
        settings: Settings,
        memory: MemoryService,
        workers: Mapping[int, WorkerHandle],
        events: SenderEvents,
        name: str,
        pickler: InputPickler | None = None,
    ) -> None:
        self._max_frame_bytes = settings.max_frame_bytes
        self._memory = memory
        # The pool's records of workers, by id.
        self._workers = workers
        self._events = events
        self._name = name
        self._has_warned = False
        # Copies large inputs into shared memory on arrival.
        self.arena = InputArena(memory, settings, self._warn)
        self._pickler: InputPickler = pickler or make_pickler(settings)
        self._watch = PicklingWatch(name)

    def send(
        self, batch: Batch, contexts: Sequence[bytes] = ()
    ) -> list[tuple[Request, BatcherError]]:
        """Send a batch to its worker; return the requests whose input cannot be sent.

        The caller removes these from the batch; the worker gets the others.
        """
        requests = batch.requests
        worker = self._workers[batch.worker]
        group = requests[0].group
        if contexts or (group is not None and group.method is not None):
            self._announce(batch, contexts)
        if requests[0].staged is not None and self._send_staged(batch, worker):
            return []
        values = [request.value for request in requests]
        if worker.takes_values:
            worker.send(Kind.VALUES, batch.id, values)
            return []
        body = dump_atoms(values, LEAST_SHARED)
        if body is not None and len(body) <= self._max_frame_bytes:
            worker.send(Kind.INPUT_ATOMS, batch.id, body)
            return []
        return self._send_apart(batch, values, worker)

    def _announce(self, batch: Batch, contexts: Sequence[bytes]) -> None:
        """Send what precedes the inputs of a batch: its contexts, and its method."""
        worker = self._workers[batch.worker]
        if contexts:
            worker.send(Kind.CONTEXTS, batch.id, dumps(contexts))
        group = batch.requests[0].group
        if group is not None and group.method is not None:
            worker.send(Kind.METHOD, batch.id, group.method.name.encode())

    def _send_apart(
        self, batch: Batch, values: list[Any], worker: WorkerHandle
    ) -> list[tuple[Request, BatcherError]]:
        """Pickle the inputs one by one, and send them through the pipe or shared memory."""
        for request in batch.requests:
            if request.staged is not None:  # staged inputs are used only if all inputs are staged
                request.staged.release()
        pickled: list[bytes] | OutOfBandPickle | None
        began_at = monotonic()
        try:
            pickled = self._pickler.pickle(values, self._has_shared_memory)
        except BaseException:  # noqa: BLE001  user code; `_send_items` finds the input that raised
            pickled = None
        self._watch.check(began_at)
        if isinstance(pickled, OutOfBandPickle):
            self.arena.enable()
            # The limit of a single output: a model may return its input.
            fits = pickling.fits(pickled.size, self._max_frame_bytes)
            if fits and self._send_shared(batch, pickled, worker):
                return []
            pickled.release()
        elif pickled is not None:
            body = dumps(pickled)
            if len(body) <= self._max_frame_bytes:
                worker.send(Kind.INPUTS, batch.id, body)
                return []
        return self._send_items(batch, worker.send)

    def _send_items(self, batch: Batch, send: Send) -> list[tuple[Request, BatcherError]]:
        """Send a batch through the pipe in one or more frames; return the unsendable requests."""
        items: list[bytes | SerializedError] = []
        unsendable: list[tuple[Request, BatcherError]] = []
        for request in batch.requests:
            item = dump_input(self._pickler, request.value, self._max_frame_bytes)
            if isinstance(item, bytes):
                items.append(item)
            else:
                unsendable.append((request, item))
        if items:
            bodies = list(pickling.fragment(items, self._max_frame_bytes))
            for body in bodies[:-1]:
                send(Kind.INPUTS_FRAGMENT, batch.id, body)
            send(Kind.INPUTS, batch.id, bodies[-1])
        return unsendable

    def skip(self, batch: Batch) -> None:
        """Let the worker of a batch not compute it, unless it has begun; a stream leaves."""
        worker = self._workers[batch.worker]
        if worker.model_spec.is_stepped:
            worker.send(Kind.LEAVE, batch.id, b"")
        else:
            worker.skip(batch.id)

    def tell(self, batch: Batch, kind: int) -> None:
        """Tell the worker of a stream that it pauses or resumes."""
        self._workers[batch.worker].send(kind, batch.id, b"")

    def free(self, worker_id: int, frame: Frame) -> None:
        """End the leases of the batches that a worker names in a FREED frame."""
        leases = self._workers[worker_id].leases
        for batch_id in loads(frame.body):
            del leases[batch_id]

    # Shared memory.

    def _has_shared_memory(self) -> bool:
        """Return whether there is shared memory; warn once if it could not be made."""
        slabs = self._memory.slabs
        if isinstance(slabs, OSError):
            self._warn(slabs)
        return isinstance(slabs, Slabs)

    def _send_staged(self, batch: Batch, worker: WorkerHandle) -> bool:
        """Send a batch if all of its inputs are staged; otherwise return False and do nothing."""
        inputs: list[StagedInput] = []
        leased: dict[Slab, None] = {}
        for request in batch.requests:
            staged: StagedInput | None = request.staged
            slab = None if staged is None else staged.slab
            if staged is None or slab is None:
                return False
            inputs.append(staged)
            leased[slab] = None
        frame = (Kind.STAGED_INPUTS, batch.id, dumps(_name_runs(inputs)))
        pending = [staged for staged in inputs if staged.state is not CopyState.COPIED]
        if pending:
            fill = functools.partial(self._fill, worker, worker.reserve(), batch, frame)
            for staged in pending:
                staged.when_copied = functools.partial(_fill_if_copied, pending, fill)
        else:
            worker.send(*frame)
        # After the send, so that the worker wakes up meanwhile.
        worker.leases[batch.id] = [*leased]
        for slab in leased:
            self.arena.close_slab(slab)
        for staged in inputs:
            staged.release()
        return True

    def _send_shared(self, batch: Batch, pickled: OutOfBandPickle, worker: WorkerHandle) -> bool:
        """Send a batch; if there is no room for it, return False and do nothing."""
        slabs = self._memory.slabs
        assert isinstance(slabs, Slabs), "`_has_shared_memory` was True"
        whole = slabs.take(pickled.size)
        if whole is None:
            self._warn(self._describe_no_room(slabs, pickled.size))
            return False
        named = dumps((whole.start, whole.length, pickled.sizes, pickled.items))
        frame = (Kind.SHARED_INPUTS, batch.id, named)
        if pickled.size > MOST_AT_ONCE:
            fill = functools.partial(self._fill, worker, worker.reserve(), batch, frame)
            self._memory.run_in_thread(
                functools.partial(_write_pickle, slabs, whole, pickled),
                functools.partial(self._finish, slabs, whole, fill),
            )
        else:
            try:
                slabs.write(whole, pickled, releases_gil=False)
            except OSError as error:
                slabs.mark_uncommitted(whole)
                self._warn(error)
                return False
            pickled.release()
            worker.send(*frame)
        worker.leases[batch.id] = [whole.slab]
        return True

    def _finish(
        self, slabs: Slabs, whole: Section, fill: Fill, error: BaseException | None
    ) -> None:
        """Send a batch after its copy on the copier thread. Loop's thread."""
        if error is not None:
            slabs.mark_uncommitted(whole)
            self._warn(error)
        fill(error is not None)

    def _fill(
        self,
        worker: WorkerHandle,
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

    def _fill_in_band(self, worker: WorkerHandle, reservation: Reservation, batch: Batch) -> None:
        """Send a batch through the pipe, at its reserved position."""
        frames: list[tuple[int, int, bytes]] = []
        unsendable = self._send_items(batch, lambda *frame: frames.append(frame))
        if unsendable:
            self._events.inputs_unsendable(batch, unsendable)
        worker.fill(reservation, frames)

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
                # As text: a record that is kept would keep the error's frames, and their slabs.
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


def dump_input(pickler: InputPickler, value: Any, max_frame_bytes: int) -> bytes | BatcherError:
    """Pickle one input, or return the error of an input that cannot be sent."""
    try:
        item = pickler.dumps(value)
    except BaseException as error:  # noqa: BLE001  pickling is the user's code
        reason = pickling.one_line(error)
        # An open file may be inside of the input.
        named = _UNPICKLED.search(reason)
        is_file = hasattr(type(value), "read") or (named is not None and hasattr(io, named[1]))
        remedy = (
            "read the file first, as await upload.read(), and send its bytes"
            if is_file
            else "send plain data instead"
        )
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


# Answers.

# Frames that are one failure for every request of their batch.
FAILURE_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL, Kind.FAILED})


class OutcomeReader:
    """Turns what a worker has pickled for one request into its outcome."""

    def read_item(self, item: bytes) -> Any:
        """Return the output in a separate pickle, or the `Failure` of one that cannot be read."""
        try:
            return loads(item)
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code
            return _unreadable(error)

    def read_error(self, error: SerializedError) -> Failure:
        """Return the failure for one request."""
        return Failure(error.to_error())


def read_outcomes(
    frame: Frame, earlier: list[Any] | None, count: int, reader: OutcomeReader
) -> list[Any]:
    """Read the outcomes of a batch, by position."""
    if frame.kind == Kind.OUTPUT_ATOMS:
        outcomes: list[Any] = loads(frame.body)
    else:
        outcomes = _read_apart(frame, earlier, count, reader)
    if len(outcomes) != count:
        raise _wrong_count(len(outcomes), count)
    return outcomes


def _read_apart(
    frame: Frame, earlier: list[Any] | None, count: int, reader: OutcomeReader
) -> list[Any]:
    """Read the outcomes of a batch one by one."""
    if frame.kind == Kind.OUTPUT_VALUES:
        return [
            reader.read_error(value) if type(value) is SerializedError else value
            for value in frame.body
        ]
    if frame.kind == Kind.OUTPUTS:
        return [
            reader.read_item(item)
            if isinstance(item, bytes)
            else reader.read_error(_read_error(item))
            for item in (earlier or []) + loads(frame.body)
        ]
    if frame.kind in FAILURE_KINDS:
        error = SerializedError(*loads(frame.body))
        return [reader.read_error(error) for _ in range(count)]
    raise TransportError(f"a worker answered with {KIND_NAMES[frame.kind]}")


class SharedOutcomes(NamedTuple):
    """Outcomes of a batch that are still in an outbox."""

    # The outputs; ignored at the positions of errors.
    answer: Answer
    # The errors by position.
    errors: dict[int, SerializedError]

    def read(self, count: int) -> list[Any]:
        """Copy the outcomes out, unless that was done before, and free their memory."""
        outcomes = self.answer.load(_unreadable)
        if len(outcomes) != count:
            raise _wrong_count(len(outcomes), count)
        for position, failure in self.read_errors().items():
            if position >= count:
                raise TransportError(f"an error came back for input {position} of {count}")
            outcomes[position] = failure
        return outcomes

    def read_errors(self) -> dict[int, Failure]:
        """Return the failures by position."""
        try:
            return {
                int(position): Failure(SerializedError(*error).to_error())
                for position, error in self.errors.items()
            }
        except (AttributeError, TypeError, ValueError) as raised:
            text = f"errors came back that are not errors: {one_line(raised)}"
            raise TransportError(text) from raised


def read_shared_outcomes(frame: Frame, outbox: OutboxReader | None) -> SharedOutcomes:
    """Find the outcomes that a worker has left in its outbox."""
    start, sizes, frozen, items, errors = loads(frame.body)
    if outbox is None:
        raise TransportError("a worker without an outbox announced an answer in its outbox")
    return SharedOutcomes(outbox.find(start, sizes, frozen, items), errors)


def _read_error(item: Any) -> SerializedError:
    try:
        return SerializedError(*item)
    except TypeError:
        text = f"the output cannot be unpickled: it is a {type(item).__name__}"
        return SerializedError(text, "", None)


def _wrong_count(found: int, count: int) -> TransportError:
    return TransportError(f"{found} outcomes came back for {count} requests")


def _unreadable(error: BaseException) -> Failure:
    text = f"the output cannot be unpickled: {one_line(error)}"
    return Failure(InferenceError(text))
