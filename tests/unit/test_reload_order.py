"""The order of a reload, and the workers that are removed."""

import pytest

from fast_batcher._core.supervision import Reload, choose_added, choose_surplus


def test_every_worker_is_replaced_one_after_the_other() -> None:
    reload = Reload(range(3))
    seen = []
    while (index := reload.current) is not None:
        seen.append(index)
        reload.replaced()
    assert seen == [0, 1, 2]
    assert not reload.goes_back


@pytest.mark.parametrize("good", [0, 1, 2])
def test_after_a_failure_the_replaced_workers_go_back(good: int) -> None:
    reload = Reload(range(3))
    for _ in range(good):
        reload.replaced()
    reload.failed()
    assert reload.goes_back
    back = []
    while (index := reload.current) is not None:
        back.append(index)
        reload.replaced()
    assert back == [*range(good)]


def test_worker_that_cannot_roll_back_is_dropped() -> None:
    reload = Reload(range(3))
    reload.replaced()
    reload.replaced()
    reload.failed()
    reload.failed()
    assert reload.current == 1
    reload.replaced()
    assert reload.current is None


@pytest.mark.parametrize(
    ("ready", "count", "removed"),
    [
        ({0: True, 1: True, 2: True}, 1, [2, 1]),
        ({0: False, 1: True, 2: False}, 1, [2, 0]),
        ({0: False, 4: True}, 1, [0]),
        ({0: True}, 1, []),
        ({0: True}, 5, []),
    ],
)
def test_surplus_is_what_is_not_ready_and_then_the_highest(
    ready: dict[int, bool], count: int, removed: list[int]
) -> None:
    assert choose_surplus(ready, count) == removed


@pytest.mark.parametrize(
    ("present", "count", "added"),
    [({0, 1}, 4, [2, 3]), ({1, 4}, 4, [0, 2]), ({1}, 1, []), ({5, 6}, 1, [])],
)
def test_added_workers_get_the_lowest_free_indexes(
    present: set[int], count: int, added: list[int]
) -> None:
    assert choose_added(present, count) == added
