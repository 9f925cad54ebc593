"""Lag of an event loop; time is an argument."""

import pytest

from fast_batcher._core.loop_lag import (
    GUILTY_SHARE,
    LEAST_LAG,
    SERIOUS,
    TICK,
    WARNING_INTERVAL,
    WINDOW,
    LoopLag,
)


def tick_until(lag: LoopLag, begin: float, end: float, late: float = 0.0) -> float:
    """Tick regularly, always so many seconds late; return the moment of the last tick."""
    now = begin
    while now + TICK + late <= end:
        now += TICK + late
        lag.tick(now)
    return now


def test_a_loop_in_time_has_no_lag() -> None:
    lag = LoopLag(0.0)
    now = tick_until(lag, 0.0, 100.0, LEAST_LAG / 2)
    assert lag.blocked(0.0, now) == 0.0
    assert lag.find_warning(now) == 0.0


def test_a_late_tick_is_a_block() -> None:
    lag = LoopLag(0.0)
    assert lag.tick(TICK) == 0.0
    assert lag.tick(TICK + TICK + 3.0) == 3.0
    block = 2 * TICK
    assert lag.blocked(0.0, 100.0 * TICK) >= 3.0
    assert lag.blocked(block + 1.0, block + 2.0) == 1.0
    assert lag.blocked(block + 3.0, block + 3.1) == 0.0


def test_a_block_that_lasts_counts() -> None:
    lag = LoopLag(0.0)
    assert lag.blocked(0.0, TICK + 2.0) == 2.0


def test_a_pause_between_batchers_is_no_block() -> None:
    lag = LoopLag(0.0)
    lag.tick(TICK)
    lag.restart(1000.0)
    assert lag.blocked(0.0, 1000.0 + TICK) == 0.0


def test_one_warning_a_minute() -> None:
    lag = LoopLag(0.0)
    lag.tick(TICK + SERIOUS)
    now = TICK + SERIOUS
    assert lag.find_warning(now) == SERIOUS
    lag.tick(now + TICK + SERIOUS)
    assert lag.find_warning(now + TICK + SERIOUS) == 0.0
    later = tick_until(lag, now + TICK + SERIOUS, now + WARNING_INTERVAL)
    lag.tick(later + TICK + SERIOUS)
    assert lag.find_warning(later + TICK + SERIOUS) == pytest.approx(SERIOUS)


def test_many_small_blocks_are_as_bad_as_a_long_one() -> None:
    """A tenth of the window: an endpoint that blocks for a moment, again and again."""
    lag = LoopLag(0.0)
    now = tick_until(lag, 0.0, WINDOW, late=2 * LEAST_LAG)
    assert lag.find_warning(now) > SERIOUS


def test_old_blocks_are_no_reason() -> None:
    lag = LoopLag(0.0)
    lag.tick(TICK + SERIOUS)
    now = tick_until(lag, TICK + SERIOUS, SERIOUS + 2 * WINDOW)
    assert lag.find_warning(now) == 0.0


def test_only_a_large_part_of_the_time_delays_a_request() -> None:
    lag = LoopLag(0.0)
    lag.tick(TICK + 1.0)
    tick_until(lag, TICK + 1.0, 9.0)
    assert lag.find_delay(0.0, 1.0 / GUILTY_SHARE) == 1.0
    assert lag.find_delay(0.0, 1.1 / GUILTY_SHARE) == 0.0
    assert lag.find_delay(5.0, 6.0) == 0.0


def test_a_long_history_is_forgotten() -> None:
    lag = LoopLag(0.0)
    now = tick_until(lag, 0.0, 3 * WARNING_INTERVAL, late=LEAST_LAG)
    assert lag.blocked(0.0, now) <= 2 * WARNING_INTERVAL * LEAST_LAG / TICK
