"""How many of those that wait should leave together? Pure; the adaptive policy asks it.

Where a batch of n takes nearly n times as long as one request, all that wait in one batch wait for
all of them; in two batches the first half has its answers in half the time, for little more work.
The derivation is in docs/decisions/0017-less-than-all.md.
"""

from math import inf, sqrt

from fast_batcher._core.straight_line import Costs


class BatchSizes:
    """By how many wait, how many to send: for one worker, and batches of `fixed + each * n`.

    With q waiting and batches of n it takes q / (n - rate t(n)) batches until nobody waits, those
    that come meanwhile included, and all together have then been here for

        q t(n) (q + n) / (n - rate t(n)) / 2

    seconds. That is least for n = k + sqrt((k + fixed / each) (k + q)), where k is the size at
    which as many come as leave.

    Args:
        costs: Seconds of a batch, `each` above 0.
        rate: Requests that come per second.
        smallest: The least size for which that is so; fewer are not sent on purpose.
    """

    def __init__(self, costs: Costs, rate: float, smallest: float = 1.0) -> None:
        left = 1.0 - rate * costs.each
        self._steady = rate * costs.fixed / left if left > 0 else inf
        self._ratio = costs.fixed / costs.each
        self._smallest = smallest

    def best(self, waiting: int) -> int:
        """How many of so many to send, at least one."""
        steady = self._steady
        if steady >= waiting:
            return waiting
        best = steady + sqrt((steady + self._ratio) * (steady + waiting))
        return max(1, min(waiting, round(max(best, self._smallest))))
