"""The test kit: what it refuses, what it leaves, and how pytest runs with it."""

import asyncio
import gc
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from forks import fork, status_of
from models.base import Echo
from models.loading import NeedsFile
from models.ordinary import Whereabouts
from paths import ROOT
from programs import run_command
from recorder import Recorder
from waits import LIMIT, assert_balance, call, outcome, turns, until

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    QueueFullError,
    WorkerStartupError,
    errors,
)
from fast_batcher.caching import LRUCache
from fast_batcher.observing import RequestEnded
from fast_batcher.testing import BatcherKit

pytestmark = pytest.mark.anyio


async def test_held_requests_end_at_their_deadlines() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Echo) as batcher:
            with kit.hold():
                held = call(batcher, 1)
                with pytest.raises(DeadlineExceededError):
                    await asyncio.gather(
                        *[batcher.process_batched(2, timeout=1e-6) for _ in range(3)]
                    )
                cancelled = call(batcher, 3)
                await turns(1)
                cancelled.cancel()
                await turns(1)
                assert kit.batches == []
            assert await held == 1
            assert kit.sizes == [1]
        assert assert_balance(batcher).cancelled == 1


async def test_observers_see_calls_that_fail_on_demand() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Echo) as batcher:
            recorder = Recorder()
            batcher.add_observer(recorder)
            kit.fail_next(ValueError)
            kit.fail_next(QueueFullError)
            for kind in (ValueError, QueueFullError):
                assert isinstance(await outcome(call(batcher, 1)), kind)
            assert [one.outcome for one in recorder.of(RequestEnded)] == ["failed", "rejected"]


async def test_latency_lets_running_calls_expire() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Echo, timeout=0.01) as batcher:
            kit.latency = 2.0
            assert isinstance(await outcome(call(batcher, 1)), DeadlineExceededError)
            kit.reset()
            assert await batcher.process_batched(2, timeout=LIMIT) == 2
        assert kit.sizes == [1]


async def test_errors_of_the_model_arrive_as_from_infer() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Echo) as batcher:
            kit.fail_next(KeyError("x"), count=2)
            for _ in range(2):
                error = await outcome(call(batcher, 1))
                assert isinstance(error, KeyError)
                assert isinstance(error, InferenceError)
            assert await batcher.process_batched(1) == 1
        stats = assert_balance(batcher)
        assert (stats.failed, stats.completed) == (2, 1)


async def test_forgotten_batchers_are_closed_at_the_end() -> None:
    batcher = DynBatcher(Echo)
    with BatcherKit() as kit:
        assert await batcher.process_batched(1) == 1
        with kit.hold():
            held = call(batcher, 2)
            await turns(1)
    assert batcher.state == "new"
    # It was released by the end of the hold, or ended with its batcher.
    assert await outcome(held) == 2 or isinstance(held.exception(), BatcherClosedError)


async def test_batcher_opened_before_kit_keeps_its_workers() -> None:
    with BatcherKit() as outer:
        async with DynBatcher(Echo) as first:
            with BatcherKit() as inner:
                assert await first.process_batched(1) == 1
                async with DynBatcher(Echo) as second:
                    assert await second.process_batched(2) == 2
            assert first.state == "open"
    assert [batch.inputs for batch in outer.batches] == [[1]]
    assert [batch.inputs for batch in inner.batches] == [[2]]


async def test_a_kit_after_the_app_is_an_error() -> None:
    """Its batcher has real workers, which no kit records or holds."""
    batcher = DynBatcher(Echo, workers="threads")
    async with batcher:
        with pytest.raises(ConfigurationError, match="Echo is open already"), BatcherKit():
            pass
        assert await batcher.process_batched(1) == 1
    with BatcherKit() as kit:
        async with batcher:
            assert await batcher.process_batched(1) == 1
    assert kit.sizes == [1]


def test_event_loops_of_one_test_do_not_harm_the_next() -> None:
    batcher = DynBatcher(Echo)
    for loops in (1, 2, 1):
        with BatcherKit() as kit:
            for number in range(loops):
                assert asyncio.run(batcher.process_batched(number)) == number
        assert kit.sizes == [1] * loops
        assert batcher.state == "new"


async def test_reload_and_more_workers() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Whereabouts) as batcher:
            batcher.reconfigure(num_workers=2, max_batch_size=2)
            await batcher.reload()
            with kit.hold():
                pids = await batcher.process_many(range(6))
            assert len({*pids}) == 1
            assert kit.sizes == [2, 2, 2]


@pytest.mark.parametrize("cache", [None, LRUCache(9)])
async def test_without_timeouts_no_limit_is_left(cache: LRUCache | None) -> None:
    with BatcherKit(timeouts=False) as kit:
        limits: dict[str, Any] = {"timeout": 0.01, "max_latency": 0.01, "infer_timeout": 0.01}
        async with DynBatcher(Echo, cache=cache, **limits) as batcher:
            batcher.reconfigure(max_batch_size=3)
            kit.latency = 0.05
            calls = [call(batcher, number, timeout=0.001) for number in range(9)]
            assert await asyncio.gather(*calls) == [*range(9)]


