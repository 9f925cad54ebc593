"""Files without a name: they are made in whatever way the system and its Python have."""

import ctypes
import os
import sys
from typing import Any

import pytest

from fast_batcher._transport.progress import make_memory_file, make_shared_file

SIZE = 100_000


class OldLibrary(ctypes.CDLL):
    """A C library from before 2018."""

    def __getattr__(self, name: str) -> Any:
        if name == "memfd_create":
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.parametrize(
    ("has_old_library", "kind"), [(False, "/memfd:fast_batcher"), (True, "/dev/shm/")]
)
def test_memory_files_work_without_memfd(
    has_old_library: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/dev/shm")
    monkeypatch.delattr(os, "memfd_create")
    if has_old_library:
        monkeypatch.setattr(ctypes, "CDLL", OldLibrary)
    fd = make_memory_file(SIZE)
    assert os.fstat(fd).st_size == SIZE
    assert not os.get_inheritable(fd)
    assert os.readlink(f"/proc/self/fd/{fd}").startswith(kind)
    assert os.listdir("/dev/shm") == before
    os.close(fd)


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
