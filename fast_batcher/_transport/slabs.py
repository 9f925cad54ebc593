"""Memory that the parent and one worker share: one side writes slabs, the other has views of them.

It is one file without a name, which ends with the processes that have it, whatever they die of. It
is as long as it may become, and takes no memory before something is written. The side that writes
also says which parts are taken; a slab is free again when the other side has no view of it.

`Slabs` is the writer's side: its thread is the event loop's, but for `write` and `punch`, which any
thread may call. `SlabViews` is the reader's: the worker's main thread, and whichever drops a view.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterable
from multiprocessing import reduction
from typing import Any, NamedTuple

from fast_batcher._transport.ranges import Ranges, round_up

# Where a buffer begins in its slab: the alignment that vector instructions like, a cache line.
ALIGNMENT = 64
# From here on a copy aside lets other threads run: less than this is over before they notice.
RELEASING_SIZE = 64 * 1024
# linux/falloc.h: keep the size, and take the memory out of the middle.
_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02


class Slab(NamedTuple):
    """A part of the memory that somebody has taken."""

    start: int
    # Bytes; what was asked for, rounded up.
    length: int
    # From where on it may be memory that the system has not given us yet.
    fresh: int


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes begin in a slab, and how long it has to be."""
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


class Slabs:
    """The side that takes slabs and writes them.

    Pickled while a process is being started, it becomes the `SlabViews` of that process.

    Args:
        size: Most bytes in all slabs together.

    Raises:
        OSError: The system has no such memory, or not so much.
    """

    def __init__(self, size: int) -> None:
        # Most bytes in all slabs together.
        self.size = size
        self._ranges = Ranges(size)
        # Up to here the file has been written.
        self._used_end = 0
        # Up to here all of it has been.
        self._solid_end = 0
        self._fd = _make_file(size)
        try:
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        # Guards the following two, for moments only.
        self._lock = threading.Lock()
        self.is_closed = False
        # Calls of `write` and `punch` under way: the memory must stay until they are over.
        self._users = 0
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd), self.size)

    @property
    def count(self) -> int:
        """Slabs that are taken."""
        return self._ranges.count

    @property
    def taken_bytes(self) -> int:
        """Bytes in them."""
        return self._ranges.taken_bytes

    def take(self, length: int) -> Slab | None:
        """Take a slab of at least so many bytes, or None if there is no room."""
        start = None if self.is_closed else self._ranges.take(length)
        if start is None:
            return None
        end = start + round_up(length)
        slab = Slab(start, end - start, min(end, max(start, self._solid_end)))
        if start <= self._solid_end:
            self._solid_end = max(self._solid_end, end)
        self._used_end = max(self._used_end, end)
        return slab

    def write(
        self, slab: Slab, pieces: Iterable[tuple[int, "bytes | memoryview"]], *, is_aside: bool
    ) -> None:
        """Copy buffers into a slab.

        Args:
            slab: Taken and not given back; nobody else writes it meanwhile.
            pieces: Where each begins in the slab, and its bytes, which are contiguous.
            is_aside: Whether other threads may run meanwhile; costs 2 us per large piece.

        Raises:
            OSError: There is no memory left, or the slabs have been closed.
        """
        self._begin_use()
        try:
            end = slab.start + slab.length
            if slab.fresh < end:
                # Else it were a fatal signal to write where there is no memory to be had.
                os.posix_fallocate(self._fd, slab.fresh, end - slab.fresh)
            for offset, piece in pieces:
                self._write_piece(slab.start + offset, piece, is_aside=is_aside)
        finally:
            self._end_use()

    def give_back(self, slab_start: int) -> None:
        """Nobody has a view of this slab any more.

        Raises:
            KeyError: There is none that starts there.
        """
        if not self.is_closed:
            self._ranges.give_back(slab_start)

    def discard(self, slab: Slab) -> None:
        """The same of one that could not be written: it may be without memory."""
        self.give_back(slab.start)
        self._solid_end = min(self._solid_end, slab.fresh)
        if self._used_end == slab.start + slab.length:
            self._used_end = slab.fresh

    def take_unused(self) -> Slab | None:
        """Take the memory at the end that was not used since the last call of this, or None.

        It is for `punch`, and `discard` after that.
        """
        begin, end = self._ranges.forget_peak(), self._used_end
        if self.is_closed or begin >= end:
            return None
        self._ranges.take_part(begin, end)
        return Slab(begin, end - begin, begin)

    def punch(self, slab: Slab) -> None:
        """Give the memory of a slab back to the system.

        Raises:
            OSError: The system cannot, or the slabs have been closed.
        """
        self._begin_use()
        try:
            _punch(self._fd, slab.start, slab.length)
        finally:
            self._end_use()

    @property
    def is_open(self) -> bool:
        """Whether there is memory to be given back."""
        return self._fd >= 0

    def retire(self) -> bool:
        """Nobody takes or writes any more; whether `close` has so much to do that it takes long."""
        with self._lock:
            self.is_closed = True
        return self._used_end > 0

    def close(self) -> None:
        """Give everything back, as soon as nobody writes any more; may be called again."""
        with self._lock:
            self.is_closed = True
            self._close_unused()

    def close_in_child(self) -> None:
        """Give back what a fork has copied of this, whatever other threads were doing with it."""
        self._lock, self._users = threading.Lock(), 0
        with contextlib.suppress(BufferError):  # one of them was writing
            self.close()

    def _write_piece(self, start: int, piece: "bytes | memoryview", *, is_aside: bool) -> None:
        size = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if is_aside and size >= RELEASING_SIZE:
            _move(self._address + start, piece)
        else:
            self._memory[start : start + size] = piece

    def _begin_use(self) -> None:
        with self._lock:
            if self.is_closed:
                raise OSError(errno.EBADF, "the shared memory is closed")
            self._users += 1

    def _end_use(self) -> None:
        with self._lock:
            self._users -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        if self.is_closed and not self._users and self._fd >= 0:
            self._memory.close()
            os.close(self._fd)
            self._fd = -1


