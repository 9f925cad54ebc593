"""`@aio.dynamically` beyond `test_decorators`: tasks on the loop, priorities, caches, its end."""

import asyncio
import functools
import logging
import threading
from typing import Any

import numpy
import pytest
from gated_functions import GatedCoroutine
from starlette.background import BackgroundTask
from waits import LIMIT, outcome, turns, until

from fast_batcher import aio, dynamically, inference
from fast_batcher.errors import BatcherClosedError, InferenceError
from fast_batcher.types import CachedNone, CacheStats, PriorityStrategy

pytestmark = pytest.mark.anyio


def double(items: list[Any]) -> list[Any]:
    return [2 * item for item in items]


async def double_async(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return double(items)


both = pytest.mark.parametrize("func", [double, double_async], ids=["thread", "task"])


async def loop_of(items: list[int]) -> list[Any]:
    return [asyncio.get_running_loop() for _ in items]


class LoopOf:
    async def __call__(self, items: list[int]) -> list[Any]:
        return await loop_of(items)

    async def method(self, items: list[int]) -> list[Any]:
        return await loop_of(items)


# Where a function runs, and what it looks like.


@pytest.mark.parametrize(
    "func",
    [loop_of, functools.partial(loop_of), functools.partial(LoopOf()), LoopOf().method],
    ids=["function", "partial", "partial of an object", "bound method"],
)
async def test_async_function_runs_on_callers_loop(func: Any) -> None:
    async with aio.dynamically(func) as function:
        assert await function(1) is asyncio.get_running_loop()


@pytest.mark.parametrize("wrap", [lambda func: func, functools.partial])
async def test_any_other_function_runs_in_a_thread(wrap: Any) -> None:
    def thread_of(items: list[int]) -> list[Any]:
        return [threading.current_thread() for _ in items]

    async with aio.dynamically(wrap(thread_of)) as function:
        assert await function(1) is not threading.current_thread()


@both
@pytest.mark.parametrize(
    ("on_loop", "in_thread", "item"),
    [
        (aio.dynamically, dynamically, 1),
        (aio.inference.dynamically, inference.dynamically, {"x": numpy.array([1])}),
    ],
    ids=["list", "features"],
)
async def test_frameworks_recognize_awaitable_functions(
    func: Any, on_loop: Any, in_thread: Any, item: Any
) -> None:
    def keys(features: Any) -> Any:
        return features["x"] if isinstance(features, dict) else features

    async def keys_async(features: Any) -> Any:
        return keys(features)

    async with on_loop(keys if func is double else keys_async) as function:
        await BackgroundTask(function, item)()
        assert function.stats.total_processed == 1
    with in_thread(keys if func is double else keys_async) as function:
        await BackgroundTask(function.acall, item)()
        await BackgroundTask(function, item)()  # in a thread
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
    # An instance of which only a call is left is there until the call is answered.
    assert await Model(2).scale(2) == 4
    assert await Model(2).scale([2, 3]) == [4, 6]


# Priorities.


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (PriorityStrategy.NONE, ["aaaa", "bb", "ccc", "d", "eeeeee"]),
        (PriorityStrategy.PRIORITY, ["eeeeee", "aaaa", "bb", "ccc", "d"]),
        (PriorityStrategy.LENGTH, ["eeeeee", "d", "bb", "ccc", "aaaa"]),
    ],
)
async def test_priorities(strategy: PriorityStrategy, expected: list[str]) -> None:
    gated = GatedCoroutine()
    decorate = aio.dynamically(batch_size=10, small_batch_threshold=2, priority_strategy=strategy)
    async with decorate(gated) as function:
        calls = [asyncio.create_task(function("first"))]
        await until(lambda: bool(gated.batches))
        calls.append(asyncio.create_task(function(["aaaa", "bb", "ccc", "d"])))
        await until(lambda: function.stats.queue_size == 4)
        calls.append(asyncio.create_task(function("eeeeee")))
        await until(lambda: function.stats.queue_size == 5)
        gated.let_on(2)
        assert (await asyncio.gather(*calls))[1] == ["aaaaaaaa", "bbbb", "cccccc", "dd"]
    assert gated.batches[1] == expected


