"""Batches filled by cost; what the queue makes of it is in `test_ranked_queue`."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.queue import BatchPacker
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
    packer = BatchPacker(budget, is_padded=True)
    for power in range(14):
        packer.service.observe(2.0**power, fixed + each * 2.0**power)
    return packer


def test_what_a_batch_is_charged() -> None:
    requests = requests_of(3, 1, 5)
    assert BatchPacker(None, is_padded=True).charge(requests) == 15
    assert BatchPacker(None, is_padded=False).charge(requests) == 9


def test_the_first_is_taken_whatever_it_costs() -> None:
    assert filled(BatchPacker(10, is_padded=True), [], [99, 1], 8) == [99]


def test_it_grows_where_the_least_padding_is() -> None:
    """At the end one longer would pad four others by two each, and one shorter itself by seven."""
    window = [10, 20, 3, 12, 11, 11]
    assert filled(BatchPacker(None, is_padded=True), [], window, 5) == [10, 11, 11, 12, 3]


def test_summed_costs_are_taken_in_order_as_far_as_they_fit() -> None:
    assert filled(BatchPacker(10, is_padded=False), [], [4, 5, 9, 1], 8) == [4, 5, 1]


def test_one_that_adds_no_padding_joins_whatever_is_believed_of_larger_batches() -> None:
    """Slow ones at the start, and then none of their size that could tell better."""
    packer = BatchPacker(None, is_padded=True)
    for charge, seconds in ((64.0, 0.8), (4.0, 0.004)):
        packer.service.observe(charge, seconds)
    assert filled(packer, [], [1] * 64, 64) == [1] * 64
    assert filled(packer, [], [1, *[2] * 63], 64) == [1]


def test_until_batches_have_been_timed_it_takes_all_that_fit() -> None:
    assert filled(BatchPacker(600, is_padded=True), [], [200, 10, 190, 10], 8) == [200, 190, 10]


def test_one_of_a_lower_priority_joins_only_if_it_is_worth_it() -> None:
    packer = padded(2048, 50, 1)
    assert filled(packer, [200, 190], [10, 10], 8) == [200, 190]
    assert filled(packer, [200, 190], [10, 180], 8) == [200, 190, 180]


@pytest.mark.parametrize("is_padded", [True, False])
@given(
    chosen=st.lists(st.integers(1, 9), max_size=3),
    window=st.lists(st.integers(1, 20), max_size=20),
    most=st.integers(3, 6),
)
def test_it_keeps_to_its_budget_and_takes_all_that_it_can(
    is_padded: bool, chosen: list[float], window: list[float], most: int
) -> None:
    budget = 30.0
    packer = BatchPacker(budget, is_padded=is_padded)
    if packer.charge(requests_of(*chosen or [1])) > budget:
        return
    batch = filled(packer, chosen, window, most)
    assert batch[: len(chosen)] == chosen
    assert len(batch) <= most
    if len(batch) > max(1, len(chosen)):
        assert packer.charge(requests_of(*batch)) <= budget
    left = sorted(window)
    for cost in batch[len(chosen) :]:
        left.remove(cost)
    if batch and left and len(batch) < most:
        cheapest = requests_of(*batch, min(left))
        assert packer.charge(cheapest) > budget


@given(
    window=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    most=st.integers(1, 32),
    budget=st.sampled_from([None, 100.0, 1000.0, 8192.0]),
    fixed=st.sampled_from([0.0, 10.0, 100.0, 1e4]),
)
def test_it_does_no_less_work_per_second_than_the_first_alone_or_all_that_fit(
    window: list[float], most: int, budget: float | None, fixed: float
) -> None:
    def work_per_second(batch: list[float]) -> float:
        return sum(batch) / packer.service.median(packer.charge(requests_of(*batch)))

    packer = padded(budget, fixed, 1.0)
    batch = filled(packer, [], window, most)
    assert batch[0] == window[0], "the oldest is in every batch"
    assert len(batch) <= most
    assert len(batch) == 1 or packer.charge(requests_of(*batch)) <= packer.max_batch_cost
    left = sorted(window)
    for cost in batch:
        left.remove(cost)
    whole = filled(BatchPacker(budget, is_padded=True), [], window, most)
    for other in ([window[0]], whole):
        # Of equals it takes the larger one.
        assert (work_per_second(batch), len(batch)) >= (work_per_second(other), len(other))
