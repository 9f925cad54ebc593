"""Pickling that leaves large buffers where they are, so that they are copied once. Both sides.

The values of a batch are pickled one after the other, each with a memo of its own, so that two
requests never share an object. A pickle is made as pieces: bytes of the stream, among them the
value's own large `bytes` objects, and, out of band (PEP 574), the buffers of arrays and tensors.
Nothing large is copied for that, but text has to be encoded. As long as no large batch has come,
no buffer is kept out of band.
"""

import copyreg
import functools
import pickle
import sys
from typing import TYPE_CHECKING, Any

from fast_batcher._shared_memory.slabs import VolatileBuffer, lay_out
from fast_batcher._transport.codec import PROTOCOL
from fast_batcher._transport.frames import READ_SIZE
from fast_batcher._transport.tensors import is_plain_tensor, rebuild_tensor
from fast_batcher.errors import forget_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# From here on the pickler of CPython passes on the object itself where it has bytes to write, and
# before that it writes the stream in pieces of about this size (its FRAME_SIZE_TARGET).
PIECE_SIZE = 64 * 1024
# Below this many bytes a buffer costs more to describe than to copy.
LEAST_BUFFER = 4 * 1024
# What is shorter is sent faster through a pipe: a frame of it is read in one piece, and needs no
# memory of its own.
LEAST_SHARED = READ_SIZE


class Parts:
    """Pickled values in pieces.

    Args:
        stream: The pickles themselves, one behind the other.
        buffers: What belongs to them out of band; locked against being resized until `release`.
        items: What belongs to each value, in order: bytes of the stream, and a number of buffers.
    """

    def __init__(
        self,
        stream: "list[bytes | memoryview]",
        buffers: list[memoryview],
        items: list[tuple[int, int]],
    ) -> None:
        self._stream = stream
        self._buffers = buffers
        self.items = items
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
        """The numbers of the read-only buffers."""
        return [index for index, buffer in enumerate(self._buffers) if buffer.readonly]

    def release(self) -> None:
        """Forget the values; nothing of them is locked any more."""
        for piece in (*self._stream, *self._buffers):
            if isinstance(piece, memoryview):
                piece.release()
        self._stream.clear()
        self._buffers.clear()


def load_items(
    stream: memoryview,
    buffers: "Sequence[Any]",
    items: "Iterable[tuple[int, int]]",
    on_error: "Callable[[BaseException], Any]",
) -> list[Any]:
    """Unpickle the values whose parts these are.

    Args:
        stream: Their pickles, one behind the other; copied from where it has to be.
        buffers: What belongs to them out of band; the values are made on it.
        items: What belongs to each value, as for `Parts`.
        on_error: Gives what stands in the place of a value that cannot be unpickled.
    """
    values = []
    begin = used = 0
    for length, count in items:
        mine = buffers[used : used + count]
        values.append(_load_item(stream[begin : begin + length], mine, on_error))
        begin += length
        used += count
    return values


def _load_item(
    stream: memoryview, buffers: "Sequence[Any]", on_error: "Callable[[BaseException], Any]"
) -> Any:
    try:
        return pickle.loads(stream, buffers=buffers)
    except BaseException as error:  # noqa: BLE001  unpickling is the user's code
        outcome = on_error(error)
        # An error is often kept by a frame of its own, and they hold the memory.
        forget_frames(error)
        return outcome


def view_parts(view: memoryview, sizes: list[int]) -> tuple[memoryview, list[memoryview]]:
    """The stream and the buffers that lie in this view, as `Parts.sizes` tells."""
    offsets, _ = lay_out(sizes)
    stream, *buffers = (
        view[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True)
    )
    return stream, buffers


