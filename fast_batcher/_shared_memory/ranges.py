"""Which parts of a file are taken. Pure: numbers in, numbers out; whoever uses it has one thread.

First fit from the front: what is used again and again stays at the front, where the memory has been
used before, and the end of the file need not exist. What is given back grows together with what is
free beside it, so once everything is back, everything fits again.
"""

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter

# A range is a whole number of pages, so that no page belongs to two and the system can have them
# back. The page of most systems; where it is larger, a few pages are given back later.
PAGE = 4096


def round_up(length: int) -> int:
    """The length of the range that is taken for so many bytes: one of eight per power of two.

    At most an eighth more than asked for, or one page. Few lengths leave few holes that nothing
    fits into.
    """
    step = max(PAGE, 1 << max(0, length.bit_length() - 4))
    return max(1, -(-length // step)) * step


class Ranges:
    """The taken and the free parts of so many bytes.

    Args:
        size: Bytes, of which the last, incomplete page is not used.
    """

    def __init__(self, size: int) -> None:
        whole = size // PAGE * PAGE
        # Free parts as (start, end), in order; no two touch.
        self._free: list[tuple[int, int]] = [(0, whole)] if whole else []
        # End of each taken range by its start.
        self._taken: dict[int, int] = {}
        # Bytes in them.
        self.taken_bytes = 0
        # The end of the farthest byte that has been taken since `forget_peak`.
        self.peak = 0

    @property
    def count(self) -> int:
        """Ranges that are taken."""
        return len(self._taken)

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
        # The free part that it is in begins there or before.
        index = bisect_right(self._free, start, key=itemgetter(0)) - 1
        free_start, free_end = self._free[index]
        assert free_start <= start < end <= free_end, "it is free"
        rest = [(free_start, start), (end, free_end)]
        self._free[index : index + 1] = [(low, high) for low, high in rest if low < high]
        self._taken[start] = end
        self.taken_bytes += end - start

    def shrink(self, start: int, length: int) -> None:
        """Of a taken range no more than so many bytes are needed; more than none."""
        end = start + -(-length // PAGE) * PAGE
        if end < self._taken[start]:
            # As if what is behind were a range of its own.
            self._taken[end] = self._taken[start]
            self._taken[start] = end
            self.give_back(end)

    def give_back(self, start: int) -> None:
        """A range is free again.

        Raises:
            KeyError: No taken range starts there.
        """
        end = self._taken.pop(start)
        self.taken_bytes -= end - start
        # The free parts before and behind it.
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            _, end = self._free.pop(index)
        if index and self._free[index - 1][1] == start:
            start, _ = self._free.pop(index - 1)
        insort(self._free, (start, end))

    def forget_peak(self) -> int:
        """The peak so far, or the end of what is taken now, from which it is counted anew."""
        peak, self.peak = self.peak, max(self._taken.values(), default=0)
        return max(peak, self.peak)
