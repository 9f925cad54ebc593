"""Pickling for frame bodies. Both sides; runs no other code than the user's pickling hooks.

The values of a batch are pickled one by one, so that no two requests share an object and a bad
value harms no other request. Exceptions cross as data: many cannot be unpickled, and the worker
finds that out, not the API process.
"""

import functools
import pickle
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fast_batcher.errors import (
    MAX_ERROR_TEXT,
    InferenceError,
    from_model,
    rebuild,
    take_apart,
)

# Pickle one object, and unpickle one, copied out of the body. Both ends run the same Python.
PROTOCOL = pickle.HIGHEST_PROTOCOL
dumps = functools.partial(pickle.dumps, protocol=PROTOCOL)
loads = pickle.loads
# Types whose values cannot be changed, so that requests may share them: a batch of only these is
# one pickle, in 0.03 us per short string and not 0.3, each way. Without it a request would cost the
# API process 3.2 times the floor of the event loop on uvloop, not 2.1 (`benchmarks/overhead.py`).
ATOMS = frozenset({str, bytes, int, float, bool, type(None)})
# The atoms that may be long.
TEXTS = frozenset({str, bytes})
# Per item, for the pickle of the list of items around it: a bytes object costs 5 to 14 bytes.
_ITEM_OVERHEAD = 16


class RemoteFailure(NamedTuple):
    """An exception as data."""

    # In one line: the type and the text.
    text: str
    traceback: str
    # Its type, arguments and attributes; None if they did not survive a round trip in the worker.
    pickled: bytes | None

    def to_error(self) -> InferenceError:
        """A new error for one caller."""
        original = None
        if self.pickled is not None:
            try:
                original = rebuild(*loads(self.pickled))
            except BaseException:  # noqa: BLE001  the class may not exist here; the text serves
                original = None
        return from_model(original, self.text, self.traceback)


def describe(error: BaseException) -> RemoteFailure:
    """Turn any exception into data that crosses the process boundary."""
    text = one_line(error)
    try:
        str(error)
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001  __str__ and __notes__ are the user's code
        # An error that cannot be shown would raise again wherever the app shows it.
        return RemoteFailure(text, text, None)
    return RemoteFailure(text, _short(trace, keep_end=True), _pickle_if_it_survives(error))


def dump_atoms(values: list[Any], limit: int) -> bytes | None:
    """Pickle a list of values whose types are all in `ATOMS`.

    Args:
        values: The values.
        limit: Characters and bytes in all of them together.

    Returns:
        None if a value has another type, or the values reach the limit.
    """
    kinds = set(map(type, values))
    if not kinds <= ATOMS:
        return None
    texts = values if kinds <= TEXTS else [one for one in values if type(one) in TEXTS]
    return dumps(values) if sum(map(len, texts)) < limit else None


def split_parts(items: Iterable[bytes | RemoteFailure], max_frame_bytes: int) -> Iterator[bytes]:
    """Pickle items as lists that each fit into a frame, at least one list.

    Args:
        items: Each fits into a frame by itself.
        max_frame_bytes: Most bytes of a pickled list.
    """
    part: list[bytes | RemoteFailure] = []
    # Room for the list around the items.
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
    """Measure roughly how many bytes a value takes when it is sent; 0 if it cannot be sent.

    A buffer knows its size. Any other value is pickled to find out.
    """
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    try:
        # Arrays and tensors have `nbytes`.
        return int(value.nbytes) if hasattr(value, "nbytes") else len(dumps(value))
    except BaseException:  # noqa: BLE001  the user's code; sending the value reports it
        return 0


def fits(length: int, max_frame_bytes: int) -> bool:
    """Whether a pickled item of this length can travel in a frame by itself."""
    return length + 2 * _ITEM_OVERHEAD <= max_frame_bytes


def _size(item: bytes | RemoteFailure) -> int:
    return len(item if isinstance(item, bytes) else dumps(item)) + _ITEM_OVERHEAD


def one_line(error: BaseException) -> str:
    """The type and the text of an exception, even if its `__str__` raises."""
    name = type(error).__qualname__
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  __str__ is the user's code
        return f"{name} (its text cannot be shown: __str__ raised)"
    return _short(f"{name}: {text}" if text else name)


def _short(text: str, *, keep_end: bool = False) -> str:
    # Lone surrogates cannot be pickled into UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= MAX_ERROR_TEXT:
        return text
    if keep_end:
        return f"[{len(text) - MAX_ERROR_TEXT} characters cut] {text[-MAX_ERROR_TEXT:]}"
    return f"{text[:MAX_ERROR_TEXT]} [{len(text) - MAX_ERROR_TEXT} characters cut]"


def _pickle_if_it_survives(error: BaseException) -> bytes | None:
    """The pickled parts of an exception; None if they cannot be put together again."""
    if not isinstance(error, Exception):
        return None
    try:
        pickled = dumps(take_apart(error))
        rebuild(*loads(pickled))
    except BaseException:  # noqa: BLE001  an exception may hold or be anything
        return None
    # A message of 10 MB is not worth sending; its shortened text is.
    return pickled if len(pickled) <= MAX_ERROR_TEXT else None
