"""Who may wait for whom."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from fast_batcher._local.function import Function
from fast_batcher._local.nesting import compute_here, drive, waiting


def test_nobody_waits_for_itself() -> None:
    with waiting("a", "a") as may_wait:
        assert not may_wait


def test_no_circle_is_closed_however_long() -> None:
    with ExitStack() as stack:
        for waiter, target in (("a", "b"), ("b", "c"), ("c", "d"), ("b", "d")):
            assert stack.enter_context(waiting(waiter, target))
        for waiter, target in (("d", "a"), ("c", "a"), ("d", "b"), ("b", "a")):
            with waiting(waiter, target) as may_wait:
                assert not may_wait
        with waiting("e", "a") as may_wait:
            assert may_wait
    with waiting("d", "a") as may_wait:
        assert may_wait


def test_a_wait_that_is_had_twice_ends_twice() -> None:
    with waiting("a", "b"):
        with waiting("a", "b"):
            pass
        with waiting("b", "a") as may_wait:
            assert not may_wait


def test_what_is_computed_here_comes_in_batches() -> None:
    sizes: list[int] = []

    def note(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    function = Function(note, "note", is_async=False)
    assert drive(compute_here(function, [1, 2, 3, 4, 5], 2), is_async=False) == [1, 2, 3, 4, 5]
    assert sizes == [2, 2, 1]


def test_an_async_function_gets_a_loop() -> None:
    async def wait(items: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return items

    function = Function(wait, "wait", is_async=True)
    assert drive(compute_here(function, [1], 2), is_async=True) == [1]


def test_one_that_only_turns_out_to_be_async_is_a_clear_error() -> None:
    async def wait(items: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return items

    function = Function(lambda items: wait(items), "wait", is_async=False)
    with pytest.raises(RuntimeError, match="write it with `async def`"):
        drive(compute_here(function, [1], 2), is_async=False)


def test_an_exception_among_the_outputs_is_raised() -> None:
    function = Function(lambda items: [KeyError(item) for item in items], "f", is_async=False)
    with pytest.raises(KeyError):
        drive(compute_here(function, [1], 2), is_async=False)
