"""The writer's half of the memory that carries inputs to the workers. API process.

The memory is one anonymous file of its maximal length. The system provides memory for a part of the
file when it is written first. The file ends with the last process that has it open.

`Slabs` keeps account of taken ranges. A range (`Slab`) is free again once no reference to it is
left: the code that writes it holds one, and so does the lease of each batch that lies in it, as
long as its worker has a view of it (`views.SlabViews` is the worker's half).

All methods run on the event loop's thread, except `write` and `punch`, which any thread may call.
Any thread may drop the last reference to a slab.
"""

import contextlib
import ctypes
import errno
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import reduction
from typing import Any, NamedTuple

from fast_batcher._fork import at_fork
from fast_batcher._shared_memory.memcpy import RELEASING_SIZE, copy_buffer
from fast_batcher._shared_memory.ranges import PAGE, Ranges, round_up
from fast_batcher._shared_memory.views import SlabViews
from fast_batcher._transport.memory_file import make_shared_file, map_file, open_passed, punch
from fast_batcher._transport.tensors import is_volatile


class Slab:
    """A range of the memory, which is taken as long as this object exists.

    Args:
        start: Start of the range, in bytes.
        ended: Receives `start` when the last reference is dropped, on any thread.
    """

    __slots__ = ("_ended", "start")

    def __init__(self, start: int, ended: deque[int]) -> None:
        self.start = start
        self._ended: deque[int] | None = ended

    def leak(self) -> None:
        """Never free the range: a process unknown to this one may read it."""
        self._ended = None

    # The garbage collector may run this in the middle of any statement. In a reference cycle other
    # objects may still refer to this one; none of them uses the slab.
    def __del__(self) -> None:
        if self._ended is not None:
            self._ended.append(self.start)


class Section(NamedTuple):
    """Section of a slab, or a whole slab, to be written."""

    slab: Slab
    # In bytes, from the beginning of the memory.
    start: int
    length: int
    # Start of the bytes for which the system may not have provided memory yet.
    fresh_from: int


