"""Which of the oldest requests share a batch, where they have costs. Pure; part of the scheduler.

Inputs of different lengths that share a batch are usually padded to the longest of them, so that a
batch costs its size times its highest cost. Requests of near costs waste least; so the batch is
grown from the first request by those next to it in cost, out of a window of the oldest.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from fast_batcher._core.messages import Request

# Batches' worth of the oldest requests to choose from. Source: simulation with log-normal lengths;
# of what was computed 75 % was padding in order of arrival, 9 % with four.
WINDOW_BATCHES = 4


class BatchFormer:
    """Fills batches up to a cost.

    Args:
        max_batch_cost: Most that a batch may cost, or None. A request that costs more goes alone.
        is_padded: Whether a batch costs its size times its highest cost, or else their sum; then
            no cost is better company than another, and the oldest that fit are taken.
    """

    def __init__(self, max_batch_cost: float | None, *, is_padded: bool) -> None:
        self.max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self._is_padded = is_padded

    def charge(self, requests: Iterable[Request]) -> float:
        """What a batch of these costs."""
        costs = [request.cost for request in requests]
        return len(costs) * max(costs) if self._is_padded else sum(costs)

    def fill(
        self, chosen: list[Request], window: Sequence[Request], most: int, *, in_order: bool
    ) -> None:
        """Add requests to a batch.

        Args:
            chosen: The batch. If it is empty, the first of the window is taken, whatever it costs.
            window: Candidates, in their order.
            most: Most requests in the batch.
            in_order: Whether to take the candidates as they come until one does not fit, so that
                none is passed over.
        """
        rest = list(window)
        if not chosen and rest:
            chosen.append(rest.pop(0))
        if in_order or not self._is_padded:
            self._fill_in_order(chosen, rest, most, may_skip=not in_order)
        else:
            self._fill_by_cost(chosen, rest, most)

    def _fill_in_order(
        self, chosen: list[Request], rest: list[Request], most: int, *, may_skip: bool
    ) -> None:
        total = sum(request.cost for request in chosen)
        highest = max((request.cost for request in chosen), default=0.0)
        for request in rest:
            if len(chosen) == most:
                return
            more, top = total + request.cost, max(highest, request.cost)
            charge = (len(chosen) + 1) * top if self._is_padded else more
            if charge <= self.max_batch_cost:
                chosen.append(request)
                total, highest = more, top
            elif not may_skip:
                return

    def _fill_by_cost(self, chosen: list[Request], rest: list[Request], most: int) -> None:
        highest = max((request.cost for request in chosen), default=0.0)
        # Python's sort keeps those of one cost in their order.
        rest.sort(key=_cost_of)
        longer = bisect_right(rest, highest, key=_cost_of)
        shorter = longer - 1
        while len(chosen) < most:
            size = len(chosen) + 1
            fits_shorter = shorter >= 0 and size * highest <= self.max_batch_cost
            fits_longer = longer < len(rest) and size * rest[longer].cost <= self.max_batch_cost
            if not (fits_shorter or fits_longer):
                return
            # The padding that each would add: its own, or one more to each of the others.
            wasted_by_shorter = highest - rest[shorter].cost if fits_shorter else inf
            wasted_by_longer = (rest[longer].cost - highest) * (size - 1) if fits_longer else inf
            if wasted_by_shorter <= wasted_by_longer:
                chosen.append(rest[shorter])
                shorter -= 1
            else:
                highest = rest[longer].cost
                chosen.append(rest[longer])
                longer += 1


def _cost_of(request: Request) -> float:
    return request.cost
