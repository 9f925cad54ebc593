"""What does a batch cost by itself, and each request in it? Learned from those that ran. Pure.

The buckets of the service model know the times of sizes well to some percent. What is left of a
time when all that is in proportion to the size is taken away is a small difference of such times:
it needs a line through all of them.
"""

from math import sqrt
from typing import NamedTuple

# A new observation's share of the averages; as good as twice its inverse of equal ones.
SHARE = 1 / 64
# Standard errors by which the fixed cost is taken for higher. Half of what it is makes batches so
# small that the simulated cpu model's mean latency is up to 9 % over the optimum, twice as much
# makes it 1.4 %, and infinitely much 3 %, which is greedy.
CAUTION = 2.0
# The least variance of sizes, over their mean squared: below it rounding would be a slope.
LEAST_SPREAD = 1e-10


class Costs(NamedTuple):
    """A batch of n takes `fixed + each * n` seconds."""

    fixed: float
    each: float


class StraightLine:
    """Least squares over the recent batches."""

    __slots__ = ("_both", "_count", "_seconds", "_seconds_square", "_size", "_size_square")

    def __init__(self) -> None:
        self._count = 0
        # Averages, and of the squares and the product of the distances from them.
        self._size = self._seconds = 0.0
        self._size_square = self._seconds_square = self._both = 0.0

    def observe(self, size: float, seconds: float) -> None:
        """Learn from a batch."""
        self._count += 1
        share = max(SHARE, 1 / self._count)
        away, late = size - self._size, seconds - self._seconds
        self._size += share * away
        self._seconds += share * late
        rest = 1 - share
        self._size_square = rest * (self._size_square + share * away * away)
        self._seconds_square = rest * (self._seconds_square + share * late * late)
        self._both = rest * (self._both + share * away * late)

    def costs(self) -> Costs | None:
        """The fixed cost is the higher the less it is known. None without sizes that differ."""
        if self._count < 1 / SHARE or self._size_square <= LEAST_SPREAD * self._size**2:
            return None
        each = self._both / self._size_square
        if each <= 0:
            return None
        scatter = max(0.0, self._seconds_square - each * self._both)
        error = sqrt(scatter * SHARE / 2 * (1 + self._size**2 / self._size_square))
        return Costs(max(0.0, self._seconds - each * self._size + CAUTION * error), each)
