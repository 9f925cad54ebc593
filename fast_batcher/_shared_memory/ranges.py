"""First-fit allocator for ranges of a file, and the layout of buffers in a range. Pure.

Each allocator is used by one thread. First fit from the front keeps ranges at the front, whose
memory the system has provided already, and the end of the file needs no memory. A range that is
given back is merged with adjacent free ranges.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from operator import itemgetter

# A range is a whole number of pages, so that no two ranges share a page and its memory can be
# returned to the system. The page size of most systems; with larger pages some memory is returned
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
    """Allocator of ranges: the taken and the free parts of a file.

    Args:
        size: Length of the file in bytes; its last, incomplete page is not used.
    """

    def __init__(self, size: int) -> None:
        whole = size // PAGE * PAGE
        # Free parts as (start, end), in order; no two touch.
        self._free: list[tuple[int, int]] = [(0, whole)] if whole else []
        # End of each taken range by its start.
        self._taken: dict[int, int] = {}
        # The largest end of a range taken since the last `forget_peak`.
        self.peak = 0

    @property
    def count(self) -> int:
        """Number of taken ranges."""
        return len(self._taken)

    @property
    def taken_bytes(self) -> int:
        """Bytes in the ranges that are taken."""
        return sum(end - start for start, end in self._taken.items())

    def take(self, length: int) -> int | None:
        """Take a range of `round_up(length)` bytes; return its start, None if there is no room."""
        length = round_up(length)
        for start, end in self._free:
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

    def shrink(self, start: int, length: int) -> None:
        """Free the part of a taken range beyond `length` bytes, which is at least 1."""
        end = start + -(-length // PAGE) * PAGE
        if end < self._taken[start]:
            # Divide it into two ranges, and give the second back.
            self._taken[end] = self._taken[start]
            self._taken[start] = end
            self.give_back(end)

    def give_back(self, start: int) -> None:
        """Free a range.

        Raises:
            KeyError: No taken range starts there.
        """
        end = self._taken.pop(start)
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
