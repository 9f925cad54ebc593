"""Memory in which one worker leaves large answers, and from which the parent copies them.

As for inputs it is one file without a name (`slabs`). Only the worker writes answers, and knows
what is taken. Each has a byte ahead of it that the worker sets and the parent clears: so the worker
sees what is free when it needs room, and no message has to wake it. What has been written outlives
the worker, as long as the parent has the memory.

`Outbox` is the parent's side: its thread is the event loop's, but for `Answer.copy`, which any
thread may call. `OutboxWriter` is the worker's: its main thread.
"""

import contextlib
import ctypes
import mmap
import os
import weakref
from itertools import chain
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from fast_batcher._shared_memory.memcpy import move_piece
from fast_batcher._shared_memory.ranges import PAGE, Ranges
from fast_batcher._shared_memory.slabs import (
    ALIGNMENT,
    RELEASING_SIZE,
    lay_out,
    make_file,
    punch,
)
from fast_batcher._transport.pickler import Parts, load_items
from fast_batcher.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

# WorkAhead of an answer, with room so that it is aligned.
_TAKEN, _FREE = 1, 0
_HEADER_SIZE = ALIGNMENT
# Bytes from which on a copy lets the threads of the model run meanwhile, which costs 1.4 us. One of
# less takes some tens, and here no event loop waits for it, as it does in the parent.
LEAST_LETTING = 256 * 1024
# Memory that no answer has used between so many rests goes back to the system. An idle worker
# rests every five seconds, with the parent's ping: that makes a minute, as for inputs.
RESTS_TO_KEEP_MEMORY = 12


class Outbox:
    """The side that reads.

    Pickled while a process is being started, it becomes the `OutboxWriter` of that process.

    Args:
        size: Most bytes in all answers together that have not been copied yet.
        least: Bytes from which on a buffer is kept out of the pickle.

    Raises:
        OSError: The system has no such memory, or not so much.
    """

    def __init__(self, size: int, least: int) -> None:
        self._size = size
        self._least = least
        self._fd = make_file(size)
        try:
            # The memory goes when nobody has a part of this view any more.
            self._view: memoryview | None = memoryview(mmap.mmap(self._fd, size))
        except BaseException:
            self.close_fd()
            raise
        # Whether `close` has so much to do that it takes long.
        self.is_used = False
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd), self._size, self._least)

    def find(
        self, start: int, sizes: list[int], frozen: list[int], items: list[tuple[int, int]]
    ) -> "Answer":
        """An answer that the worker has left.

        Args:
            start: Where `OutboxWriter.put` has put it.
            sizes: Those of its parts.
            frozen: The numbers of its read-only buffers.
            items: What of it belongs to each output, as `Parts.items`.

        Raises:
            TransportError: No answer can lie there.
        """
        self.is_used = True
        numbers = (start, *sizes, *chain.from_iterable(items))
        if self._view is not None and all(type(one) is int and one >= 0 for one in numbers):
            offsets, length = lay_out(sizes)
            end = start + _HEADER_SIZE + length
            in_items = [sum(column) for column in zip(*items, strict=True)]
            if sizes and end <= self._size and in_items == [sizes[0], len(sizes) - 1]:
                return Answer(self._view[start:end], offsets, sizes, {*frozen}, items)
        raise TransportError("a worker says that it has left an answer where there can be none")

    def close_fd(self) -> None:
        """The memory stays, and nobody else is to get it; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_open(self) -> bool:
        """Whether there is memory to be given back."""
        return self._view is not None

    def close(self) -> None:
        """Give the memory back as soon as no answer is left in it; may be called again."""
        self.close_fd()
        self._view = None


# Those of this process. A child that the app forks would keep their memory as long as it lives.
_all: "weakref.WeakSet[Outbox]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for outbox in list(_all):
        outbox.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class Answer:
    """The outputs of a batch, as they lie in an outbox.

    Args:
        slab: Where they lie, and the byte ahead of them.
        offsets: Where each part begins behind that.
        sizes: The bytes of each part.
        frozen: Which parts behind the first become `bytes`.
        items: What of the parts belongs to each output.
    """

    def __init__(
        self,
        slab: memoryview,
        offsets: list[int],
        sizes: list[int],
        frozen: set[int],
        items: list[tuple[int, int]],
    ) -> None:
        self._slab = slab
        self._frozen = frozen
        self._items = items
        self._stream, *self._parts = (
            slab[_HEADER_SIZE + offset : _HEADER_SIZE + offset + size]
            for offset, size in zip(offsets, sizes, strict=True)
        )
        # Bytes of them all.
        self.size = sum(sizes)
        # Copies of the first parts, each of which is memory of its own: who keeps one output does
        # not keep the others.
        self._copies: list[bytes | bytearray] = []

    def copy(self, *, releases_gil: bool) -> None:
        """Copy what will not be copied when it is loaded.

        Args:
            releases_gil: Whether other threads may run meanwhile.

        Raises:
            MemoryError: There is none left; `load` tries again.
        """
        if not self._copies:
            _ask_for_memory(self.size)
        for index in range(len(self._copies), len(self._parts)):
            part = self._parts[index]
            kind = _BYTES if index in self._frozen else _BYTEARRAY
            is_long = releases_gil and part.nbytes >= RELEASING_SIZE
            self._copies.append(kind.copy_beside(part) if is_long else kind.type(part))

    def load(self, on_error: "Callable[[BaseException], Any]") -> list[Any]:
        """Make the outputs; nothing of them is in the outbox any more, and this answer is over.

        Args:
            on_error: Gives what stands in the place of an output that cannot be unpickled.
        """
        try:
            self.copy(releases_gil=False)
            return load_items(self._stream, self._copies, self._items, on_error)
        finally:
            self.release()

    def release(self) -> None:
        """Give its place back to the worker: it is not wanted any more."""
        self._slab[0] = _FREE
        self._slab = self._stream = memoryview(b"")
        self._parts, self._copies = [], []


# Functions of our own: those of `ctypes.pythonapi` are everybody's, and so are their types.
_python = ctypes.PyDLL(None)


class _Kind:
    """A type of buffer that owns its bytes.

    Args:
        type: It.
        make: CPython's function that makes one whose bytes are anything.
        address: The one that tells where those are.
    """

    def __init__(self, type: type[bytes] | type[bytearray], make: Any, address: Any) -> None:
        self.type = type
        self.make = make
        self.make.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
        self.make.restype = ctypes.py_object
        self._address = address
        self._address.argtypes = (ctypes.py_object,)
        self._address.restype = ctypes.c_void_p

    def copy_beside(self, part: memoryview) -> Any:
        """A copy that is made while other threads run; its type's own would stop them."""
        copy = self.make(None, part.nbytes)
        move_piece(self._address(copy), part)
        return copy


