"""`@dynamically`: what its callers get, in threads and on loops, in good and bad times."""

import asyncio
import contextvars
import copy
import functools
import gc
import inspect
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest
from held import Held, InThread, spin_until
from programs import CALL_WHILE_ENDING, run_program
from waits import LIMIT, turns

from fast_batcher import dynamically
from fast_batcher._local import nesting
from fast_batcher.dynamic import BatchedFunction
from fast_batcher.errors import (
    BatcherClosedError,
    ConfigurationError,
    InferenceError,
    OutputMismatchError,
    QueueFullError,
)


def double(items: list[Any]) -> list[Any]:
    """Double each item."""
    return [2 * item for item in items]


@dynamically
def doubled_by_all(items: list[int]) -> list[int]:
    """Double each item."""
    return double(items)


class Model:
    """A class with a batched method."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @dynamically(batch_size=4)
    def scale(self, items: list[int]) -> list[int]:
        """Multiply each item."""
        return [self.factor * item for item in items]

    @dynamically
    @classmethod
    def name_of(cls, items: list[int]) -> list[str]:
        return [f"{cls.__name__} {item}" for item in items]

    @classmethod
    @dynamically
    def outer_name_of(cls, items: list[int]) -> list[str]:
        return [f"{cls.__name__} {item}" for item in items]

    @dynamically
    @staticmethod
    def halve(items: list[int]) -> list[int]:
        return [item // 2 for item in items]

    @staticmethod
    @dynamically
    def outer_halve(items: list[int]) -> list[int]:
        return [item // 2 for item in items]


@pytest.fixture(autouse=True)
def _ends_what_is_global() -> Iterator[None]:
    yield
    for function in (
        doubled_by_all,
        Model.name_of,
        Model.outer_name_of,
        Model.halve,
        Model.outer_halve,
    ):
        function.shutdown()
        function.start()


def end(*functions: Any) -> None:
    """Shut them down, and with them their threads."""
    for function in functions:
        function.shutdown()


def outcome_of(call: Any) -> Any:
    """What it raises or gives."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  whatever it is
        return error


# What a call gives.


def test_one_item_gives_one_output() -> None:
    assert doubled_by_all(21) == 42


def test_a_list_gives_outputs_in_its_order() -> None:
    assert doubled_by_all([3, 1, 2]) == [6, 2, 4]


def test_an_empty_list_gives_an_empty_list_and_calls_nobody() -> None:
    doubled_by_all.clear_stats()
    assert doubled_by_all([]) == []
    assert doubled_by_all.stats.total_batches == 0


def test_a_tuple_is_one_item() -> None:
    assert doubled_by_all((1, 2)) == (1, 2, 1, 2)  # type: ignore[call-overload]  # not its type


def test_both_can_be_awaited() -> None:
    async def main() -> None:
        assert await doubled_by_all.acall(21) == 42
        assert await doubled_by_all.acall([1, 2]) == [2, 4]
        assert await doubled_by_all.acall([]) == []

    asyncio.run(main())


