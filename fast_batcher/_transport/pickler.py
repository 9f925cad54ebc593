"""Pickling with out-of-band buffers (PEP 574), so that large buffers are copied only once.

Both sides: the event loop's thread pickles inputs, and the worker's main thread outputs. The values
of a batch are pickled one after the other, each with its own memo, so that two requests never share
an object. A pickle is a list of pieces: bytes of the stream, among them large `bytes` objects of
the value, and the out-of-band buffers of arrays and tensors. Large pieces are not copied; text is
encoded. Until the first large batch all buffers are in the stream.
"""

import copyreg
import functools
import io
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

# CPython's FRAME_SIZE_TARGET: its pickler writes the stream in pieces of about this size, and
# passes a `bytes` object of at least this size to `write` without copying it.
PIECE_SIZE = 64 * 1024
# A smaller buffer is cheaper to copy than to describe.
LEAST_BUFFER = 4 * 1024
# A smaller batch is sent faster through a pipe: its frame is read in one piece.
LEAST_SHARED = READ_SIZE


class OutOfBandPickle:
    """Pickled values with out-of-band buffers, all in pieces.

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
        """Iterate over the pieces, each with its offset in a slab."""
        begin = 0
        for piece in self._stream:
            yield begin, piece
            begin += len(piece)
        yield from zip(self._offsets[1:], self._buffers, strict=True)

    def find_frozen(self) -> list[int]:
        """Return the numbers of the read-only buffers."""
        return [index for index, buffer in enumerate(self._buffers) if buffer.readonly]

    def release(self) -> None:
        """Unlock and drop the values."""
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
    """Unpickle values from their stream and buffers.

    Args:
        stream: The pickles, one behind the other; the values do not refer to it.
        buffers: The out-of-band buffers; arrays and tensors are views of them.
        items: For each value its bytes in the stream and its number of buffers.
        on_error: Returns the substitute for a value that cannot be unpickled.
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
        # A frame often keeps the error, and its frames keep the memory.
        forget_frames(error)
        return outcome


def view_pickle(view: memoryview, sizes: list[int]) -> tuple[memoryview, list[memoryview]]:
    """Return the stream and the buffers that lie in this view; see `OutOfBandPickle.sizes`."""
    offsets, _ = lay_out(sizes)
    stream, *buffers = (
        view[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True)
    )
    return stream, buffers


class OutOfBandPickler:
    """Pickles the values of batches; for one thread.

    Args:
        least: Bytes from which on a buffer stays out of the stream.
        makes_writable: Make read-only NumPy arrays writable on arrival.
    """

    def __init__(self, least: int, *, makes_writable: bool = False) -> None:
        # A buffer of PIECE_SIZE or more costs the same in the stream and out of it.
        self._least = min(max(least, LEAST_BUFFER), PIECE_SIZE)
        # Whether large buffers stay out of the stream; True from the first large batch on.
        self._keeps_buffers = False
        self._makes_writable = makes_writable
        self._reducers = _Reducers()

    def pickle(
        self, values: "Sequence[Any]", may_share: "Callable[[], bool]"
    ) -> "list[bytes] | OutOfBandPickle":
        """Pickle values one after the other, each for itself.

        Args:
            values: The values of one batch.
            may_share: Returns whether there is shared memory for buffers. Called for large batches
                until it has returned True.

        Returns:
            A pickle per value, or an `OutOfBandPickle` if the values are large and may be shared.

        Raises:
            BufferError: A value was resized meanwhile.
            BaseException: Any exception of the user's code while a value is pickled.
        """
        if not self._keeps_buffers:
            items = [self.dumps(value) for value in values]
            if sum(map(len, items)) < LEAST_SHARED or not may_share():
                return items
            self._keeps_buffers = True
        pickled = _Pickled(self._least)
        try:
            pickled.dump(values, self._find_reducers())
            return pickled.take()
        except BaseException:
            pickled.unlock()  # the error keeps it
            raise

    def dumps(self, value: Any) -> bytes:
        """Pickle one value with all of its buffers in the stream."""
        reducers = self._find_reducers() if self._makes_writable else None
        if reducers is None:
            return pickle.dumps(value, PROTOCOL)
        file = io.BytesIO()
        pickler = pickle.Pickler(file, PROTOCOL)
        pickler.dispatch_table = reducers
        pickler.dump(value)
        return file.getvalue()

    def _find_reducers(self) -> "_Reducers | None":
        """Return the reducers for arrays and tensors, None while neither library is loaded."""
        torch: Any = sys.modules.get("torch")
        if hasattr(torch, "Tensor") and torch.Tensor not in self._reducers:
            self._reducers[torch.Tensor] = functools.partial(_reduce_tensor, torch, self._least)
        numpy: Any = sys.modules.get("numpy")
        if self._makes_writable and hasattr(numpy, "ndarray"):  # else it is being imported
            self._reducers[numpy.ndarray] = _reduce_array
        return self._reducers or None