_BYTES = _Kind(bytes, _python.PyBytes_FromStringAndSize, _python.PyBytes_AsString)
_BYTEARRAY = _Kind(bytearray, _python.PyByteArray_FromStringAndSize, _python.PyByteArray_AsString)


# The C library's limit for what `_ask_for_memory` brings about, less what it needs for itself.
_MOST_ASKED_FOR = 31 * 1024 * 1024


def _ask_for_memory(size: int) -> None:
    """Have so much memory in one piece, untouched, and give it back.

    From then on the C library of Linux keeps that much of what is given back to it, where it would
    give large pieces back to the system one by one, and get each again as pages that have not been
    used before. They take several times as long as the copying.
    """
    _BYTEARRAY.make(None, min(size, _MOST_ASKED_FOR))


class OutboxWriter:
    """The side that writes.

    Args:
        fd: Of the file, which is taken over.
        size: Its length in bytes.
        least: Bytes from which on a buffer is kept out of the pickle.

    Raises:
        OSError: This process may not have so much memory.
    """

    def __init__(self, fd: int, size: int, least: int) -> None:
        self.least = least
        self._size = size
        self._fd = fd
        try:
            # What the model starts has no use for it, and would keep the memory.
            os.set_inheritable(fd, False)
            self._memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self._ranges = Ranges(size)
        # Where answers begin that had not been copied when we looked last.
        self._starts: list[int] = []
        # Up to here there is memory.
        self._committed_end = 0
        self._rests = 0

    def put(self, parts: Parts) -> int | None:
        """Leave an answer; where it lies, or None if there is no room for it.

        Raises:
            OSError: There is no memory left.
        """
        self._take_back()
        start = self._ranges.take(_HEADER_SIZE + parts.size)
        if start is None:
            return None
        try:
            self._get_memory(start + _HEADER_SIZE + parts.size)
        except OSError:
            self._ranges.give_back(start)
            raise
        for offset, piece in parts:
            self._write(start + _HEADER_SIZE + offset, piece)
        self._memory[start] = _TAKEN
        self._starts.append(start)
        return start

    def rest(self) -> None:
        """There is nothing to do: now and then, give back memory that was not used for long."""
        self._take_back()
        self._rests += 1
        if self._rests % RESTS_TO_KEEP_MEMORY:
            return
        end, self._committed_end = (
            self._committed_end,
            min(self._committed_end, self._ranges.forget_peak()),
        )
        if self._committed_end < end:
            with contextlib.suppress(OSError):
                punch(self._fd, self._committed_end, end - self._committed_end)

    def describe_room(self) -> str:
        """How much there is, and how much of it is taken."""
        return f"{self._ranges.taken_bytes} of max_shared_bytes={self._size} are taken"

    def close(self) -> None:
        """Give the memory back; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._memory.close()

    def _take_back(self) -> None:
        """Find what has been copied."""
        left = []
        for start in self._starts:
            # Looked at once: the parent may clear it at any moment.
            if self._memory[start] == _FREE:
                self._ranges.give_back(start)
            else:
                left.append(start)
        self._starts = left

    def _get_memory(self, end: int) -> None:
        end = -(-end // PAGE) * PAGE  # part of a page could not be given back
        if self._committed_end < end:
            # Else it were a fatal signal to write where there is no memory to be had.
            os.posix_fallocate(self._fd, self._committed_end, end - self._committed_end)
            self._committed_end = end

    def _write(self, start: int, piece: bytes | memoryview) -> None:
        size = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if size >= LEAST_LETTING:
            move_piece(self._address + start, piece)
        else:
            self._memory[start : start + size] = piece


def _open(duplicate: Any, size: int, least: int) -> OutboxWriter | OSError:
    try:
        writer = OutboxWriter(duplicate.detach(), size, least)
    except OSError as error:  # the process may not have so much: it will be told when it wants it
        return error.with_traceback(None)
    # The model may fork, and its child would keep the memory as long as it lives.
    os.register_at_fork(after_in_child=writer.close)
    return writer
