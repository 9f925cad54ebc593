"""Two threads that copy: everything arrives, whoever copies it."""

import contextlib
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from waits import LIMIT

from fast_batcher._process.mover import LEAST_HELPED, PIECE_SIZE, Mover
from fast_batcher._transport.moving import move

# What lies around that which is copied, and must stay as it is.
AROUND = 64


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover("mover", lambda: False)
    yield mover
    mover.close()


def check(mover: Mover, size: int) -> None:
    """Copy so many bytes, and see that they and nothing else have arrived."""
    source = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    target = np.zeros(size + 2 * AROUND, np.uint8)
    mover.move(target.ctypes.data + AROUND, source.ctypes.data, size)
    assert np.array_equal(target[AROUND:-AROUND], source)
    assert not target[:AROUND].any()
    assert not target[-AROUND:].any()


@pytest.mark.parametrize("offset", range(-2, 3))
@pytest.mark.parametrize("size", [2, LEAST_HELPED, LEAST_HELPED + 3 * PIECE_SIZE])
def test_every_byte_is_copied_and_no_other(mover: Mover, size: int, offset: int) -> None:
    check(mover, size + offset)


def test_two_threads_share_much() -> None:
    """Each waits with its first piece until the other has one."""
    movers: set[int] = set()
    are_two = threading.Event()

    def wait(target: int, source: int, size: int) -> None:
        movers.add(threading.get_ident())
        if len(movers) == 2:
            are_two.set()
        assert are_two.wait(LIMIT)
        move(target, source, size)

    with contextlib.closing(Mover("mover", lambda: False, wait)) as mover:
        check(mover, LEAST_HELPED)
    assert len(movers) == 2


def test_while_something_waits_to_be_copied_one_thread_copies_alone() -> None:
    movers: set[int] = set()

    def note(target: int, source: int, size: int) -> None:
        movers.add(threading.get_ident())
        move(target, source, size)

    with contextlib.closing(Mover("mover", lambda: True, note)) as mover:
        check(mover, LEAST_HELPED)
    assert movers == {threading.get_ident()}


def test_what_the_other_thread_has_begun_is_waited_for() -> None:
    """It has taken one piece, and copies it only when all others have been."""
    mine = threading.get_ident()
    has_begun, is_alone = threading.Event(), threading.Event()
    left = 0

    def wait(target: int, source: int, size: int) -> None:
        nonlocal left
        if threading.get_ident() != mine:
            has_begun.set()
            assert is_alone.wait(LIMIT)
            move(target, source, size)
            return
        assert has_begun.wait(LIMIT)
        move(target, source, size)
        left -= 1
        if left == 1:
            is_alone.set()

    with contextlib.closing(Mover("mover", lambda: False, wait)) as mover:
        # Whether one that does not wait is caught is chance.
        for _ in range(20):
            left = LEAST_HELPED // PIECE_SIZE
            has_begun.clear()
            is_alone.clear()
            check(mover, LEAST_HELPED)


def test_without_another_thread_one_copies_all_and_nothing_is_copied_later(
    monkeypatch: pytest.MonkeyPatch, mover: Mover
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = np.ones(LEAST_HELPED, np.uint8)
    target = np.zeros(LEAST_HELPED, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        mover.move(target.ctypes.data, source.ctypes.data, LEAST_HELPED)
    assert target.all()
    target[:] = 0
    # The job that could not be handed over is done before this.
    mover._helper.submit(int).result(LIMIT)
    assert not target.any()


def test_after_the_end_one_copies_all(mover: Mover) -> None:
    check(mover, LEAST_HELPED)
    mover.close()
    mover.close()
    check(mover, LEAST_HELPED)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_fork_one_copies_all(mover: Mover) -> None:
    check(mover, LEAST_HELPED)
    child = os.fork()
    if not child:
        try:
            check(mover, LEAST_HELPED)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
