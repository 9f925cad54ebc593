"""Batches filled by cost; what the queue makes of it is in `test_ranked_queue`."""

from collections.abc import Iterator, Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.queue import BatchPacker, PaddedPacker, SummedPacker
from fast_batcher._core.service_model import Shape
from fast_batcher._core.values import Request


def requests_of(*costs: float) -> list[Request]:
    requests = []
    for cost in costs:
        request = Request(None, None)
        request.cost = cost
        requests.append(request)
    return requests


def filled(
    packer: BatchPacker, chosen: Sequence[float], window: Sequence[float], most: int
) -> list[float]:
    batch = requests_of(*chosen)
    packer.fill(batch, requests_of(*window), most)
    return [request.cost for request in batch]


def padded(budget: float | None, fixed: float, each: float) -> BatchPacker:
    """One that has seen batches take `fixed` seconds and `each` more for what they are charged."""
    packer = PaddedPacker(budget)
    for size in (1, 4, 16):
        for longest in (1.0, 16.0, 256.0):
            work = size * longest
            packer.times.observe(Shape(size, longest, work), fixed + each * work)
    return packer


def shape_of(costs: Sequence[float]) -> Shape:
    return Shape(len(costs), max(costs), sum(costs))


def charge(costs: Sequence[float], *, is_padded: bool = True) -> float:
    """The costs against which the budget counts."""
    return len(costs) * max(costs) if is_padded else sum(costs)


def test_the_first_is_taken_whatever_it_costs() -> None:
    assert filled(PaddedPacker(10), [], [99, 1], 8) == [99]


def test_summed_costs_fill_a_batch_in_order() -> None:
    assert filled(SummedPacker(10), [], [4, 5, 9, 1], 8) == [4, 5, 1]


def test_equal_lengths_share_a_batch() -> None:
    """Otherwise a wrong estimate for larger batches would never be corrected."""
    packer = PaddedPacker(None)
    for size, seconds in ((64, 0.8), (4, 0.004), (1, 0.001)):
        packer.times.observe(Shape(size, 1.0, size), seconds)
    assert filled(packer, [], [1] * 64, 64) == [1] * 64


def test_untimed_packer_takes_all_that_fit() -> None:
    assert filled(PaddedPacker(600), [], [200, 10, 190, 10], 8) == [200, 10, 190]


def test_lower_priority_joins_only_with_a_gain() -> None:
    packer = padded(2048, 50, 1)
    assert filled(packer, [200, 190], [10, 10], 8) == [200, 190]
    assert filled(packer, [200, 190], [10, 180], 8) == [200, 190, 180]


@pytest.mark.parametrize("is_padded", [True, False])
@given(
    chosen=st.lists(st.integers(1, 9), max_size=3),
    window=st.lists(st.integers(1, 20), max_size=20),
    most=st.integers(3, 6),
)
def test_packer_keeps_its_budget(
    is_padded: bool, chosen: list[float], window: list[float], most: int
) -> None:
    budget = 30.0
    packer = PaddedPacker(budget) if is_padded else SummedPacker(budget)
    if not (chosen or window) or charge(chosen or [1], is_padded=is_padded) > budget:
        return
    batch = filled(packer, chosen, window, most)
    assert batch[: len(chosen)] == chosen
    assert len(batch) <= most
    if len(batch) > max(1, len(chosen)):
        assert charge(batch, is_padded=is_padded) <= budget
    left = sorted(window)
    for cost in batch[len(chosen) :]:
        left.remove(cost)


def divisions(ordered: list[float], most: int, budget: float) -> Iterator[list[list[float]]]:
    """Yield all divisions of sorted lengths into batches."""
    if not ordered:
        yield []
    for size in range(1, min(most, len(ordered)) + 1):
        last = ordered[-size:]
        if size == 1 or charge(last) <= budget:
            for rest in divisions(ordered[:-size], most, budget):
                yield [*rest, last]


@given(
    window=st.lists(st.integers(1, 300), min_size=1, max_size=7),
    most=st.integers(1, 8),
    budget=st.sampled_from([inf, 100.0, 1000.0]),
    fixed=st.sampled_from([0.0, 10.0, 100.0, 1e4]),
)
def test_batch_of_oldest_belongs_to_quickest_division(
    window: list[float], most: int, budget: float, fixed: float
) -> None:
    packer = padded(budget, fixed, 1.0)
    batch = filled(packer, [], window, most)
    assert batch[0] == window[0], "the oldest is in every batch"

    def seconds(division: list[list[float]]) -> float:
        return sum(packer.times.median(shape_of(one)) for one in division)

    found = [(seconds(one), one) for one in divisions(sorted(window), most, budget)]
    least = min(found)[0]
    best = [one for total, one in found if total <= least * (1 + 1e-6)]
    assert any(sorted(batch) in one for one in best)
