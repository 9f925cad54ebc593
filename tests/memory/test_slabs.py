"""Memory for inputs: what is written is seen, and a range is free when no process can see it."""

import ctypes
import gc
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from forks import fork, status_of
from memory_files import memory_of, refuse_memory
from waits import LIMIT

from fast_batcher._arrays.tensors import VolatileBuffer
from fast_batcher._shared_memory.inputs import Section, Slab, Slabs, SlabViews, SpareMemory
from fast_batcher._shared_memory.ranges import PAGE, copy_buffer
from fast_batcher._transport.progress import WorkerProgress, open_passed

MEBI = 2**20
SIZE = 8 * MEBI
# The id of a batch.
BATCH = 17


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    slabs = Slabs(SIZE)
    yield slabs
    slabs.close()


@pytest.fixture
def views(slabs: Slabs) -> Iterator[SlabViews]:
    """The worker's half, in this process."""
    views = SlabViews(os.dup(slabs._fd), SIZE)
    yield views
    gc.collect()
    views.close()


def taken(slabs: Slabs, length: int) -> Section:
    part = slabs.take(length)
    assert part is not None
    return part


def reserved(slabs: Slabs, length: int) -> Slab:
    slab = slabs.reserve(length)
    assert slab is not None
    return slab


def write(slabs: Slabs, part: Section, data: bytes = b"x") -> None:
    slabs.write(part, [(0, data)], releases_gil=False)


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [b"bytes", memoryview(b"read-only"), memoryview(bytearray(9))])
def test_copy_stays_inside_the_target(piece: Any) -> None:
    target = np.zeros(len(piece) + 1, np.uint8)
    copy_buffer(target.ctypes.data, piece)
    assert target.tobytes() == bytes(piece) + b"\0"
    with pytest.raises(BufferError):
        copy_buffer(target.ctypes.data, memoryview(bytes(4))[::2])


def volatile(address: int, size: int) -> memoryview:
    """Bytes that their owner may free."""
    owner = SimpleNamespace(data_ptr=lambda: address, nbytes=size)
    array: Any = np.asarray(VolatileBuffer(owner))
    return memoryview(array)


@pytest.mark.slow
def test_freeable_memory_is_copied_whole_or_fails(slabs: Slabs, views: SlabViews) -> None:
    source = np.random.default_rng(0).integers(0, 255, 3 * MEBI, np.uint8)
    part = taken(slabs, 3 * MEBI)
    slabs.write(part, [(0, volatile(source.ctypes.data, source.nbytes))], releases_gil=True)
    assert views.view(BATCH)[part.start : part.start + 3 * MEBI] == source.tobytes()
    gone = mmap.mmap(-1, MEBI)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(gone))
    gc.collect()
    gone.close()
    with pytest.raises(OSError, match="resized"):
        slabs.write(taken(slabs, MEBI), [(0, volatile(address, MEBI))], releases_gil=True)


# --- memory of the system -------------------------------------------------------------------------


