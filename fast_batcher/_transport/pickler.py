"""Pickling that leaves large buffers where they are, so that they are copied once. Both sides.

A pickle is made as pieces: bytes of the stream, among them the value's own large `bytes` objects,
and, out of band (PEP 574), the buffers of arrays and tensors. Nothing large is copied for that, but
text has to be encoded. What is small comes as one piece, and costs less than with `pickle.dumps`:
the pickler is used again.
"""

import copyreg
import functools
import pickle
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fast_batcher._transport.slabs import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator

# From here on the pickler of CPython passes on the object itself where it has bytes to write, and
# before that it writes the stream in pieces of about this size (its FRAME_SIZE_TARGET).
PIECE_SIZE = 64 * 1024
# A pickler remembers what it has seen in a table that grows, is emptied after each use, and never
# becomes smaller: for bodies up to this length emptying it takes about a microsecond.
MOST_REUSED = 4 * 1024


class Parts:
    """One pickled value in pieces.

    Args:
        stream: The pickle itself.
        buffers: What belongs to it out of band; locked against being resized until `release`.
    """

    def __init__(self, stream: "list[bytes | memoryview]", buffers: list[memoryview]) -> None:
        self._stream = stream
        self._buffers = buffers
        # Bytes of the whole stream, and of each buffer.
        self.sizes = [sum(map(len, stream)), *(buffer.nbytes for buffer in buffers)]
        self._offsets, self.size = lay_out(self.sizes)

    def __iter__(self) -> "Iterator[tuple[int, bytes | memoryview]]":
        """Every piece, and where in a slab it begins."""
        begin = 0
        for piece in self._stream:
            yield begin, piece
            begin += len(piece)
        yield from zip(self._offsets[1:], self._buffers, strict=True)

    def join(self) -> bytes | None:
        """All of it in one, None if there is something out of band."""
        return None if self._buffers else b"".join(self._stream)

    def release(self) -> None:
        """Forget the value; nothing of it is locked any more."""
        for piece in (*self._stream, *self._buffers):
            if isinstance(piece, memoryview):
                piece.release()
        self._stream.clear()
        self._buffers.clear()


def load(view: memoryview, sizes: list[int]) -> Any:
    """The value whose parts lie in this view; its buffers are views of it, the rest is copied."""
    offsets, _ = lay_out(sizes)
    stream, *buffers = (
        view[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True)
    )
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        # An error keeps this frame, and is often kept by one of its own.
        del view, stream, buffers


class PartsPickler:
    """Pickles one value after the other; for one thread.

    Usual use, in as few calls as can be: `dump(value)`, then `chunks` has one piece and `buffers`
    none; take that, and `clear_memo()`. After any other outcome: `take_parts` or `renew`.

    Args:
        least: Bytes from which on a buffer stays where it is.
    """

    def __init__(self, least: int) -> None:
        # A longer one would be passed on by itself if it went into the stream, and not stay.
        self._least = min(least, PIECE_SIZE)
        self.chunks: list[Any] = []
        self.buffers: list[memoryview] = []
        self._reducers: _Reducers | None = None
        self.renew()

    def renew(self) -> None:
        """Forget everything, and begin with a pickler that has seen nothing."""
        self.chunks.clear()
        while self.buffers:
            self.buffers.pop().release()
        keep = functools.partial(_keep_large, self.buffers, self._least)
        pickler = pickle.Pickler(
            _Sink(self.chunks.append), pickle.HIGHEST_PROTOCOL, buffer_callback=keep
        )
        if self._reducers is not None:
            pickler.dispatch_table = self._reducers
        self.dump = pickler.dump
        self.clear_memo = pickler.clear_memo

    def take_parts(self) -> Parts:
        """What has just been pickled."""
        stream = [_to_keep(chunk) for chunk in self.chunks]
        for before, chunk in pairwise(stream):
            # Locked only now: another thread may have resized it behind the length in the stream.
            if isinstance(chunk, memoryview) and before[-8:] != len(chunk).to_bytes(8, "little"):
                del chunk
                for piece in stream:
                    if isinstance(piece, memoryview):
                        piece.release()
                self.renew()
                raise BufferError("an input was resized while it was pickled")
        parts = Parts(stream, self.buffers[:])
        self.buffers.clear()
        self.renew()
        return parts

    def learn_tensors(self) -> bool:
        """Leave the buffers of tensors too where they are; False if that is known, or no use."""
        torch = sys.modules.get("torch")
        if self._reducers is not None or torch is None or not hasattr(torch, "Tensor"):
            return False
        reduce = functools.partial(_reduce_tensor, torch, self._least)
        self._reducers = _Reducers({torch.Tensor: reduce})
        self.renew()
        return True


class _Sink:
    """What a pickler takes for a file."""

    __slots__ = ("write",)

    def __init__(self, write: Any) -> None:
        self.write = write


class _Reducers(dict[type, Any]):
    """Ours, and those that everybody has registered."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


def _keep_large(buffers: list[memoryview], least: int, buffer: pickle.PickleBuffer) -> bool:
    """Whether this buffer goes into the stream; else it is kept."""
    # Not the PickleBuffer itself: in a cycle with what it shows, CPython 3.11 crashes on it.
    view = buffer.raw()
    if view.nbytes < least:
        return True
    buffers.append(view)
    return False


def _to_keep(chunk: Any) -> "bytes | memoryview":
    if isinstance(chunk, bytes):
        return chunk
    if isinstance(chunk, bytearray):
        return memoryview(chunk)  # so that it stays as long as it is
    # Not in CPython 3.11 to 3.14, but it may be something that only shows memory of somebody else.
    return bytes(chunk)


class _Shown:
    """The bytes of a tensor, as NumPy asks for them."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        data, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


def _reduce_tensor(torch: Any, least: int, tensor: Any) -> Any:
    """A tensor of plain numbers in the memory of the CPU by its buffer, any other as it likes."""
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not vars(tensor)
        and tensor.dim() > 0
        and tensor.nbytes >= least
    )
    if is_plain:
        try:
            numpy: Any = sys.modules.get("numpy")
            # As bytes: NumPy lacks some of the types. It fails for values that are not what is in
            # their memory (conjugated, negated, quantised).
            # Not by `numpy()`: for ever after the caller could not resize the tensor.
            buffer = numpy.asarray(_Shown(tensor.view(torch.uint8)))
        except (RuntimeError, TypeError, AttributeError):
            pass
        else:
            shape = tuple(tensor.shape)
            return rebuild_tensor, (pickle.PickleBuffer(buffer), tensor.dtype, shape)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """The tensor that lies in this buffer, which it keeps."""
    import torch

    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
