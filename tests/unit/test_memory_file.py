"""Files without a name: they are made in whatever way the system and its Python have."""

import os
import sys

import pytest

from fast_batcher._transport.progress import make_memory_file, make_shared_file

SIZE = 100_000


def test_elsewhere_it_is_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    fd = make_memory_file(SIZE)
    assert os.fstat(fd).st_size == SIZE
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    with pytest.raises(OSError, match="Linux only"):
        make_shared_file(SIZE)


@pytest.mark.parametrize("has_memfd", [True, False])
def test_failed_allocation_leaves_nothing(has_memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Invalid argument"):
        make_memory_file(-1)
    assert os.listdir("/proc/self/fd") == before
