"""Pickling that leaves large buffers where they are, so that they are copied once. Both sides.

The values of a batch are pickled one after the other, each with a separate memo, so that two
requests never share an object. A pickle is a list of pieces: bytes of the stream, among them large
`bytes` objects of the value, and, out of band (PEP 574), the buffers of arrays and tensors. No
piece that is large is copied; text is encoded. Until a large batch has come, all buffers are in the
stream.

The event loop's thread pickles inputs, and the worker's main thread outputs.
"""

import copyreg
import functools
import pickle
import sys
from typing import TYPE_CHECKING, Any

from fast_batcher._shared_memory.ranges import lay_out
from fast_batcher._transport.codec import PROTOCOL
from fast_batcher._transport.frames import READ_SIZE
from fast_batcher._transport.tensors import is_plain_tensor, rebuild_tensor, view_tensor
from fast_batcher.errors import forget_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# CPython's FRAME_SIZE_TARGET: its pickler writes the stream in pieces of about this size, and where
# it has at least this many bytes to write, it passes on the object itself.
PIECE_SIZE = 64 * 1024
# Below this many bytes a buffer costs more to describe than to copy.
LEAST_BUFFER = 4 * 1024
# A shorter batch is sent faster through a pipe: a frame with it is read in one piece.
LEAST_SHARED = READ_SIZE


class Parts:
    """Pickled values in pieces.

    Args:
        stream: The pickles, one behind the other.
        buffers: Their buffers out of band; locked against being resized until `release`.
        items: For each value, in order, its bytes in the stream and its number of buffers.
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
        """Unlock and forget the values."""
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
    """Unpickle the values that were taken apart into these parts.

    Args:
        stream: Their pickles, one behind the other; the values do not refer to it.
        buffers: Their buffers out of band; arrays and tensors are views of them.
        items: For each value its bytes in the stream and its number of buffers.
        on_error: Returns what stands in the place of a value that cannot be unpickled.
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
        # An error is often kept by one of its frames, and those hold the memory.
        forget_frames(error)
        return outcome


def view_parts(view: memoryview, sizes: list[int]) -> tuple[memoryview, list[memoryview]]:
    """The stream and the buffers that lie in this view; see `Parts.sizes`."""
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
        # From PIECE_SIZE on a buffer is a piece of the stream too, and costs as much there. Below
        # LEAST_BUFFER it is not worth it.
        self.least = min(max(least, LEAST_BUFFER), PIECE_SIZE)
        # Whether large buffers stay out of the stream.
        self._keeps_buffers = False
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        # How many chunks and buffers there were when each value had been pickled.
        self._ends: list[tuple[int, int]] = []
        self._reducers: _Reducers | None = None
        # Bytes of large buffers in the values that are being pickled.
        self._large = [0]

    def dump(self, values: "Iterable[Any]") -> None:
        """Pickle values one after the other, each for itself.

        Raises:
            BaseException: What the user's code raises while one is pickled; call `renew` then.
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
        """Forget the pickled values."""
        self._chunks.clear()
        self._ends.clear()
        self._large[0] = 0
        while self._buffers:
            self._buffers.pop().release()

    def has_enough(self) -> bool:
        """Whether the pickled values are large enough to go through shared memory."""
        if self._buffers:
            return True
        length = _length if self._keeps_buffers else len
        return sum(map(length, self._chunks)) >= LEAST_SHARED

    def take_items(self) -> list[bytes]:
        """Return a pickle per value; only if not `has_enough`, so that no buffer is out of band.

        Raises:
            BufferError: An input was resized meanwhile; call `renew` then.
        """
        if not self._keeps_buffers:
            items, self._chunks = self._chunks, []
            return items
        assert not self._buffers, "buffers stay in the stream until there is enough to share"
        stream = _hold(self._chunks)
        begin, items = 0, []
        for end, _ in self._ends:
            items.append(b"".join(stream[begin:end]))
            begin = end
        self.renew()
        return items

    def take_parts(self) -> Parts:
        """Return the pickled values in parts.

        Raises:
            BufferError: An input was resized meanwhile; call `renew` then.
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
        """Leave large buffers of arrays where they are from now on, and of tensors once they exist.

        Returns:
            Whether this changes anything; the values are forgotten then, and to be dumped again.
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
    """A file to which a pickler writes."""

    __slots__ = ("write",)

    def __init__(self, write: Any) -> None:
        self.write = write


class _Reducers(dict[type, Any]):
    """Our reducers, and all that any module has registered with `copyreg`."""

    # Not a Python function: it is called for each object of a type that is not built in.
    __missing__ = copyreg.dispatch_table.__getitem__


def _keep_large(
    buffers: list[memoryview], least: int, total: list[int]
) -> "Callable[[pickle.PickleBuffer], bool]":
    """Make a function that keeps a buffer, or returns True for one that goes into the stream.

    All go into the stream until the large ones together are worth sharing.
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
    """Lock the pieces of a stream against being resized.

    Raises:
        BufferError: Another thread has resized one since its length was written into the stream.
    """
    stream = [_view(chunk) for chunk in chunks]
    # A PickleBuffer locks any other buffer from the beginning.
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


def _reduce_tensor(torch: Any, least: int, tensor: Any) -> Any:
    """Pickle a large plain tensor by its buffer, and any other tensor as PyTorch does it."""
    if is_plain_tensor(torch, tensor) and tensor.nbytes >= least:
        array = view_tensor(torch, tensor)
        if array is not None:
            shape = tuple(tensor.shape)
            return rebuild_tensor, (pickle.PickleBuffer(array), tensor.dtype, shape)
    return tensor.__reduce_ex__(PROTOCOL)