def test_each_page_is_provided_once(slabs: Slabs) -> None:
    slab = reserved(slabs, MEBI)
    assert slab.start == 0
    # The last part is written first, and the first has pages of the second.
    lengths = [(2000 + 2 * PAGE, 1000), (0, 1000), (1000, 1000), (2000, 2 * PAGE)]
    parts = [Section(slab, begin, length) for begin, length in lengths]
    assert [slabs.count_fresh(part) // PAGE for part in parts] == [1, 1, 1, 3]
    assert memory_of(slabs._fd) == 0
    for part, pages in zip(parts, [1, 2, 2, 3], strict=True):
        write(slabs, part)
        assert slabs.count_fresh(part) == 0
        assert memory_of(slabs._fd) == pages * PAGE


def test_memory_that_was_returned_is_fresh(slabs: Slabs) -> None:
    part = taken(slabs, MEBI)
    slabs.write(part, (), releases_gil=False)
    assert slabs.take_unused() is None
    del part
    assert slabs.take_unused() is None  # it was used since the last call
    unused = slabs.take_unused()
    assert unused is not None
    assert (unused.start, unused.length) == (0, MEBI)
    slabs.punch(unused)
    del unused
    assert memory_of(slabs._fd) == 0
    assert slabs.count_fresh(taken(slabs, MEBI)) == MEBI


def test_missing_memory_fails_before_writing(slabs: Slabs) -> None:
    small = taken(slabs, MEBI)
    write(slabs, small, b"before")
    refuse_memory(slabs._fd)
    large = taken(slabs, 4 * MEBI)
    with pytest.raises(OSError, match="Bad file descriptor"):
        write(slabs, large)
    del large
    assert memory_of(slabs._fd) == MEBI
    # It is known that the memory is not there, and the memory that is there can be used.
    assert slabs.count_fresh(taken(slabs, MEBI)) == MEBI
    del small
    write(slabs, taken(slabs, MEBI), b"after")


# --- ranges ---------------------------------------------------------------------------------------


def test_referenced_slab_stays_occupied(slabs: Slabs) -> None:
    slab = reserved(slabs, MEBI)
    part = Section(slab, slab.start, PAGE)
    del slab
    assert slabs.count == 1
    del part
    assert slabs.count == 0
    held = [taken(slabs, SIZE)]
    thread = threading.Thread(target=held.clear)  # any thread may drop the last reference
    thread.start()
    thread.join(LIMIT)
    assert slabs.count == 0
    leaked = reserved(slabs, MEBI)
    leaked.leak()
    del leaked
    assert slabs.count == 1


# --- memory of the worker -------------------------------------------------------------------------


def place(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def test_spare_memory_is_used_again_when_no_view_is_left() -> None:
    spare = SpareMemory()
    pieces = [memoryview(b"1" * MEBI), memoryview(b"23")]
    view = spare.gather(pieces)
    first = place(view)
    row = np.frombuffer(view[MEBI - 1 :], np.uint8)
    del view
    assert row.tobytes() == b"123"
    assert place(spare.gather(pieces)) != first
    assert row.tobytes() == b"123"
    del row
    assert first in {place(view) for view in [spare.gather(pieces), spare.gather(pieces[1:])]}
    assert len(spare._free) == 2
    spare.gather(pieces * 2)
    # The others were too small.
    assert [len(memory) >= 2 * MEBI for memory in spare._free] == [True]


def test_spare_memory_that_was_not_used_for_a_while_is_returned() -> None:
    spare, piece = SpareMemory(), [memoryview(b"x")]
    views = [spare.gather(piece) for _ in range(3)]
    views.clear()
    spare.rest()
    for count in (3, 1, 1):
        assert len(spare._free) == count
        view = spare.gather(piece)
        del view
        spare.rest()
    spare.rest()
    assert spare._free == []


# --- forks ----------------------------------------------------------------------------------------


@pytest.fixture
def progress(views: SlabViews) -> Iterator[WorkerProgress]:
    """Answers that the worker's parent reads."""
    progress = WorkerProgress()
    views.report_forks(progress)
    yield progress
    progress.close()


class Child:
    """A forked child of this process, which lives until it is told to end."""

    def __init__(self) -> None:
        source, self._sink = os.pipe()

        def wait() -> int:
            os.close(self._sink)
            return len(os.read(source, 1))

        self._pid = fork(wait)
        os.close(source)

    def end(self) -> None:
        os.close(self._sink)
        assert status_of(self._pid) == 0


@pytest.mark.slow
def test_batch_is_free_without_views_in_children(
    views: SlabViews, progress: WorkerProgress
) -> None:
    Child().end()
    told = [progress.inherited]  # there was nothing to see
    held = {batch_id: views.view(batch_id) for batch_id in (1, 2)}
    child = Child()
    told.append(progress.inherited)
    held[3] = views.view(3)
    del held[1], held[3]
    assert views.take_freed() == [3]
    child.end()
    assert views.take_freed() == [1]
    del held[2]
    assert views.take_freed() == [2]
    assert [*told, progress.inherited] == [None, 2, None]
    assert views.take_freed() == []


@pytest.mark.slow
def test_batch_stays_occupied_without_a_pipe(views: SlabViews) -> None:
    held = views.view(1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        views._before_fork()  # not a real one: a child without descriptors is aborted by uvloop
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    views._after_fork_in_parent()
    del held
    assert views.take_freed() == []


@pytest.mark.slow
def test_forked_app_releases_its_copy(slabs: Slabs) -> None:
    write(slabs, taken(slabs, MEBI), bytes(MEBI))
    with slabs._lock:
        pid = fork(lambda: slabs._fd != -1)
    assert status_of(pid) == 0
    assert memory_of(slabs._fd) == MEBI


# --- the end --------------------------------------------------------------------------------------


def test_closed_slabs_are_not_used() -> None:
    slabs = Slabs(SIZE)
    slab = taken(slabs, PAGE)
    slabs.close()
    slabs.close()
    assert slabs.take(1) is None
    assert slabs.take_unused() is None
    with pytest.raises(OSError, match="closed"):
        write(slabs, slab)
    with pytest.raises(OSError, match="closed"):
        slabs.punch(slab)
    with pytest.raises(OSError, match="closed"):
        slabs.lend(slab)


def test_memory_stays_until_the_copy_ends() -> None:
    slabs = Slabs(SIZE)
    slab = taken(slabs, MEBI)
    copying, go_on = threading.Event(), threading.Event()

    def pieces() -> Iterator[tuple[int, bytes | memoryview]]:
        copying.set()
        assert go_on.wait(LIMIT)
        yield 0, bytes(MEBI)

    thread = threading.Thread(target=lambda: slabs.write(slab, pieces(), releases_gil=True))
    thread.start()
    assert copying.wait(LIMIT)
    slabs.close()
    fd = slabs._fd
    os.fstat(fd)
    go_on.set()
    thread.join(LIMIT)
    assert slabs._fd == -1
    assert not hasattr(slabs, "_memory")


# --- systems that refuse --------------------------------------------------------------------------


@pytest.mark.slow
def test_failed_mapping_is_an_error(slabs: Slabs) -> None:
    def refused() -> bool:
        # Enough for the interpreter.
        most = psutil.Process().memory_info().vms + SIZE // 2
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        duplicate = SimpleNamespace(detach=lambda: os.dup(slabs._fd))
        return isinstance(open_passed(SlabViews, duplicate, SIZE), OSError)

    assert status_of(fork(refused)) == 1
