"""The order of a reload."""

import pytest

from fast_batcher._core.supervision import Reload


def test_every_worker_is_replaced_one_after_the_other() -> None:
    reload = Reload(3)
    seen = []
    while (index := reload.current) is not None:
        seen.append(index)
        reload.replaced()
    assert seen == [0, 1, 2]
    assert not reload.goes_back


@pytest.mark.parametrize("good", [0, 1, 2])
def test_after_a_failure_the_replaced_workers_go_back(good: int) -> None:
    reload = Reload(3)
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
    reload = Reload(3)
    reload.replaced()
    reload.replaced()
    reload.failed()
    reload.failed()
    assert reload.current == 1
    reload.replaced()
    assert reload.current is None
