"""`process=True`: the function runs in a worker process, and its calls come from anywhere."""

import asyncio
import functools
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import sample_functions
from held import InThread, spin_until
from programs import CALL_WHILE_ENDING, run_program
from waits import LIMIT, shown, until

from fast_batcher import aio, dynamically
from fast_batcher._local.function_model import FunctionModel
from fast_batcher._local.process_batcher import ProcessBatcher
from fast_batcher._local.settings import LocalSettings
from fast_batcher.errors import BatcherClosedError, ConfigurationError, InferenceError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _ends_what_is_global() -> Iterator[None]:
    yield
    for function in (
        sample_functions.double,
        sample_functions.pid_of,
        sample_functions.fail_for_negative,
        sample_functions.double_features,
        sample_functions.Model.halve,
        sample_functions.number_held,
        sample_functions.total_length,
        sample_functions.double_few,
    ):
        function.shutdown()
        function.start()


def test_it_runs_in_another_process_for_all_callers() -> None:
    async def main() -> list[Any]:
        calls = [sample_functions.pid_of.acall(number) for number in range(3)]
        return await asyncio.gather(*calls)

    pids = {sample_functions.pid_of(1), *asyncio.run(main())}
    pids.update(InThread(asyncio.run, main()).result())
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_items_lists_and_stats() -> None:
    double = sample_functions.double
    assert double.stats.total_batches == 0
    assert double(4) == 8
    assert double([*range(10)]) == [*range(0, 20, 2)]
    assert double([]) == []
    stats = double.stats
    assert stats.total_processed == 11
    assert stats.avg_batch_size == 11 / stats.total_batches
    assert stats.avg_processing_time > 0
    double.clear_stats()
    assert double.stats.total_processed == 0
    assert sample_functions.Model.halve(8) == 4


def test_an_async_function_and_several_loops() -> None:
    double = sample_functions.double_async

    async def main() -> Any:
        return await asyncio.gather(double(1), double([2, 3]), double([]))

    assert asyncio.run(main()) == [2, [4, 6], []]
    assert asyncio.run(main()) == [2, [4, 6], []]
    asyncio.run(double.shutdown())
    with pytest.raises(BatcherClosedError, match=r"start\(\) opens it again"):
        asyncio.run(main())
    double.start()


def test_errors_are_those_of_any_call() -> None:
    function = sample_functions.fail_for_negative
    with pytest.raises(ValueError, match="too small") as caught:
        function(-2)
    assert isinstance(caught.value, InferenceError)
    with pytest.raises(KeyError):
        function(-1)
    assert function(3) == 3


def test_features_are_joined_in_the_worker() -> None:
    rows = [numpy.array([1]), numpy.array([2, 3])]
    assert sample_functions.double_features({"ids": rows}).tolist() == [[2, 18], [4, 6]]


@pytest.mark.parametrize("as_list", [False, True])
def test_rows_of_a_tensor_are_sent_without_the_rest(as_list: bool) -> None:
    model = FunctionModel("sample_functions", "tensor_of" if not as_list else "tensors_of")
    rows = model.infer([*range(100)])
    assert [int(row[0]) for row in rows] == [*range(100)]
    assert all(len(pickle.dumps(row)) < 10_000 for row in rows), "one has 4 kB, all 400"


def test_a_function_in_a_decorator_runs_with_it() -> None:
    with sample_functions.double_and_add_one_in_a_worker as function:
        assert function([1, 2]) == [3, 5]


def test_a_forked_child_begins_anew() -> None:
    assert sample_functions.double(1) == 2
    child = os.fork()
    if child == 0:
        signal.alarm(round(LIMIT))  # or it would outlive a test that fails
        answer = sample_functions.double(3)
        sample_functions.double.shutdown()
        os._exit(answer)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 6
    assert sample_functions.double(2) == 4


def test_shutdown_can_cancel_and_be_repeated() -> None:
    assert sample_functions.double(1) == 2
    sample_functions.double.shutdown(cancel=True)
    sample_functions.double.shutdown()
    with pytest.raises(BatcherClosedError):
        sample_functions.double(1)
    with sample_functions.double:
        assert sample_functions.double(2) == 4


def _closure() -> Any:
    return lambda items: items


