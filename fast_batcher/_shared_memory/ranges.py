"""Which ranges of a file are taken, and where buffers begin in one. Pure; used by one thread each.

First fit from the front: ranges that are used again and again stay at the front, whose memory the
system has provided already, and the end of the file needs no memory. A range that is given back is
joined with the free ranges beside it, so once everything is back, everything fits again.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from operator import itemgetter

# A range is a whole number of pages, so that no page belongs to two and the system can have them
# back. The page of most systems; where it is larger, a few pages are given back later.
PAGE = 4096
# Where a buffer begins in its slab: a cache line, the alignment that vector instructions like.
ALIGNMENT = 64


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of buffers of these sizes, one behind the other and aligned, and their end."""
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def round_up(length: int) -> int:
    """The length of the range that is taken for `length` bytes: one of eight per power of two.

    At most an eighth more than asked for, or one page. Few different lengths leave few holes that
    nothing fits into.
    """
    step = max(PAGE, 1 << max(0, length.bit_length() - 4))
    return max(1, -(-length // step)) * step


class Ranges:
    """The taken and the free parts of a file.

    Args:
        size: Length of the file in bytes; its last, incomplete page is not used.
    """

    def __init__(self, size: int) -> None:
        whole = size // PAGE * PAGE
        # Free parts as (start, end), in order; no two touch.
        self._free: list[tuple[int, int]] = [(0, whole)] if whole else []
        # End of each taken range by its start.
        self._taken: dict[int, int] = {}
        # The largest end of a range that has been taken since the last `forget_peak`.
        self.peak = 0

    @property
    def count(self) -> int:
        """How many ranges are taken."""
        return len(self._taken)

    @property
    def taken_bytes(self) -> int:
        """Bytes in the ranges that are taken."""
        return sum(end - start for start, end in self._taken.items())

    def take(self, length: int) -> int | None:
        """Take a range of `round_up(length)` bytes; its start, or None if there is no room."""
        length = round_up(length)
        for start, end in self._free:
            if end - start >= length:
                self.take_part(start, start + length)
                self.peak = max(self.peak, start + length)
                return start
        return None

    def take_part(self, start: int, end: int) -> None:
        """Take a part that is free; it does not count for the peak."""
        # The free part that contains it begins there or before.
        index = bisect_right(self._free, start, key=itemgetter(0)) - 1
        free_start, free_end = self._free[index]
        assert free_start <= start < end <= free_end, "the part is free"
        rest = [(free_start, start), (end, free_end)]
        self._free[index : index + 1] = [(low, high) for low, high in rest if low < high]
        self._taken[start] = end

    def shrink(self, start: int, length: int) -> None:
        """Give back what a taken range has beyond `length` bytes, which is at least 1."""
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
        # The free parts before and behind it.
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            _, end = self._free.pop(index)
        if index and self._free[index - 1][1] == start:
            start, _ = self._free.pop(index - 1)
        insort(self._free, (start, end))

    def forget_peak(self) -> int:
        """Return the peak, and start a new one at the end of the ranges that are taken now."""
        peak, self.peak = self.peak, max(self._taken.values(), default=0)
        return max(peak, self.peak)
