"""`@dynamically`: calls that block, methods, threads and their end.

What it promises to awaited calls is in `test_decorators`.
"""

import asyncio
import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from forks import fork, status_of
from gated_functions import GatedFunction, InThread, spin_until
from programs import CALL_WHILE_ENDING, run_program
from waits import LIMIT

from fast_batcher import dynamically
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
        outer_name_of(Model),
        Model.halve,
        Model.outer_halve,
    ):
        function.shutdown()
        function.start()


def outer_name_of(cls: type[Model]) -> Any:
    """The function of a class; from Python 3.13 on a class method does not bind what it wraps."""
    return vars(Model)["outer_name_of"].__func__.__get__(cls)


def end(*functions: Any) -> None:
    """Shut them down, and with them their threads."""
    for function in functions:
        function.shutdown()


def outcome_of(call: Any) -> Any:
    """Error or result of a call."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  whatever it is
        return error


async def acall(function: BatchedFunction[Any, Any], item: Any) -> Any:
    """A coroutine of ours around its own."""
    return await function.acall(item)


# Calls that block.


def test_errors_reach_a_caller_that_blocks() -> None:
    gated = GatedFunction()

    def fail_for_negative(items: list[int]) -> list[int]:
        if min(items) < 0:
            raise KeyError(items[0])
        return gated(items) if items != [1, 1] else []

    with dynamically(max_queue_size=2)(fail_for_negative) as function:
        with pytest.raises(KeyError) as caught:
            function([-1])
        assert isinstance(caught.value, InferenceError)
        with pytest.raises(OutputMismatchError, match="0 outputs for 2 inputs"):
            function([1, 1])
        running = InThread(function, 0)
        gated.next_batch()
        with pytest.raises(QueueFullError, match="no room for 3 more, 0 wait already"):
            function([1, 2, 3])
        gated.let_on()
        assert running.result() == 0
    with pytest.raises(BatcherClosedError, match=r"start\(\) opens it again"):
        function(1)


def test_small_calls_go_first_without_starvation() -> None:
    gated = GatedFunction()
    with dynamically(batch_size=2, small_batch_threshold=1)(gated) as function:
        calls = [InThread(function, 100)]
        gated.next_batch()
        calls.append(InThread(function, [1, 2, 3, 4]))
        spin_until(lambda: function.stats.queue_size == 4)
        for number in range(5, 21):
            calls.append(InThread(function, number))
            spin_until(lambda number=number: function.stats.queue_size == number)  # type: ignore[misc]
        gated.let_on(11)
        results = [call.result() for call in calls]
        assert results[:2] == [200, [2, 4, 6, 8]]
        batches = [gated.next_batch() for _ in range(10)]
        # Small ones first, in order of arrival; the eighth batch that leaves the queue goes by age.
        small = [[first, first + 1] for first in range(5, 19, 2)]
        assert batches == [*small, [1, 2], [19, 20], [3, 4]]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_thread_survives_base_exceptions(kind: type[BaseException]) -> None:
    def fail_for_negative(items: list[int]) -> list[int]:
        if min(items) < 0:
            raise kind("out")
        return items

    with dynamically(fail_for_negative) as function:
        with pytest.raises(InferenceError, match=f"{kind.__name__}: out"):
            function([-1, 2])
        assert function(5) == 5


# Functions that call functions.


def test_recursive_call_is_computed_at_once() -> None:
    sizes: list[int] = []

    @dynamically(batch_size=2)
    def count_down(items: list[int]) -> list[int]:
        sizes.append(len(items))
        # Each level calls with one item more.
        return [0 if item == 0 else sum(count_down([item - 1] * 5)) + item for item in items]

    with count_down:
        assert count_down(2) == 5 * (5 * 0 + 1) + 2
    assert sizes == [1, 2, *[2, 2, 1] * 2, 2, *[2, 2, 1] * 2, 1, 2, 2, 1]


@pytest.mark.parametrize("length", [2, 5])
def test_mutually_recursive_functions_do_not_deadlock(length: int) -> None:
    """Each function calls the next, and the last one the first."""
    functions: list[Any] = []

    def chain(number: int) -> Any:
        def call_next(items: list[int]) -> list[int]:
            following = functions[(number + 1) % length]
            return [1 + following(one - 1) if one else 0 for one in items]

        return dynamically(call_next)

    functions += [chain(number) for number in range(length)]
    calls = [InThread(function, 12) for function in functions * 2]
    assert [call.result() for call in calls] == [12] * len(calls)
    end(*functions)


def test_recursive_call_raises_the_usual_error() -> None:
    error = KeyError("zero")

    @dynamically
    def fail_at_zero(items: list[int]) -> list[Any]:
        if items == [0]:
            raise error
        if items == [1]:
            return [error]
        return [outcome_of(lambda item=item: fail_at_zero(item - 2)) for item in items]

    with fail_at_zero:
        for item in (2, 3):
            with pytest.raises(KeyError) as caught:
                fail_at_zero(item)
            assert isinstance(caught.value, InferenceError)


def test_async_function_runs_in_one_thread_loop() -> None:
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
        assert asyncio.run(acall(double_async, 4)) == 8
    assert len(loops) == 1
    assert "double_async" in threads.pop()


def test_returned_awaitable_is_awaited_outside_recursion() -> None:
    async def answer(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [decorated(item - 1) if item == 1 else 2 * item for item in items]

    decorated: Any = dynamically(lambda items: answer(items))
    with decorated:
        assert decorated(2) == 4
        with pytest.raises(RuntimeError, match="define it with `async def`"):
            decorated(1)


def test_a_method_can_be_called_on_its_class() -> None:
    model = Model(3)
    assert Model.scale(model, 2) == 6  # type: ignore[call-overload]  # as types do not know
    assert asyncio.run(Model.scale.acall(model, 3)) == 9  # type: ignore[call-overload]  # the same
    assert model.scale.stats.total_processed == 2
    end(model.scale)


# Methods.


def test_class_and_static_methods_in_either_order() -> None:
    class Sub(Model):
        pass

    assert Model.name_of(1) == Model.outer_name_of(1) == "Model 1"
    assert Sub.name_of(1) == Sub(1).outer_name_of(1) == "Sub 1"
    assert Model.halve(8) == Model(1).halve(8) == Model.outer_halve(8) == 4
    assert Model(1).outer_halve([2, 4]) == [1, 2]
    end(Sub.name_of, outer_name_of(Sub))


def test_instance_is_released_with_its_thread() -> None:
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


def test_instances_are_distinguished_by_identity() -> None:
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


def test_slots_without_weakref_are_rejected() -> None:
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


def test_used_instance_can_be_copied_and_pickled() -> None:
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


def test_decorated_function_keeps_its_metadata() -> None:
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
        # From Python 3.14 on a partial is a method otherwise.
        partial = dynamically(staticmethod(functools.partial(scale, 3)))
        bound = dynamically(Bound().scale)
        called = dynamically(Bound())

    assert [one(2) for one in (Owner().partial, Owner().bound, Owner().called)] == [6, 8, 10]
    end(Owner.partial, Owner.bound, Owner.called)


def generate(items: list[int]) -> Iterator[int]:
    yield from items


@pytest.mark.parametrize(
    ("func", "remedy"),
    [(64, "named"), ("double", "named"), ([1], "named"), (generate, "return a list")],
)
def test_unsupported_functions_are_rejected(func: Any, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        dynamically(func)


# The end.


def test_self_shutdown_does_not_deadlock() -> None:
    @dynamically
    def last(items: list[int]) -> list[int]:
        last.shutdown()
        return items

    assert last(1) == 1
    with pytest.raises(BatcherClosedError):
        last(2)
    spin_until(lambda: not any("last" in t.name for t in threading.enumerate()))


@pytest.mark.slow
def test_a_forked_child_begins_anew() -> None:
    gated = GatedFunction()
    with dynamically(gated) as function:
        call = InThread(function, 1)
        gated.next_batch()
        waiting = InThread(function, 2)
        spin_until(lambda: function.stats.queue_size == 1)

        def use() -> int:
            # A thread that the child does not have may hold the lock of the parent's gate.
            gated.renew_gate(1)
            result: int = function(3)
            return result

        assert status_of(fork(use)) == 6
        gated.let_on(2)
        assert (call.result(), waiting.result()) == (2, 4)


@pytest.mark.slow
def test_call_during_interpreter_exit_is_rejected() -> None:
    """No thread ever starts, and it would wait for one."""
    done = run_program(
        "from fast_batcher import dynamically\n"
        "@dynamically\n"
        "def double(items):\n"
        "    return [2 * item for item in items]\n" + CALL_WHILE_ENDING
    )
    assert done.stdout == "double: the interpreter is ending\n"
    assert (done.returncode, done.stderr) == (0, "")