async def test_broken_batcher_is_closed_at_the_end(tmp_path: Path) -> None:
    batcher = DynBatcher(NeedsFile, model_args=(str(tmp_path / "weights"),))
    for _ in range(2):
        with BatcherKit(), pytest.raises(WorkerStartupError):
            await batcher.process_batched(1)
        assert batcher.state == "new"


class EndsSlowly(Echo):
    """Cannot be loaded, and takes some time to be removed, after the parent was told."""

    def __init__(self) -> None:
        self.kept = Remains()
        raise FileNotFoundError("weights")


class Remains:
    def __del__(self) -> None:
        time.sleep(0.3)


async def test_worker_of_a_failed_start_is_awaited() -> None:
    """The check of each test finds its thread otherwise."""
    with BatcherKit(), pytest.raises(WorkerStartupError, match="weights"):
        await DynBatcher(EndsSlowly).open()


async def test_abandoned_worker_computes_nothing() -> None:
    with BatcherKit() as kit:
        kit.latency = LIMIT
        batcher = DynBatcher(Counts, stop_timeout=0.0)
        await batcher.open()
        running = call(batcher, 1)
        await until(lambda: batcher.stats.running == 1)
        batcher.stop()
        assert isinstance(await outcome(running), BatcherClosedError)
    await until(lambda: not [one for one in threading.enumerate() if "Counts" in one.name])
    assert Counts.computed == []


class Counts(Echo):
    """Keeps what it has computed, in the test's process."""

    computed: ClassVar[list[Any]] = []

    def infer(self, inputs: list[Any]) -> list[Any]:
        self.computed.extend(inputs)
        return inputs


@pytest.mark.slow
async def test_closing_does_not_wait_for_a_forked_child() -> None:
    def wait() -> int:
        signal.pause()
        return 0

    with BatcherKit():
        batcher = DynBatcher(Echo, stop_timeout=LIMIT)
        await batcher.open()
        with warnings.catch_warnings():
            # From Python 3.12 on: there are threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            lasting = fork(wait)
        await batcher.aclose()
        os.kill(lasting, signal.SIGKILL)
        assert status_of(lasting) == -signal.SIGKILL


async def test_inner_hold_ends_before_the_outer_one() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Echo) as batcher:
            with kit.hold():
                held = [call(batcher, 1)]
                with kit.hold(until=2):
                    await asyncio.gather(*held, call(batcher, 2))
                held = [call(batcher, number) for number in range(3)]
                await turns()
                assert kit.sizes == [2]
            await asyncio.gather(*held)
            assert kit.sizes == [2, 3]


async def test_all_that_wait_leave_in_several_batches() -> None:
    """Of different groups, when as many wait as the test wants."""
    with BatcherKit() as kit:
        async with DynBatcher(Echo, group_by=lambda number: number % 2) as batcher:
            with kit.hold(until=3):
                await asyncio.gather(*[call(batcher, number) for number in range(3)])
                assert sorted(kit.sizes) == [1, 2]
                held = call(batcher, 3)
                await turns()
                assert len(kit.sizes) == 2
            assert await held == 3


def test_batcher_that_a_call_opens_works_in_each_test() -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher(Echo)
    for number in range(2):
        with BatcherKit():
            assert asyncio.run(batcher.process_batched(number)) == number
        assert batcher.state == "new"
    with BatcherKit():  # one that was opened stays closed
        asyncio.run(batcher.open())
    assert batcher.state == "closed"


def test_batcher_that_calls_on_several_loops_open_works_in_each_test() -> None:
    """A test client without a `with` block has an event loop for each request."""
    batcher: DynBatcher[Any, Any] = DynBatcher(Echo)
    for count in (1, 2, 1):
        with BatcherKit():
            assert [asyncio.run(batcher.process_batched(1)) for _ in range(count)] == [1] * count


class Input(list[int]):
    """An input that a weak reference can watch."""


def test_closed_batcher_keeps_no_input_of_a_test() -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher(Echo)
    refs: list[weakref.ref[Input]] = []

    async def use() -> None:
        async with batcher:
            value = Input([1])
            refs.append(weakref.ref(value))
            await batcher.process_batched(value)

    with BatcherKit():
        asyncio.run(use())
    gc.collect()
    assert [ref() for ref in refs] == [None]


async def test_each_call_gets_a_copy_of_the_error() -> None:
    with BatcherKit() as kit:
        async with DynBatcher(Echo) as batcher:
            kit.fail_next(QueueFullError("full", retry_after=2), count=2)
            errors = [await outcome(call(batcher, 1)) for _ in range(2)]
            assert errors[0] is not errors[1]
            assert [getattr(error, "retry_after", None) for error in errors] == [2, 2]