class Slabs:
    """Allocator and writer of slabs.

    Passed to a child process as an argument, it becomes the `SlabViews` of that process.

    Args:
        size: Most bytes in all slabs together.
        fd: Descriptor of a file of another process, owned by this object from now on; -1 makes a
            file.
        base: Start of the range of that file, in bytes; a whole number of pages. Positions in the
            memory count from here.

    Raises:
        OSError: The system does not provide such memory, or not of this size.
    """

    def __init__(self, size: int, fd: int = -1, base: int = 0) -> None:
        # Most bytes in all slabs together.
        self.size = size
        self.base = base
        self._ranges = Ranges(size)
        # Starts of slabs without a reference: added by any thread, freed by the loop's.
        self._ended: deque[int] = deque()
        # The end of the ranges that have been taken so far.
        self._used_end = 0
        # The system has provided all memory up to here, or is about to.
        self._committed_end = 0
        self._fd = make_shared_file(size) if fd < 0 else fd
        self._memory = map_file(self._fd, size, base)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        # Protects the next two attributes. Held for moments only.
        self._lock = threading.Lock()
        self.is_closed = False
        # Calls of `write`, `lend` and `punch` that are running: the memory stays until they end.
        self._users = 0
        at_fork(self, in_child=Slabs.close_in_child)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_passed, (SlabViews, reduction.DupFd(self._fd), self.size)

    def duplicate_fd(self) -> int:
        """Return a descriptor of the file for another process.

        Raises:
            OSError: The slabs have been closed, or the process has too many descriptors.
        """
        with self._in_use():
            return os.dup(self._fd)

    @property
    def count(self) -> int:
        """Number of taken slabs."""
        self._free_ended()
        return self._ranges.count

    @property
    def taken_bytes(self) -> int:
        """Total bytes of the taken slabs."""
        self._free_ended()
        return self._ranges.taken_bytes

    def take(self, length: int) -> Section | None:
        """Take a slab of at least `length` bytes, to be written whole; None if there is no room."""
        slab = self.reserve(length)
        return None if slab is None else self.section(slab, slab.start, round_up(length))

    def reserve(self, length: int) -> Slab | None:
        """Take a slab, to be written section by section; None if there is no room."""
        self._free_ended()
        start = None if self.is_closed else self._ranges.take(length)
        if start is None:
            return None
        self._used_end = max(self._used_end, start + round_up(length))
        return Slab(start, self._ended)

    def section(self, slab: Slab, start: int, length: int) -> Section:
        """Return a section of a slab; the caller must write it, or call `mark_uncommitted`."""
        end = start + length
        section = Section(slab, start, length, min(end, max(start, self._committed_end)))
        if start <= self._committed_end:
            # The system provides whole pages.
            self._committed_end = max(self._committed_end, -(-end // PAGE) * PAGE)
        return section

    def shrink(self, slab: Slab, length: int) -> None:
        """Free the part of a slab beyond `length` bytes, which is at least 1."""
        if not self.is_closed:
            self._ranges.shrink(slab.start, length)

    def write(
        self,
        section: Section,
        pieces: Iterable[tuple[int, bytes | memoryview]],
        *,
        releases_gil: bool,
    ) -> None:
        """Copy buffers into a section of a slab. Any thread.

        Args:
            section: The section; no other thread may write it meanwhile.
            pieces: The offset of each piece in the section, and its contiguous bytes.
            releases_gil: Release the GIL during large copies; costs 2 us per large piece.

        Raises:
            OSError: There is no memory left, the slabs have been closed, or the memory of a
                volatile piece was freed meanwhile.
        """
        with self._in_use():
            self._get_memory(section)
            for offset, piece in pieces:
                self._write_piece(section.start + offset, piece, releases_gil=releases_gil)

    def lend(self, section: Section) -> memoryview:
        """Return a view of a section of a slab for the app to write; it does not keep the slab.

        The view's `obj` lives as long as any view that was made from it.

        Raises:
            OSError: There is no memory left, or the slabs have been closed.
        """
        with self._in_use():
            self._get_memory(section)
            owner = (ctypes.c_ubyte * section.length).from_buffer(self._memory, section.start)
            return pickle.PickleBuffer(owner).raw()

    def offset_of(self, address: int) -> int:
        """Return an address as an offset in the memory; outside of 0 to `size` if elsewhere."""
        return address - self._address

    def mark_uncommitted(self, section: Section) -> None:
        """Note that a section may have no memory: it could not be written, or was punched."""
        self._committed_end = min(self._committed_end, section.fresh_from)
        if self._used_end == section.start + section.length:
            self._used_end = section.fresh_from

    def take_unused(self) -> Section | None:
        """Take the memory at the end that was not used since the last call, None without any.

        The caller must pass the section to `punch`, and then to `mark_uncommitted`.
        """
        self._free_ended()
        begin, end = self._ranges.forget_peak(), self._used_end
        if self.is_closed or begin >= end:
            return None
        self._ranges.take_part(begin, end)
        return Section(Slab(begin, self._ended), begin, end - begin, begin)

    def punch(self, section: Section) -> None:
        """Return the memory of a section of a slab to the system. Any thread.

        Raises:
            OSError: The system cannot take it back, or the slabs have been closed.
        """
        with self._in_use():
            punch(self._fd, self.base + section.start, section.length)

    def when_unmapped(self, done: Callable[[], None]) -> None:
        """Call `done` once the memory is unmapped: at `close`, or when the last lent view is gone.

        A forked child calls it, too, for its copy of the map. A process that ends does not.
        """
        weakref.finalize(self._memory, done).atexit = False

    def close(self) -> None:
        """Unmap all memory as soon as no thread writes it; may be called again.

        Takes 80 ms per 200 MiB that were used.
        """
        with self._lock:
            self.is_closed = True
            self._close_unused()

    def close_in_child(self) -> None:
        """Unmap the memory in a forked child, where no thread writes any more."""
        self._lock, self._users = threading.Lock(), 0
        self.close()

    def _free_ended(self) -> None:
        while self._ended:
            self._ranges.give_back(self._ended.popleft())

    def _get_memory(self, section: Section) -> None:
        """Let the system provide memory for a section: writing without it is a fatal signal."""
        end = section.start + section.length
        if section.fresh_from < end:
            # With the page before: allocation may have failed for a section that ends in it.
            begin = max(section.start, section.fresh_from - PAGE)
            os.posix_fallocate(self._fd, self.base + begin, end - begin)

    def _write_piece(self, start: int, piece: bytes | memoryview, *, releases_gil: bool) -> None:
        if releases_gil and isinstance(piece, memoryview) and is_volatile(piece):
            self._write_volatile(start, piece)
        elif releases_gil and len(piece) >= RELEASING_SIZE:
            copy_buffer(self._address + start, piece)
        else:
            self._memory[start : start + len(piece)] = piece

    def _write_volatile(self, start: int, piece: memoryview) -> None:
        """Copy bytes that another thread may free meanwhile, without the GIL.

        Reading freed memory is a fatal signal in this process, but only an error in a system call.
        """
        while piece:
            try:
                written = os.pwrite(self._fd, piece, self.base + start)
            except OSError as error:
                if error.errno == errno.EFAULT:
                    error.strerror = "an input was resized while it was copied"
                raise
            start += written
            piece = piece[written:]

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the memory mapped during a `with` block."""
        with self._lock:
            if self.is_closed:
                raise OSError(errno.EBADF, "the shared memory is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if self.is_closed and not self._users and self._fd >= 0:
            with contextlib.suppress(BufferError):
                self._memory.close()
            # A view that was lent keeps the map until the app drops it.
            del self._memory
            os.close(self._fd)
            self._fd = -1
