"""Memory that the parent and its workers share: the parent writes slabs, the workers have views.

It is one file without a name, which ends with the processes that have it, whatever they die of. It
is as long as it may become, and takes no memory before something is written. The side that writes
also says what is taken: a slab, as long as somebody has it. Who writes it has, and so has a batch
that lies in it, as long as its worker has a view of it.

`Slabs` is the writer's side: its thread is the event loop's, but for what any thread may call:
`write`, `copy` and `punch`. Any may be the last to have a slab. `SlabViews` is the reader's: the
worker's main thread, and whichever drops a view.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import pickle
import select
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from typing import Any, NamedTuple

from fast_batcher._shared_memory.memcpy import Move, move, move_held, move_piece
from fast_batcher._shared_memory.ranges import PAGE, Ranges, round_up
from fast_batcher._transport.memory_file import make_memory_file

# Where a buffer begins in its slab: the alignment that vector instructions like, a cache line.
ALIGNMENT = 64
# From here on a copy aside lets other threads run: less than this is over before they notice.
RELEASING_SIZE = 64 * 1024
# linux/falloc.h: keep the size, and take the memory out of the middle.
_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02


class Slab:
    """Memory that is taken until nobody has this object any more."""

    __slots__ = ("_on_end", "start")

    def __init__(self, start: int, on_end: Callable[[int], object]) -> None:
        self.start = start
        self._on_end = on_end

    def leak(self) -> None:
        """It is taken for ever."""
        self._on_end = _ignore

    # On whichever thread, and the garbage collector may call it in the middle of anything. Of a
    # cycle it does so while others of the cycle may still have it: none has a slab that is in use.
    def __del__(self) -> None:
        self._on_end(self.start)


def _ignore(_: int) -> None:
    """Nobody wants to know."""


class Part(NamedTuple):
    """A part of a slab that is to be written, or all of it."""

    slab: Slab
    start: int
    # Bytes.
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


class VolatileBuffer:
    """What an array is made of whose memory may be freed while the array is there."""


class Slabs:
    """The side that takes slabs and writes them.

    Pickled while a process is being started, it becomes the `SlabViews` of that process.

    Args:
        size: Most bytes in all slabs together.
        by: How to copy when other threads may run.

    Raises:
        OSError: The system has no such memory, or not so much.
    """

    def __init__(self, size: int, by: Move = move) -> None:
        # Most bytes in all slabs together.
        self.size = size
        self._move = by
        self._ranges = Ranges(size)
        # Starts of slabs that nobody has any more: noted by any thread, freed by ours.
        self._ended: deque[int] = deque()
        # Up to here the file has been taken.
        self._used_end = 0
        # Up to here all of it has been written, or is about to be.
        self._committed_end = 0
        self._fd = make_file(size)
        try:
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        # Guards the following two, for moments only.
        self._lock = threading.Lock()
        self.is_closed = False
        # Calls of `write`, `copy` and `punch` under way: the memory must stay until they are over.
        self._users = 0
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd), self.size)

    @property
    def count(self) -> int:
        """Slabs that are taken."""
        self._forget_ended()
        return self._ranges.count

    @property
    def taken_bytes(self) -> int:
        """Bytes in them."""
        self._forget_ended()
        return self._ranges.taken_bytes

    def take(self, length: int) -> Part | None:
        """Take a slab of at least so many bytes, written as one; None if there is no room."""
        slab = self.reserve(length)
        return None if slab is None else self.part(slab, slab.start, round_up(length))

    def reserve(self, length: int) -> Slab | None:
        """Take a slab that is written part by part; None if there is no room."""
        self._forget_ended()
        start = None if self.is_closed else self._ranges.take(length)
        if start is None:
            return None
        self._used_end = max(self._used_end, start + round_up(length))
        return Slab(start, self._ended.append)

    def part(self, slab: Slab, start: int, length: int) -> Part:
        """A part of a slab, which is written now."""
        end = start + length
        part = Part(slab, start, length, min(end, max(start, self._committed_end)))
        if start <= self._committed_end:
            # Memory comes in pages.
            self._committed_end = max(self._committed_end, -(-end // PAGE) * PAGE)
        return part

    def shrink(self, slab: Slab, length: int) -> None:
        """Of a slab no more than so many bytes are needed; more than none."""
        if not self.is_closed:
            self._ranges.shrink(slab.start, length)

    def write(
        self, part: Part, pieces: Iterable[tuple[int, "bytes | memoryview"]], *, releases_gil: bool
    ) -> None:
        """Copy buffers into a part of a slab.

        Args:
            part: Nobody else writes it meanwhile.
            pieces: Where each begins in it, and its bytes, which are contiguous.
            releases_gil: Whether other threads may run meanwhile; costs 2 us per large piece.

        Raises:
            OSError: There is no memory left, or the slabs have been closed.
        """
        self._begin_use()
        try:
            self._get_memory(part)
            for offset, piece in pieces:
                self._write_piece(part.start + offset, piece, releases_gil=releases_gil)
        finally:
            self._end_use()

    def copy(
        self, part: Part, address: int, *, releases_gil: bool, may_be_freed: bool = False
    ) -> None:
        """Copy what is at this address into all of a part of a slab; otherwise like `write`.

        Args:
            part: As for `write`.
            address: Of as many bytes.
            releases_gil: As for `write`.
            may_be_freed: Whether others may free them meanwhile; that is an `OSError` then, or what
                is copied is anything.
        """
        self._begin_use()
        try:
            self._get_memory(part)
            if may_be_freed and releases_gil:
                source = (ctypes.c_ubyte * part.length).from_address(address)
                self._write_volatile(part.start, memoryview(source))
            else:
                by = self._move if releases_gil else move_held
                by(self._address + part.start, address, part.length)
        finally:
            self._end_use()

    def put(self, start: int, end: int, array: Any) -> bool:
        """Copy an array into a part that has memory already; but for the bytes cheaper than `copy`.

        Args:
            start: Of the part, of a slab that the caller has.
            end: The part has as many bytes as the array.
            array: Contiguous.

        Returns:
            Whether it has been done. Not if there may be no memory, and not if another thread has
            resized the array or closed the slabs just now.
        """
        if end > self._committed_end:
            return False
        try:
            self._memory[start:end] = array
        except (AttributeError, BufferError, IndexError, ValueError):
            return False
        return True

    def lend(self, part: Part) -> memoryview:
        """A part of a slab, for somebody else to write; its `obj` lives as long as views of it.

        It does not keep the slab.

        Raises:
            OSError: There is no memory left, or the slabs have been closed.
        """
        self._begin_use()
        try:
            self._get_memory(part)
            owner = (ctypes.c_ubyte * part.length).from_buffer(self._memory, part.start)
            return pickle.PickleBuffer(owner).raw()
        finally:
            self._end_use()

    def offset_of(self, address: int) -> int:
        """Where this address is in the memory; below 0, or `size` and more, if it is elsewhere."""
        return address - self._address

    def lacks_memory(self, part: Part) -> None:
        """A part could not be written, or was punched: it may be without memory."""
        self._committed_end = min(self._committed_end, part.fresh)

    def discard(self, whole: Part) -> None:
        """The same of all of a slab."""
        self.lacks_memory(whole)
        if self._used_end == whole.start + whole.length:
            self._used_end = whole.fresh

    def take_unused(self) -> Part | None:
        """Take the memory at the end that was not used since the last call of this, or None.

        It is for `punch`, and `discard` after that.
        """
        self._forget_ended()
        begin, end = self._ranges.forget_peak(), self._used_end
        if self.is_closed or begin >= end:
            return None
        self._ranges.take_part(begin, end)
        return Part(Slab(begin, self._ended.append), begin, end - begin, begin)

    def punch(self, part: Part) -> None:
        """Give the memory of a part of a slab back to the system.

        Raises:
            OSError: The system cannot, or the slabs have been closed.
        """
        self._begin_use()
        try:
            punch(self._fd, part.start, part.length)
        finally:
            self._end_use()

    def close(self) -> None:
        """Give everything back, as soon as nobody writes any more; may be called again.

        Takes 80 ms per 200 MiB.
        """
        with self._lock:
            self.is_closed = True
            self._close_unused()

    def close_in_child(self) -> None:
        """Give back what a fork has copied of this, whatever other threads were doing with it."""
        self._lock, self._users = threading.Lock(), 0
        self.close()

    def _forget_ended(self) -> None:
        while self._ended:
            self._ranges.give_back(self._ended.popleft())

    def _get_memory(self, part: Part) -> None:
        end = part.start + part.length
        if part.fresh < end:
            # Else it were a fatal signal to write where there is no memory to be had. With the page
            # before: a neighbour that begins it may have failed to get it.
            begin = max(part.start, part.fresh - PAGE)
            os.posix_fallocate(self._fd, begin, end - begin)

    def _write_piece(self, start: int, piece: "bytes | memoryview", *, releases_gil: bool) -> None:
        size = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if releases_gil and isinstance(piece, memoryview) and _is_volatile(piece):
            self._write_volatile(start, piece)
        elif releases_gil and size >= RELEASING_SIZE:
            move_piece(self._address + start, piece, self._move)
        else:
            self._memory[start : start + size] = piece

    def _write_volatile(self, start: int, piece: memoryview) -> None:
        """Copy what somebody may free meanwhile, and let other threads run.

        To read what has been freed would be a fatal signal; for the system it is an error.
        """
        while piece:
            try:
                written = os.pwrite(self._fd, piece, start)
            except OSError as error:
                if error.errno == errno.EFAULT:
                    error.strerror = "an input was resized while it was copied"
                raise
            start += written
            piece = piece[written:]

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
            with contextlib.suppress(BufferError):
                self._memory.close()
            # What has been lent keeps it until that is forgotten.
            del self._memory
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

    What a batch has been given can be written: nobody else looks at it as long as there is a view.

    Args:
        fd: Of the file, which is taken over.
        size: Its length in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        try:
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # In bytes.
        self.size = size
        self._type = ctypes.c_ubyte * size
        # Where the memory is in this process.
        self.address = ctypes.addressof(self._type.from_buffer(self._memory))
        # By batch: dies with the last view that was made for it in this process, and says so.
        self._owners: dict[int, weakref.ref[Any]] = {}
        # Batches that are not free.
        self._leased: dict[int, None] = {}
        # Children of this process that may have views and had not ended when we looked last.
        self.forks: list[_Fork] = []
        # The other ends of their pipes, by the thread that is forking.
        self._write_ends: dict[int, int] = {}
        # Ids of batches of which no view is left and the writer has not been told yet.
        self.freed: list[int] = []
        # Told the last batch of which children may have views, -1 if there is none any more.
        self.on_fork: Callable[[int], object] = _ignore
        # Held while it is told: what is told last counts. A child, which has a copy, tells nothing.
        self._telling = threading.Lock()

    def view(self, batch_id: int) -> memoryview:
        """The whole memory, for one batch, which may use what it has been given of it.

        The batch is free when no view of this view and no array on it is left.
        """
        # An exporter of its own for every batch. All views have a reference to the exporter, how-
        # ever they were made, and not to the views between: those are no measure of its life.
        owner = self._type.from_buffer(self._memory)
        self._leased[batch_id] = None
        self._owners[batch_id] = weakref.ref(owner, functools.partial(self._drop, batch_id))
        # A view of plain bytes, which that of a ctypes array is not.
        return pickle.PickleBuffer(owner).raw()

    def take_freed(self) -> list[int]:
        """Batches that have become free since the last call."""
        if self.forks:
            self._forget_ended_forks()
        # Another thread may add one at any moment.
        freed = self.freed[:]
        del self.freed[: len(freed)]
        return freed

    def before_fork(self) -> None:
        """The child will have copies of the views: their batches are free when it has ended, too.

        A pipe tells: its other end is the child's alone, and that of processes which it forks.
        """
        batch_ids = [*self._owners]
        if not batch_ids:
            return
        try:
            read_end, self._write_ends[threading.get_ident()] = os.pipe()
        except OSError:  # there is no descriptor left: they are never free
            read_end = -1
        self.forks.append(_Fork(read_end, batch_ids))
        self._tell_last_viewed()

    def after_fork_in_parent(self) -> None:
        """Leave the other end of the pipe to the child."""
        write_end = self._write_ends.pop(threading.get_ident(), None)
        if write_end is not None:
            os.close(write_end)

    def after_fork_in_child(self) -> None:
        """Keep the end that tells of this child, and nothing that tells of others."""
        self._write_ends.pop(threading.get_ident(), None)
        for fd in (*self._write_ends.values(), *(fork.read_end for fork in self.forks)):
            if fd >= 0:
                os.close(fd)
        self._write_ends.clear()
        self.forks.clear()
        # What the child forks keeps that end, too.
        self._owners.clear()

    def close(self) -> None:
        """Give the memory back.

        Raises:
            BufferError: There are views.
        """
        self._memory.close()

    def _drop(self, batch_id: int, _: object) -> None:
        """The last view of a batch in this process has died, on whichever thread."""
        self._owners.pop(batch_id, None)
        self._free_unviewed(batch_id)

    def _forget_ended_forks(self) -> None:
        poller = select.poll()
        for fork in self.forks[:]:
            if fork.read_end >= 0:
                # The end of a pipe is told without being asked for.
                poller.register(fork.read_end, 0)
        ended = {fd for fd, _ in poller.poll(0)}
        if not ended:
            return
        for fork in self.forks[:]:
            if fork.read_end in ended:
                self.forks.remove(fork)
                os.close(fork.read_end)
                for batch_id in fork.batch_ids:
                    self._free_unviewed(batch_id)
        self._tell_last_viewed()

    def _tell_last_viewed(self) -> None:
        with self._telling:
            self.on_fork(max((max(fork.batch_ids) for fork in self.forks[:]), default=-1))

    def _free_unviewed(self, batch_id: int) -> None:
        """Free a batch if neither this process nor a child has a view of it."""
        if batch_id in self._owners or any(batch_id in fork.batch_ids for fork in self.forks[:]):
            return
        # The last view here and the last child may go at once; only one of them takes it.
        if self._leased.pop(batch_id, self) is None:
            self.freed.append(batch_id)


class _Fork(NamedTuple):
    """A child of the process that views slabs."""

    # Of a pipe; at its end when the child has ended or runs another program. -1 if there is none.
    read_end: int
    # Of what the child may have views.
    batch_ids: list[int]


def _open(duplicate: Any, size: int) -> SlabViews | OSError:
    try:
        views = SlabViews(duplicate.detach(), size)
    except OSError as error:  # the process may not have so much: it says so when it can
        return error.with_traceback(None)
    os.register_at_fork(
        before=views.before_fork,
        after_in_parent=views.after_fork_in_parent,
        after_in_child=views.after_fork_in_child,
    )
    return views


def make_file(size: int) -> int:
    """The descriptor of a file without a name, of so many bytes.

    Raises:
        OSError: The system has no such memory, or not so much.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "memory is shared on Linux only")
    return make_memory_file(size)


def _is_volatile(piece: memoryview) -> bool:
    return isinstance(getattr(piece.obj, "base", None), VolatileBuffer)


def punch(fd: int, start: int, length: int) -> None:
    """Give the memory of a part of a file back to the system.

    Raises:
        OSError: The system cannot.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if fallocate(fd, _KEEP_SIZE_AND_PUNCH, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
