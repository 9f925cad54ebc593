"""Detection of idle workers that no longer answer; time is an argument."""

from fast_batcher._core.supervision import HEARTBEAT_INTERVAL, LATENESS, Heartbeat


def test_the_idle_ones_are_pinged() -> None:
    assert Heartbeat().tick(0.0, [0, 2]) == ([0, 2], [])


def test_answering_worker_is_pinged_again() -> None:
    heartbeat = Heartbeat()
    heartbeat.tick(0.0, [0])
    heartbeat.answered(0)
    assert heartbeat.tick(HEARTBEAT_INTERVAL, [0]) == ([0], [])


def test_silent_worker_is_reported_once() -> None:
    heartbeat = Heartbeat()
    heartbeat.tick(0.0, [0, 1])
    heartbeat.answered(1)
    assert heartbeat.tick(HEARTBEAT_INTERVAL, [0, 1]) == ([1], [0])
    heartbeat.answered(1)
    assert heartbeat.tick(2 * HEARTBEAT_INTERVAL, [1]) == ([1], [])


def test_worker_with_new_work_after_ping_is_reported() -> None:
    heartbeat = Heartbeat()
    heartbeat.tick(0.0, [0])
    assert heartbeat.tick(HEARTBEAT_INTERVAL, []) == ([], [0])


def test_busy_worker_is_not_pinged() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.tick(0.0, []) == ([], [])
    assert heartbeat.tick(HEARTBEAT_INTERVAL, []) == ([], [])


def test_late_tick_judges_no_worker() -> None:
    heartbeat = Heartbeat()
    heartbeat.tick(0.0, [0])
    late = HEARTBEAT_INTERVAL + LATENESS + 0.1
    assert heartbeat.tick(late, [0, 1]) == ([1], [])
    # It has had another interval now.
    assert heartbeat.tick(late + HEARTBEAT_INTERVAL, []) == ([], [0, 1])


def test_a_little_lateness_is_usual() -> None:
    heartbeat = Heartbeat()
    heartbeat.tick(0.0, [0])
    assert heartbeat.tick(HEARTBEAT_INTERVAL + LATENESS, [0]) == ([], [0])


def test_removed_worker_is_forgotten() -> None:
    heartbeat = Heartbeat()
    heartbeat.tick(0.0, [0])
    heartbeat.answered(0)
    assert heartbeat.tick(HEARTBEAT_INTERVAL, []) == ([], [])
