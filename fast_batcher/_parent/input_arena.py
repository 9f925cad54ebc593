"""Inputs that are copied into shared memory when they arrive. The parent's event loop thread.

An array or tensor is copied into a *row* behind those of its layout that came before it, so that a
batch lies in one piece when it is formed, and only has to be named. The value itself is kept beside
it: a row is sent once, because the model may write into it, and a second try sends the value.
"""

import functools
import math
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from fast_batcher._shared_memory.layouts import (
    Key,
    Layout,
    LayoutProbe,
    address_of,
    find_probes,
    is_plain_dtype,
)
from fast_batcher._shared_memory.slabs import Part, Slab, Slabs

# Bytes from which on an input has a row. A lone request of less is sent 10 to 20 us faster through
# the pipe; from 64 KiB on, where the pipe takes it in two pieces, the row is 15 us faster. Two or
# more at a time are faster in rows from 40 KiB on.
LEAST = 56 * 1024
# Bytes; copying so much takes the loop about a tenth of a millisecond, and a millisecond where the
# system has to find the memory first.
MOST_AT_ONCE = 1024 * 1024
# Bytes that the loop copies in one of its turns, in one to two milliseconds. Those for which the
# system has to find the memory count `FRESH` times: they take so many times as long.
MOST_PER_TURN = 16 * 1024 * 1024
FRESH = 10
# Of so many layouts slabs are open for more rows at a time. Each holds memory for a batch.
MOST_OPEN = 4
# An open slab takes at most this part of all shared memory, and none is opened when that part is
# taken: what has no row needs room too.
MOST_OF_ONE = 1 / 4
MOST_OF_ALL = 1 / 2

RunInThread = Callable[[Callable[[], None], Callable[[BaseException | None], None]], None]


class StagedInput:
    """One input in shared memory."""

    __slots__ = ("end", "has_failed", "is_copied", "layout", "on_copied", "slab", "start")

    def __init__(self, slab: Slab, start: int, end: int, layout: bytes) -> None:
        # None once it has been sent, or is never going to be.
        self.slab: Slab | None = slab
        # Bytes in the memory.
        self.start = start
        self.end = end
        # Pickled; the same object for all in a slab.
        self.layout = layout
        self.is_copied = False
        # There was no memory for it.
        self.has_failed = False
        # Called when it is copied, or has failed.
        self.on_copied: Callable[[], None] | None = None

    def give_up(self) -> None:
        """Nobody sends it, from here on; may be called again."""
        self.slab = None


class _Open:
    """A slab that takes more rows."""

    __slots__ = ("end", "next", "packed", "slab")

    def __init__(self, slab: Slab, length: int, packed: bytes) -> None:
        self.slab = slab
        # Where the next row begins, and where none begins any more.
        self.next = slab.start
        self.end = slab.start + length
        self.packed = packed


class _Given(NamedTuple):
    """A part of a slab that somebody has, to write it."""

    slab: Slab
    end: int
    # Ends it.
    watch: "weakref.ref[Any]"


