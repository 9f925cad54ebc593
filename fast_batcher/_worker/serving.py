"""Main loop of a worker: receive a batch, call the model's `infer`, send the outputs.

Runs in a worker process, on its main thread, one batch at a time. It makes no decisions about
requests: the parent forms batches, and decides what follows from a failure.
"""

import ctypes
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any

from fast_batcher._arrays import stacking
from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._batch_contexts import BatchContexts
from fast_batcher._shared_memory.layouts import unpack_layout, view_rows
from fast_batcher._shared_memory.views import SlabViews
from fast_batcher._transport import codec
from fast_batcher._transport.blocking_channel import BlockingChannel
from fast_batcher._transport.codec import SerializedError
from fast_batcher._transport.frames import Frame, Kind, pack_header
from fast_batcher._transport.pickler import load_items, view_pickle
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.out_of_memory import free_memory
from fast_batcher._worker.replies import Reply, ReplyEncoder
from fast_batcher.errors import (
    cuda_message,
    forget_frames,
    is_out_of_memory,
)

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_INPUT_ATOMS, _INPUTS, _SHARED_INPUTS = Kind.INPUT_ATOMS, Kind.INPUTS, Kind.SHARED_INPUTS


class InputReader:
    """Reads the inputs of batches, and reports batches whose shared memory is free.

    Args:
        slabs: Shared memory with large inputs, or None.
    """

    def __init__(self, slabs: SlabViews | None) -> None:
        self._slabs = slabs
        # Inputs from INPUTS_FRAGMENT frames, by batch id, until the last frame of the batch.
        self._fragments: dict[int, list[bytes]] = {}

    def keep_fragment(self, frame: Frame) -> None:
        """Keep a fragment of a batch that is larger than one frame, until the last one comes."""
        self._fragments.setdefault(frame.batch_id, []).extend(codec.loads(frame.body))

    def read(self, frame: Frame) -> tuple[list[Any], dict[int, SerializedError]]:
        """Return the inputs of a batch that can be unpickled, and the errors of the others.

        Inputs in shared memory are lent to `stack` until `forget_lent`.
        """
        if frame.kind is _INPUT_ATOMS:
            return codec.loads(frame.body), {}
        if frame.kind is _INPUTS:
            items = self._fragments.pop(frame.batch_id, []) + codec.loads(frame.body)
            values = [_unpickle_item(item) for item in items]
        else:
            values = self._load_shared(frame)
        errors = {at: one for at, one in enumerate(values) if type(one) is SerializedError}
        if errors:
            values = [one for one in values if type(one) is not SerializedError]
        return values, errors

    def forget_lent(self) -> None:
        """Take back the memory lent to `stack`, after the batch has been computed."""
        stacking.lent.clear()

    def pack_freed(self) -> bytes:
        """Return a FREED frame with the batches that have no view left; empty without any."""
        slabs = self._slabs
        if slabs is None or not (slabs.freed or slabs.forks):
            return b""
        freed = slabs.take_freed()
        if not freed:  # a child that the model has forked still has views
            return b""
        body = codec.dumps(freed)
        return pack_header(Kind.FREED, len(body), 0, 0.0) + body

    def _load_shared(self, frame: Frame) -> list[Any]:
        """Return views of inputs in shared memory; a `SerializedError` for an unreadable one."""
        slabs = self._slabs
        assert slabs is not None, "the parent knows that it shares no memory"
        named = codec.loads(frame.body)
        memory = slabs.view(frame.batch_id)
        if frame.kind is _SHARED_INPUTS:
            start, length, sizes, items = named
            view = memory[start : start + length]
            stacking.lend(_address_of(view), view)
            stream, buffers = view_pickle(view, sizes)
            return load_items(stream, buffers, items, codec.describe)
        inputs: list[Any] = []
        for packed, start, count in named:
            layout = unpack_layout(packed)
            view = memory[start : start + count * layout.nbytes]
            if layout.is_original:
                view = slabs.view_apart(view, start)
            rows, whole = view_rows(layout, view)
            inputs += rows
            stacking.lend(_address_of(view), view, whole, () if whole is None else rows)
        return inputs


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def _unpickle_item(item: bytes) -> Any:
    try:
        return codec.loads(item)
    except BaseException as error:  # noqa: BLE001  unpickling is the user's code
        return codec.describe(error)


# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_STOP, _PING, _INPUTS_FRAGMENT, _FATAL = Kind.STOP, Kind.PING, Kind.INPUTS_FRAGMENT, Kind.FATAL
_BEFORE_BATCH = frozenset({Kind.CONTEXTS, Kind.METHOD})
_NO_CONTEXTS = nullcontext()

