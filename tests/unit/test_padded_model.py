"""Times of padded batches, learned by their size and their longest input."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.service_model import PaddedModel, Shape


def encoder(size: float, longest: float) -> float:
    """Seconds of a batch: fixed, by tokens, and by pairs of tokens."""
    return 0.005 + 5e-6 * size * longest + 5e-8 * size * longest**2


def observe(
    model: PaddedModel, batches: int, *, speed: float = 1.0, noise: float = 0.05, seed: int = 1
) -> None:
    """Let the model see random batches; one in a hundred takes five times as long."""
    random = Random(seed)
    for _ in range(batches):
        size, longest = random.randint(1, 32), random.uniform(4, 512)
        seconds = encoder(size, longest) / speed * random.lognormvariate(0.0, noise)
        if random.random() < 0.01:
            seconds *= 5
        model.observe(Shape(size, longest, size * longest), seconds)


def shape(size: float, longest: float) -> Shape:
    return Shape(size, longest, size * longest)


SHAPES = [shape(1, 16), shape(2, 500), shape(10, 100), shape(32, 16), shape(32, 500)]


def test_nothing_is_known_before_the_first_batch() -> None:
    model = PaddedModel()
    known = [model.is_known]
    model.observe(shape(4, 10), 0.1)
    assert [*known, model.is_known] == [False, True]
    assert model.median(shape(4, 10)) == pytest.approx(0.1)
    # Without evidence a batch has no fixed cost.
    assert model.median(shape(1, 10)) == pytest.approx(0.025, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_batches_distinguish_equal_products(seed: int) -> None:
    model = PaddedModel()
    observe(model, 200, seed=seed)
    for one in SHAPES:
        expected = encoder(one.requests, one.longest)
        assert model.median(one) == pytest.approx(expected, rel=0.1)
        assert expected < model.high(one) < 1.4 * expected


def test_a_model_of_another_speed_is_learned() -> None:
    model = PaddedModel()
    observe(model, 500)
    observe(model, 500, speed=0.25, seed=2)
    for one in SHAPES:
        expected = 4 * encoder(one.requests, one.longest)
        assert model.median(one) == pytest.approx(expected, rel=0.3)


@given(
    batches=st.lists(
        st.tuples(st.integers(1, 64), st.floats(0.1, 1e6), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=60,
    ),
    size=st.integers(1, 64),
    longest=st.floats(0.1, 1e6),
)
def test_a_larger_batch_takes_no_less_time(
    batches: list[tuple[int, float, float]], size: int, longest: float
) -> None:
    model = PaddedModel()
    for count, length, seconds in batches:
        model.observe(shape(count, length), seconds)
    here = model.median(shape(size, longest))
    assert 0 < here <= model.high(shape(size, longest))
    assert here <= model.median(shape(size + 1, longest))
    assert here <= model.median(shape(size, 2 * longest))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_times_are_ignored(seconds: float) -> None:
    model = PaddedModel()
    model.observe(shape(1, 1), seconds)
    assert not model.is_known
