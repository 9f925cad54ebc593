"""Two threads that copy: everything arrives, whoever copies it."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from waits import LIMIT

from fast_batcher._parent.parallel_copier import LEAST_HELPED, PIECES, ParallelCopier, RunBeside
from fast_batcher._parent.pool import _JobThread
from fast_batcher._shared_memory.memcpy import move

# What lies around that which is copied, and must stay as it is.
AROUND = 64


@pytest.fixture
def helper() -> Iterator[RunBeside]:
    helper = _JobThread("helper")
    yield helper.run
    helper.stop()


def is_free() -> bool:
    return False


def check(mover: ParallelCopier, size: int) -> None:
    """Copy so many bytes, and see that they and nothing else have arrived."""
    source = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    target = np.zeros(size + 2 * AROUND, np.uint8)
    mover.move(target.ctypes.data + AROUND, source.ctypes.data, size)
    assert np.array_equal(target[AROUND:-AROUND], source)
    assert not target[:AROUND].any()
    assert not target[-AROUND:].any()


@pytest.mark.parametrize("offset", range(-2, 3))
@pytest.mark.parametrize("size", [2, LEAST_HELPED, 2 * LEAST_HELPED])
def test_every_byte_is_copied_and_no_other(helper: RunBeside, size: int, offset: int) -> None:
    check(ParallelCopier(helper, is_free), size + offset)


def test_two_threads_share_much(helper: RunBeside) -> None:
    """Each waits with its first piece until the other has one."""
    movers: set[int] = set()
    are_two = threading.Event()

    def wait(target: int, source: int, size: int) -> None:
        movers.add(threading.get_ident())
        if len(movers) == 2:
            are_two.set()
        assert are_two.wait(LIMIT)
        move(target, source, size)

    check(ParallelCopier(helper, is_free, wait), LEAST_HELPED)
    assert len(movers) == 2


@pytest.mark.parametrize(("size", "is_busy"), [(LEAST_HELPED, True), (LEAST_HELPED - 1, False)])
def test_one_thread_copies_what_is_little_or_not_alone(size: int, is_busy: bool) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("there is nothing to help with")

    check(ParallelCopier(refuse, lambda: is_busy), size)


@pytest.mark.parametrize("fails", [False, True], ids=["it goes well", "the caller's half fails"])
def test_what_the_other_thread_has_begun_is_waited_for(helper: RunBeside, fails: bool) -> None:
    """It has taken one piece, and copies it only when the caller can do nothing but wait."""
    mine = threading.get_ident()
    has_begun, is_alone, has_ended = (threading.Event() for _ in range(3))
    left = PIECES - 1

    def wait(target: int, source: int, size: int) -> None:
        nonlocal left
        if threading.get_ident() != mine:
            has_begun.set()
            assert is_alone.wait(LIMIT)
            move(target, source, size)
            has_ended.set()
            return
        assert has_begun.wait(LIMIT)
        move(target, source, size)
        left -= 1
        if fails or not left:
            is_alone.set()
        if fails:
            raise KeyboardInterrupt

    mover = ParallelCopier(helper, is_free, wait)
    source = np.ones(LEAST_HELPED, np.uint8)
    target = np.zeros(LEAST_HELPED, np.uint8)
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        mover.move(target.ctypes.data, source.ctypes.data, LEAST_HELPED)
    # Whoever does not wait is here before a piece can be copied.
    assert has_ended.is_set()
    assert fails or target.all()


Job = Callable[[], None]


@pytest.mark.parametrize("has_a_thread", [False, True])
def test_without_help_one_copies_all_and_nothing_is_copied_later(has_a_thread: bool) -> None:
    kept: list[Job] = []

    def keep(job: Job) -> None:
        if not has_a_thread:
            raise RuntimeError("can't start new thread")
        kept.append(job)

    mover = ParallelCopier(keep, is_free)
    source = np.ones(LEAST_HELPED, np.uint8)
    target = np.zeros(LEAST_HELPED, np.uint8)
    mover.move(target.ctypes.data, source.ctypes.data, LEAST_HELPED)
    assert target.all()
    target[:] = 0
    assert len(kept) == has_a_thread
    # The thread comes when all is over.
    for job in kept:
        job()
    assert not target.any()


def test_after_an_interrupt_nothing_is_copied_later() -> None:
    kept: list[Job] = []
    is_first = True

    def interrupt(target: int, source: int, size: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            raise KeyboardInterrupt
        move(target, source, size)

    source = np.ones(LEAST_HELPED, np.uint8)
    target = np.zeros(LEAST_HELPED, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        ParallelCopier(kept.append, is_free, interrupt).move(
            target.ctypes.data, source.ctypes.data, LEAST_HELPED
        )
    for job in kept:
        job()
    assert not target.any()


def test_what_goes_wrong_beside_is_raised(helper: RunBeside) -> None:
    mine = threading.get_ident()
    has_begun = threading.Event()

    def fail(target: int, source: int, size: int) -> None:
        if threading.get_ident() != mine:
            has_begun.set()
            raise MemoryError("beside")
        assert has_begun.wait(LIMIT)
        move(target, source, size)

    with pytest.raises(MemoryError, match="beside"):
        check(ParallelCopier(helper, is_free, fail), LEAST_HELPED)
