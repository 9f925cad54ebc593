"""Reads the inputs of a batch from its frames: from the pipe, or from shared memory.

Runs in a worker process, on its main thread. An input that cannot be unpickled becomes a
`SerializedError`, so that the other inputs of its batch are computed. This module does not receive
frames, which `serving` does.
"""

import ctypes
from typing import Any

from fast_batcher._arrays import stacking
from fast_batcher._shared_memory.layouts import unpack_layout, view_rows
from fast_batcher._shared_memory.views import SlabViews
from fast_batcher._transport import codec
from fast_batcher._transport.codec import SerializedError
from fast_batcher._transport.frames import Frame, Kind, pack_header
from fast_batcher._transport.pickler import load_items, view_pickle

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
