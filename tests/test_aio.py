"""`@aio.dynamically`: what its callers get, on one loop and several, with a cache or without."""

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from held import Held, InThread, spin_until
from starlette.background import BackgroundTask
from waits import LIMIT, outcome, turns, until

import fast_batcher
from fast_batcher import aio, dynamically
from fast_batcher._local.cache import CachedNone
from fast_batcher.errors import (
    BatcherClosedError,
    ConfigurationError,
    InferenceError,
    OutputMismatchError,
    QueueFullError,
)
from fast_batcher.types import CacheStats, PriorityStrategy

pytestmark = pytest.mark.anyio


def double(items: list[Any]) -> list[Any]:
    return [2 * item for item in items]


async def double_async(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return double(items)


class HeldTask:
    """An async function whose batches wait until they are let on, on the loop it is made on."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._gate = asyncio.Semaphore(0)

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        async with asyncio.timeout(LIMIT):
            await self._gate.acquire()
        return double(items)

    def let_on(self, batches: int = 1) -> None:
        for _ in range(batches):
            self._gate.release()


both = pytest.mark.parametrize("func", [double, double_async], ids=["thread", "task"])


# What a call gives.


@both
async def test_items_and_lists_give_outputs_in_their_order(func: Any) -> None:
    async with aio.dynamically(func) as function:
        assert await function(21) == 42
        assert await function([3, 1, 2]) == [6, 2, 4]
        assert await function([]) == []
        assert await function((1,)) == (1, 1)


@both
async def test_320_ordered_requests_are_served_in_order(func: Any) -> None:
    served: list[int] = []

    if func is double:

        def note(items: list[int]) -> list[int]:
            served.extend(items)
            return items
    else:

        async def note(items: list[int]) -> list[int]:  # type: ignore[misc]  # the same, async
            served.extend(items)
            return items

    async with aio.dynamically(batch_size=32)(note) as function:
        assert await asyncio.gather(*map(function, range(320))) == list(range(320))
    assert served == list(range(320))


async def test_where_a_function_runs() -> None:
    async def loop_of(items: list[int]) -> list[Any]:
        return [asyncio.get_running_loop() for _ in items]

    def thread_of(items: list[int]) -> list[Any]:
        return [threading.current_thread() for _ in items]

    async with aio.dynamically(loop_of) as on_loop, aio.dynamically(thread_of) as in_thread:
        assert await on_loop(1) is asyncio.get_running_loop()
        assert await in_thread(1) is not threading.current_thread()


async def test_the_names_can_be_found_from_the_package() -> None:
    assert fast_batcher.aio.dynamically is aio.dynamically
    assert callable(fast_batcher.aio.inference.dynamically)
    with pytest.raises(AttributeError, match="no_such"):
        _ = aio.no_such  # type: ignore[attr-defined]


@both
async def test_frameworks_see_what_is_to_be_awaited(func: Any) -> None:
    async with aio.dynamically(func) as function:
        await BackgroundTask(function, 1)()
        assert function.stats.total_processed == 1
    with dynamically(func) as function:
        await BackgroundTask(function.acall, 1)()
        await BackgroundTask(function, 1)()  # in a thread
        assert function.stats.total_processed == 2


async def test_methods_have_a_batcher_for_each_instance() -> None:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @aio.dynamically
        async def scale(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

    two, three = Model(2), Model(3)
    on_the_class: Any = Model.scale
    outcomes: Any = await asyncio.gather(two.scale(5), three.scale([1, 2]), on_the_class(two, 7))
    assert list(outcomes) == [10, [3, 6], 14]
    assert two.scale.stats.total_processed == 2


async def test_an_instance_of_which_only_a_call_is_left_is_there_until_it_is_answered() -> None:
    class Model:
        @aio.dynamically
        async def on_loop(self, items: list[int]) -> list[int]:
            return double(items)

    assert await Model().on_loop(2) == 4
    assert await Model().on_loop([2, 3]) == [4, 6]


@pytest.mark.parametrize("make", [lambda item: item, lambda item: [item]], ids=["item", "list"])
async def test_a_call_that_fails_keeps_nothing_alive(make: Any) -> None:
    class Thing:
        pass

    async def fail(items: list[Thing]) -> list[Thing]:
        raise ValueError("bad")

    async with aio.dynamically(fail) as function:
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


async def test_what_comes_while_the_function_computes_is_one_batch() -> None:
    held = HeldTask()
    async with aio.dynamically(held) as function:
        calls = [asyncio.create_task(function(0))]
        await until(lambda: held.batches == [[0]])
        calls += [asyncio.create_task(function(number)) for number in range(1, 6)]
        await until(lambda: function.stats.queue_size == 5)
        held.let_on(2)
        assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8, 10]
    assert held.batches == [[0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (PriorityStrategy.NONE, ["aaaa", "bb", "ccc", "d", "eeeeee"]),
        (PriorityStrategy.PRIORITY, ["eeeeee", "aaaa", "bb", "ccc", "d"]),
        (PriorityStrategy.LENGTH, ["eeeeee", "d", "bb", "ccc", "aaaa"]),
    ],
)
async def test_priorities(strategy: PriorityStrategy, expected: list[str]) -> None:
    held = HeldTask()
    decorate = aio.dynamically(batch_size=10, small_batch_threshold=2, priority_strategy=strategy)
    async with decorate(held) as function:
        calls = [asyncio.create_task(function("first"))]
        await until(lambda: bool(held.batches))
        calls.append(asyncio.create_task(function(["aaaa", "bb", "ccc", "d"])))
        await until(lambda: function.stats.queue_size == 4)
        calls.append(asyncio.create_task(function("eeeeee")))
        await until(lambda: function.stats.queue_size == 5)
        held.let_on(2)
        assert (await asyncio.gather(*calls))[1] == ["aaaaaaaa", "bbbb", "cccccc", "dd"]
    assert held.batches[1] == expected


async def test_any_number_of_lengths_goes_the_shortest_first() -> None:
    held = HeldTask()
    held.let_on(9)
    # So large that no batch goes by age: the eighth would.
    decorate = aio.dynamically(batch_size=100, priority_strategy=PriorityStrategy.LENGTH)
    items = ["x" * (1 + 7 * number % 600) for number in range(600)]
    async with decorate(held) as function:
        assert await function(items) == double(items)
    lengths = [len(item) for batch in held.batches for item in batch]
    assert lengths == list(range(1, 601))


async def test_a_full_queue_refuses_the_call_as_a_whole() -> None:
    held = HeldTask()
    async with aio.dynamically(max_queue_size=2)(held) as function:
        running = asyncio.create_task(function(0))
        await until(lambda: bool(held.batches))
        with pytest.raises(QueueFullError, match="no room for 3 more, 0 wait already"):
            await function([1, 2, 3])
        waiting = [asyncio.create_task(function(number)) for number in (1, 2)]
        await until(lambda: function.stats.queue_size == 2)
        with pytest.raises(QueueFullError, match="no room for 1 more, 2 wait already"):
            await function(3)
        held.let_on(2)
        assert await asyncio.gather(running, *waiting) == [0, 2, 4]


async def test_a_batch_stays_within_its_length() -> None:
    held = HeldTask()
    held.let_on(9)
    async with aio.dynamically(max_batch_length=4)(held) as function:
        assert await function("abc") == "abcabc"
        await function(["ab", "cd", "e", "much too long"])
    assert held.batches == [["abc"], ["ab", "cd"], ["e"], ["much too long"]]


async def test_what_is_empty_counts_as_one_long() -> None:
    held = HeldTask()
    held.let_on(9)
    async with aio.dynamically(max_batch_length=2)(held) as function:
        assert await function(["", "", "", "ab", ""]) == ["", "", "", "abab", ""]
    assert held.batches == [["", ""], ["", ""], ["ab"]]


# Errors.


@both
async def test_the_error_is_an_inference_error_and_what_was_raised(func: Any) -> None:
    def fail(items: list[int]) -> list[int]:
        raise KeyError(items[0])

    async def fail_async(items: list[int]) -> list[int]:
        return fail(items)

    async with aio.dynamically(fail if func is double else fail_async) as function:
        calls: list[Any] = [function(1), function(2)]
        for item, error in enumerate(await asyncio.gather(*calls, return_exceptions=True), 1):
            assert isinstance(error, InferenceError)
            assert isinstance(error, KeyError)
            assert error.args == (item,)
            assert type(error.__cause__) is KeyError
            traceback = error.__cause__.__traceback__
            assert traceback is not None
            assert traceback.tb_frame.f_code.co_name.startswith("fail")


async def test_anything_but_one_output_per_input_is_an_error_for_all() -> None:
    async def too_few(items: list[int]) -> list[int]:
        return items[1:]

    async with aio.dynamically(too_few) as function:
        with pytest.raises(OutputMismatchError, match="1 outputs for 2 inputs"):
            await function([1, 2])


async def test_a_cancellation_by_the_function_itself_settles_everybody() -> None:
    async def cancel(items: list[int]) -> list[int]:
        if items == [0]:
            return items
        raise asyncio.CancelledError("by itself")

    async with aio.dynamically(cancel) as function:
        outcomes = await asyncio.gather(function(1), function(2), return_exceptions=True)
        assert [type(one) for one in outcomes] == [InferenceError, InferenceError]
        assert await function(0) == 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_settles_everybody_and_ends_the_loop(
    kind: type[BaseException],
) -> None:
    """As it would if the function were called without batching."""

    async def leave(items: list[int]) -> list[int]:
        raise kind("out")

    function = aio.dynamically(leave)
    loop = asyncio.new_event_loop()
    calls = [loop.create_task(function(number)) for number in (1, 2)]
    with pytest.raises(kind, match="out"):
        loop.run_until_complete(asyncio.wait(calls))
    outcomes = loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
    assert [type(one) for one in outcomes] == [InferenceError, InferenceError]
    loop.run_until_complete(function.shutdown())
    loop.close()


async def test_a_caller_that_goes_harms_nobody_be_it_waiting_or_running() -> None:
    held = HeldTask()
    async with aio.dynamically(held) as function:
        running = [asyncio.create_task(function(number)) for number in (1, 2)]
        await until(lambda: held.batches == [[1, 2]])
        waiting = [asyncio.create_task(function(number)) for number in (3, 4)]
        await turns()
        running[0].cancel()
        waiting[0].cancel()
        await turns()
        held.let_on(2)
        outcomes = await asyncio.gather(*running, *waiting, return_exceptions=True)
        assert [one if isinstance(one, int) else type(one) for one in outcomes] == [
            asyncio.CancelledError,
            4,
            asyncio.CancelledError,
            8,
        ]
    assert held.batches == [[1, 2], [4]]


async def test_all_callers_of_a_batch_may_go() -> None:
    held = HeldTask()
    async with aio.dynamically(held) as function:
        calls = [asyncio.create_task(function(number)) for number in (1, 2)]
        await until(lambda: bool(held.batches))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        later = asyncio.create_task(function(3))
        await turns()
        held.let_on(2)
        assert await later == 6


def batch_tasks() -> list[asyncio.Task[Any]]:
    """The tasks that compute batches."""
    return [task for task in asyncio.all_tasks() if "TaskWorker" in repr(task.get_coro())]


async def test_a_batch_whose_task_is_cancelled_fails_and_the_next_one_goes_on() -> None:
    held = HeldTask()
    async with aio.dynamically(held) as function:
        first = asyncio.create_task(function(1))
        await until(lambda: bool(held.batches))
        second = asyncio.create_task(function(2))
        await until(lambda: function.stats.queue_size == 1)
        (task,) = batch_tasks()
        task.cancel()
        with pytest.raises(InferenceError, match="CancelledError"):
            await first
        held.let_on()
        assert await second == 4


async def test_one_that_ends_with_its_callers_leaves_the_function_free() -> None:
    held = HeldTask()
    async with aio.dynamically(held) as function:
        calls = [asyncio.create_task(function(1))]
        await until(lambda: bool(held.batches))
        calls.append(asyncio.create_task(function(2)))
        await until(lambda: function.stats.queue_size == 1)
        for task in (*batch_tasks(), *calls):
            task.cancel()
        await asyncio.wait(calls)
        held.let_on()
        assert await function(3) == 6
    assert held.batches == [[1], [3]]


async def test_a_batch_whose_task_is_cancelled_before_its_first_step_is_computed() -> None:
    seen: list[list[int]] = []

    async def note(items: list[int]) -> list[int]:
        seen.append(items)
        return double(items)

    async with asyncio.timeout(LIMIT), aio.dynamically(note) as function:
        first = asyncio.create_task(function(1))
        await until(lambda: bool(batch_tasks()))
        assert seen == []
        batch_tasks()[0].cancel()
        assert await first == 2
        assert await function(2) == 4
    assert seen == [[1], [2]]


async def test_a_task_that_is_cancelled_between_batches_leaves_nobody_waiting() -> None:
    seen: list[list[int]] = []

    async def cancel_own_task(items: list[int]) -> list[int]:
        seen.append(items)
        if items == [1]:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # takes effect when it waits next, and this function never does
        return double(items)

    async with asyncio.timeout(LIMIT), aio.dynamically(batch_size=1)(cancel_own_task) as function:
        assert await function([1, 2, 3]) == [2, 4, 6]
        assert await function(4) == 8
    assert seen == [[1], [2], [3], [4]]


async def test_the_loop_gets_a_turn_between_batches_of_a_function_that_never_waits() -> None:
    turns_had = 0
    seen: list[int] = []

    async def note(items: list[int]) -> list[int]:
        seen.append(turns_had)
        return items

    async def count_turns() -> None:
        nonlocal turns_had
        while True:
            turns_had += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    async with aio.dynamically(batch_size=1)(note) as function:
        await function(list(range(5)))
    counting.cancel()
    assert len(set(seen)) == 5


# Several loops.


@both
def test_several_loops_call_at_once(func: Any) -> None:
    function = aio.dynamically(batch_size=8)(func)

    async def call_many(start: int) -> list[Any]:
        return await asyncio.gather(*(function(start + number) for number in range(300)))

    calls = [InThread(lambda at=at: asyncio.run(call_many(at))) for at in (0, 1000, 2000)]
    for start, call in zip((0, 1000, 2000), calls, strict=True):
        assert call.result() == [2 * (start + at) for at in range(300)]
    assert function.stats.total_processed == 900
    asyncio.run(function.shutdown())


@both
def test_one_loop_after_the_other(func: Any) -> None:
    function = aio.dynamically(func)

    async def call(item: int) -> Any:
        return await function(item)

    assert [asyncio.run(call(number)) for number in range(5)] == [0, 2, 4, 6, 8]
    assert asyncio.run(function(7)) == 14  # a coroutine that was made before its loop
    assert len(function._own_batcher._submitters) == 1
    asyncio.run(function.shutdown())


def test_a_loop_that_ends_while_calls_wait_harms_no_other() -> None:
    entered: list[int] = []

    async def forever(items: list[int]) -> list[int]:
        entered.extend(items)
        if items != [0]:
            await asyncio.sleep(3600)
        return items

    function = aio.dynamically(forever)

    async def leave() -> None:
        calls = [asyncio.create_task(function(1))]
        await until(lambda: entered == [1])
        calls.append(asyncio.create_task(function(2)))
        await turns()

    asyncio.run(leave())
    assert asyncio.run(function(0)) == 0
    assert entered == [1, 0]
    asyncio.run(function.shutdown())


# Functions that call functions.


@both
async def test_a_function_that_calls_itself_is_computed_at_once(func: Any) -> None:
    async def factorial(items: list[int]) -> list[int]:
        return [1 if item <= 1 else item * await function(item - 1) for item in items]

    def factorial_in_thread(items: list[int]) -> list[int]:
        return [
            1 if item <= 1 else item * asyncio.run(as_coroutine(function(item - 1)))
            for item in items
        ]

    async def as_coroutine(call: Any) -> Any:
        return await call

    async with aio.dynamically(factorial_in_thread if func is double else factorial) as function:
        assert await function([5, 3]) == [120, 6]


async def test_two_functions_that_call_each_other_do_not_wait_for_each_other() -> None:
    @aio.dynamically
    async def is_even(items: list[int]) -> list[bool]:
        return [item == 0 or await is_odd(item - 1) for item in items]

    @aio.dynamically
    async def is_odd(items: list[int]) -> list[bool]:
        return [item != 0 and await is_even(item - 1) for item in items]

    outcomes = await asyncio.gather(*(one(8) for one in (is_even, is_odd) * 4))
    assert outcomes == [True, False] * 4


async def test_context_variables_of_a_caller_are_not_seen_by_the_others_of_its_batch() -> None:
    user = contextvars.ContextVar("user", default="nobody")

    @aio.dynamically
    async def who(items: list[int]) -> list[str]:
        return [user.get() for _ in items]

    user.set("somebody")
    assert await who([1, 2]) == ["nobody", "nobody"]


# Caches.


class Memory:
    """A cache that does what it is told."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        self.broken: set[str] = set()
        self.counts = CacheStats()

    async def get(self, key: Any) -> Any:
        if "get" in self.broken:
            raise OSError("no disk")
        self.counts.update_get(hit=key in self.known, time_taken=0.5)
        return self.known.get(key)

    async def set(self, key: Any, value: Any) -> None:
        if "set" in self.broken:
            raise OSError("disk full")
        self.counts.update_set(time_taken=0.25)
        self.known[key] = value

    async def clear(self) -> None:
        self.known.clear()

    def stats(self) -> CacheStats:
        if "stats" in self.broken:
            raise OSError("no stats")
        return self.counts


async def test_hits_and_misses_in_one_list() -> None:
    memory = Memory()
    held = HeldTask()
    held.let_on(9)
    async with aio.dynamically(cache=memory)(held) as function:
        assert await function([1, 2]) == [2, 4]
        await until(lambda: memory.known == {1: 2, 2: 4})
        assert await function([3, 1, 4, 2]) == [6, 2, 8, 4]
        assert await function(1) == 2
        stats = function.stats.cache_stats
        assert (stats.gets, stats.hits) == (7, 3)
        assert (stats.avg_get_time, stats.avg_hit_time, stats.avg_set_time) == (0.5, 0.5, 0.25)
    assert held.batches == [[1, 2], [3, 4]]
    assert memory.known == {1: 2, 2: 4, 3: 6, 4: 8}, "shutdown waits for what is being stored"


async def test_none_is_cached() -> None:
    memory = Memory()
    calls: list[list[int]] = []

    async def nothing(items: list[int]) -> list[None]:
        calls.append(items)
        return [None] * len(items)

    async with aio.dynamically(cache=memory)(nothing) as function:
        assert await function(1) is None
        await until(lambda: memory.known == {1: CachedNone.NONE})
        assert await function([1, 1]) == [None, None]
    assert calls == [[1]]


@pytest.mark.parametrize("what", ["get", "set", "stats"])
async def test_a_cache_that_raises_is_done_without_and_named_once(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    memory.broken.add(what)
    with caplog.at_level(logging.WARNING, "fast_batcher"):
        async with aio.dynamically(cache=memory)(double) as function:
            assert await function([1, 2, 3]) == [2, 4, 6]
            assert await function(1) == 2
            _ = function.stats
    (record,) = caplog.records
    assert f"the cache's {what}() raised" in record.getMessage()
    assert record.exc_info is not None


async def test_a_cache_that_cancels_itself_is_done_without() -> None:
    class Cancels(Memory):
        async def get(self, key: Any) -> Any:
            raise asyncio.CancelledError

    async with aio.dynamically(cache=Cancels())(double) as function:
        assert await function([1, 2, 3]) == [2, 4, 6]


async def test_a_call_that_is_cancelled_while_the_cache_looks_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looking = asyncio.Event()

    class Waits(Memory):
        async def get(self, key: Any) -> Any:
            looking.set()
            await asyncio.Event().wait()

    async with aio.dynamically(cache=Waits())(double) as function:
        call = asyncio.create_task(function(1))
        await looking.wait()
        call.cancel()
        assert isinstance(await outcome(call), asyncio.CancelledError)
        assert function.stats.total_processed == 0
    assert not caplog.records


async def test_an_error_is_not_cached() -> None:
    memory = Memory()

    async def fail(items: list[int]) -> list[int]:
        raise ValueError("bad")

    async with aio.dynamically(cache=memory)(fail) as function:
        with pytest.raises(ValueError, match="bad"):
            await function(1)
    assert memory.known == {}


# Life.


@both
async def test_shutdown_computes_what_waits(func: Any) -> None:
    held: Any = Held() if func is double else HeldTask()
    function = aio.dynamically(held)
    calls = [asyncio.create_task(function(1))]
    await turns()
    calls.append(asyncio.create_task(function([2, 3])))
    await until(lambda: function.stats.queue_size == 2)
    calls.append(asyncio.create_task(function(4)))
    ending = asyncio.create_task(function.shutdown())
    await turns()
    with pytest.raises(BatcherClosedError, match=r"start\(\) opens it again"):
        await function(5)
    held.let_on(2)
    assert await asyncio.gather(*calls) == [2, [4, 6], 8]
    await ending
    await function.shutdown()
    async with function:
        held.let_on()
        assert await function(1) == 2


@both
async def test_shutdown_with_cancel_settles_at_once_what_waits(func: Any) -> None:
    held: Any = Held() if func is double else HeldTask()
    function = aio.dynamically(held)
    running = asyncio.create_task(function(1))
    await turns()
    waiting = asyncio.create_task(function([2, 3]))
    await until(lambda: function.stats.queue_size == 2)
    ending = asyncio.create_task(function.shutdown(cancel=True))
    with pytest.raises(BatcherClosedError, match="shut down before"):
        await waiting
    held.let_on()
    assert await running == 2
    await ending


async def test_a_cancelled_shutdown_goes_on() -> None:
    held = HeldTask()
    function = aio.dynamically(held)
    call = asyncio.create_task(function(1))
    await turns()
    ending = asyncio.create_task(function.shutdown())
    await turns()
    ending.cancel()
    held.let_on()
    assert await call == 2
    with pytest.raises(BatcherClosedError):
        await function(2)


async def test_a_function_that_shuts_itself_down_does_not_wait_for_itself() -> None:
    async def last(items: list[int]) -> list[int]:
        await decorated.shutdown()
        return items

    decorated: Any = aio.dynamically(last)
    assert await decorated(1) == 1


async def test_a_function_that_another_one_waits_for_may_shut_that_down() -> None:
    async def shut_down(items: list[int]) -> list[int]:
        await outer.shutdown()
        return double(items)

    async def call(items: list[int]) -> list[int]:
        return [await inner(item) for item in items]

    inner: Any = aio.dynamically(shut_down)
    outer: Any = aio.dynamically(call)
    async with asyncio.timeout(LIMIT):
        assert await outer(1) == 2
    with pytest.raises(BatcherClosedError):
        await outer(2)
    await inner.shutdown()


async def test_a_task_that_outlives_its_batch_is_a_caller_like_any_other() -> None:
    is_over = asyncio.Event()
    batches: list[list[int]] = []
    tasks: list[asyncio.Task[int]] = []

    async def call_later(item: int) -> int:
        await is_over.wait()
        output: int = await decorated(item)
        return output

    async def begin(items: list[int]) -> list[int]:
        batches.append(items)
        if 0 in items:
            tasks.extend(asyncio.create_task(call_later(item)) for item in (1, 2))
        return items

    decorated: Any = aio.dynamically(begin)
    assert await decorated(0) == 0
    is_over.set()
    assert await asyncio.gather(*tasks) == [1, 2]
    assert batches == [[0], [1, 2]]
    assert decorated.stats.total_processed == 3
    await decorated.shutdown()


def test_shutdown_from_another_loop_settles_those_of_a_loop_that_stands_still() -> None:
    async def forever(items: list[int]) -> list[int]:
        await asyncio.sleep(3600)
        return items

    function = aio.dynamically(forever)
    still = asyncio.new_event_loop()
    call = still.create_task(function(1))
    still.run_until_complete(turns())
    asyncio.run(function.shutdown())
    with pytest.raises(BatcherClosedError, match="event loop that computed it has ended"):
        still.run_until_complete(call)
    for task in asyncio.all_tasks(still):
        task.cancel()
        still.run_until_complete(asyncio.wait([task]))
    still.close()


def test_shutdown_from_another_loop_waits_for_one_that_runs() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def compute(items: list[int]) -> list[int]:
        begun.set()
        await asyncio.to_thread(go_on.wait, LIMIT)
        return double(items)

    function = aio.dynamically(compute)

    async def call() -> Any:
        return await function(1)

    other = InThread(lambda: asyncio.run(call()))
    assert begun.wait(LIMIT)
    ending = InThread(lambda: asyncio.run(function.shutdown()))
    spin_until(lambda: function._own_batcher._is_closed)  # type: ignore[union-attr]
    go_on.set()
    ending.result()
    assert other.result() == 2


# Settings.


async def test_batch_item_cls_is_accepted_with_a_note() -> None:
    with pytest.warns(UserWarning, match="batch_item_cls") as warned:
        decorate = aio.dynamically(batch_item_cls=dict)
    assert warned[0].filename == __file__
    async with decorate(double) as function:
        assert await function(1) == 2


def test_wrong_settings_are_refused_when_it_is_decorated() -> None:
    with pytest.raises(ConfigurationError, match="priority_strategy='LENGTH'"):
        aio.dynamically(priority_strategy="LENGTH")  # type: ignore[call-overload]  # wrong on purpose
