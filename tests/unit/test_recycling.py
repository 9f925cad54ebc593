"""Replacement of healthy workers."""

import pytest

from fast_batcher._core.supervision import Recycling


@pytest.mark.parametrize(("batches", "is_due"), [(1, False), (9, False), (10, True), (11, True)])
def test_worker_is_due_after_max_batches(batches: int, is_due: bool) -> None:
    recycling = Recycling(10, None)
    assert recycling.is_wanted
    assert recycling.is_due(batches, 2**50) is is_due


@pytest.mark.parametrize(("rss_bytes", "is_due"), [(0, False), (99, False), (100, True)])
def test_worker_is_due_at_memory_limit(rss_bytes: int, is_due: bool) -> None:
    recycling = Recycling(None, 100)
    assert recycling.is_wanted
    assert recycling.is_due(2, rss_bytes) is is_due


def test_limit_below_model_size_recycles_no_worker() -> None:
    recycling = Recycling(None, 100)
    assert not recycling.is_due(1, 100)
    assert recycling.is_limit_too_low
    assert not recycling.is_due(2, 1000)


def test_batches_count_despite_too_low_memory_limit() -> None:
    recycling = Recycling(5, 100)
    assert not recycling.is_due(1, 100)
    assert recycling.is_due(5, 100)
