"""Batches filled by cost; what the queue makes of it is in `test_ranked_queue`."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.batch_former import BatchFormer
from fast_batcher._core.messages import Request


def requests_of(*costs: float) -> list[Request]:
    requests = []
    for cost in costs:
        request = Request(None, None)
        request.cost = cost
        requests.append(request)
    return requests


def filled(
    former: BatchFormer,
    chosen: Sequence[float],
    window: Sequence[float],
    most: int,
    in_order: bool = False,
) -> list[float]:
    batch = requests_of(*chosen)
    former.fill(batch, requests_of(*window), most, in_order=in_order)
    return [request.cost for request in batch]


def test_what_a_batch_is_charged() -> None:
    requests = requests_of(3, 1, 5)
    assert BatchFormer(None, is_padded=True).charge(requests) == 15
    assert BatchFormer(None, is_padded=False).charge(requests) == 9


def test_the_first_is_taken_whatever_it_costs() -> None:
    assert filled(BatchFormer(10, is_padded=True), [], [99, 1], 8) == [99]


def test_it_grows_where_the_least_padding_is() -> None:
    """At the end one longer would pad four others by two each, and one shorter itself by seven."""
    window = [10, 20, 3, 12, 11, 11]
    assert filled(BatchFormer(None, is_padded=True), [], window, 5) == [10, 11, 11, 12, 3]


def test_it_goes_on_from_what_is_there() -> None:
    assert filled(BatchFormer(None, is_padded=True), [5, 7], [1, 6, 50], 3) == [5, 7, 6]


def test_in_order_it_ends_at_the_first_that_does_not_fit() -> None:
    former = BatchFormer(20, is_padded=True)
    assert filled(former, [], [4, 5, 9, 1], 8, in_order=True) == [4, 5]
    assert filled(former, [], [4, 5, 9, 1], 8) == [4, 5, 1]


@pytest.mark.parametrize("is_padded", [True, False])
@given(
    chosen=st.lists(st.integers(1, 9), max_size=3),
    window=st.lists(st.integers(1, 20), max_size=20),
    most=st.integers(3, 6),
    in_order=st.booleans(),
)
def test_it_keeps_to_its_budget_and_takes_all_that_it_can(
    is_padded: bool, chosen: list[float], window: list[float], most: int, in_order: bool
) -> None:
    budget = 30.0
    former = BatchFormer(budget, is_padded=is_padded)
    if former.charge(requests_of(*chosen or [1])) > budget:
        return
    batch = filled(former, chosen, window, most, in_order)
    assert batch[: len(chosen)] == chosen
    assert len(batch) <= most
    if len(batch) > max(1, len(chosen)):
        assert former.charge(requests_of(*batch)) <= budget
    left = sorted(window)
    for cost in batch[len(chosen) :]:
        left.remove(cost)
    if not in_order and batch and left and len(batch) < most:
        cheapest = requests_of(*batch, min(left))
        assert former.charge(cheapest) > budget