# Tasks that are cancelled, and errors that end the loop.


async def test_cancellation_by_function_settles_all_callers() -> None:
    async def cancel(items: list[int]) -> list[int]:
        if items == [0]:
            return items
        raise asyncio.CancelledError("by itself")

    async with aio.dynamically(cancel) as function:
        outcomes = await asyncio.gather(function(1), function(2), return_exceptions=True)
        assert [type(one) for one in outcomes] == [InferenceError, InferenceError]
        assert await function(0) == 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_system_exit_settles_all_callers(kind: type[BaseException]) -> None:
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


def batch_tasks() -> list[asyncio.Task[Any]]:
    """The tasks that compute batches."""
    return [task for task in asyncio.all_tasks() if "FunctionOpening" in repr(task.get_coro())]


@pytest.mark.parametrize("callers_too", [False, True])
async def test_cancelled_task_fails_only_its_batch(callers_too: bool) -> None:
    gated = GatedCoroutine()
    async with aio.dynamically(gated) as function:
        first = asyncio.create_task(function(1))
        await until(lambda: bool(gated.batches))
        second = asyncio.create_task(function(2))
        await until(lambda: function.stats.queue_size == 1)
        (task,) = batch_tasks()
        for one in (task, first, second) if callers_too else (task,):
            one.cancel()
        if callers_too:  # what has no callers left is not computed
            await asyncio.wait([first, second])
        else:
            with pytest.raises(InferenceError, match="CancelledError"):
                await first
            gated.let_on()
            assert await second == 4
        gated.let_on()
        assert await function(3) == 6
    assert gated.batches == ([[1], [3]] if callers_too else [[1], [2], [3]])


async def test_loop_runs_between_batches_of_busy_function() -> None:
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


def test_ended_loop_affects_no_other_loop() -> None:
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
async def test_recursive_call_is_computed_at_once(func: Any) -> None:
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


# Caches.


class Memory:
    """A cache that does what it is told."""

    def __init__(self, broken: str = "") -> None:
        self.known: dict[Any, Any] = {}
        # The method that raises.
        self._broken = broken
        self._counts = CacheStats()

    async def get(self, key: Any) -> Any:
        self._check("get")
        self._counts.update_get(hit=key in self.known, time_taken=0.5)
        return self.known.get(key)

    async def set(self, key: Any, value: Any) -> None:
        self._check("set")
        self._counts.update_set(time_taken=0.25)
        self.known[key] = value

    async def clear(self) -> None:
        self.known.clear()

    def stats(self) -> CacheStats:
        self._check("stats")
        return self._counts

    def _check(self, method: str) -> None:
        if method == self._broken:
            raise OSError("no disk")


async def test_hits_and_misses_in_one_list() -> None:
    memory = Memory()
    gated = GatedCoroutine()
    gated.let_on(9)
    async with aio.dynamically(cache=memory)(gated) as function:
        assert await function([1, 2]) == [2, 4]
        await until(lambda: [*memory.known.values()] == [2, 4])
        assert await function([3, 1, 4, 2]) == [6, 2, 8, 4]
        assert await function(1) == 2
        stats = function.stats.cache_stats
        assert (stats.gets, stats.hits) == (7, 3)
        assert (stats.avg_get_time, stats.avg_hit_time, stats.avg_set_time) == (0.5, 0.5, 0.25)
    assert gated.batches == [[1, 2], [3, 4]]
    assert [*memory.known.values()] == [2, 4, 6, 8], "shutdown waits for what is being stored"


