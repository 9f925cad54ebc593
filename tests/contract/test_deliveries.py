"""Copies of one output for many callers: how many in a turn of the loop, and in which thread."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from waits import LIMIT, ONE_LOOP, turns, until

from fast_batcher._core.values import Request
from fast_batcher._session.cache import MOST_BYTES, MOST_PARTS, SLICE, Deliveries

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return ONE_LOOP


class Copied:
    """An output that calls a function while it is copied."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def __deepcopy__(self, memo: Any) -> "Copied":
        self._note()
        return Copied(self._note)


class Receivers:
    """Callers, and the copies that they got."""

    def __init__(self, count: int) -> None:
        self.waiting = [Request(None, None) for _ in range(count)]
        self.got: list[Any] = []
        self.deliveries = Deliveries(lambda _, output: self.got.append(output))

    def begin(self, output: Any) -> None:
        self.deliveries.add(self.waiting, output, asyncio.get_running_loop())


async def test_loop_turn_copies_for_a_time_slice() -> None:
    turn = 0
    copies: Counter[int] = Counter()

    def note() -> None:
        time.sleep(SLICE / 4)
        copies[turn] += 1

    receivers = Receivers(40)
    receivers.begin(Copied(note))
    while receivers.waiting:
        turn += 1
        await asyncio.sleep(0)
    assert len({id(one) for one in receivers.got}) == 40
    assert max(copies.values()) <= 5


def make_wide(part: Any) -> Any:
    return [part, *range(MOST_PARTS)]


def make_heavy(part: Any) -> Any:
    return {"part": part, "pixels": np.zeros(MOST_BYTES + 1, np.uint8)}


@pytest.mark.parametrize("make", [make_wide, make_heavy])
async def test_a_thread_makes_the_copies_of_large_outputs(make: Any) -> None:
    threads: list[int] = []
    receivers = Receivers(3)
    receivers.begin(make(Copied(lambda: threads.append(threading.get_ident()))))
    await receivers.deliveries.wait(LIMIT)
    assert len(receivers.got) == len(threads) == 3
    assert threading.get_ident() not in threads


async def test_slow_copies_move_to_a_thread() -> None:
    threads: list[int] = []

    def note() -> None:
        time.sleep(2 * SLICE)
        threads.append(threading.get_ident())

    receivers = Receivers(3)
    receivers.begin(Copied(note))
    await until(lambda: len(receivers.got) == 3)
    assert [one == threading.get_ident() for one in threads] == [True, False, False]


async def test_callers_share_an_output_that_cannot_be_copied() -> None:
    def fail() -> None:
        raise asyncio.CancelledError

    receivers = Receivers(2)
    output = Copied(fail)
    receivers.begin(output)
    await until(lambda: receivers.got == [output] * 2)


async def test_callers_may_leave_while_a_thread_copies() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def note() -> None:
        begun.set()
        may_end.wait()

    receivers = Receivers(2)
    receivers.begin(make_wide(Copied(note)))
    await until(begun.is_set)
    receivers.waiting.clear()
    may_end.set()
    await receivers.deliveries.wait(LIMIT)
    assert receivers.got == []


async def test_finish_gives_every_caller_its_copy_now() -> None:
    receivers = Receivers(3)
    receivers.begin([1])
    receivers.deliveries.finish()
    assert receivers.got == [[1]] * 3
    await turns()
    receivers.waiting.append(Request(None, None))
    receivers.begin([2])
    await receivers.deliveries.wait(LIMIT)
    assert receivers.got[3:] == [[2]]