@pytest.mark.parametrize(
    "func", [lambda items: items, _closure(), functools.partial(sum), [].__len__], ids=shown
)
def test_what_a_worker_cannot_import_is_refused(func: Any) -> None:
    for decorate in (dynamically(process=True), aio.dynamically(process=True)):
        with pytest.raises(ConfigurationError, match="process=True"):
            decorate(func)


def test_a_method_is_refused_where_it_is_bound() -> None:
    with pytest.raises(ConfigurationError, match=r"Model\.scale is a method, and its instance"):
        sample_functions.Model().scale(1)
    with pytest.raises(ConfigurationError, match=r"Path\.exists is a method, and its instance"):
        dynamically(process=True)(Path().exists)


def test_short_items_go_before_long_ones_of_any_call(tmp_path: Path) -> None:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    function = sample_functions.number_by_length

    def items_of(*lengths: int) -> list[str]:
        return ["x" * length for length in lengths]

    async def main() -> None:
        running = asyncio.create_task(function(path))
        with await asyncio.to_thread(open, path, "wb"):
            # Two batches of a call are queued at a time, of which one goes to the worker ahead.
            # Lengths may be more than priorities may.
            long = asyncio.create_task(function(items_of(900, 500, 700, 950, 850, 550)))
            await until(lambda: function.stats.queue_size == 2)
            mixed = asyncio.create_task(function(items_of(800, 1, 600)))
            await until(lambda: function.stats.queue_size == 5)
            small = asyncio.create_task(function("x" * 999))
            await until(lambda: function.stats.queue_size == 6)
        assert await running == 0
        assert await long == [9, 1, 6, 10, 8, 2]
        assert await small == 3
        assert await mixed == [7, 4, 5]

    asyncio.run(main())
    asyncio.run(function.shutdown())
    function.start()


def test_small_calls_go_before_large_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    function = sample_functions.number_held
    running = InThread(function, path)
    with open(path, "wb"):  # it has begun, and goes on when this is closed
        # A full batch goes to the worker ahead, and one waits.
        large = InThread(function, [*range(12)])
        spin_until(lambda: function.stats.queue_size == 4)
        small = InThread(function, 0)
        spin_until(lambda: function.stats.queue_size == 5)
    assert running.result() == 0
    assert small.result() == 5
    assert large.result() == [1, 2, 3, 4, *range(6, 14)]


def test_batches_are_as_long_as_they_may_be() -> None:
    lengths = sample_functions.total_length(["aaa", "bb", "cccccc", "dddd", "", ""])
    assert max(lengths[:2] + lengths[3:]) == 5
    assert lengths[2] == 6


def test_the_wait_of_a_batch_is_bounded() -> None:
    for timeout_ms, max_delay in ((0.0, 0.0), (250.0, 0.25)):
        settings = LocalSettings(timeout_ms=timeout_ms)
        batcher = ProcessBatcher(sample_functions.plain, settings, None)._make_batcher()
        assert batcher._settings.max_delay == max_delay


def test_a_call_larger_than_the_queue_is_fed_in() -> None:
    assert sample_functions.double_few([*range(40)]) == [*range(0, 80, 2)]


def test_nothing_is_left_of_a_loop_that_was_shut_down() -> None:
    assert sample_functions.double(1) == 2
    (thread,) = (
        weakref.ref(one) for one in threading.enumerate() if one.name == "fast_batcher double"
    )
    sample_functions.double.shutdown()
    gc.collect()
    assert thread() is None


def test_a_program_that_forgets_to_shut_down_ends() -> None:
    done = run_program("import sample_functions; print(sample_functions.double(21))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_a_call_from_what_goes_with_the_program_is_refused() -> None:
    done = run_program(
        "from sample_functions import double\nprint(double(21))\n" + CALL_WHILE_ENDING
    )
    assert done.stdout == "42\ndouble: the interpreter is ending\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_call_of_an_exit_hook_that_comes_too_late_is_refused() -> None:
    """A hook that was registered before the first call runs after the loop has ended."""
    done = run_program(
        "import atexit\n"
        "def late():\n"
        "    try:\n"
        "        double(1)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "    double.shutdown()\n"
        "atexit.register(late)\n"
        "from sample_functions import double\n"
        "print(double(21))\n"
        "atexit.register(lambda: print(double(4)))\n"
    )
    assert done.stdout == "42\n8\ndouble: the interpreter is ending\n"
    assert (done.returncode, done.stderr) == (0, "")