class InputArena:
    """Gives rows to inputs.

    Args:
        find_slabs: Gives the memory that there is now.
        run_in_thread: As `Pool.run_in_thread`.
        warn: Told why there is no memory for a row.
        least: Bytes from which on an input has a row.
        most: Bytes up to which it has one.
        rows_per_slab: As many as a batch has at most.
    """

    def __init__(
        self,
        find_slabs: Callable[[], Slabs | OSError | None],
        run_in_thread: RunInThread,
        warn: Callable[[BaseException], None],
        least: int,
        most: int,
        rows_per_slab: int,
    ) -> None:
        self._find_slabs = find_slabs
        self._run_in_thread = run_in_thread
        self._warn = warn
        self._least = least
        self._most = most
        self.rows_per_slab = rows_per_slab
        # Bytes that have been copied in this turn of the loop, as they count for `MOST_PER_TURN`;
        # set to 0 by whoever sees the turn end.
        self.copied = 0
        # By type. None before something large has come: until then nobody is asked for its size.
        self.probes: dict[type, LayoutProbe] = {}
        # By layout, the one that was used last at the end.
        self._open: dict[Key, _Open] = {}
        # By their start.
        self._given: dict[int, _Given] = {}
        _all.add(self)

    def enable(self) -> None:
        """Something large has come: the like of it gets rows from now on."""
        for kind, look in find_probes().items():
            self.probes.setdefault(kind, look)

    def take(self, value: Any) -> StagedInput | None:
        """A row with a copy of this value, made by now or soon; None if it is to have none.

        Args:
            value: Of a type that is in `probes`.
        """
        found = self.probes[type(value)](value, self._least, self._most)
        slabs = self._find_slabs()
        if found is None or not isinstance(slabs, Slabs):
            return None
        key, size = found
        if self._given:
            start = slabs.offset_of(address_of(value))
            given = self._given.get(start)
            if given is not None and given.end - start == size:
                return _repeat(given, start, key)
        place = self._place(slabs, key, size)
        if place is None:
            return None
        opened, start = place
        row = StagedInput(opened.slab, start, start + size, opened.packed)
        is_tensor = key[0]
        is_little = size <= MOST_AT_ONCE and self.copied + size <= MOST_PER_TURN
        if is_little and not is_tensor and slabs.put(row.start, row.end, value):
            self.copied += size
            row.is_copied = True
            return row
        if value.nbytes != size:  # another thread has resized it just now
            return None
        part = slabs.part(opened.slab, start, size)
        return self._fill(slabs, part, row, value, is_tensor=is_tensor)

    def _fill(
        self, slabs: Slabs, part: Part, row: StagedInput, value: Any, *, is_tensor: bool
    ) -> StagedInput | None:
        """Copy a value into its row, here or aside; None if that cannot be."""
        size = part.length
        address = address_of(value)
        cost = size + (row.end - part.fresh) * (FRESH - 1)
        if size > MOST_AT_ONCE or self.copied + cost > MOST_PER_TURN:
            if is_tensor:
                # Has this memory also when the tensor is given another.
                value = value.detach()
            # The part keeps the slab, whoever gives the row up.
            copy = functools.partial(_copy, slabs, part, address, value, is_tensor, row)
            self._run_in_thread(copy, functools.partial(_finish, slabs, part, row, self._warn))
            return row
        self.copied += cost
        try:
            slabs.copy(part, address, releases_gil=False)
        except OSError as error:
            self._fail(slabs, part, error)
            return None
        row.is_copied = True
        return row

    def give(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """An array in a row, which is sent as it is when it is taken; None if it is to have none.

        Args:
            dtype: NumPy's.
            shape: Of one input.
        """
        numpy: Any = sys.modules["numpy"]
        slabs = self._find_slabs()
        size = math.prod(shape) * dtype.itemsize
        is_fit = self._least <= size <= self._most and shape and is_plain_dtype(dtype)
        if not is_fit or not isinstance(slabs, Slabs):
            return None
        place = self._place(slabs, (False, dtype, shape, True), size)
        if place is None:
            return None
        opened, start = place
        part = slabs.part(opened.slab, start, size)
        end = start + size
        cost = (end - part.fresh) * FRESH
        if self.copied + cost > MOST_PER_TURN:
            slabs.lacks_memory(part)
            return None
        self.copied += cost
        try:
            memory = slabs.lend(part)
        except OSError as error:
            self._fail(slabs, part, error)
            return None
        # The slab is let go with the last view of the memory.
        given = self._given
        watch = weakref.ref(memory.obj, lambda _: given.pop(start, None))
        given[start] = _Given(opened.slab, end, watch)
        return numpy.frombuffer(memory, dtype).reshape(shape)

    def pin_for_fork(self) -> None:
        """What somebody has to write is never given to another: a child will see it too."""
        for given in list(self._given.values()):
            given.slab.leak()

    def close(self, slab: Slab) -> None:
        """No more rows in this slab: a batch has been taken from it."""
        slabs = self._find_slabs()
        keys = [key for key, opened in self._open.items() if opened.slab is slab]
        if keys and isinstance(slabs, Slabs):
            self._close(slabs, keys[0])

    def _place(self, slabs: Slabs, key: Key, size: int) -> tuple[_Open, int] | None:
        """A slab for one more row, and where in the memory that begins."""
        opened = self._open.get(key) or self._begin(slabs, key, size)
        if opened is None:
            return None
        start = opened.next
        opened.next = end = start + size
        if end + size > opened.end:
            self._close(slabs, key)
        elif len(self._open) > 1:
            self._open[key] = self._open.pop(key)
        return opened, start

    def _fail(self, slabs: Slabs, part: Part, error: OSError) -> None:
        slabs.lacks_memory(part)
        self._warn(error)

    def _begin(self, slabs: Slabs, key: Key, size: int) -> _Open | None:
        """Open a slab for this layout."""
        length = size * max(1, min(self.rows_per_slab, int(slabs.size * MOST_OF_ONE) // size))
        most = slabs.size * MOST_OF_ALL - length
        # Those that are open may be of layouts that never come again.
        while self._open and (len(self._open) == MOST_OPEN or slabs.taken_bytes > most):
            self._close(slabs, next(iter(self._open)))
        if slabs.taken_bytes > most:
            return None
        packed = _pack(Layout(*key))
        slab = slabs.reserve(length)
        if slab is None:
            return None
        self._open[key] = begun = _Open(slab, length, packed)
        return begun

    def _close(self, slabs: Slabs, key: Key) -> None:
        closed = self._open.pop(key)
        slabs.shrink(closed.slab, closed.next - closed.slab.start)


# Those of this process, which may fork.
_all: "weakref.WeakSet[InputArena]" = weakref.WeakSet()


def _pin_for_fork() -> None:
    for rows in list(_all):
        rows.pin_for_fork()


os.register_at_fork(before=_pin_for_fork)


# A dtype takes microseconds to pickle.
@functools.lru_cache(maxsize=64)
def _pack(layout: Layout) -> bytes:
    return pickle.dumps(layout, pickle.HIGHEST_PROTOCOL)


def _repeat(given: _Given, start: int, key: Key) -> StagedInput:
    """A row of what somebody has been given, and has written."""
    packed = _pack(Layout(*key)._replace(is_read_only=True))
    row = StagedInput(given.slab, start, given.end, packed)
    row.is_copied = True
    return row


class _NotWanted(OSError):
    """There is nobody left whom a row is for."""


def _copy(
    slabs: Slabs, part: Part, address: int, value: Any, may_be_freed: bool, row: StagedInput
) -> None:
    """On another thread. The value is here so that its memory stays."""
    # Given up, and no batch waits for it: its caller has left.
    if row.slab is None and row.on_copied is None:
        raise _NotWanted
    slabs.copy(part, address, releases_gil=True, may_be_freed=may_be_freed)


def _finish(
    slabs: Slabs,
    part: Part,
    row: StagedInput,
    warn: Callable[[BaseException], None],
    error: BaseException | None,
) -> None:
    """On the loop again: a row has been copied, or could not be."""
    if error is None:
        row.is_copied = True
    else:
        slabs.lacks_memory(part)
        row.has_failed = True
        row.give_up()
        if not slabs.is_closed and not isinstance(error, _NotWanted):
            warn(error)
    on_copied, row.on_copied = row.on_copied, None
    if on_copied is not None:
        on_copied()
