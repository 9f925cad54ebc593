"""Pickling of inputs, outputs and errors. Both sides, any thread.

The values of a batch are pickled one after the other, each with its own memo, so that no two
requests share an object, and a value that cannot be pickled affects its own request only. A pickle
of a value with large buffers is a list of pieces: bytes of the stream, among them large `bytes`
objects of the value, and the out-of-band buffers of arrays and tensors. Large pieces are not
copied; text is encoded.

Exceptions are sent as data: many exceptions cannot be unpickled, and the worker finds that out
before it sends them.
"""

import copyreg
import functools
import io
import pickle
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fast_batcher._arrays.kinds import is_array, is_tensor
from fast_batcher._arrays.libraries import LIBRARIES, Library, find_array_type
from fast_batcher._shared_memory.ranges import lay_out
from fast_batcher._transport.channels import READ_SIZE
from fast_batcher.errors import (
    MAX_ERROR_TEXT,
    InferenceError,
    InputError,
    RemoteTraceback,
    forget_frames,
    from_model,
    is_kind,
    rebuild,
    take_apart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Pickle and unpickle one object; unpickling copies it out of the body. Both ends run the same
# Python, so the highest protocol is safe.
PROTOCOL = pickle.HIGHEST_PROTOCOL
dumps = functools.partial(pickle.dumps, protocol=PROTOCOL)
loads = pickle.loads
# Immutable types, whose values requests may share: a batch of only these types is one pickle, which
# takes 0.03 us per short string and direction instead of 0.3 us. Without it a request would cost
# the API process 3.2 times the floor of the event loop on uvloop, not 2.1
# (`benchmarks/overhead.py`).
ATOMS = frozenset({str, bytes, int, float, bool, type(None)})
# Atoms of variable length.
TEXTS = frozenset({str, bytes})
# Bytes per item in the pickle of the list of items: a bytes object costs 5 to 14.
_ITEM_OVERHEAD = 16


class SerializedError(NamedTuple):
    """An exception as data."""

    # Type and message, in one line.
    text: str
    traceback: str
    # Pickled type, arguments and attributes; None if they did not survive a round trip in the
    # worker.
    pickled: bytes | None
    # Whether it is an `InputError`: a host, which counts it, has not the type.
    is_refusal: bool = False

    def to_error(self) -> InferenceError:
        """Make an error for one caller."""
        original = None
        if self.pickled is not None:
            try:
                original = rebuild(*loads(self.pickled))
            except BaseException:  # noqa: BLE001  the class may not exist here; the text serves
                original = None
        if original is None and self.is_refusal:
            original = InputError(self.text)
        return from_model(original, self.text, self.traceback)


def describe(error: BaseException) -> SerializedError:
    """Turn any exception into data that crosses the process boundary."""
    text = one_line(error)
    trace = _format(error)
    if trace is None:
        # An error that cannot be shown would raise again wherever the app shows it.
        return SerializedError(text, text, None)
    is_refusal = is_kind(error, InputError)
    return SerializedError(text, trace, _pickle_if_it_survives(error), is_refusal)


def to_cause(error: BaseException) -> RemoteTraceback:
    """Make the cause of a caller's error from an exception of the user's code, without frames."""
    return RemoteTraceback(_format(error) or one_line(error))


def _format(error: BaseException) -> str | None:
    """Return the traceback of an exception as text, None if the exception cannot be shown."""
    try:
        str(error)
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001  __str__ and __notes__ are the user's code
        return None
    return _short(trace, keep_end=True)


def dump_atoms(values: list[Any], limit: int) -> bytes | None:
    """Pickle a list of `ATOMS`; None if it has another type, or `limit` bytes of texts."""
    texts = values
    if not TEXTS.issuperset(map(type, values)):
        if not ATOMS.issuperset(map(type, values)):
            return None
        texts = [value for value in values if type(value) in TEXTS]
    return pickle.dumps(values, PROTOCOL) if sum(map(len, texts)) < limit else None


def fragment(items: Iterable[bytes | SerializedError], max_frame_bytes: int) -> Iterator[bytes]:
    """Pickle items, each of which fits into a frame, as lists that each fit into one."""
    part: list[bytes | SerializedError] = []
    # Starts with the overhead of the list itself.
    size = _ITEM_OVERHEAD
    for item in items:
        item_size = _size(item)
        if part and size + item_size > max_frame_bytes:
            yield dumps(part)
            part, size = [], _ITEM_OVERHEAD
        part.append(item)
        size += item_size
    yield dumps(part)


def measure_size(value: Any) -> int:
    """Estimate the bytes of a value on the pipe; 0 if it cannot be pickled.

    Values that do not know their size are pickled to measure it.
    """
    try:
        size = measure_known(value)
        return len(dumps(value)) if size is None else size
    except BaseException:  # noqa: BLE001  user code; the error is reported when the value is sent
        return 0


class Measured:
    """A value of this library whose `nbytes` is its size."""

    __slots__ = ()
    nbytes: Any


def measure_known(value: Any) -> int | None:
    """Return the bytes of a text, array or tensor; None for a value that does not know its size."""
    if type(value) in TEXTS or type(value) is bytearray:
        return len(value)
    # Another class may have anything under this name.
    is_known = issubclass(type(value), Measured) or is_array(value) or is_tensor(value)
    return int(value.nbytes) if is_known else None


def fits(length: int, max_frame_bytes: int) -> bool:
    """Return whether a pickled item of this length fits into a frame alone."""
    return length + 2 * _ITEM_OVERHEAD <= max_frame_bytes


def _size(item: bytes | SerializedError) -> int:
    return len(item if isinstance(item, bytes) else dumps(item)) + _ITEM_OVERHEAD


def one_line(error: BaseException) -> str:
    """Return type and message of an exception, even if its `__str__` raises."""
    name = type(error).__qualname__
    try:
        text = str(error)
        line = f"{name}: {text}" if text else name
    except BaseException:  # noqa: BLE001  __str__, and what it returns, is the user's code
        return f"{name} (its text cannot be shown: __str__ raised)"
    return _short(line)


def _short(text: str, *, keep_end: bool = False) -> str:
    # Lone surrogates cannot be pickled into UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= MAX_ERROR_TEXT:
        return text
    if keep_end:
        return f"[{len(text) - MAX_ERROR_TEXT} characters cut] {text[-MAX_ERROR_TEXT:]}"
    return f"{text[:MAX_ERROR_TEXT]} [{len(text) - MAX_ERROR_TEXT} characters cut]"


def _pickle_if_it_survives(error: BaseException) -> bytes | None:
    """Return the pickled parts of an exception; None if it cannot be rebuilt from them."""
    if not is_kind(error, Exception):
        return None
    try:
        pickled = dumps(take_apart(error))
        rebuild(*loads(pickled))
    except BaseException:  # noqa: BLE001  pickling and rebuilding run the user's code
        return None
    # A longer exception is sent as its shortened text.
    return pickled if len(pickled) <= MAX_ERROR_TEXT else None


# CPython's FRAME_SIZE_TARGET: its pickler writes the stream in pieces of about this size, and
# passes a `bytes` object of at least this size to `write` without copying it.
PIECE_SIZE = 64 * 1024
# A smaller buffer is cheaper to copy than to describe.
LEAST_BUFFER = 4 * 1024
# A smaller batch is sent faster through a pipe: its frame is read in one piece.
LEAST_SHARED = READ_SIZE


class OutOfBandPickle:
    """Pickled values with out-of-band buffers, all in pieces."""

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
    """Unpickle values from their stream and buffers."""
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
    """Pickles the values of batches; for one thread."""

    def __init__(self, least: int, *, makes_writable: bool = False) -> None:
        # A buffer of PIECE_SIZE or more costs the same in the stream and out of it.
        self._least = min(max(least, LEAST_BUFFER), PIECE_SIZE)
        # Whether large buffers stay out of the stream; True from the first large batch on.
        self._keeps_buffers = False
        self._makes_writable = makes_writable
        self._reducers = _Reducers()
        # Libraries of arrays that were not loaded when a value was pickled.
        self._missing: Sequence[Library] = LIBRARIES

    def pickle(
        self, values: "Sequence[Any]", may_share: "Callable[[], bool]"
    ) -> "list[bytes] | OutOfBandPickle":
        """Pickle each value for itself; out of band if they are large, and may be shared."""
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
        reducers = self._find_reducers()
        if reducers is None:
            return pickle.dumps(value, PROTOCOL)
        file = io.BytesIO()
        pickler = pickle.Pickler(file, PROTOCOL)
        pickler.dispatch_table = reducers
        pickler.dump(value)
        return file.getvalue()

    def _find_reducers(self) -> "_Reducers | None":
        """Return the reducers for arrays and tensors, None while neither library is loaded."""
        for library in self._missing:
            if library.module in sys.modules and (kind := find_array_type(library)) is not None:
                self._missing = [one for one in self._missing if one is not library]
                if library.reduces_outputs or self._makes_writable:
                    self._reducers[kind] = functools.partial(
                        library.reduce, self._least, self._makes_writable
                    )
        return self._reducers or None


class _Pickled:
    """File-like target of a pickler that collects the pickles of one batch."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        # Number of chunks and of buffers up to the end of each value.
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
        # The raw buffer is kept: CPython 3.11 crashes if a PickleBuffer is in a reference cycle.
        raw = buffer.raw()
        if raw.nbytes < self._least:
            return True
        self._large += raw.nbytes
        if self._large < LEAST_SHARED:
            return True
        self._buffers.append(raw)
        return False

    def take(self) -> "list[bytes] | OutOfBandPickle":
        """Return a pickle per value, or an `OutOfBandPickle` if they are worth sharing."""
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

    # A built-in method is fast: it is called for each object of a type that is not built in.
    __missing__ = copyreg.dispatch_table.__getitem__


def _hold(chunks: list[Any]) -> "list[bytes | memoryview]":
    """Lock the pieces of a stream against being resized."""
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
