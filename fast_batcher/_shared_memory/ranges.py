"""Ranges of one memory file: which are free, and copies into them. Both sides, any thread.

Each allocator is used by one thread. First fit from the front keeps ranges at the front, whose
memory the system has provided already, and the end of the file needs no memory. A range that is
given back is merged with adjacent free ranges.
"""

import ctypes
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

# Bytes. glibc maps a block above a threshold separately and returns it to the system when it is
# freed, so each large body costs the page faults of its memory again. The threshold follows the
# largest mapped block that was freed, up to 32 MiB, and twice as much may stay free at the end of
# the heap. Source: mallopt(3), M_MMAP_THRESHOLD.
MOST_KEPT = 32 * 2**20 - 2**16


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed large blocks. Takes 10 us.

    After this call bodies of 602 KB cost a server as little as half the CPU (`benchmarks/http.py`).
    The call has no effect where the environment sets glibc's thresholds, or with another C library.
    """
    bytes(MOST_KEPT)  # mapped, never written, and freed at once


# Bytes from which on a copy releases the GIL: a shorter copy ends before another thread runs.
RELEASING_SIZE = 64 * 1024


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`, whose layout is the same in all versions from 3.11 on."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        # Sizes of items, shape and strides, which plain bytes do not need.
        ("others", ctypes.c_void_p * 7),
    )


# A library object that only this module uses: argument types are attributes of its functions, and
# every program shares those of `ctypes.pythonapi`.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None
# Contiguous bytes, which need not be writable.
_SIMPLE = 0
_makers: dict[type, Any] = {
    bytes: _python.PyBytes_FromStringAndSize,
    bytearray: _python.PyByteArray_FromStringAndSize,
}
for _make in _makers.values():
    _make.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    _make.restype = ctypes.py_object


def copy_buffer(target: int, piece: bytes | memoryview) -> None:
    """Copy contiguous bytes to this address, without the GIL.

    Not for the event loop's thread: a thread that has released the GIL may wait up to 5 ms to get
    it again while another thread computes.
    """
    buffer = _Buffer()
    _get_buffer(piece, buffer, _SIMPLE)
    try:
        ctypes.memmove(target, buffer.address, buffer.size)
    finally:
        _release_buffer(buffer)


def copy_releasing(kind: type[bytes] | type[bytearray], piece: memoryview) -> Any:
    """Copy bytes to a new object, without the GIL, which the type's constructor would hold."""
    copy, target = _makers[kind](None, len(piece)), _Buffer()  # uninitialized bytes
    _get_buffer(copy, target, _SIMPLE)
    try:
        copy_buffer(target.address, piece)
    finally:
        _release_buffer(target)
    return copy


# A range begins at a page. The page size of most systems; with larger pages some memory is returned
# later.
PAGE = 4096
# Alignment of a buffer in its slab: a cache line, which suits vector instructions.
ALIGNMENT = 64


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return aligned offsets for adjacent buffers of these sizes, and the end of the last."""
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def round_up(length: int) -> int:
    """Round a length up to one of eight lengths per power of two, which limits fragmentation.

    The result is at most an eighth or one page more than asked for.
    """
    step = max(PAGE, 1 << max(0, length.bit_length() - 4))
    return max(1, -(-length // step)) * step


class Ranges:
    """Allocator of ranges: the taken and the free parts of a file."""

    def __init__(self, size: int) -> None:
        whole = size // PAGE * PAGE
        # Free parts as (start, end), in order; no two touch.
        self._free: list[tuple[int, int]] = [(0, whole)] if whole else []
        # End of each taken range by its start.
        self._taken: dict[int, int] = {}
        # Total bytes of the ranges that are taken.
        self.taken_bytes = 0
        # The largest end of a range taken since the last `forget_peak`.
        self.peak = 0

    @property
    def count(self) -> int:
        """Number of taken ranges."""
        return len(self._taken)

    def take(self, length: int) -> int | None:
        """Take a range of `round_up(length)` bytes; return its start, None if there is no room."""
        length = round_up(length)
        for free_start, end in self._free:
            start = -(-free_start // PAGE) * PAGE
            if end - start >= length:
                self.take_part(start, start + length)
                self.peak = max(self.peak, start + length)
                return start
        return None

    def take_part(self, start: int, end: int) -> None:
        """Take a given free part; it does not count for the peak."""
        # The free part that contains it starts at `start` or before.
        index = bisect_right(self._free, start, key=itemgetter(0)) - 1
        free_start, free_end = self._free[index]
        assert free_start <= start < end <= free_end, "the part is free"
        rest = [(free_start, start), (end, free_end)]
        self._free[index : index + 1] = [(low, high) for low, high in rest if low < high]
        self._taken[start] = end
        self.taken_bytes += end - start

    def divide(self, start: int, length: int) -> int:
        """Divide a taken range behind `length` bytes, and return the start of its second part."""
        middle = start + length
        assert start < middle < self._taken[start], "both parts have bytes"
        self._taken[middle], self._taken[start] = self._taken[start], middle
        return middle

    def give_back(self, start: int) -> None:
        end = self._taken.pop(start)
        self.taken_bytes -= end - start
        # Merge with the free parts before and behind it.
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            _, end = self._free.pop(index)
        if index and self._free[index - 1][1] == start:
            start, _ = self._free.pop(index - 1)
        insort(self._free, (start, end))

    def forget_peak(self) -> int:
        """Return the peak, and reset it to the end of the ranges that are taken now."""
        peak, self.peak = self.peak, max(self._taken.values(), default=0)
        return max(peak, self.peak)