class PartsPickler:
    """Pickles the values of one batch after the other; for one thread.

    `dump` the values; then one of `take_items`, `take_parts` and `renew`.

    Args:
        least: Bytes from which on a buffer stays where it is.
    """

    def __init__(self, least: int) -> None:
        # A longer one has a piece of the stream for itself, and so costs as much there. And what
        # is shorter is not worth asking a buffer for.
        self.least = min(max(least, LEAST_BUFFER), PIECE_SIZE)
        # Whether something large has come.
        self._keeps_buffers = False
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        # How many chunks and buffers there were when each value had been pickled.
        self._ends: list[tuple[int, int]] = []
        self._reducers: _Reducers | None = None
        # Bytes of large buffers in the values that are being pickled.
        self._large = [0]

    def dump(self, values: "Iterable[Any]") -> None:
        """Pickle values one after the other, each as if it were alone.

        Raises:
            BaseException: What pickling one of them raises, which is the user's code; `renew` is
                all that can be done then.
        """
        if not self._keeps_buffers:
            self._chunks.extend([pickle.dumps(value, PROTOCOL) for value in values])
            return
        keep = _keep_large(self._buffers, self.least, self._large)
        sink = _Sink(self._chunks.append)
        for value in values:
            pickler = pickle.Pickler(sink, PROTOCOL, buffer_callback=keep)
            if self._reducers is not None:
                pickler.dispatch_table = self._reducers
            pickler.dump(value)
            self._ends.append((len(self._chunks), len(self._buffers)))

    def renew(self) -> None:
        """Forget what has been pickled."""
        self._chunks.clear()
        self._ends.clear()
        self._large[0] = 0
        while self._buffers:
            self._buffers.pop().release()

    def has_enough(self) -> bool:
        """Whether what has just been pickled is so much that it pays to share it."""
        if self._buffers:
            return True
        length = _length if self._keeps_buffers else len
        return sum(map(length, self._chunks)) >= LEAST_SHARED

    def take_items(self) -> list[bytes]:
        """What has just been pickled, of which there is nothing out of band: a pickle per value.

        Raises:
            BufferError: An input was resized meanwhile; `renew` is all that can be done.
        """
        if not self._keeps_buffers:
            items, self._chunks = self._chunks, []
            return items
        assert not self._buffers, "there is not enough for that"
        stream = _hold(self._chunks)
        begin, items = 0, []
        for end, _ in self._ends:
            items.append(b"".join(stream[begin:end]))
            begin = end
        self.renew()
        return items

    def take_parts(self) -> Parts:
        """What has just been pickled.

        Raises:
            BufferError: An input was resized meanwhile; `renew` is all that can be done.
        """
        stream, buffers = _hold(self._chunks), self._buffers[:]
        items, begin, used = [], 0, 0
        for end, count in self._ends:
            items.append((sum(map(len, stream[begin:end])), count - used))
            begin, used = end, count
        self._buffers.clear()
        self.renew()
        return Parts(stream, buffers, items)

    def learn_buffers(self) -> bool:
        """Leave large buffers where they are from now on; those of tensors too, if there are any.

        Returns:
            Whether that is new; then nothing is pickled, and what was has to be once more.
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


def _length(chunk: Any) -> int:
    return memoryview(chunk).nbytes


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


class _Shown(VolatileBuffer):
    """The bytes of a tensor, as NumPy asks for them; whoever has the tensor may resize it."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        data, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


class OutOfBandBytes:
    """Bytes that are kept out of the pickle as other buffers are, which plain ones are not."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_down, (pickle.PickleBuffer(self._raw),)


def _put_down(raw: bytes) -> bytes:
    return raw


def _reduce_tensor(torch: Any, least: int, tensor: Any) -> Any:
    """A large plain tensor by its buffer, any other as PyTorch pickles it."""
    if is_plain_tensor(torch, tensor) and tensor.nbytes >= least:
        numpy: Any = sys.modules.get("numpy")
        try:
            # As bytes: NumPy lacks some of the types.
            # Not by `numpy()`: for ever after the caller could not resize the tensor.
            buffer = numpy.asarray(_Shown(tensor.view(torch.uint8)))
        except (RuntimeError, TypeError, AttributeError):
            pass
        else:
            shape = tuple(tensor.shape)
            return rebuild_tensor, (pickle.PickleBuffer(buffer), tensor.dtype, shape)
    return tensor.__reduce_ex__(PROTOCOL)