@pytest.mark.parametrize("name", errors.__all__)
async def test_a_call_gets_each_error_of_the_library(name: str) -> None:
    kind = getattr(errors, name)
    with BatcherKit() as kit:
        async with DynBatcher(Echo) as batcher:
            kit.fail_next(kind)
            assert type(await outcome(call(batcher, 1))) is kind
            assert await call(batcher, 2) == 2
        assert_balance(batcher)


WRONG: list[tuple[Any, str]] = [
    (lambda kit: BatcherKit(cast("Any", "fibres")), "workers='fibres'"),
    (lambda kit: setattr(kit, "latency", -1), "latency=-1"),
    (lambda kit: kit.hold(0).__enter__(), "until=0"),
    (lambda kit: kit.fail_next("error"), "error='error'"),
    (lambda kit: kit.fail_next(ValueError, 0), "count=0"),
    (lambda kit: kit.fail_next(ValueError, batcher=DynBatcher(Echo)), "batcher=<.*the name"),
    (lambda kit: kit.fail_next(UnicodeDecodeError), "UnicodeDecodeError.*give an instance"),
    (lambda kit: setattr(BatcherKit("processes"), "latency", 1), "latency=1"),
]


@pytest.mark.parametrize(("use", "named"), WRONG, ids=[named for _, named in WRONG])
def test_wrong_use_is_told(use: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        use(BatcherKit())


# --- pytest ---------------------------------------------------------------------------------------


def run_pytest(directory: Path, *options: str, status: int = 0, **run_options: Any) -> str:
    """Run pytest as a user does until it ends with this status, and return its output."""
    paths = [str(ROOT), str(ROOT / "tests" / "edge"), str(directory)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = run_command(
        [*command, "--rootdir", str(directory), *options],
        cwd=directory,
        env={"PYTHONPATH": ":".join(paths), "PATH": ""},
        **run_options,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


@pytest.mark.slow
def test_the_tests_of_an_app_pass_with_processes(tmp_path: Path) -> None:
    tests = (ROOT / "tests" / "edge" / "test_kit_on_an_app.py").read_text()
    (tmp_path / "test_app.py").write_text(tests)
    # All of them do; each starts two workers.
    some = "share_a_batch or full_queue or one_batcher or cached or workers_are"
    assert "4 passed" in run_pytest(tmp_path, "--batcher-workers=processes", "-k", some)


MODEL = """
from fast_batcher import InferenceModel

class Doubler(InferenceModel[int, int]):
    def infer(self, inputs: list[int]) -> list[int]:
        outputs = [2 * number for number in inputs]
        return outputs
"""
TESTS = """
import asyncio
from doubler import Doubler
from fast_batcher import DynBatcher

async def double(number):
    async with DynBatcher(Doubler) as batcher:
        return await batcher.process_batched(number)

def test_doubles(batcher_kit):
    assert asyncio.run(double(21)) == 42

def test_batches_of_the_test_before(batcher_kit):
    assert len(batcher_kit.batches) == BATCHES
"""


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "batches"), [("function", 0), ("session", 1)])
def test_the_fixture_has_the_scope_of_the_settings(
    tmp_path: Path, scope: str, batches: int
) -> None:
    (tmp_path / "doubler.py").write_text(MODEL)
    (tmp_path / "test_doubler.py").write_text(TESTS.replace("BATCHES", str(batches)))
    assert "2 passed" in run_pytest(tmp_path, "-o", f"batcher_kit_scope={scope}")


@pytest.mark.slow
def test_an_unknown_scope_is_told(tmp_path: Path) -> None:
    said = run_pytest(
        tmp_path, "-o", "batcher_kit_scope=banana", status=pytest.ExitCode.USAGE_ERROR
    )
    assert said.strip().startswith("ERROR: batcher_kit_scope = 'banana': give one of")


@pytest.mark.slow
def test_coverage_sees_the_model(tmp_path: Path) -> None:
    (tmp_path / "doubler.py").write_text(MODEL)
    (tmp_path / "test_doubler.py").write_text(TESTS.replace("BATCHES", "0"))
    (line,) = re.findall("^doubler.py .*$", run_pytest(tmp_path, "--cov=doubler"), re.MULTILINE)
    assert line.split() == ["doubler.py", "5", "0", "100%"]


@pytest.mark.slow
def test_a_breakpoint_stops_in_the_model(tmp_path: Path) -> None:
    (tmp_path / "doubler.py").write_text(MODEL.replace("return", "breakpoint(); return"))
    (tmp_path / "test_doubler.py").write_text(TESTS.replace("BATCHES", "0"))
    output = run_pytest(tmp_path, "-s", input="p 'the outputs are', outputs\nc\n")
    assert "('the outputs are', [42])" in output