# Those of this process. A child that the app forks would keep their memory as long as it lives.
_all: "weakref.WeakSet[Slabs]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for slabs in list(_all):
        slabs.close_in_child()


os.register_at_fork(after_in_child=_leave_to_parent)


class SlabViews:
    """The side that reads slabs.

    A view of a slab can be written: nobody else looks at that memory as long as there is one.

    Args:
        fd: Of the file, which is taken over.
        size: Its length in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        try:
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # By the start of a slab: dies with the last view of it, and says so.
        self._owners: dict[int, weakref.ref[Any]] = {}
        # One type of owner for each length that slabs have.
        self._types: dict[int, Any] = {}
        # Where slabs start of which no view is left and the writer has not been told yet.
        self.freed: list[int] = []

    def view(self, start: int, length: int) -> memoryview:
        """The bytes of a slab; it is free when no view of this view and no array on it is left.

        Args:
            start: As in `Slab`.
            length: As in `Slab`.
        """
        kind = self._types.get(length)
        if kind is None:
            kind = self._types[length] = ctypes.c_ubyte * length
        # An exporter of its own for every slab. All views have a reference to the exporter, however
        # they were made, and not to the views between: those are no measure of its life.
        owner = kind.from_buffer(self._memory, start)
        self._owners[start] = weakref.ref(owner, functools.partial(self._free, start))
        # A view of plain bytes, which that of a ctypes array is not.
        return pickle.PickleBuffer(owner).raw()

    def take_freed(self) -> list[int]:
        """Where slabs start that have become free since the last call."""
        # Another thread may add one at any moment.
        freed = self.freed[:]
        del self.freed[: len(freed)]
        return freed

    def pin(self) -> None:
        """What is viewed now is never free again: a copy of this process will have views too."""
        self._owners.clear()

    def close(self) -> None:
        """Give the memory back.

        Raises:
            BufferError: There are views.
        """
        self._memory.close()

    def _free(self, start: int, _: object) -> None:
        # Not there if it was pinned.
        if self._owners.pop(start, None) is not None:
            self.freed.append(start)


def _open(duplicate: Any, size: int) -> SlabViews:
    views = SlabViews(duplicate.detach(), size)
    # A model may fork, and nobody would hear of the views that its child drops.
    os.register_at_fork(before=views.pin)
    return views


def _make_file(size: int) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "there is memory without a name on Linux only")
    fd = os.memfd_create("fast_batcher")
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`, which is the same in all versions from 3.11 on."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t),
        ("is_read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Functions of our own: those of `ctypes.pythonapi` are everybody's, and so are their types.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None
# Contiguous bytes, which need not be writable.
_SIMPLE = 0


def _move(address: int, piece: "bytes | memoryview") -> None:
    """Copy to this address, and let other threads run meanwhile."""
    buffer = _Buffer()
    _get_buffer(piece, buffer, _SIMPLE)
    try:
        ctypes.memmove(address, buffer.address, buffer.size)
    finally:
        _release_buffer(buffer)


def _punch(fd: int, start: int, length: int) -> None:
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if fallocate(fd, _KEEP_SIZE_AND_PUNCH, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
