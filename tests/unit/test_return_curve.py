"""The return curve of arrivals after events: numbers only."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.policy import POINTS, ReturnCurve

HORIZON = 12.0  # so that a part is one second


def curve_of(*events: tuple[float, list[float]]) -> ReturnCurve:
    """Events of these sizes, 100 seconds apart, each with arrivals so long after it."""
    curve = ReturnCurve()
    for number, (size, arrivals) in enumerate(events):
        curve.begin(100.0 * number, HORIZON, size)
        for after in arrivals:
            curve.arrived(100.0 * number + after, 1)
    curve.close(100.0 * len(events))
    return curve


def test_curve_expects_observed_returns() -> None:
    curve = curve_of((4, [0.5, 1.5, 1.7, 8.0]))
    assert curve.count == 1
    assert curve.expected(0.0, 4) == [1, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4]


def test_curve_expects_in_proportion_up_to_usual() -> None:
    curve = curve_of((4, [0.5, 1.5]))
    assert curve.expected(0.0, 1)[-1] == 0.5
    assert curve.expected(0.0, 8)[-1] == 2.0


def test_interrupted_observation_is_ignored() -> None:
    curve = ReturnCurve()
    curve.begin(0.0, HORIZON, 1)
    curve.forget_open()
    curve.close(1000.0)
    assert curve.count == 0


def test_curve_stays_open_until_its_end() -> None:
    curve = ReturnCurve()
    curve.begin(0.0, HORIZON, 1)
    curve.close(11.9)
    assert curve.count == 0
    curve.arrived(11.95, 1)
    curve.arrived(12.5, 5)  # after its end: it ends it, and is none of it
    assert curve.count == 1
    assert curve.expected(0.0, 1)[-1] == 1.0


times = st.lists(st.floats(0.0, 30.0), max_size=20).map(sorted)


@given(events=st.lists(st.tuples(st.integers(1, 64), times), min_size=1, max_size=40))
def test_curve_is_monotonic(events: list[tuple[float, list[float]]]) -> None:
    curve = curve_of(*events)
    assert curve.count == len(events)
    for since in (0.0, 0.5, 3.0, POINTS - 1e-9):
        expected = curve.expected(since, 5)
        assert len(expected) == POINTS - int(since)
        assert all(0 <= before <= after + 1e-9 for before, after in pairwise(expected))
