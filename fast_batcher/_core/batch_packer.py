"""Which of the oldest requests share a batch, where they have costs. Pure; part of the scheduler.

Inputs of different lengths that share a batch are usually padded to the longest of them, so that a
batch costs its size times its highest cost. Requests of near costs waste least; so the batch is
grown from the first request by those next to it in cost, out of a window of the oldest.

It grows on paper only: of all the sizes that it passes, the one is sent at which the worker does
most *real work per second*, the sum of the costs over the time of what they are charged. To fill
the budget whatever it takes would put short texts beside a long one, each at the price of the long
one. To pad least would send one text at a time, each at the price of a batch. The time of a batch
by its charge, which is learned, weighs the one against the other: where a batch costs much by
itself they become large, and where it costs what it computes they hold what is nearly of one
length. Why that and nothing else is in docs/decisions/0014-unequal-requests.md.
"""

from collections.abc import Iterable, Sequence
from math import inf

from fast_batcher._core.messages import Request
from fast_batcher._core.service_model import ServiceModel

# Batches' worth of the oldest requests to choose from. Source: `tests/test_simulation.py`: with
# log-normal lengths, 128 callers and batches of 32 that cost up to 1000 tokens by themselves, 4.9
# tokens are computed for each real one in order of arrival, and 1.0 to 1.5 with four.
WINDOW_BATCHES = 4


class BatchPacker:
    """Fills batches up to a cost.

    Args:
        max_batch_cost: Most that a batch may cost, or None. A request that costs more goes alone.
        is_padded: Whether a batch costs its size times its highest cost, or else their sum; then
            no cost is better company than another, and the oldest that fit are taken.
    """

    def __init__(self, max_batch_cost: float | None, *, is_padded: bool) -> None:
        self.max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self._is_padded = is_padded
        # How long batches take by what they are charged; the scheduler tells it.
        self.service = ServiceModel()

    def charge(self, requests: Iterable[Request]) -> float:
        """What a batch of these costs."""
        costs = [request.cost for request in requests]
        return len(costs) * max(costs) if self._is_padded else sum(costs)

    def fill(self, chosen: list[Request], window: Sequence[Request], most: int) -> None:
        """Add requests to a batch.

        Args:
            chosen: The batch. If it is empty, the first of the window is taken, whatever it costs.
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
            # Of equals the larger one: fewer batches. And one that adds no padding is not left out
            # for what is believed of larger batches, or it would be believed for ever.
            work = self._work_per_second(total, size * highest)
            if work >= best or is_free:
                best, best_size = work, size
        del chosen[best_size:]

    def _work_per_second(self, work: float, charge: float) -> float:
        """Equal for all until something is known; 0 without work."""
        seconds = self.service.median(charge) if self.service.is_known else 0.0
        return work / seconds if seconds else 0.0


def _cost_of(request: Request) -> float:
    return request.cost
