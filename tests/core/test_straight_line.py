"""What a batch costs by itself and for each request, from times that scatter."""

from random import Random

import pytest

from fast_batcher._core.service_model import ServiceModel
from fast_batcher._core.straight_line import SHARE, StraightLine

MANY = 300


def seen(fixed: float, each: float, noise: float, seed: int = 0, most: int = 8) -> StraightLine:
    random = Random(seed)
    line = StraightLine()
    for _ in range(MANY):
        size = random.randint(1, most)
        line.observe(size, (fixed + each * size) * random.lognormvariate(0, noise))
    return line


def test_without_noise_it_is_exact() -> None:
    costs = seen(0.5, 2.0, 0.0).costs()
    assert costs is not None
    assert costs == pytest.approx((0.5, 2.0), rel=1e-6)


def test_the_fixed_cost_is_hardly_ever_believed_too_low() -> None:
    found = [seen(0.5, 2.0, 0.2, seed).costs() for seed in range(200)]
    fixed = [costs.fixed for costs in found if costs is not None]
    assert len(fixed) == 200
    assert sum(value < 0.5 for value in fixed) < 20
    assert sum(fixed) / 200 < 3.0


def test_what_has_one_size_has_no_slope() -> None:
    assert seen(0.5, 2.0, 0.2, most=1).costs() is None


def test_larger_batches_that_take_less_are_no_line() -> None:
    assert seen(20.0, -2.0, 0.0).costs() is None


def test_few_batches_are_no_evidence() -> None:
    line = StraightLine()
    for number in range(round(1 / SHARE) - 1):
        line.observe(number % 4 + 1, number % 4 + 2.0)
    assert line.costs() is None
    line.observe(1, 2.0)
    assert line.costs() is not None


def test_it_follows_a_change() -> None:
    line = seen(0.5, 2.0, 0.0)
    for number in range(20 * round(1 / SHARE)):
        size = number % 8 + 1
        line.observe(size, 4.0 + 0.1 * size)
    assert line.costs() == pytest.approx((4.0, 0.1), rel=1e-3)


def test_outliers_do_not_count_and_the_least_size_is_one_that_was_seen_often() -> None:
    random = Random(0)
    service = ServiceModel()
    assert service.costs() is None
    service.observe(1, 2.5)
    for _ in range(MANY):
        size = random.randint(3, 16)
        late = 20.0 if random.random() < 0.02 else 1.0
        service.observe(size, (0.5 + 2.0 * size) * late)
    known = service.costs()
    assert known is not None
    costs, smallest = known
    assert costs == pytest.approx((0.5, 2.0), rel=0.05)
    assert 3 <= smallest <= 4