async def test_none_is_cached_and_an_error_is_not() -> None:
    memory = Memory()
    calls: list[list[int]] = []

    async def nothing(items: list[int]) -> list[int | None]:
        calls.append(items)
        if 0 in items:
            raise ValueError("bad")
        return [None] * len(items)

    async with aio.dynamically(cache=memory)(nothing) as function:
        with pytest.raises(ValueError, match="bad"):
            await function(0)
        assert await function(1) is None
        await until(lambda: [*memory.known.values()] == [CachedNone.NONE])
        assert await function([1, 1]) == [None, None]
    assert calls == [[0], [1]]


@aio.dynamically(cache=(together := Memory()))
async def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@aio.dynamically(cache=together)
async def count(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


class Greeter:
    """Its instances, and its subclasses, answer differently."""

    word = "hi"

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    @aio.dynamically(cache=together)
    async def greet(self, names: list[str]) -> list[str]:
        return [f"{self.greeting} {name}" for name in names]

    @aio.dynamically(cache=together)
    @classmethod
    async def call(cls, names: list[str]) -> list[str]:
        return [f"{cls.word} {name}" for name in names]


class Loud(Greeter):
    word = "HI"


def add(number: int) -> Any:
    @aio.dynamically(cache=together)
    async def add_it(items: list[str]) -> list[str]:
        return [f"{item} + {number}" for item in items]

    return add_it


async def test_functions_with_one_cache_keep_their_outputs_apart() -> None:
    together.known.clear()
    english, german = Greeter("hello"), Greeter("hallo")
    functions: list[Any] = [
        *(shout, count, english.greet, german.greet, Greeter.call, Loud.call, add(1), add(2))
    ]
    expected = ["ANN", 3, "hello ann", "hallo ann", "hi ann", "HI ann", "ann + 1", "ann + 2"]
    for _ in range(2):
        assert [await function("ann") for function in functions] == expected
        await until(lambda: len(together.known) == len(functions))
    assert all(isinstance(key, str) for key in together.known)
    # An item without a pickle has no key, and is computed.
    assert await add(1)(threading.Lock()) != await add(1)(threading.Lock())
    assert len(together.known) == len(functions)


@pytest.mark.parametrize("what", ["get", "set", "stats"])
async def test_raising_cache_is_logged_once_and_bypassed(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fast_batcher"):
        async with aio.dynamically(cache=Memory(broken=what))(double) as function:
            assert await function([1, 2, 3]) == [2, 4, 6]
            assert await function(1) == 2
            _ = function.stats
    (record,) = caplog.records
    assert f"the cache's {what}() raised" in record.getMessage()
    assert record.exc_info is not None


async def test_call_is_cancellable_during_cache_lookup(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_cancelled_shutdown_goes_on() -> None:
    gated = GatedCoroutine()
    function = aio.dynamically(gated)
    call = asyncio.create_task(function(1))
    await turns()
    ending = asyncio.create_task(function.shutdown())
    await turns()
    ending.cancel()
    gated.let_on()
    assert await call == 2
    with pytest.raises(BatcherClosedError):
        await function(2)


# The end.


async def test_function_may_shut_itself_down() -> None:
    async def last(items: list[int]) -> list[int]:
        await decorated.shutdown()
        return items

    async def shut_down(items: list[int]) -> list[int]:
        await outer.shutdown()
        return double(items)

    async def call(items: list[int]) -> list[int]:
        return [await inner(item) for item in items]

    decorated: Any = aio.dynamically(last)
    inner: Any = aio.dynamically(shut_down)
    outer: Any = aio.dynamically(call)
    async with asyncio.timeout(LIMIT):
        assert await decorated(1) == 1
        assert await outer(1) == 2
    with pytest.raises(BatcherClosedError):
        await outer(2)
    await inner.shutdown()


# Settings.


@pytest.mark.parametrize("dynamically", [aio.dynamically, aio.inference.dynamically])
def test_batch_item_cls_is_accepted_with_a_note(dynamically: Any) -> None:
    with pytest.warns(UserWarning, match="batch_item_cls") as warned:
        dynamically(batch_item_cls=dict)
    assert warned[0].filename == __file__
