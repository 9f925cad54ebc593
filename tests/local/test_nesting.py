"""Which engine may wait for which."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from fast_batcher._local.call_formats import list_outputs
from fast_batcher._local.function import Function
from fast_batcher._local.nesting import (
    EngineWait,
    RunningBatch,
    compute_inline,
    run_inline,
    running_batch,
)


@contextmanager
def wait_of(batch: RunningBatch, target: str) -> Iterator[bool]:
    """What a batch does while it waits for another engine."""
    token = running_batch.set(batch)
    wait = EngineWait(target)
    try:
        may_wait = wait.__enter__()
    finally:
        running_batch.reset(token)
    try:
        yield may_wait
    finally:
        wait.__exit__()


def wait(waiter: str, target: str) -> AbstractContextManager[bool]:
    return wait_of(RunningBatch(waiter), target)


def test_no_engine_waits_for_itself() -> None:
    with wait("a", "a") as may_wait:
        assert not may_wait


def test_a_batch_that_has_ended_may_wait_for_its_engine() -> None:
    batch = RunningBatch("a")
    batch.has_ended = True
    with wait_of(batch, "a") as may_wait:
        assert may_wait
        with wait("a", "a") as may_wait_too:
            assert not may_wait_too, "nothing was noted"


def test_no_circle_is_closed_however_long() -> None:
    with ExitStack() as stack:
        for waiter, target in (("a", "b"), ("b", "c"), ("c", "d"), ("b", "d")):
            assert stack.enter_context(wait(waiter, target))
        for waiter, target in (("d", "a"), ("c", "a"), ("d", "b"), ("b", "a")):
            with wait(waiter, target) as may_wait:
                assert not may_wait
        with wait("e", "a") as may_wait:
            assert may_wait
    with wait("d", "a") as may_wait:
        assert may_wait


def test_a_wait_that_is_had_twice_ends_twice() -> None:
    with wait("a", "b"):
        with wait("a", "b"):
            pass
        with wait("b", "a") as may_wait:
            assert not may_wait


def test_what_is_computed_here_comes_in_batches() -> None:
    sizes: list[int] = []

    def note(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    function = Function(note, "note", is_async=False, split=list_outputs)
    assert run_inline(compute_inline(function, [1, 2, 3, 4, 5], 2), is_async=False) == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert sizes == [2, 2, 1]


def test_an_async_function_gets_a_loop() -> None:
    async def wait(items: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return items

    function = Function(wait, "wait", is_async=True, split=list_outputs)
    assert run_inline(compute_inline(function, [1], 2), is_async=True) == [1]


def test_one_that_only_turns_out_to_be_async_is_a_clear_error() -> None:
    async def wait(items: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return items

    function = Function(lambda items: wait(items), "wait", is_async=False, split=list_outputs)
    with pytest.raises(RuntimeError, match="write it with `async def`"):
        run_inline(compute_inline(function, [1], 2), is_async=False)


def test_an_exception_among_the_outputs_is_raised() -> None:
    function = Function(
        lambda items: [KeyError(item) for item in items], "f", is_async=False, split=list_outputs
    )
    with pytest.raises(KeyError):
        run_inline(compute_inline(function, [1], 2), is_async=False)
