"""The service model of batch times: numbers only, no clock."""

from itertools import pairwise
from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.service_model import MOST_BUCKETS, ServiceModel

sizes = st.one_of(st.integers(1, 256), st.floats(1e-3, 1e6))
seconds = st.floats(1e-6, 1e4)
observations = st.lists(st.tuples(sizes, seconds), min_size=1, max_size=200)


def with_knee(size: float) -> float:
    """A model that is limited by memory up to 16 inputs and computes beyond."""
    return 0.004 + 0.00002 * size + 0.00023 * max(0.0, size - 16)


def model_of(*observed: tuple[float, float], times: int = 1) -> ServiceModel:
    model = ServiceModel()
    for _ in range(times):
        for size, took in observed:
            model.observe(size, took)
    return model


def test_nothing_is_known_before_the_first() -> None:
    assert not ServiceModel().is_known
    assert model_of((1, 0.5)).is_known


def test_the_points_are_the_learned_sizes_in_order() -> None:
    assert ServiceModel().points() == []
    assert model_of((8, 0.2), (1, 0.1)).points() == [(1, 0.1, 0.1), (8, 0.2, 0.2)]


@pytest.mark.parametrize("took", [0.0, -1.0, nan, inf, -inf])
def test_impossible_time_is_ignored(took: float) -> None:
    assert not model_of((1, took)).is_known
    model = model_of((1, 2.0), times=50)
    model.observe(1, took)
    assert model.median(1) == model_of((1, 2.0), times=50).median(1)


@pytest.mark.parametrize("size", [0.0, -1.0, nan, inf])
def test_impossible_size_is_ignored(size: float) -> None:
    assert not model_of((size, 1.0)).is_known


@given(observed=observations, read=st.lists(sizes, min_size=2, max_size=10))
def test_a_larger_batch_never_takes_less(
    observed: list[tuple[float, float]], read: list[float]
) -> None:
    model = model_of(*observed)
    read.sort()
    assert all(model.median(size) <= model.high(size) for size in read)
    for function in (model.median, model.high):
        times = [function(size) for size in read]
        assert all(0 < took < inf for took in times)
        assert all(after >= before * (1 - 1e-9) for before, after in pairwise(times))


def test_the_first_five_are_a_plain_median() -> None:
    model = model_of((4, 5.0), (4, 1.0), (4, 3.0), (4, 90.0))
    assert model.median(4) == 4.0
    model.observe(4, 2.0)
    assert model.median(4) == 3.0
    assert model.high(4) == 5.0  # the highest but one


def test_between_two_sizes_it_is_a_line() -> None:
    model = model_of((1, 1.0), (32, 32.0))
    assert model.median(11) == pytest.approx(11.0, rel=0.1)


def test_model_extrapolates_at_both_ends() -> None:
    model = model_of((8, 10.0), (16, 14.0), (32, 30.0), times=3)
    assert model.median(64) == pytest.approx(62.0, rel=0.1)
    assert model.median(2) == pytest.approx(7.0, rel=0.1)
    # At least proportional: no batch takes less than nothing.
    steep = model_of((8, 1.0), (16, 10.0), times=3)
    assert steep.median(4) == pytest.approx(0.5, rel=0.1)


def test_one_size_predicts_no_larger_size() -> None:
    model = model_of((8, 2.0))
    assert model.median(8) == model.median(64) == 2.0
    assert model.median(1) == 0.25


def test_noise_of_neighbours_gives_no_slope() -> None:
    """Buckets that end and begin with nearly the same size, and times that differ a little."""
    model = model_of((1, 1.0), (16, 1.0), (17, 1.1), times=3)
    assert model.median(64) < 1.5


@pytest.mark.parametrize("seed", range(5))
def test_model_finds_a_knee_among_outliers(seed: int) -> None:
    """One time in a hundred is twentyfold, the others scatter by a tenth."""
    random = Random(seed)
    model = ServiceModel()
    for _ in range(4000):
        size = random.choice([1, 2, 4, 8, 16, 24, 32, 48, 64])
        factor = random.gauss(1, 0.1) * (20 if random.random() < 0.01 else 1)
        model.observe(size, with_knee(size) * factor)
    errors = [abs(model.median(n) / with_knee(n) - 1) for n in (1, 2, 4, 8, 16, 28, 32, 56, 64)]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_five_percent_take_longer_than_high(seed: int) -> None:
    random = Random(seed)
    model = ServiceModel()
    longer = 0
    for number in range(6000):
        took = random.lognormvariate(0, 0.3)
        if number >= 1000:
            longer += took > model.high(8)
        model.observe(8, took)
    assert 0.03 < longer / 5000 < 0.08


def test_slow_first_batches_are_forgotten() -> None:
    """The highest but one of the first five is slow, and the quantile falls slowly by itself."""
    model = model_of((1, 0.2), times=2)
    for _ in range(150):
        model.observe(1, 0.004)
    assert model.high(1) <= 0.008


@pytest.mark.parametrize("seed", range(5))
def test_frequent_slow_batches_stay_known(seed: int) -> None:
    random = Random(seed)
    model = model_of((1, 0.08), (1, 0.08), (1, 0.004), (1, 0.004), (1, 0.004))
    lows = 0
    for _ in range(4000):
        model.observe(1, 0.08 if random.random() < 0.1 else 0.004)
        lows += model.high(1) < 0.04
    assert lows < 400


@pytest.mark.parametrize("factor", [50.0, 1 / 50])
def test_a_new_time_is_found_soon(factor: float) -> None:
    model = model_of((8, 1.0), times=500)
    for _ in range(35):
        model.observe(8, factor)
    assert model.median(8) == pytest.approx(factor, rel=0.2)
    for _ in range(65):
        model.observe(8, factor)
    assert model.median(8) == pytest.approx(factor, rel=0.05)
    assert factor * 0.95 < model.high(8) < 2 * factor


def test_costs_may_be_anything_above_nothing() -> None:
    model = ServiceModel()
    for exponent in range(-300, 300):
        model.observe(10.0**exponent, 1.0)
    assert len(model._buckets) <= MOST_BUCKETS
    assert model.median(1e299) == 1.0
