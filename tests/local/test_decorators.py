"""Behaviour of awaited calls, common to all decorators."""

import asyncio
import contextvars
import gc
import random
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy
import pytest
from gated_functions import InThread, Variant, every_variant
from hostile_errors import ALL, draw_hostile, make_hostile
from paths import TESTS
from tables import UNEVEN
from waits import turns, until

from fast_batcher.errors import (
    BatcherClosedError,
    InferenceError,
    OutputMismatchError,
    QueueFullError,
)

pytestmark = [pytest.mark.anyio, every_variant]


def double(items: list[Any]) -> list[Any]:
    return [2 * item for item in items]


class Thing:
    """An input that can be seen to be released."""


# What a call returns.


async def test_items_and_lists_give_outputs_in_their_order(variant: Variant) -> None:
    async with variant.batched(double) as function:
        assert await function(21) == 42
        assert await function([3, 1, 2]) == [6, 2, 4]
        assert await function((1, 2)) == (1, 2, 1, 2), "a tuple is one item"
        assert function.stats.total_batches == 3
        assert await function([]) == []
        assert function.stats.total_batches == 3


async def test_calls_need_exactly_one_argument(variant: Variant) -> None:
    async with variant.batched(double) as function:
        for arguments in ((), (1, 2), ([1], [2])):
            with pytest.raises(TypeError, match="called with one argument"):
                await function(*arguments)


# Which batches are made.


async def test_calls_during_a_batch_form_the_next(variant: Variant) -> None:
    gated = variant.gated()
    async with variant.batched(gated) as function:
        calls = [asyncio.create_task(function(0))]
        await until(lambda: gated.batches == [[0]])
        calls += [asyncio.create_task(function(number)) for number in range(1, 6)]
        await until(lambda: function.stats.queue_size == 5)
        gated.let_on(2)
        assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8, 10]
    assert gated.batches == [[0], [1, 2, 3, 4, 5]]


