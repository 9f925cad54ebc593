"""Pickling that leaves large buffers where they are, so that they are copied once. Both sides.

A pickle is made as pieces: bytes of the stream, among them the value's own large `bytes` objects,
and, out of band (PEP 574), the buffers of arrays and tensors. Nothing large is copied for that, but
text has to be encoded. What is small comes as one piece, and costs less than with `pickle.dumps`:
the pickler is used again. As long as nothing large has come, nothing is asked of any buffer.
"""

import copyreg
import functools
import pickle
import sys
from typing import TYPE_CHECKING, Any

from fast_batcher._transport.frames import READ_SIZE
from fast_batcher._transport.slabs import Loose, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# From here on the pickler of CPython passes on the object itself where it has bytes to write, and
# before that it writes the stream in pieces of about this size (its FRAME_SIZE_TARGET).
PIECE_SIZE = 64 * 1024
# A pickler remembers what it has seen in a table that grows, is emptied after each use, and never
# becomes smaller: after bodies up to this length emptying it takes about a microsecond.
MOST_REUSED = 4 * 1024
# Bytes of that table after which a pickler is not used again; to empty so much takes half a
# microsecond.
MOST_REMEMBERED = 16 * 1024
# What is shorter is sent faster through a pipe: a frame of it is read in one piece, and needs no
# memory of its own.
LEAST_SHARED = READ_SIZE


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

    def find_frozen(self) -> list[int]:
        """Which of the buffers nobody may write."""
        return [index for index, buffer in enumerate(self._buffers) if buffer.readonly]

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
    none; pop that, and `clear_memo()`, or `forget()` if it is longer than `MOST_REUSED`. After any
    other outcome: `take_whole`, `take_parts` or `renew`.

    Args:
        least: Bytes from which on a buffer stays where it is.
    """

    def __init__(self, least: int) -> None:
        # A longer one has a piece of the stream for itself, and so costs as much there. And after a
        # longer body `forget` is called, also of how much there has been.
        self.least = min(max(least, MOST_REUSED), PIECE_SIZE)
        # Whether something large has come.
        self._keeps_buffers = False
        self.chunks: list[Any] = []
        self.buffers: list[memoryview] = []
        self._reducers: _Reducers | None = None
        # Bytes of large buffers in the value that is being pickled.
        self._large = [0]
        self.renew()

    def renew(self) -> None:
        """Forget everything, and begin with a pickler that has seen nothing."""
        self.chunks.clear()
        self._large[0] = 0
        while self.buffers:
            self.buffers.pop().release()
        sink = _Sink(self.chunks.append)
        if self._keeps_buffers:
            keep = _keep_large(self.buffers, self.least, self._large)
            pickler = pickle.Pickler(sink, pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
        else:
            pickler = pickle.Pickler(sink, pickle.HIGHEST_PROTOCOL)
        if self._reducers is not None:
            pickler.dispatch_table = self._reducers
        self.dump = pickler.dump
        self.clear_memo = pickler.clear_memo
        self._size_of_memo = pickler.__sizeof__

    def forget(self) -> None:
        """Forget what has been pickled; needed after a body longer than `MOST_REUSED`."""
        if self.buffers or self._size_of_memo() > MOST_REMEMBERED:
            self.renew()
        else:
            self.chunks.clear()
            self._large[0] = 0
            self.clear_memo()

    def has_enough(self) -> bool:
        """Whether what has just been pickled is so much that it pays to share it."""
        if self.buffers or len(self.chunks) == 1:  # one piece is shorter than two of `PIECE_SIZE`
            return bool(self.buffers)
        return sum(memoryview(chunk).nbytes for chunk in self.chunks) >= LEAST_SHARED

    def take_whole(self) -> bytes | None:
        """What has just been pickled, in one piece; None if something of it is out of band.

        Raises:
            BufferError: As of `take_parts`.
        """
        body = None if self.buffers else b"".join(_hold(self.chunks))
        self.forget()
        return body

    def take_parts(self) -> Parts:
        """What has just been pickled.

        Raises:
            BufferError: An input was resized meanwhile; `renew` is all that can be done.
        """
        parts = Parts(_hold(self.chunks), self.buffers[:])
        self.buffers.clear()
        self.renew()
        return parts

    def learn_buffers(self) -> bool:
        """Leave large buffers where they are from now on; those of tensors too, if there are any.

        Returns:
            Whether that is new; then it begins anew, and what was pickled has to be once more.
        """
        torch: Any = sys.modules.get("torch")
        learns_tensors = self._reducers is None and hasattr(torch, "Tensor")
        if self._keeps_buffers and not learns_tensors:
            return False
        self._keeps_buffers = True
        if learns_tensors:
            reduce = functools.partial(_reduce_tensor, torch, self.least)
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

    # No function of Python's: it is asked for each object of a type that is not built in.
    __missing__ = copyreg.dispatch_table.__getitem__


def _keep_large(
    buffers: list[memoryview], least: int, total: list[int]
) -> "Callable[[pickle.PickleBuffer], bool]":
    """A function that keeps a buffer, or says that it goes into the stream.

    All go there until there is so much in large ones that it pays to share it.
    """

    def keep(buffer: pickle.PickleBuffer) -> bool:
        # Not the PickleBuffer itself: in a cycle with what it shows, CPython 3.11 crashes on it.
        raw = buffer.raw()
        size = raw.nbytes
        if size < least:
            return True
        total[0] += size
        if total[0] < LEAST_SHARED:
            return True
        buffers.append(raw)
        return False

    return keep


def _hold(chunks: list[Any]) -> "list[bytes | memoryview]":
    """The pieces of a stream, which nobody can resize any more.

    Raises:
        BufferError: Another thread has, behind the length that is in the stream.
    """
    stream = [_view(chunk) for chunk in chunks]
    # Any other is held by its PickleBuffer.
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, bytearray):
            length = len(stream[index]).to_bytes(8, "little")
            if stream[index - 1][-8:] != length:
                raise BufferError("an input was resized while it was pickled")
    return stream


def _view(chunk: Any) -> "bytes | memoryview":
    if isinstance(chunk, bytes):
        return chunk
    return chunk.raw() if isinstance(chunk, pickle.PickleBuffer) else memoryview(chunk)


class _Shown(Loose):
    """The bytes of a tensor, as NumPy asks for them; whoever has the tensor may resize it."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        data, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


class Lifted:
    """Bytes that are kept out of the pickle as other buffers are, which plain ones are not."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_down, (pickle.PickleBuffer(self._raw),)


def _put_down(raw: bytes) -> bytes:
    return raw


class Alike:
    """Arrays of one dtype and shape, which are pickled as a list of them, in less time.

    Args:
        arrays: At least one; contiguous, and what is in their memory is all that they are.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = arrays

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._arrays[0]
        return _set_apart, (first.dtype, first.shape, *map(pickle.PickleBuffer, self._arrays))


def _set_apart(dtype: Any, shape: tuple[int, ...], *buffers: Any) -> list[Any]:
    import numpy

    return [numpy.frombuffer(buffer, dtype).reshape(shape) for buffer in buffers]


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
