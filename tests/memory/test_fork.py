"""Behaviour of objects at a fork."""

import pytest
from forks import fork, status_of

from fast_batcher._process import at_fork

pytestmark = pytest.mark.slow


class Noted:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        at_fork(
            self,
            before=lambda one: one.told.append("before"),
            in_parent=lambda one: one.told.append("parent"),
            in_child=lambda one: one.told.append("child"),
        )


def test_objects_are_notified_around_a_fork() -> None:
    noted = Noted()
    assert status_of(fork(lambda: noted.told != ["before", "child"])) == 0
    assert noted.told == ["before", "parent"]


def test_deleted_object_is_not_notified() -> None:
    gone, kept = Noted(), Noted()
    told = gone.told
    del gone
    assert status_of(fork(lambda: kept.told != ["before", "child"])) == 0
    assert told == []