@pytest.mark.slow
async def test_a_large_list_is_split_over_batches(variant: Variant) -> None:
    sizes: list[int] = []

    def count(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    async with variant.batched(count, batch_size=32) as function:
        assert await function(list(range(10_000))) == list(range(10_000))
    assert (max(sizes), sum(sizes), len(sizes)) == (32, 10_000, 313)


@pytest.mark.parametrize(
    ("items", "batches"),
    [
        (["ab", "cd", "e", "too long", "f"], [["ab", "cd", "e"], ["too long"], ["f"]]),
        (["", "", "", "abc", ""], [["", "", "", ""], ["abc"]]),
        ([{"a": "xyz", "b": "x"}, 7, 7, 7], [[{"a": "xyz", "b": "x"}, 7, 7], [7]]),
    ],
    ids=["texts", "empty ones count 1", "dicts by their first value"],
)
async def test_a_batch_stays_within_its_length(
    variant: Variant, items: list[Any], batches: list[list[Any]]
) -> None:
    seen: list[list[Any]] = []

    def note(items: list[Any]) -> list[Any]:
        seen.append(items)
        return items

    async with variant.batched(note, max_batch_length=5) as function:
        assert await function(items) == items
        assert await function("alone") == "alone"
    assert seen == [*batches, ["alone"]]


@pytest.mark.slow
async def test_full_queue_rejects_whole_calls(variant: Variant) -> None:
    gated = variant.gated()
    async with variant.batched(gated, max_queue_size=2) as function:
        running = asyncio.create_task(function(0))
        await until(lambda: gated.batches == [[0]])
        with pytest.raises(QueueFullError, match="no room for 3 more, 0 wait already") as caught:
            await function([1, 2, 3])
        assert "max_queue_size=2" in str(caught.value)
        # Three calls in one turn.
        calls = asyncio.gather(*map(function, (1, [2, 3], 4)), return_exceptions=True)
        await until(lambda: function.stats.queue_size == 2)
        with pytest.raises(QueueFullError, match="no room for 1 more, 2 wait already"):
            await function(5)
        gated.let_on(2)
        one, two, three = await calls
        assert (await running, one, three) == (0, 2, 8)
        assert isinstance(two, QueueFullError)
        assert "no room for 2 more, 1 wait already" in str(two)
    assert gated.batches == [[0], [1, 4]]


# Errors.


class BadItemError(Exception):
    """Needs more than a message."""

    def __init__(self, item: int, why: str) -> None:
        super().__init__(f"{item}: {why}")
        self.item = item


async def test_error_has_both_types(variant: Variant) -> None:
    def fail(items: list[int]) -> list[int]:
        raise BadItemError(items[0], "bad")

    async with variant.batched(fail) as function:
        errors = await asyncio.gather(function(1), function(2), return_exceptions=True)
    for item, error in enumerate(errors, 1):
        assert isinstance(error, InferenceError)
        assert isinstance(error, BadItemError)
        assert error.item == item
        cause = error.__cause__
        assert type(cause) is BadItemError
        # The traceback of the function, and nothing of ours that would hold its callers.
        assert cause.__traceback__ is not None
        assert Path(cause.__traceback__.tb_frame.f_code.co_filename).is_relative_to(TESTS)


async def test_bad_item_fails_alone(variant: Variant) -> None:
    def fail_for_3(items: list[int]) -> list[int]:
        if 3 in items:
            raise ValueError("3 is bad")
        return double(items)

    async with variant.batched(fail_for_3) as function:
        outcomes = await asyncio.gather(*map(function, range(6)), return_exceptions=True)
    assert isinstance(outcomes.pop(3), ValueError)
    assert outcomes == [0, 2, 4, 8, 10]


async def test_wrong_number_of_outputs_fails_all(variant: Variant) -> None:
    wrong: list[Any] = [[1], [1, 2, 3, 4], [], None, "abc", b"abc", bytearray(3), {1, 2, 3}, 7]
    wrong += [{1: 1, 2: 2, 3: 3}, (number for number in range(3)), numpy.zeros((2, 3))]
    wrong.append(numpy.array(3))
    async with variant.batched(lambda items: wrong[0] if len(items) == 3 else items) as function:
        while wrong:
            with pytest.raises(OutputMismatchError, match="3 inputs"):
                await function([1, 2, 3])
            del wrong[0]
            assert await function(1) == 1


@pytest.mark.parametrize("name", UNEVEN)
async def test_misleading_iterables_are_rejected(variant: Variant, name: str) -> None:
    make, message = UNEVEN[name]
    async with variant.batched(lambda items: make(2) if len(items) == 2 else items) as function:
        with pytest.raises(OutputMismatchError, match=message):
            await function([1, 2])
        assert await function(1) == 1


async def test_exception_as_output_fails_its_item_alone(variant: Variant) -> None:
    def answer(items: list[int]) -> list[Any]:
        errors = {2: KeyError(2), 4: KeyboardInterrupt()}
        return [errors.get(item, item) for item in items]

    async with variant.batched(answer) as function:
        calls = map(function, (1, 2, 3, 4))
        one, two, three, four = await asyncio.gather(*calls, return_exceptions=True)
    assert (one, three) == (1, 3)
    assert isinstance(two, KeyError)
    assert isinstance(two, InferenceError)
    assert type(four) is InferenceError


class Bomb(NamedTuple):
    """An item for which an exception is raised or returned."""

    error: BaseException
    is_raised: bool


def answer_hostile(items: list[Any]) -> list[Any]:
    """Raise the first exception that is to be raised, or return the others."""
    for item in items:
        if isinstance(item, Bomb) and item.is_raised:
            raise item.error
    return [item.error if isinstance(item, Bomb) else item for item in items]


async def answer_hostile_async(items: list[Any]) -> list[Any]:
    """The same; on the loop of the thread for a thread decorator."""
    return answer_hostile(items)


async def check_hostile(variant: Variant, function: Any, bombs: list[Bomb]) -> None:
    """Call for good items and these; only the callers of these get errors."""
    items = [*range(4), *bombs]
    # A batch that raises something that is no `Exception` is not divided.
    is_divided = all(issubclass(type(bomb.error), Exception) for bomb in bombs)
    random.Random(len(bombs)).shuffle(items)
    async with variant.batched(function, batch_size=8) as batched:
        outcomes = await asyncio.gather(*map(batched, items), return_exceptions=True)
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(item, Bomb):
                assert issubclass(type(outcome), InferenceError)
                assert traceback.format_exception(outcome), "it can be shown"
            elif is_divided:
                assert outcome == item
        assert await batched(1) == 1


@pytest.mark.parametrize("function", [answer_hostile, answer_hostile_async])
@pytest.mark.parametrize("name", ALL)
async def test_raising_error_fails_its_callers(variant: Variant, name: str, function: Any) -> None:
    error = make_hostile(random.Random(name), name)
    await check_hostile(variant, function, [Bomb(error, True), Bomb(error, False)])


@pytest.mark.parametrize("function", [answer_hostile, answer_hostile_async])
@pytest.mark.parametrize("seed", range(20))
async def test_random_hostile_errors_fail_their_callers(
    variant: Variant, seed: int, function: Any
) -> None:
    bombs = [Bomb(draw_hostile(f"{seed} {at}"), bool(at % 2)) for at in range(8)]
    await check_hostile(variant, function, bombs)


async def test_raising_sequence_settles_all_callers(variant: Variant) -> None:
    class Bad(Sequence[int]):
        def __len__(self) -> int:
            raise RuntimeError("no length")

        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("no items")

    async with variant.batched(lambda _: Bad()) as function:
        with pytest.raises(RuntimeError, match="no length"):
            await function([1, 2])


@pytest.mark.parametrize("raised", [MemoryError(), RuntimeError("CUDA error: out of memory")])
async def test_out_of_memory_makes_batches_smaller(variant: Variant, raised: Exception) -> None:
    sizes: list[int] = []

    def answer(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 4:
            raise raised
        return items

    async with variant.batched(answer, batch_size=16) as function:
        assert await function(list(range(100))) == list(range(100))
    # Not by looking for a culprit in each of them.
    assert sorted(sizes)[-3:] == [4, 8, 16]


async def test_out_of_memory_frees_the_batch(variant: Variant) -> None:
    things: list[weakref.ref[Thing]] = []

    def fail() -> NoReturn:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise MemoryError

    def stream() -> Iterator[Any]:
        try:
            fail()
        except MemoryError as error:
            caught = error
        yield caught
        yield "goes on"

    outcomes = stream()

    def answer(items: list[int]) -> list[Any]:
        outcome = next(outcomes)
        if isinstance(outcome, MemoryError):
            raise outcome
        return [outcome for _ in items]

    async with variant.batched(answer) as function:
        with pytest.raises(MemoryError):
            await function(1)
        assert things[0]() is None
        assert await function(1) == "goes on"


async def test_first_error_ends_wait_for_the_list(variant: Variant) -> None:
    gated = variant.gated()

    def fail_for_negative(items: list[int]) -> Any:
        if -1 in items:
            raise ValueError("bad")
        return gated(items)

    async def fail_async(items: list[int]) -> Any:
        return await fail_for_negative(items)

    func = fail_async if variant.runs_on_loop else fail_for_negative
    async with variant.batched(func, batch_size=1) as function:
        with pytest.raises(ValueError, match="bad"):
            await function([-1, 2, 3])
        # One of the others may have begun meanwhile.
        gated.let_on(3)
        assert await function(5) == 10


@pytest.mark.parametrize("make", [lambda item: item, lambda item: [item]], ids=["item", "list"])
async def test_failed_call_keeps_nothing_alive(variant: Variant, make: Any) -> None:
    def fail(items: list[Thing]) -> list[Thing]:
        raise ValueError("bad")

    async with variant.batched(fail) as function:
        gc.disable()
        try:
            thing = Thing()
            reference = weakref.ref(thing)
            with pytest.raises(ValueError, match="bad"):
                await function(make(thing))
            del thing
            await until(lambda: reference() is None)
        finally:
            gc.enable()


# Callers that go.


async def test_a_cancelled_caller_harms_no_other(variant: Variant) -> None:
    gated = variant.gated()
    async with variant.batched(gated) as function:
        running = [asyncio.create_task(function(number)) for number in (1, 2)]
        await until(lambda: gated.batches == [[1, 2]])
        waiting = [asyncio.create_task(function(item)) for item in (3, 4, [5, 6])]
        await until(lambda: function.stats.queue_size == 4)
        for call in (running[0], waiting[0], waiting[2]):
            call.cancel()
        await turns()
        assert function.stats.queue_size == 1
        gated.let_on(2)
        outcomes = await asyncio.gather(*running, *waiting, return_exceptions=True)
        assert outcomes[1::2] == [4, 8]
        assert [type(one) for one in outcomes[::2]] == [asyncio.CancelledError] * 3
    assert gated.batches == [[1, 2], [4]]


@pytest.mark.parametrize("item", [1, [1, 2]], ids=["item", "list"])
async def test_call_cancelled_in_its_turn_is_not_computed(variant: Variant, item: Any) -> None:
    async with variant.batched(double) as function:
        call = function(item)
        call.send(None)
        call.close()
        assert await function(3) == 6
        assert function.stats.total_processed == 1


# Several loops.


def test_several_loops_call_at_once(variant: Variant) -> None:
    function = variant.decorate(double, batch_size=8)

    async def call_many(start: int) -> list[Any]:
        return await asyncio.gather(*(function(start + number) for number in range(300)))

    calls = [InThread(lambda at=at: asyncio.run(call_many(at))) for at in (0, 1000, 2000)]
    for start, call in zip((0, 1000, 2000), calls, strict=True):
        assert call.result() == [2 * (start + at) for at in range(300)]
    assert function.stats.total_processed == 900
    asyncio.run(function.shutdown())


# Functions that call functions.


async def test_callers_do_not_share_context_variables(variant: Variant) -> None:
    user = contextvars.ContextVar("user", default="unknown")

    def who(items: list[int]) -> list[str]:
        return [user.get() for _ in items]

    async with variant.batched(who) as function:
        user.set("known")
        assert await function([1, 2]) == ["unknown", "unknown"]


async def test_the_stats_have_the_fields_of_batched(variant: Variant) -> None:
    async with variant.batched(double, batch_size=2) as function:
        await function([1, 2, 3])
        stats = function.stats
        assert (stats.queue_size, stats.total_processed, stats.total_batches) == (0, 3, 2)
        assert stats.avg_batch_size == 1.5
        assert stats.avg_processing_time > 0
        assert stats.cache_stats is None
        function.clear_stats()
        assert function.stats.total_processed == function.stats.total_batches == 0
        assert function.stats.avg_batch_size == function.stats.avg_processing_time == 0.0


# Statistics, start and end.


async def test_shutdown_computes_waiting_items(variant: Variant) -> None:
    gated = variant.gated()
    async with variant.batched(gated) as function:
        calls = [asyncio.create_task(function(1))]
        await until(lambda: bool(gated.batches))
        calls.append(asyncio.create_task(function([2, 3])))
        await until(lambda: function.stats.queue_size == 2)
        ending = asyncio.create_task(function.shutdown())
        await turns()
        if variant.is_aio:  # that of the thread decorator blocks, so it ends in another thread
            with pytest.raises(BatcherClosedError, match=r"start\(\) opens it again"):
                await function(5)
        gated.let_on(2)
        assert await asyncio.gather(*calls) == [2, [4, 6]]
        await ending
        with pytest.raises(BatcherClosedError, match=r"start\(\) opens it again"):
            await function(5)
        await function.shutdown()
        for _ in range(3):
            function.start()
            gated.let_on()
            assert await function(1) == 2
            await function.shutdown()


async def test_shutdown_with_cancel_fails_waiting_items(variant: Variant) -> None:
    gated = variant.gated()
    function = variant.decorate(gated)
    running = asyncio.create_task(function(1))
    await until(lambda: bool(gated.batches))
    waiting = asyncio.create_task(function([2, 3]))
    await until(lambda: function.stats.queue_size == 2)
    ending = asyncio.create_task(function.shutdown(cancel=True))
    with pytest.raises(BatcherClosedError, match="shut down before"):
        await waiting
    gated.let_on()
    assert await running == 2
    await ending