def test_a_large_list_is_split_over_batches() -> None:
    sizes: list[int] = []

    @dynamically(batch_size=32)
    def count(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    with count:
        assert count(list(range(10_000))) == list(range(10_000))
    assert max(sizes) == 32
    assert sum(sizes) == 10_000
    assert len(sizes) == 313


def test_settings_may_be_positional_as_in_batched() -> None:
    with dynamically(None, 16, 1.0, 4)(double) as function:
        assert function(1) == 2


@pytest.mark.parametrize("arguments", [(), ([1], [2])])
def test_it_is_called_with_one_argument(arguments: Any) -> None:
    function: Any = dynamically(functools.partial(double))  # a function could be a method
    with pytest.raises(TypeError, match="one argument"):
        function(*arguments)


def test_320_ordered_requests_are_served_in_order() -> None:
    """And the same items, which a queue that compares them might mix up."""
    served: list[int] = []

    def note(items: list[int]) -> list[int]:
        served.extend(items)
        return items

    async def main() -> None:
        with dynamically(batch_size=32)(note) as function:
            assert await asyncio.gather(*(function.acall(n) for n in range(320))) == [*range(320)]

    asyncio.run(main())
    assert served == list(range(320))


# Which batches are made.


def test_what_comes_while_the_function_computes_is_one_batch() -> None:
    held = Held()
    with dynamically(held) as function:
        calls = [InThread(function, 0)]
        assert held.next_batch() == [0]
        for number in range(1, 6):
            calls.append(InThread(function, number))
            spin_until(lambda number=number: function.stats.queue_size == number)  # type: ignore[misc]
        held.let_on(2)
        assert [call.result() for call in calls] == [0, 2, 4, 6, 8, 10]
        assert held.next_batch() == [1, 2, 3, 4, 5]


def test_a_batch_on_an_idle_function_leaves_at_once_whatever_the_timeout() -> None:
    with dynamically(timeout_ms=1000 * 3600)(double) as function:
        assert function(1) == 2
        assert function([1, 2]) == [2, 4]


def test_small_calls_go_before_large_ones_and_large_ones_are_not_starved() -> None:
    held = Held()
    with dynamically(batch_size=2, small_batch_threshold=1)(held) as function:
        calls = [InThread(function, 100)]
        held.next_batch()
        calls.append(InThread(function, [1, 2, 3, 4]))
        spin_until(lambda: function.stats.queue_size == 4)
        for number in range(5, 21):
            calls.append(InThread(function, number))
            spin_until(lambda number=number: function.stats.queue_size == number)  # type: ignore[misc]
        held.let_on(11)
        results = [call.result() for call in calls]
        assert results[:2] == [200, [2, 4, 6, 8]]
        batches = [held.next_batch() for _ in range(10)]
        # Small ones first, in order of arrival; the eighth batch that leaves the queue goes by age.
        small = [[first, first + 1] for first in range(5, 19, 2)]
        assert batches == [*small, [1, 2], [19, 20], [3, 4]]


def test_a_batch_stays_within_its_length() -> None:
    held = Held()
    with dynamically(max_batch_length=5)(held) as function:
        first = InThread(function, "x")
        held.next_batch()
        second = InThread(function, ["ab", "cd", "e", "much too long", "f"])
        spin_until(lambda: function.stats.queue_size == 5)
        held.let_on(4)
        assert first.result() == "xx"
        assert second.result()[3] == "much too longmuch too long"
        batches = [held.next_batch() for _ in range(3)]
        assert batches == [["ab", "cd", "e"], ["much too long"], ["f"]]


def test_a_full_queue_refuses_the_call_as_a_whole() -> None:
    held = Held()
    with dynamically(max_queue_size=3)(held) as function:
        calls = [InThread(function, 0)]
        held.next_batch()
        calls.append(InThread(function, [1, 2]))
        spin_until(lambda: function.stats.queue_size == 2)
        with pytest.raises(QueueFullError, match="no room for 2 more, 2 wait already") as caught:
            function([3, 4])
        assert "max_queue_size=3" in str(caught.value)

        async def call_twice() -> list[Any]:
            calls = asyncio.gather(function.acall(3), function.acall(4), return_exceptions=True)
            await turns()
            held.let_on(2)
            return list(await calls)

        outcomes = asyncio.run(call_twice())
        assert outcomes[0] == 6
        assert isinstance(outcomes[1], QueueFullError)
        assert [call.result() for call in calls] == [0, [2, 4]]


# Errors.


class BadItemError(Exception):
    """Wants more than a message."""

    def __init__(self, item: int, why: str) -> None:
        super().__init__(f"{item}: {why}")
        self.item = item


def test_the_error_is_an_inference_error_and_what_was_raised() -> None:
    def fail(items: list[int]) -> list[int]:
        raise BadItemError(items[0], "bad")

    with dynamically(fail) as function:
        with pytest.raises(BadItemError) as caught:
            function(7)
        assert isinstance(caught.value, InferenceError)
        assert caught.value.item == 7
        # The function's own traceback, and nothing of ours that would hold its callers.
        cause = caught.value.__cause__
        assert type(cause) is BadItemError
        assert cause.__traceback__ is not None
        assert cause.__traceback__.tb_frame.f_code.co_name == "fail"


class FrozenError(Exception):
    """Refuses all attributes that are set, as a frozen dataclass does."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_an_error_that_refuses_attributes_is_like_any_other() -> None:
    def fail(items: list[int]) -> list[int]:
        raise FrozenError(items[0])

    with dynamically(fail) as function:
        for item in (1, 2):
            with pytest.raises(FrozenError) as caught:
                function(item)
            assert isinstance(caught.value, InferenceError)
            assert caught.value.args == (item,)


def test_one_bad_item_fails_alone() -> None:
    held = Held()

    def fail_for_3(items: list[int]) -> list[int]:
        if 3 in items:
            raise ValueError("3 is bad")
        return held(items)

    with dynamically(fail_for_3) as function:
        calls = [InThread(function, 0)]
        held.next_batch()
        calls += [InThread(function, number) for number in range(1, 6)]
        spin_until(lambda: function.stats.queue_size == 5)
        held.let_on(10)
        outcomes = [outcome_of(call.result) for call in calls]
        assert isinstance(outcomes.pop(3), ValueError)
        assert outcomes == [0, 2, 4, 8, 10]


def test_without_isolation_a_batch_fails_as_a_whole_and_is_called_once() -> None:
    calls: list[list[int]] = []

    @dynamically(isolate_errors=False)
    def fail(items: list[int]) -> list[int]:
        calls.append(items)
        raise ValueError("bad")

    with fail, pytest.raises(ValueError, match="bad"):
        fail([1, 2, 3])
    assert calls == [[1, 2, 3]]


@pytest.mark.parametrize(
    "outputs",
    [[1], [1, 2, 3, 4], [], None, "abc", {1: 1, 2: 2, 3: 3}, (number for number in range(3)), 7],
    ids=lambda outputs: type(outputs).__name__,
)
def test_anything_but_one_output_per_input_is_an_error_for_all(outputs: Any) -> None:
    with dynamically(lambda items: outputs if len(items) == 3 else items) as function:
        with pytest.raises(OutputMismatchError, match="3 inputs"):
            function([1, 2, 3])
        assert function(1) == 1


def test_a_tuple_of_outputs_will_do() -> None:
    as_tuple: Any = tuple
    with dynamically(as_tuple) as function:
        assert function([1, 2]) == [1, 2]


def test_an_exception_among_the_outputs_fails_its_item_alone() -> None:
    def answer(items: list[int]) -> list[Any]:
        return [KeyError(item) if item == 2 else item for item in items]

    async def main() -> None:
        with dynamically(answer) as function:
            calls = [function.acall(number) for number in (1, 2, 3)]
            one, two, three = await asyncio.gather(*calls, return_exceptions=True)
            assert (one, three) == (1, 3)
            assert isinstance(two, KeyError)
            assert isinstance(two, InferenceError)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_is_no_exception_settles_everybody_and_the_thread_goes_on(
    kind: type[BaseException],
) -> None:
    def fail_for_negative(items: list[int]) -> list[int]:
        if min(items) < 0:
            raise kind("out")
        return items

    with dynamically(fail_for_negative) as function:
        with pytest.raises(InferenceError, match=f"{kind.__name__}: out"):
            function([-1, 2])
        assert function(5) == 5


def test_a_sequence_that_raises_settles_everybody() -> None:
    class Bad(Sequence[int]):
        def __len__(self) -> int:
            raise RuntimeError("no length")

        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("no items")

    with dynamically(lambda _: Bad()) as function, pytest.raises(RuntimeError, match="no length"):
        function([1, 2])


@pytest.mark.parametrize("raised", [MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_out_of_memory_makes_batches_smaller(raised: Exception) -> None:
    sizes: list[int] = []

    def answer(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 4:
            raise raised
        return items

    with dynamically(batch_size=16)(answer) as function:
        assert function(list(range(100))) == list(range(100))
    # Not by looking for a culprit in each of them.
    assert sorted(sizes)[-3:] == [4, 8, 16]


def test_out_of_memory_lets_go_of_the_batch_and_ends_no_generator_of_the_model() -> None:
    class Batch:
        pass

    batches: list[weakref.ref[Batch]] = []

    def fail() -> NoReturn:
        batch = Batch()
        batches.append(weakref.ref(batch))
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

    with dynamically(answer) as function:
        with pytest.raises(MemoryError):
            function(1)
        assert batches[0]() is None
        assert function(1) == "goes on"


def test_the_first_error_ends_the_wait_for_the_whole_list() -> None:
    held = Held()

    def answer(items: list[int]) -> list[int]:
        if -1 in items:
            raise ValueError("bad")
        return held(items)

    with dynamically(batch_size=1)(answer) as function:
        with pytest.raises(ValueError, match="bad"):
            function([-1, 2, 3])
        # One of the others may have begun meanwhile.
        held.let_on(3)
        assert function(5) == 10


# Callers that go.


def test_a_cancelled_caller_harms_nobody_be_it_waiting_or_running() -> None:
    held = Held()

    async def main() -> None:
        with dynamically(held) as function:
            running = [asyncio.create_task(function.acall(number)) for number in (1, 2)]
            await turns()
            assert held.next_batch() == [1, 2]
            waiting = [asyncio.create_task(function.acall(number)) for number in (3, 4)]
            await turns()
            running[0].cancel()
            waiting[0].cancel()
            await turns()
            held.let_on(2)
            outcomes = await asyncio.gather(*running, *waiting, return_exceptions=True)
            assert isinstance(outcomes[0], asyncio.CancelledError)
            assert isinstance(outcomes[2], asyncio.CancelledError)
            assert (outcomes[1], outcomes[3]) == (4, 8)
            assert held.next_batch() == [4]

    asyncio.run(main())


def test_one_that_goes_in_the_turn_of_its_call_is_never_computed() -> None:
    async def main() -> None:
        with dynamically(double) as function:
            call = function.acall(1)
            call.send(None)
            call.close()
            assert await function.acall(2) == 4
            assert function.stats.total_processed == 1

    asyncio.run(main())


def test_a_cancelled_list_leaves_nothing_behind() -> None:
    held = Held()

    async def main() -> None:
        with dynamically(batch_size=2)(held) as function:
            call = asyncio.create_task(function.acall([1, 2, 3, 4, 5]))
            await turns()
            assert held.next_batch() == [1, 2]
            call.cancel()
            await asyncio.wait([call])
            assert function.stats.queue_size == 0
            held.let_on(2)
            assert await function.acall(6) == 12

    asyncio.run(main())


def test_a_loop_that_is_closed_while_calls_wait_harms_nobody_else() -> None:
    held = Held()
    with dynamically(held) as function:
        loop = asyncio.new_event_loop()
        left = [loop.create_task(function.acall(number)) for number in (1, 2)]
        loop.run_until_complete(turns())
        assert held.next_batch() == [1, 2]
        left.append(loop.create_task(function.acall(3)))
        loop.run_until_complete(turns())
        other = InThread(function, 4)
        spin_until(lambda: function.stats.queue_size == 2)
        loop.close()
        held.let_on(2)
        assert other.result() == 8
        assert asyncio.run(_call(function, 5, held)) == 10
        for task in left:  # as asyncio would complain
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.get_coro().close()


async def _call(function: BatchedFunction[Any, Any], item: Any, held: Held) -> Any:
    held.let_on()
    return await function.acall(item)


def test_several_loops_and_threads_call_at_once() -> None:
    async def call_many(function: BatchedFunction[int, int], start: int) -> list[int]:
        return await asyncio.gather(*(function.acall(start + number) for number in range(300)))

    with dynamically(batch_size=8)(double) as function:
        loops = [
            InThread(lambda start=start: asyncio.run(call_many(function, start)))
            for start in (0, 1000, 2000)
        ]
        threads = [
            InThread(lambda start=start: [function(start + number) for number in range(300)])
            for start in (3000, 4000)
        ]
        for number, call in enumerate((*loops, *threads)):
            assert call.result() == [2 * (1000 * number + at) for at in range(300)]
        assert function.stats.total_processed == 1500


# Functions that call functions.


def test_a_function_that_calls_itself_is_computed_at_once() -> None:
    @dynamically
    def factorial(items: list[int]) -> list[int]:
        return [1 if item <= 1 else item * factorial(item - 1) for item in items]

    with factorial:
        assert factorial([5, 3]) == [120, 6]


def test_two_functions_that_call_each_other_do_not_wait_for_each_other() -> None:
    @dynamically
    def is_even(items: list[int]) -> list[bool]:
        return [item == 0 or is_odd(item - 1) for item in items]

    @dynamically
    def is_odd(items: list[int]) -> list[bool]:
        return [item != 0 and is_even(item - 1) for item in items]

    with is_even, is_odd:
        assert is_even([10, 7]) == [True, False]
        calls = [InThread(one, 8) for one in (is_even, is_odd) * 4]
        assert [call.result() for call in calls] == [True, False] * 4


def test_the_error_of_a_call_of_itself_is_that_of_any_call() -> None:
    @dynamically
    def fail_at_zero(items: list[int]) -> list[Any]:
        if items == [0]:
            raise KeyError("zero")
        return [outcome_of(lambda item=item: fail_at_zero(item - 1)) for item in items]

    with fail_at_zero:
        with pytest.raises(KeyError) as caught:
            fail_at_zero(1)
        assert isinstance(caught.value, InferenceError)


def test_a_function_may_call_another() -> None:
    with dynamically(double) as inner:

        @dynamically
        def outer(items: list[int]) -> list[int]:
            return inner(items)

        with outer:
            assert outer([1, 2]) == [2, 4]


def test_an_async_function_runs_in_the_thread_on_one_loop() -> None:
    loops: set[Any] = set()
    threads: set[str] = set()

    @dynamically
    async def double_async(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        threads.add(threading.current_thread().name)
        return double(items)

    with double_async:
        assert double_async(1) == 2
        assert double_async([2, 3]) == [4, 6]
        assert asyncio.run(_acall(double_async, 4)) == 8
    assert len(loops) == 1
    assert "double_async" in threads.pop()


async def _acall(function: BatchedFunction[Any, Any], item: Any) -> Any:
    return await function.acall(item)


def test_an_async_function_may_await_itself() -> None:
    @dynamically
    async def countdown(items: list[int]) -> list[int]:
        return [0 if item == 0 else await countdown.acall(item - 1) for item in items]

    with countdown:
        assert countdown([3, 1]) == [0, 0]


def test_a_function_that_returns_something_to_await_is_awaited() -> None:
    async def answer(items: list[int]) -> list[int]:
        return double(items)

    with dynamically(lambda items: answer(items)) as function:
        assert function(1) == 2


def test_context_variables_of_a_caller_are_not_seen_by_the_others_of_its_batch() -> None:
    user = contextvars.ContextVar("user", default="nobody")

    def who(items: list[int]) -> list[str]:
        return [user.get() for _ in items]

    async def main() -> None:
        with dynamically(who) as function:
            user.set("somebody")
            assert await function.acall([1, 2]) == ["nobody", "nobody"]
            assert function(1) == "nobody"

    asyncio.run(main())


# Methods.


def test_each_instance_has_its_own_batcher() -> None:
    two, three = Model(2), Model(3)
    assert two.scale(5) == 10
    assert three.scale([1, 2, 3, 4, 5]) == [3, 6, 9, 12, 15]
    assert (two.scale.stats.total_processed, three.scale.stats.total_processed) == (1, 5)
    end(two.scale, three.scale)


def test_a_method_can_be_called_on_its_class() -> None:
    model = Model(3)
    assert Model.scale(model, 2) == 6  # type: ignore[call-overload]  # as types do not know
    assert asyncio.run(Model.scale.acall(model, 3)) == 9  # type: ignore[call-overload]  # the same
    assert model.scale.stats.total_processed == 2
    end(model.scale)


def test_two_arguments_are_an_item_too_many_where_there_is_no_class() -> None:
    for function in (dynamically(double), dynamically(lambda items: items)):
        for first in (1, Model(1)):
            with pytest.raises(TypeError, match="called with one argument"):
                function(first, 2)  # type: ignore[call-overload]  # as types know


def test_class_and_static_methods_in_either_order() -> None:
    class Sub(Model):
        pass

    assert Model.name_of(1) == Model.outer_name_of(1) == "Model 1"
    assert Sub.name_of(1) == Sub(1).outer_name_of(1) == "Sub 1"
    assert Model.halve(8) == Model(1).halve(8) == Model.outer_halve(8) == 4
    assert Model(1).outer_halve([2, 4]) == [1, 2]
    end(Sub.name_of, Sub.outer_name_of)


def test_an_instance_is_released_and_its_thread_with_it() -> None:
    before = set(threading.enumerate())
    model = Model(2)
    assert model.scale([1, 2, 3]) == [2, 4, 6]
    (thread,) = set(threading.enumerate()) - before
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
        thread.join(LIMIT)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_what_a_batch_held_is_released_when_it_has_been_answered() -> None:
    class Thing:
        pass

    with dynamically(lambda items: items) as function:
        thing = Thing()
        reference = weakref.ref(thing)
        assert function(thing) is thing
        del thing
        # The thread lets go of it before it waits for the next batch, soon after the answer.
        spin_until(lambda: reference() is None)


def test_an_error_is_released_with_those_who_hold_it() -> None:
    def fail(items: list[int]) -> list[int]:
        raise BadItemError(items[0], "bad")

    def call(function: BatchedFunction[int, int]) -> "weakref.ref[BaseException]":
        try:
            function(1)
        except BadItemError as error:
            return weakref.ref(error)
        raise AssertionError

    with dynamically(fail) as function:
        gc.disable()
        try:
            reference = call(function)
            spin_until(lambda: reference() is None)
        finally:
            gc.enable()


@pytest.mark.parametrize("make", [lambda item: item, lambda item: [item]], ids=["item", "list"])
def test_an_awaited_call_that_fails_keeps_nothing_alive(make: Any) -> None:
    class Thing:
        pass

    def fail(items: list[Thing]) -> list[Thing]:
        raise ValueError("bad")

    async def main(function: BatchedFunction[Thing, Thing]) -> "weakref.ref[Thing]":
        thing = Thing()
        with pytest.raises(ValueError, match="bad"):
            await function.acall(make(thing))
        return weakref.ref(thing)

    with dynamically(fail) as function:
        gc.disable()
        try:
            reference = asyncio.run(main(function))
            spin_until(lambda: reference() is None)
        finally:
            gc.enable()


def test_an_instance_lives_while_calls_wait_for_it() -> None:
    held = Held()

    class Holder:
        @dynamically
        def compute(self, items: list[int]) -> list[int]:
            return held(items)

    async def main() -> None:
        holder = Holder()
        function = holder.compute
        call = asyncio.create_task(holder.compute.acall(1))
        await turns()
        held.next_batch()
        del holder
        gc.collect()
        held.let_on()
        assert await call == 2
        function.shutdown()

    asyncio.run(main())


def test_an_instance_of_which_only_a_call_is_left_is_there_until_it_is_answered() -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        assert await Model(2).scale.acall(3) == 6
        assert await Model(2).scale.acall([3, 4]) == [6, 8]

    asyncio.run(main())
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)


def test_an_instance_need_not_be_hashable_and_equal_ones_are_not_the_same() -> None:
    class Equal:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, name: str) -> None:
            self.name = name

        def __eq__(self, other: object) -> bool:
            return True

        @dynamically
        def names(self, items: list[int]) -> list[str]:
            return [self.name for _ in items]

    one, two = Equal("one"), Equal("two")
    assert (one.names(1), two.names(1)) == ("one", "two")
    end(one.names, two.names)


def test_slots_without_room_for_weak_references_are_a_clear_error() -> None:
    class Slotted:
        __slots__ = ()

        @dynamically
        def compute(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(ConfigurationError, match=r"add '__weakref__' to its __slots__"):
        Slotted().compute(1)

    class WithRoom:
        __slots__ = ("__weakref__",)

        @dynamically
        def compute(self, items: list[int]) -> list[int]:
            return items

    instance = WithRoom()
    assert instance.compute(1) == 1
    end(instance.compute)


def test_an_instance_in_use_can_be_copied_and_pickled() -> None:
    model = Model(3)
    assert model.scale(1) == 3
    for twin in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(twin) == {"factor": 3}
        twin.factor = 5
        assert twin.scale(1) == 5
        end(twin.scale)
    assert pickle.loads(pickle.dumps(model.scale)).__self__.factor == 3
    end(model.scale)


def test_the_function_itself_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(doubled_by_all)) is doubled_by_all
    assert pickle.loads(pickle.dumps(Model.scale)) is Model.scale
    assert copy.deepcopy(doubled_by_all) is doubled_by_all


def test_it_looks_like_the_function() -> None:
    assert doubled_by_all.__name__ == "doubled_by_all"
    assert doubled_by_all.__doc__ == "Double each item."
    assert doubled_by_all.__module__ == __name__
    assert str(inspect.signature(doubled_by_all)) == "(items: list[int]) -> list[int]"
    model = Model(2)
    assert (model.scale.__name__, model.scale.__qualname__) == ("scale", "Model.scale")
    assert model.scale.__doc__ == Model.scale.__doc__ == "Multiply each item."
    assert str(inspect.signature(model.scale)) == "(items: list[int]) -> list[int]"
    assert "doubled_by_all" in repr(doubled_by_all)
    with pytest.raises(AttributeError, match="no_such"):
        _ = doubled_by_all.no_such
    end(model.scale)


def test_partials_bound_methods_and_objects_can_be_decorated() -> None:
    def scale(factor: int, items: list[int]) -> list[int]:
        return [factor * item for item in items]

    class Bound:
        factor = 4

        def scale(self, items: list[int]) -> list[int]:
            return scale(self.factor, items)

        def __call__(self, items: list[int]) -> list[int]:
            return scale(5, items)

    class Owner:
        partial = dynamically(functools.partial(scale, 3))
        bound = dynamically(Bound().scale)
        called = dynamically(Bound())

    assert [one(2) for one in (Owner().partial, Owner().bound, Owner().called)] == [6, 8, 10]
    end(Owner.partial, Owner.bound, Owner.called)


@pytest.mark.parametrize("func", [64, "double", [1]])
def test_what_is_no_function_is_refused(func: Any) -> None:
    with pytest.raises(ConfigurationError, match="settings are named"):
        dynamically(func)


def test_generators_are_refused() -> None:
    def generate(items: list[int]) -> Iterator[int]:
        yield from items

    with pytest.raises(ConfigurationError, match="return a list"):
        dynamically(generate)


# Stats.


def test_the_stats_have_the_fields_of_batched() -> None:
    with dynamically(batch_size=2)(double) as function:
        function([1, 2, 3])
        stats = function.stats
        assert (stats.queue_size, stats.total_processed, stats.total_batches) == (0, 3, 2)
        assert stats.avg_batch_size == 1.5
        assert stats.avg_processing_time > 0
        assert stats.cache_stats is None
        function.clear_stats()
        assert function.stats.total_processed == 0
        assert function.stats.avg_batch_size == function.stats.avg_processing_time == 0.0
        function(1)
        assert function.stats.total_batches == 1


# Life.


def test_shutdown_computes_what_waits_and_ends_the_thread() -> None:
    held = Held()
    function = dynamically(held)
    calls = [InThread(function, 1)]
    held.next_batch()
    calls.append(InThread(function, [2, 3]))
    spin_until(lambda: function.stats.queue_size == 2)
    ending = InThread(function.shutdown)
    spin_until(lambda: isinstance(outcome_of(lambda: function(4)), BatcherClosedError))
    held.let_on(2)
    assert [call.result() for call in calls] == [2, [4, 6]]
    ending.result()
    with pytest.raises(BatcherClosedError, match=r"start\(\) opens it again"):
        function(1)
    with pytest.raises(BatcherClosedError):
        asyncio.run(_acall(function, 1))
    function.shutdown()


def test_shutdown_with_cancel_settles_at_once_what_waits() -> None:
    held = Held()
    function = dynamically(held)
    running = InThread(function, 1)
    held.next_batch()
    waiting = InThread(function, [2, 3])
    spin_until(lambda: function.stats.queue_size == 2)
    ending = InThread(lambda: function.shutdown(cancel=True))
    with pytest.raises(BatcherClosedError, match="shut down before"):
        waiting.result()
    held.let_on()
    assert running.result() == 2
    ending.result()


def test_it_can_be_opened_again() -> None:
    function = dynamically(double)
    function.shutdown()
    for _ in range(3):
        with function:
            assert function(1) == 2


def test_a_function_that_shuts_itself_down_does_not_wait_for_itself() -> None:
    @dynamically
    def last(items: list[int]) -> list[int]:
        last.shutdown()
        return items

    assert last(1) == 1
    with pytest.raises(BatcherClosedError):
        last(2)
    spin_until(lambda: not any("last" in t.name for t in threading.enumerate()))


def test_a_function_that_another_one_waits_for_may_shut_that_down() -> None:
    @dynamically
    def inner(items: list[int]) -> list[int]:
        outer.shutdown()
        return double(items)

    @dynamically
    def outer(items: list[int]) -> list[int]:
        return [inner(item) for item in items]

    with inner:
        assert InThread(outer, 1).result() == 2
        with pytest.raises(BatcherClosedError):
            outer(2)


def test_a_function_that_is_being_shut_down_may_call_the_one_that_does_it() -> None:
    held = Held()

    @dynamically
    def ending(items: list[int]) -> list[int]:
        last.shutdown()
        return double(items)

    @dynamically
    def last(items: list[int]) -> list[int]:
        return [ending(item) for item in held(items)]

    with ending:
        calls = [InThread(last, 1)]
        held.next_batch()
        calls.append(InThread(ending, 5))
        spin_until(lambda: bool(nesting._waits))  # for the end of the other
        held.let_on()
        assert [call.result() for call in calls] == [4, 10]


def test_shutdown_on_a_loop_computes_the_calls_of_that_turn() -> None:
    function = dynamically(double)

    async def main() -> list[int]:
        calls = [asyncio.create_task(function.acall(number)) for number in range(2)]
        await turns(1)  # they have called, and the loop has not turned since
        function.shutdown()
        outputs: list[int] = await asyncio.gather(*calls)
        return outputs

    assert asyncio.run(main()) == [0, 2]


def test_nothing_is_left_of_a_thread_that_was_shut_down() -> None:
    function = dynamically(double)
    with function:
        assert function(1) == 2
        (thread,) = (
            weakref.ref(one) for one in threading.enumerate() if one.name.endswith(" double")
        )
    gc.collect()
    assert thread() is None
    with function:
        assert function(2) == 4


def test_a_forked_child_begins_anew() -> None:
    held = Held()
    with dynamically(held) as function:
        call = InThread(function, 1)
        held.next_batch()
        waiting = InThread(function, 2)
        spin_until(lambda: function.stats.queue_size == 1)
        child = os.fork()
        if child == 0:
            signal.alarm(round(LIMIT))  # or it would outlive a test that fails
            held.let_on(1)
            os._exit(function(3))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 6
        held.let_on(2)
        assert (call.result(), waiting.result()) == (2, 4)


def test_a_call_from_what_goes_with_the_program_is_refused() -> None:
    """No thread ever starts, and it would wait for one."""
    done = run_program(
        "from fast_batcher import dynamically\n"
        "@dynamically\n"
        "def double(items):\n"
        "    return [2 * item for item in items]\n" + CALL_WHILE_ENDING
    )
    assert done.stdout == "double: the interpreter is ending\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_wait_at_the_end_of_the_program_get_their_answers() -> None:
    done = run_program(
        "import os, threading\n"
        "from fast_batcher import dynamically\n"
        "go = threading.Event()\n"
        "@dynamically\n"
        "def double(items):\n"
        "    go.wait()\n"
        "    return [2 * item for item in items]\n"
        "def call(item):\n"
        "    os.write(1, b'%d\\n' % double(item))\n"
        "for item in (21, 21):\n"
        "    threading.Thread(target=call, args=(item,)).start()\n"
        "threading.Timer(0.05, go.set).start()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n42\n", "")


def test_it_is_quick_to_end_many() -> None:
    with ExitStack() as stack:
        functions = [stack.enter_context(dynamically(double)) for _ in range(20)]
        assert [function(1) for function in functions] == [2] * 20
