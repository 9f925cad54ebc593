"""The delays between tries of a dead worker's replacement; every moment is an argument."""

from fast_batcher._core.backoff import FIRST_DELAY, MAX_DELAY, STABLE_AFTER, Backoff


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff()
    delays = [backoff.lost(now=0.0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_the_figures_of_the_design() -> None:
    assert (FIRST_DELAY, MAX_DELAY, STABLE_AFTER) == (0.1, 10.0, 60.0)


def test_a_worker_that_was_ready_for_a_moment_does_not_start_them_again() -> None:
    backoff = Backoff()
    backoff.lost(0.0)
    backoff.ready(10.0)
    assert backoff.lost(10.0 + STABLE_AFTER - 0.001) == 2 * FIRST_DELAY


def test_a_stable_worker_starts_them_again() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.lost(0.0)
    backoff.ready(10.0)
    assert backoff.lost(10.0 + STABLE_AFTER) == FIRST_DELAY
    assert backoff.lost(10.0 + STABLE_AFTER) == 2 * FIRST_DELAY


def test_a_stable_time_counts_once() -> None:
    """Only the worker that was ready is forgiven, not the failed starts after it."""
    backoff = Backoff()
    backoff.ready(0.0)
    assert backoff.lost(STABLE_AFTER) == FIRST_DELAY
    later = 10 * STABLE_AFTER
    assert [backoff.lost(later) for _ in range(3)] == [0.2, 0.4, 0.8]


def test_a_start_that_fails_for_long_is_not_stable() -> None:
    backoff = Backoff()
    assert [backoff.lost(now) for now in (0.0, 1000.0, 2000.0)] == [0.1, 0.2, 0.4]
