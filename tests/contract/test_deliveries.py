"""Copies of one output for many callers: how many in a turn of the loop, and in which thread."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from models.base import Echo
from waits import LIMIT, ONE_LOOP, call, turns, until

from fast_batcher import DynBatcher
from fast_batcher._opening.cache import MOST_BYTES, MOST_PARTS, SLICE
from fast_batcher.testing import BatcherKit

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


class Knows:
    """A cache with one output for every input, which it finds when it may."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self.may_find = asyncio.Event()

    async def get(self, key: Any) -> Any:
        await self.may_find.wait()
        return self._output

    def set(self, key: Any, value: Any) -> None:
        raise AssertionError("nothing is computed")


@asynccontextmanager
async def joined(count: int, output: Any) -> AsyncIterator["list[asyncio.Task[Any]]"]:
    """Calls of a batcher that get this output in the same turn of the loop."""
    cache = Knows(output)
    with BatcherKit():
        async with DynBatcher(Echo, cache=cache) as batcher:
            calls = [call(batcher, 1) for _ in range(count)]
            await turns()
            assert batcher.stats.cache_coalesced == count - 1
            cache.may_find.set()
            yield calls


async def outputs_of(calls: "list[asyncio.Task[Any]]") -> list[Any]:
    async with asyncio.timeout(LIMIT):
        return await asyncio.gather(*calls)


async def test_loop_turn_copies_for_a_time_slice() -> None:
    turn = 0
    copies: Counter[int] = Counter()

    def note() -> None:
        time.sleep(SLICE / 4)
        copies[turn] += 1

    async with joined(40, Copied(note)) as calls:
        while not all(one.done() for one in calls):
            turn += 1
            await asyncio.sleep(0)
        assert len({id(one) for one in await outputs_of(calls)}) == 40
    assert max(copies.values()) <= 5


def make_wide(part: Any) -> Any:
    return [part, *range(MOST_PARTS)]


def make_heavy(part: Any) -> Any:
    return {"part": part, "pixels": np.zeros(MOST_BYTES + 1, np.uint8)}


@pytest.mark.parametrize("make", [make_wide, make_heavy])
async def test_a_thread_makes_the_copies_of_large_outputs(make: Any) -> None:
    threads: list[int] = []
    async with joined(3, make(Copied(lambda: threads.append(threading.get_ident())))) as calls:
        assert len({id(one) for one in await outputs_of(calls)}) == len(threads) == 3
    assert threading.get_ident() not in threads


async def test_slow_copies_move_to_a_thread() -> None:
    threads: list[int] = []

    def note() -> None:
        time.sleep(2 * SLICE)
        threads.append(threading.get_ident())

    async with joined(3, Copied(note)) as calls:
        await outputs_of(calls)
    assert [one == threading.get_ident() for one in threads] == [True, False, False]


async def test_callers_share_an_output_that_cannot_be_copied() -> None:
    def fail() -> None:
        raise asyncio.CancelledError

    output = Copied(fail)
    async with joined(2, output) as calls:
        assert await outputs_of(calls) == [output] * 2


async def test_callers_may_leave_while_a_thread_copies() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def note() -> None:
        begun.set()
        assert may_end.wait(LIMIT)

    async with joined(3, make_wide(Copied(note))) as calls:
        await until(begun.is_set)
        for one in calls[:2]:
            one.cancel()
        await turns()
        may_end.set()
        assert len(await calls[2]) == MOST_PARTS + 1
        assert [one.cancelled() for one in calls] == [True, True, False]


async def test_callers_get_their_copies_after_the_end() -> None:
    async with joined(40, Copied(lambda: time.sleep(SLICE / 4))) as calls:
        await until(lambda: any(one.done() for one in calls))
        assert not all(one.done() for one in calls)
    assert len({id(one) for one in await outputs_of(calls)}) == 40