# Texts of CUDA errors after which the process cannot use its device any more.
_FATAL_SIGNS = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "CUDA error",
)


class BatchLoop:
    """Main loop of a worker: answers batches with a model until the parent sends STOP.

    Args:
        channel: Channel to the parent.
        models: The model as `collate_methods` returned it, by the name of the method.
        progress: Shared memory from which the parent reads the current batches after this process
            has died.
        inputs: Reads the inputs of batches.
        encoder: Encodes outputs as frames.
    """

    def __init__(
        self,
        channel: BlockingChannel,
        models: Mapping[str, Any],
        progress: WorkerProgress,
        inputs: InputReader,
        encoder: ReplyEncoder,
    ) -> None:
        self._channel = channel
        self._models = models
        self._progress = progress
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
            freed = self._inputs.pack_freed()
            if freed:
                self._channel.send_packed(freed)
            frame = self._channel.receive()
            if frame is None or frame.kind is _STOP:
                return
            if frame.kind is _PING:
                self._channel.send(Kind.PONG)
                self._encoder.give_back_unused()
            elif frame.kind is _INPUTS_FRAGMENT:
                self._inputs.keep_fragment(frame)
            elif frame.kind in _BEFORE_BATCH:
                self._prepare(frame)
            elif self._answer(frame) is _FATAL:
                return

    def _prepare(self, frame: Frame) -> None:
        """Note what precedes a batch."""
        if frame.kind is Kind.METHOD:
            self._method = {frame.batch_id: bytes(frame.body).decode()}
        else:
            contexts = self._contexts.give_pickled(codec.loads(frame.body))
            self._given = {frame.batch_id: contexts}

    def _answer(self, frame: Frame) -> Kind:
        """Compute a batch and send its outputs; return the kind of the last frame."""
        batch_id = frame.batch_id
        self._progress.taken = batch_id
        try:
            inputs, errors = self._inputs.read(frame)
        except BaseException as error:  # noqa: BLE001  a dtype may be the user's code, too
            frames: Reply = [(Kind.FAILED, codec.dumps(codec.describe(error)))]
            seconds = 0.0
            forget_frames(error)
        else:
            self._progress.begun = batch_id
            frames, seconds = self._compute(batch_id, inputs, errors)
            del inputs
        self._inputs.forget_lent()
        # If the model keeps no view of the batch, its memory is free when the answer arrives.
        ahead = self._inputs.pack_freed()
        for kind, body in frames:
            self._channel.send(kind, batch_id, body, seconds, ahead)
            ahead = b""
        return frames[-1][0]

    def _compute(
        self, batch_id: int, inputs: list[Any], errors: dict[int, SerializedError]
    ) -> tuple[Reply, float]:
        """Call the model's `infer` on a batch, and encode its outputs or its error.

        Args:
            batch_id: The batch.
            inputs: The inputs that could be read.
            errors: Errors of the other inputs, by position in the batch.

        Returns:
            The frames that answer the batch, and the seconds that `infer` took.
        """
        # Read now: `infer` may change the list that it is given.
        count = len(inputs)
        started = monotonic()
        try:
            with self._given.pop(batch_id, _NO_CONTEXTS):
                model = self._models[self._method.pop(batch_id, "infer")]
                outputs = model.infer(inputs) if inputs else []
        except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
            seconds = monotonic() - started
            kind, failure = _judge(error)
            # A frame often keeps the error, and its frames keep the inputs.
            forget_frames(error)
            return [(kind, codec.dumps(failure))], seconds
        seconds = monotonic() - started
        checked = _check(outputs, count)
        if isinstance(checked, SerializedError):
            return [(Kind.FAILED, codec.dumps(checked))], seconds
        if errors:
            total, computed = count + len(errors), iter(checked)
            checked = [None if at in errors else next(computed) for at in range(total)]
        return self._encoder.pack(checked, errors), seconds


def _check(outputs: Any, count: int) -> list[Any] | SerializedError:
    try:
        return list_outputs(outputs, count, "infer returned", copies=False)
    except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
        return codec.describe(error)


def _judge(error: BaseException) -> tuple[Kind, SerializedError]:
    """Return the kind of frame that reports an error of `infer`, and the error as data."""
    failure = codec.describe(error)
    kind = Kind.RAISED
    if is_out_of_memory(error):
        kind = Kind.OUT_OF_MEMORY
        free_memory(error)
    elif any(sign in cuda_message(error) for sign in _FATAL_SIGNS):
        kind = Kind.FATAL
    return kind, failure
