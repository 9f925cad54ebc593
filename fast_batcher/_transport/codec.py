"""Pickling of frame bodies, and of exceptions as data.

Runs in both processes: on the event loop's thread of the API process, and on the main thread of
workers. The values of a batch are pickled one by one, so that no two requests share an object, and
a value that cannot be pickled affects its own request only. Exceptions are sent as data: many
exceptions cannot be unpickled, and the worker finds that out before it sends them. This module does
no I/O; `pickler` handles large buffers.
"""

import functools
import pickle
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fast_batcher.errors import (
    MAX_ERROR_TEXT,
    InferenceError,
    RemoteTraceback,
    from_model,
    is_kind,
    rebuild,
    take_apart,
)

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

    def to_error(self) -> InferenceError:
        """Make an error for one caller."""
        original = None
        if self.pickled is not None:
            try:
                original = rebuild(*loads(self.pickled))
            except BaseException:  # noqa: BLE001  the class may not exist here; the text serves
                original = None
        return from_model(original, self.text, self.traceback)


def describe(error: BaseException) -> SerializedError:
    """Turn any exception into data that crosses the process boundary."""
    text = one_line(error)
    trace = _format(error)
    if trace is None:
        # An error that cannot be shown would raise again wherever the app shows it.
        return SerializedError(text, text, None)
    return SerializedError(text, trace, _pickle_if_it_survives(error))


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
    """Pickle a list of values whose types are all in `ATOMS`.

    Args:
        values: The values.
        limit: Total of characters and bytes below which the values are pickled.

    Returns:
        The pickle, or None if a value has another type or the total reaches the limit.
    """
    texts = values
    if not TEXTS.issuperset(map(type, values)):
        if not ATOMS.issuperset(map(type, values)):
            return None
        texts = [one for one in values if type(one) in TEXTS]
    return pickle.dumps(values, PROTOCOL) if sum(map(len, texts)) < limit else None


def fragment(items: Iterable[bytes | SerializedError], max_frame_bytes: int) -> Iterator[bytes]:
    """Pickle items as one or more lists that each fit into a frame.

    Args:
        items: Items that each fit into a frame alone.
        max_frame_bytes: Most bytes of a pickled list.
    """
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

    Texts, bytes, arrays and tensors know their size; other values are pickled to measure it.
    """
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    try:
        # Arrays and tensors have `nbytes`.
        return int(value.nbytes) if hasattr(value, "nbytes") else len(dumps(value))
    except BaseException:  # noqa: BLE001  user code; the error is reported when the value is sent
        return 0


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
    # Of a longer exception only the shortened text is sent.
    return pickled if len(pickled) <= MAX_ERROR_TEXT else None