class _Pickled:
    """File-like target of a pickler that collects the pickles of one batch.

    Args:
        least: Bytes from which on a buffer stays out of the stream.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        # For each value the number of chunks and of buffers up to its end.
        self._ends: list[tuple[int, int]] = []
        # Total bytes of large buffers.
        self._large = 0
        self.write = self._chunks.append

    def dump(self, values: "Iterable[Any]", reducers: "_Reducers | None") -> None:
        """Pickle values."""
        for value in values:
            pickler = pickle.Pickler(self, PROTOCOL, buffer_callback=self._takes_in)
            if reducers is not None:
                pickler.dispatch_table = reducers
            pickler.dump(value)
            self._ends.append((len(self._chunks), len(self._buffers)))

    def _takes_in(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a buffer out of band, or return True to put it into the stream.

        Buffers go into the stream until the large ones together are worth sharing.
        """
        # Not the PickleBuffer itself: in a reference cycle with its object, CPython 3.11 crashes.
        raw = buffer.raw()
        if raw.nbytes < self._least:
            return True
        self._large += raw.nbytes
        if self._large < LEAST_SHARED:
            return True
        self._buffers.append(raw)
        return False

    def take(self) -> "list[bytes] | OutOfBandPickle":
        """Return a pickle per value, or an `OutOfBandPickle` if they are worth sharing.

        Raises:
            BufferError: A value was resized meanwhile.
        """
        stream = _hold(self._chunks)
        values: list[list[bytes | memoryview]] = []
        items: list[tuple[int, int]] = []
        begin = used = 0
        for end, count in self._ends:
            values.append(stream[begin:end])
            items.append((sum(map(len, values[-1])), count - used))
            begin, used = end, count
        if self._buffers or sum(map(len, stream)) >= LEAST_SHARED:
            return OutOfBandPickle(stream, self._buffers, items)
        return [b"".join(pieces) for pieces in values]

    def unlock(self) -> None:
        """Let the values be resized again, and drop them."""
        self._chunks.clear()
        for buffer in self._buffers:
            buffer.release()


class _Reducers(dict[type, Any]):
    """Dispatch table of a pickler: our reducers, and those registered with `copyreg`."""

    # Not a Python function: it is called for each object of a type that is not built in.
    __missing__ = copyreg.dispatch_table.__getitem__


def make_reducers(torch: Any) -> dict[type, Any]:
    """Make a dispatch table that reduces plain tensors to their bytes.

    Args:
        torch: The library, None if the program has not imported it.
    """
    reducers = _Reducers()
    if hasattr(torch, "Tensor"):
        reducers[torch.Tensor] = functools.partial(_reduce_tensor, torch, 0)
    return reducers


def _hold(chunks: list[Any]) -> "list[bytes | memoryview]":
    """Lock the pieces of a stream against being resized.

    Raises:
        BufferError: Another thread has resized one since its length was written into the stream.
    """
    stream = [_view(chunk) for chunk in chunks]
    # Other buffers were locked by their PickleBuffer from the beginning.
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


def _reduce_array(array: Any) -> Any:
    """Reduce an array so that it is writable on arrival."""
    reduced = array.__reduce_ex__(PROTOCOL)
    # An array with a state, as if not contiguous, is always writable on arrival.
    if array.flags.writeable or len(reduced) != 2:
        return reduced
    return _make_writable, reduced


def _make_writable(function: "Callable[..., Any]", arguments: tuple[Any, ...]) -> Any:
    """Make an array, and copy it if it is read-only."""
    array = function(*arguments)
    return array if array.flags.writeable else array.copy(order="K")


def _reduce_tensor(torch: Any, least: int, tensor: Any) -> Any:
    """Reduce a large plain tensor to its buffer, and any other tensor as PyTorch does."""
    if is_plain_tensor(torch, tensor) and tensor.nbytes >= least:
        array = view_tensor(torch, tensor)
        if array is not None:
            shape = tuple(tensor.shape)
            return rebuild_tensor, (pickle.PickleBuffer(array), tensor.dtype, shape)
    return tensor.__reduce_ex__(PROTOCOL)
