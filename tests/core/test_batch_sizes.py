"""How many of those that wait leave together."""

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.batch_sizes import BatchSizes
from fast_batcher._core.straight_line import Costs

QUEUES = range(1, 200)
costs_of_models = st.builds(Costs, st.floats(0.0, 0.1), st.floats(1e-6, 0.1))


def waited(costs: Costs, rate: float, waiting: int, size: int) -> float:
    """By all together until the queue is empty, with batches of that size; inf if it never is."""
    seconds = costs.fixed + costs.each * size
    drained = size - rate * seconds
    return seconds * (waiting + size) / drained if drained > 1e-9 else inf


@given(costs=costs_of_models, rate=st.floats(0.0, 1e4), smallest=st.floats(1.0, 64.0))
def test_it_sends_something_and_no_more_than_wait_and_of_more_no_less(
    costs: Costs, rate: float, smallest: float
) -> None:
    sizes = BatchSizes(costs, rate, smallest)
    found = [sizes.best(waiting) for waiting in QUEUES]
    assert all(1 <= size <= waiting for size, waiting in zip(found, QUEUES, strict=True))
    assert found == sorted(found)


@given(costs=costs_of_models, load=st.floats(0.0, 0.99))
def test_no_other_size_has_all_wait_for_less(costs: Costs, load: float) -> None:
    """Sizes are whole: the least is at the one that is told or beside it."""
    rate = load / costs.each
    sizes = BatchSizes(costs, rate)
    for waiting in QUEUES:
        totals = [waited(costs, rate, waiting, size) for size in range(1, waiting + 1)]
        best = sizes.best(waiting)
        near = min(totals[max(0, best - 2) : best + 1])
        assert near <= min(totals) * (1 + 1e-9)


@pytest.mark.parametrize("rate", [0.0, 10.0, 1e5])
def test_where_a_batch_takes_nearly_the_same_whatever_its_size_all_are_sent(rate: float) -> None:
    sizes = BatchSizes(Costs(0.01, 1e-6), rate)
    assert [sizes.best(waiting) for waiting in QUEUES] == list(QUEUES)


def test_where_a_batch_costs_nothing_by_itself_they_go_one_by_one() -> None:
    sizes = BatchSizes(Costs(0.0, 0.01), 50.0)
    assert {sizes.best(waiting) for waiting in QUEUES} == {1}


def test_the_more_come_the_larger_they_are() -> None:
    found = [BatchSizes(Costs(0.5e-3, 2e-3), rate).best(16) for rate in (0.0, 200.0, 400.0, 470.0)]
    assert found == [2, 3, 6, 13]


@pytest.mark.parametrize("rate", [500.0, 1e9])
def test_if_more_come_than_can_be_served_all_are_sent(rate: float) -> None:
    sizes = BatchSizes(Costs(0.5e-3, 2e-3), rate)
    assert [sizes.best(waiting) for waiting in QUEUES] == list(QUEUES)


@given(costs=costs_of_models, rate=st.floats(0.0, 1e4))
def test_nobody_waits_for_many_batches(costs: Costs, rate: float) -> None:
    """As if nobody came any more: those who do make batches larger."""
    sizes = BatchSizes(costs, rate)
    for queue in QUEUES:
        batches, waiting = 0, queue
        while waiting:
            waiting -= sizes.best(waiting)
            batches += 1
        # 2 sqrt(q a / b), and half as many again since sizes are rounded.
        most = 3 * sqrt(queue * costs.each / costs.fixed) + 1 if costs.fixed else inf
        assert batches <= min(queue, most)


def test_it_sends_no_fewer_than_have_been_seen_on_purpose() -> None:
    sizes = BatchSizes(Costs(0.0, 0.01), 50.0, smallest=2.6)
    assert [sizes.best(waiting) for waiting in (1, 2, 3, 8)] == [1, 2, 3, 3]
