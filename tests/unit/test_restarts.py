"""Delays and the budget of restarts; time is an argument."""

from hypothesis import given
from hypothesis import strategies as st

from fast_batcher._core.supervision import MAX_BACKOFF, NextTry, Restarts

moments = st.lists(st.floats(0.0, 40.0, allow_nan=False), max_size=60)


def test_the_delays_double_up_to_ten_seconds() -> None:
    restarts = Restarts(None, 60.0, 0.1)
    delays = [restarts.lost(0.0).delay for _ in range(10)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def test_stable_worker_restarts_with_first_delay() -> None:
    restarts = Restarts(None, 60.0, 0.1)
    restarts.lost(0.0)
    restarts.ready(1.0)
    assert restarts.lost(60.9).delay == 0.2
    restarts.ready(100.0)
    assert restarts.lost(160.0).delay == 0.1


def test_recycled_worker_counts_as_stable() -> None:
    restarts = Restarts(None, 60.0, 0.1)
    restarts.lost(0.0)
    for now in (1.0, 31.0, 60.5):
        restarts.ready(now)
    assert restarts.lost(61.0).delay == 0.1


def test_restarts_in_a_window_spend_the_budget() -> None:
    restarts = Restarts(2, 60.0, 0.1)
    assert [restarts.lost(now).is_given_up for now in (0.0, 30.0, 59.9)] == [False, False, True]


def test_a_restart_leaves_the_budget_with_its_window() -> None:
    restarts = Restarts(2, 60.0, 0.1)
    assert [restarts.lost(now).is_given_up for now in (0.0, 30.0, 60.0)] == [False, False, False]
    assert restarts.lost(89.9).is_given_up


def test_restart_is_retried_after_a_window() -> None:
    restarts = Restarts(1, 60.0, 0.1)
    restarts.lost(0.0)
    assert restarts.lost(1.0) == NextTry(60.0, is_given_up=True)
    assert not restarts.lost(61.0).is_given_up


@given(moments, st.integers(0, 5), st.floats(0.1, 20.0))
def test_no_window_has_more_restarts_than_the_budget(
    pauses: list[float], budget: int, window: float
) -> None:
    restarts = Restarts(budget, window, 0.1)
    now, done = 0.0, []
    for pause in pauses:
        now += pause
        next_try = restarts.lost(now)
        assert 0.1 <= next_try.delay <= max(MAX_BACKOFF, window)
        if not next_try.is_given_up:
            done.append(now)
    for end in done:
        assert sum(end - window < moment <= end for moment in done) <= budget
