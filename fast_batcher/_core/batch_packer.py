"""Selection of the requests that share a batch, where requests have costs. Pure.

Part of the scheduler. Inputs of different lengths that share a batch are usually padded to the
longest of them, so the *charge* of a batch is its size times its highest cost. Requests of similar
costs waste least: the packer starts with the first request and adds the requests nearest to it in
cost, out of a window of the oldest ones.

Of all the sizes that this passes, the packer sends the size with most *real work per second*: the
sum of the costs, divided by the predicted time of the charge. Filling the budget at any price would
put short texts beside a long one, each at the price of the long one. Padding least would send one
text at a time, each at the fixed cost of a batch. The learned time of a batch by its charge weighs
the two: with a high fixed cost batches become large, without one they hold inputs of nearly equal
length. docs/decisions/0014-unequal-requests.md gives the reasons.
"""

from collections.abc import Iterable, Sequence
from math import inf

from fast_batcher._core.messages import Request
from fast_batcher._core.service_model import ServiceModel

# Batches' worth of the oldest requests to choose from. Source: `tests/project/test_simulation.py`:
# with log-normal lengths, 128 callers and batches of 32 that cost up to 1000 tokens by themselves,
# 4.9 tokens are computed for each real one in order of arrival, and 1.0 to 1.5 with four.
WINDOW_BATCHES = 4


class BatchPacker:
    """Fills batches up to a cost.

    Args:
        max_batch_cost: Most that a batch may cost, or None. A request that costs more goes alone.
        is_padded: True if a batch is charged its size times its highest cost; False if it is
            charged the sum of the costs, in which case the oldest requests that fit are taken.
    """

    def __init__(self, max_batch_cost: float | None, *, is_padded: bool) -> None:
        self.max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self._is_padded = is_padded
        # Seconds of batches by their charge; the scheduler adds the observations.
        self.service = ServiceModel()

    def charge(self, requests: Iterable[Request]) -> float:
        """Return the cost of these requests as one batch."""
        costs = [request.cost for request in requests]
        return len(costs) * max(costs) if self._is_padded else sum(costs)

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Add requests to a batch.

        Args:
            chosen: The batch. If it is empty, the first of the window is taken at any cost.
            window: Candidates, in their order.
            most: Most requests in the batch.
        """
        rest = list(window)
        if not chosen and rest:
            chosen.append(rest.pop(0))
        if self._is_padded:
            self._fill_by_cost(chosen, rest, most)
        else:
            self._fill_in_order(chosen, rest, most)

    def _fill_in_order(self, chosen: list[Request], rest: list[Request], most: int) -> None:
        total = sum(request.cost for request in chosen)
        for request in rest:
            if len(chosen) == most:
                return
            if total + request.cost <= self.max_batch_cost:
                chosen.append(request)
                total += request.cost

    def _fill_by_cost(self, chosen: list[Request], rest: list[Request], most: int) -> None:
        total = sum(request.cost for request in chosen)
        highest = max((request.cost for request in chosen), default=0.0)
        # The nearest last, and of those of one cost the oldest: sorting keeps their order.
        rest.reverse()
        shorter = sorted([one for one in rest if one.cost <= highest], key=_cost_of)
        longer = sorted([one for one in rest if one.cost > highest], key=_cost_of, reverse=True)
        best, best_size = self._work_per_second(total, len(chosen) * highest), len(chosen)
        while len(chosen) < most:
            size = len(chosen) + 1
            fits_shorter = shorter and size * highest <= self.max_batch_cost
            fits_longer = longer and size * longer[-1].cost <= self.max_batch_cost
            if not (fits_shorter or fits_longer):
                break
            # The padding that each would add: its own, or one more to each of the others.
            wasted_by_shorter = highest - shorter[-1].cost if fits_shorter else inf
            wasted_by_longer = (longer[-1].cost - highest) * (size - 1) if fits_longer else inf
            request = (shorter if wasted_by_shorter <= wasted_by_longer else longer).pop()
            is_free = min(wasted_by_shorter, wasted_by_longer) == 0 and best_size == size - 1
            highest = max(highest, request.cost)
            chosen.append(request)
            total += request.cost
            # Of equal rates the larger batch is taken: fewer batches. A request that adds no
            # padding is always taken: otherwise a wrong estimate for larger batches would never be
            # corrected.
            work = self._work_per_second(total, size * highest)
            if work >= best or is_free:
                best, best_size = work, size
        del chosen[best_size:]

    def _work_per_second(self, work: float, charge: float) -> float:
        """Return work over the predicted seconds; 0 without work, and before any observation."""
        seconds = self.service.median(charge) if self.service.is_known else 0.0
        return work / seconds if seconds else 0.0


def _cost_of(request: Request) -> float:
    return request.cost
