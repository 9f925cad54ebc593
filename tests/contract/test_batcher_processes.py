"""`DynBatcher` and the processes around it: dying workers, bad models, other loops, forks, the end.

Everything here is about a real worker process, or about a real program that has one.
"""

import asyncio
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from models.base import Echo
from models.children import Forks, Reports, TalksNonsense
from models.loading import (
    ExitsOnLoad,
    LoadsAgain,
    NeedsArguments,
    NeverLoads,
    RaisesOnLoad,
    RaisesOnWarmUp,
    RaisesTypeError,
    SystemExitOnLoad,
    WarmsUpBadly,
)
from models.ordinary import Gated, GatedOnLoad, Holds, Noisy, Whereabouts
from models.raising import EXCEPTIONS, Raises
from models.returning import OUTPUTS, Returns
from openings import pids_of
from packed_frames import pack
from programs import Start, program, run_command
from waits import (
    LIMIT,
    Gate,
    Watch,
    assert_balance,
    both_loops,
    call,
    measured,
    outcome,
    turns,
    until,
)

from fast_batcher import (
    DynBatcher,
    InferenceError,
    OutputMismatchError,
    RequestTooLargeError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher._core.values import Report
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import Kind
from fast_batcher.errors import RemoteTraceback

MEBI = 2**20

__all__ = ["program"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def until_not_ready(batcher: DynBatcher[Any, Any]) -> None:
    """Wait until it has been noticed that no worker is left."""
    await until(lambda: batcher.stats.workers_ready == 0)


# --- workers that die -----------------------------------------------------------------------------


@both_loops
async def test_death_of_worker_with_child_is_noticed(gate: Gate) -> None:
    """Fault F02: its child has inherited pipe and sentinel, so neither tells of the death."""
    async with DynBatcher(Forks, model_args=(gate.path,), idempotent=False) as batcher:
        running = call(batcher, None)
        visit = await gate.visit()
        with Watch([visit.note]) as child:
            with measured(0.2, "the same, with a child of the worker alive"):
                os.kill(visit.pid, signal.SIGKILL)
                async with asyncio.timeout(LIMIT):
                    assert isinstance(await outcome(running), WorkerLostError)
            assert child.survivors(0.0) == [visit.note]
            again = call(batcher, None)
            second = await gate.visit()
            second.let_on()
            assert await outcome(again) == second.note
            os.kill(visit.note, signal.SIGKILL)
            # The child of the second worker lives while the batcher closes.
            with Watch([second.pid, second.note]) as last:
                async with asyncio.timeout(LIMIT):
                    await batcher.aclose()
                assert last.survivors(LIMIT) == []
            assert child.survivors(LIMIT) == []


@both_loops
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_killed_idle_workers_fail_no_request(num_workers: int) -> None:
    """Faults F01 and F10."""
    async with DynBatcher(Whereabouts, num_workers=num_workers) as batcher:
        pids: set[int] = set()
        while len(pids) < num_workers:
            pids |= set(await batcher.process_many([None] * 64))
        what = f"the death of {num_workers} idle workers is noticed"
        with measured(0.1 * num_workers, what):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(LIMIT):
                await until_not_ready(batcher)
        assert (batcher.state, batcher.is_ready) == ("open", False)
        assert await batcher.process_batched(None) not in pids
        assert (batcher.state, batcher.is_ready) == ("open", True)
        await until(lambda: batcher.stats.workers_ready == num_workers)
        assert (batcher.stats.restarts, assert_balance(batcher).failed) == (num_workers, 0)


@both_loops
@pytest.mark.parametrize("then", [signal.SIGKILL, signal.SIGCONT], ids=lambda then: then.name)
async def test_unread_large_batch_does_not_block_loop(gate: Gate, then: signal.Signals) -> None:
    """Fault F03: 50 MB are on their way to a stopped worker, so its full pipe is not read."""
    async with DynBatcher(Holds, model_args=(gate.path,)) as batcher:
        held = call(batcher, "hold")
        visit = await gate.visit()
        visit.let_on()
        assert await outcome(held) == "hold"
        os.kill(visit.pid, signal.SIGSTOP)
        large = call(batcher, b"x" * 50 * MEBI)
        await until(lambda: batcher.stats.running == 1)
        await turns(100)
        assert not large.done()
        # If the worker dies, it had not begun with the batch: its replacement gets it, whole.
        os.kill(visit.pid, then)
        assert await outcome(large) == b"x" * 50 * MEBI
        assert await batcher.process_batched("next") == "next"
        assert batcher.stats.restarts == (then == signal.SIGKILL)


NONSENSE: dict[str, tuple[bytes, str]] = {
    "not a frame": (b"nonsense" * 10, "is replaced"),
    "a frame of 2**63 bytes": (
        b"fbt1" + b"\x12\0\0\0" + b"\0\0\0\0\0\0\0\x80" + bytes(16),
        "is replaced",
    ),
    "no pickle": (pack(Kind.ITEMS, 0, b"garbage"), "is replaced"),
    "an answer to no batch": (
        pack(Kind.ATOMS, 12345, pickling.dumps(["forged"])),
        "a worker answered batch 12345, which it does not have",
    ),
    "a step of a model that answers in batches": (
        pack(Kind.ITEMS, 0, pickling.dumps(([], Report(step=([0], [], {}))))),
        "a step came from a worker whose model answers in batches",
    ),
}


@both_loops
@pytest.mark.parametrize("what", NONSENSE)
async def test_worker_breaking_the_protocol_is_replaced(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Faults F37 and F38."""
    nonsense, text = NONSENSE[what]
    async with DynBatcher(TalksNonsense, idempotent=False) as batcher:
        assert isinstance(await outcome(call(batcher, nonsense)), WorkerLostError)
        assert await batcher.process_batched(b"") == b""
        assert assert_balance(batcher).restarts == 1
    assert text in caplog.text


# --- models that fail -----------------------------------------------------------------------------

# What the caller gets for each: classes it is an instance of, and a part of its text.
RAISED: dict[str, tuple[tuple[type[BaseException], ...], str]] = {
    "value": ((ValueError,), "'x' is not a number"),
    "key": ((KeyError,), "missing"),
    "os": ((FileNotFoundError,), "weights.bin"),
    "unicode": ((UnicodeDecodeError,), "can't decode byte 0xff"),
    "coded": ((ValueError,), "coded"),
    "two arguments": ((InferenceError,), "5: broken"),
    "lock": ((InferenceError,), "HoldsLockError: holds a lock"),
    "elsewhere": ((InferenceError,), "KeptElsewhereError: kept elsewhere"),
    "unprintable": ((InferenceError,), "UnprintableError"),
    "huge": ((InferenceError,), "yyyy"),
    "surrogate": ((InferenceError,), "lone"),
    "stop iteration": ((InferenceError,), "StopIteration: stop"),
    "stop async iteration": ((InferenceError,), "stop"),
    "timeout": ((TimeoutError,), "upstream"),
    "group": ((InferenceError,), "many"),
    "exit": ((InferenceError,), "SystemExit: 3"),
    "interrupt": ((InferenceError,), "KeyboardInterrupt"),
    "generator exit": ((InferenceError,), "GeneratorExit"),
    "base": ((InferenceError,), "NotAnExceptionError: only a base"),
    "reduce exits": ((InferenceError,), "reduced"),
    "str exits": ((InferenceError,), "StrExitsError"),
}


@pytest.fixture(scope="module")
async def raising() -> Any:
    """One worker for all of them: that it serves on after each is the point."""
    async with DynBatcher(Raises, max_queue_size=10_000, idempotent=False) as batcher:
        yield batcher


def text_of(error: BaseException) -> str:
    """As a caller's logging would show it; what happens then must not depend on the model."""
    try:
        return str(error)
    except BaseException as raised:  # noqa: BLE001  a SystemExit here would end the tests
        return f"str() raised {type(raised).__name__}"


@pytest.mark.parametrize("name", EXCEPTIONS)
async def test_model_error_reaches_callers_of_the_batch(
    raising: DynBatcher[Any, Any], name: str
) -> None:
    """Fault F26."""
    kinds, text = RAISED[name]
    restarts = raising.stats.restarts
    errors = [await outcome(task) for task in [call(raising, "fine"), call(raising, name)]]
    for error in errors:
        assert isinstance(error, InferenceError)
        assert isinstance(error, kinds)
        assert text in text_of(error)
        assert len(text_of(error)) < 100_000
        assert isinstance(error.__cause__, RemoteTraceback)
        assert name != "value" or "raise EXCEPTIONS[name]()" in str(error.__cause__)
        assert name != "coded" or getattr(error, "code", None) == 42
    assert errors[0] is not errors[1]
    assert await raising.process_batched("fine") == "fine"
    assert raising.stats.restarts == restarts
    assert_balance(raising)


GOOD_OUTPUTS = {"list", "tuple", "ndarray", "matrix", "array", "range"}


@pytest.fixture(scope="module")
async def returning() -> Any:
    async with DynBatcher(Returns) as batcher:
        yield batcher


@pytest.mark.parametrize("name", OUTPUTS)
async def test_the_model_must_return_one_output_per_input(
    returning: DynBatcher[Any, Any], name: str
) -> None:
    """Faults F23 and F24."""
    results = [await outcome(task) for task in [call(returning, name) for _ in range(3)]]
    if name in GOOD_OUTPUTS:
        assert not any(isinstance(result, BaseException) for result in results)
    else:
        for result in results:
            assert isinstance(result, OutputMismatchError)
            assert isinstance(result, IndexError)
            assert "3 inputs" in str(result)
        wrong = {"fewer": "2 outputs", "more": "4 outputs", "empty": "0 outputs"}
        assert wrong.get(name, "") in str(results[0])
    assert await returning.process_batched("list") == "list"
    assert returning.stats.restarts == 0
    assert_balance(returning)


# --- large messages -------------------------------------------------------------------------------


async def test_max_frame_bytes_is_exact() -> None:
    """Around the limit there is no size that is neither refused nor answered."""
    async with DynBatcher(Echo, max_frame_bytes=MEBI) as batcher:
        outcomes = []
        for size in range(MEBI - 64, MEBI + 2, 3):
            result = await outcome(call(batcher, b"x" * size))
            outcomes.append(isinstance(result, bytes))
            assert isinstance(result, bytes | RequestTooLargeError)
        assert outcomes == sorted(outcomes, reverse=True)
        assert outcomes[0] is True
        assert outcomes[-1] is False
        # One that is too large fails alone.
        calls = [call(batcher, b"x" * size) for size in (10, 2 * MEBI, 20)]
        small, large, other = [await outcome(task) for task in calls]
        assert (small, other) == (b"x" * 10, b"x" * 20)
        assert isinstance(large, RequestTooLargeError)
        assert f"more than max_frame_bytes={MEBI}" in str(large)
        assert assert_balance(batcher).restarts == 0


async def test_printing_model_is_not_delayed() -> None:
    """Fault F30."""
    async with DynBatcher(Noisy) as batcher:
        assert await batcher.process_batched(2000) == 2000


# --- models that do not load ----------------------------------------------------------------------


async def start_error_of(batcher: DynBatcher[Any, Any]) -> WorkerStartupError:
    with measured(1.0, "a failed start is told"):
        async with asyncio.timeout(LIMIT):
            with pytest.raises(WorkerStartupError) as caught:
                await batcher.open()
    assert batcher.state == "broken"
    await batcher.aclose()
    return caught.value


# Model, its arguments, and parts of the error's text and of its cause's.
BROKEN: dict[str, tuple[Any, tuple[str, ...], str, str]] = {
    "raises": (
        RaisesOnLoad,
        (),
        "worker 0 could not load RaisesOnLoad: FileNotFoundError: no weights at /models/tiny.bin",
        "raise FileNotFoundError",
    ),
    "sys.exit": (SystemExitOnLoad, (), "SystemExit: 3", "sys.exit(3)"),
    "exit 3": (ExitsOnLoad, ("exit 3",), "exit code 3 before it had loaded ExitsOnLoad", ""),
    "exit 0": (ExitsOnLoad, ("exit 0",), "exit code 0 before it had loaded ExitsOnLoad", ""),
    "killed": (ExitsOnLoad, ("killed",), "signal 9 (SIGKILL, possibly out of memory) before", ""),
    "segfault": (ExitsOnLoad, ("segfault",), "signal 11 (SIGSEGV) before", ""),
    "warm-up, too few outputs": (WarmsUpBadly, (), "during warm-up", ""),
    "warm-up raises": (RaisesOnWarmUp, (), "during warm-up", "too cold"),
    "no arguments": (
        NeedsArguments,
        (),
        "missing 1 required positional argument: 'path'",
        "models.loading:NeedsArguments with model_args of types ()",
    ),
    "wrong arguments": (
        NeedsArguments,
        ("canary", "canary"),
        "takes 2 positional arguments but 3 were given",
        "with model_args of types (str, str) and model_kwargs of types {}",
    ),
    "TypeError": (RaisesTypeError, ("canary",), "TypeError: the words of the model", ""),
    "a function": ("models.base:pass_gate", (), "it is not a class", ""),
    "no such class": ("models.ordinary:NoSuch.Inner", (), "has no 'NoSuch.Inner'", ""),
    "abstract": ("fast_batcher:InferenceModel", (), "does not implement infer", ""),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_failed_load_is_a_startup_error_with_cause(
    name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault F12; and no value of an argument is shown anywhere."""
    model, arguments, text, cause = BROKEN[name]
    error = await start_error_of(DynBatcher(model, model_args=arguments))
    assert text in str(error)
    assert cause in str(error.__cause__)
    if isinstance(model, str):
        assert model in str(error)
    shown = [*traceback.format_exception(error), caplog.text, *capfd.readouterr()]
    assert "canary" not in "".join(shown)


@both_loops
async def test_start_timeout_ends_a_hanging_constructor(gate: Gate) -> None:
    """Fault F13."""
    batcher = DynBatcher(NeverLoads, model_args=(gate.path,), start_timeout=1.0)
    early = call(batcher, "early")
    opening = asyncio.create_task(batcher.open())
    await turns()
    await until(lambda: bool(pids_of(batcher)))
    with Watch(pids_of(batcher)) as worker:
        with measured(1.1, "a start that never ends (start_timeout=1)"):
            error = await outcome(opening)
        assert isinstance(error, WorkerStartupError)
        assert "within start_timeout=1.0 seconds" in str(error)
        assert worker.survivors(0.0) == []
    assert isinstance(await outcome(early), WorkerStartupError)
    await batcher.aclose()


@both_loops
async def test_failed_replacement_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with DynBatcher(LoadsAgain, model_args=(str(tmp_path / "attempts"),)) as batcher:
        first = await batcher.process_batched(None)
        os.kill(first, signal.SIGKILL)
        await until_not_ready(batcher)
        second = await batcher.process_batched(None)
        assert second != first
        assert batcher.state == "open"
        assert batcher.stats.restarts == 1
    assert caplog.text.count("trying again") == 2


# --- what a worker is -----------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("ignores", [False, True])
async def test_worker_process_environment(ignores: bool) -> None:
    """Also if its parent ignores signals."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores else before)
    try:
        async with DynBatcher(Reports) as batcher:
            report = await batcher.process_batched("")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report["signals"] == {
        "SIGINT": str(signal.SIG_IGN),
        "SIGTERM": report["signals"]["SIGTERM"],
        "SIGPIPE": str(signal.SIG_IGN),
        "SIGCHLD": str(signal.SIG_DFL),
    }
    # It ignores the signal, and processes that the model starts do not inherit that.
    assert "end_if_wanted" in report["signals"]["SIGTERM"]
    assert report["blocked"] == []
    assert report["daemon"] is False
    assert report["threads"] == ["MainThread", "fast_batcher-watcher"]
    # The loop, the shell and the pool are the parent's.
    for module in ("asyncio", "fast_batcher.batcher", "fast_batcher._parent.pool"):
        assert module not in report["modules"]
    # That of its log.
    assert sum(target.startswith("socket:") for target in report["descriptors"]) == 1
    # One to read from and one to write into; the parent's have stayed with the parent.
    assert report["channel ends"] == 2


# --- other loops ----------------------------------------------------------------------------------

NewLoop = Callable[[], asyncio.AbstractEventLoop]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Iterator[NewLoop]:
    """Makes loops, and closes those that the test has left open."""
    loops: list[asyncio.AbstractEventLoop] = []

    def make() -> asyncio.AbstractEventLoop:
        loops.append(request.param())
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


@pytest.fixture
def run(new_loop: NewLoop) -> Run:
    """Runs a coroutine on a loop of its own, which is closed then."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        loop = new_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()

    return run


def test_requests_of_closed_loop_are_dropped(run: Run, gate: Gate) -> None:
    batcher = DynBatcher(Gated, 2, model_args=(gate.path,), stop_timeout=0.0)
    tasks: list[asyncio.Task[Any]] = []

    async def start() -> Any:
        tasks.extend(call(batcher, number) for number in range(5))
        return await gate.visit()

    visit = run(start())
    assert (assert_balance(batcher).running, batcher.stats.waiting) == (4, 1)

    async def go_on() -> Any:
        late = call(batcher, "late")
        with Watch([visit.pid]) as worker:
            await turns()
            assert worker.survivors(0.0) == []
        assert assert_balance(batcher).cancelled == 5
        gate.close()
        return await outcome(late)

    assert run(go_on()) == "late"
    batcher.stop()
    assert_balance(batcher)
    abandon(tasks)


def abandon(tasks: "list[asyncio.Task[Any]]") -> None:
    """Close the coroutines of tasks whose loop is closed, of which asyncio would complain."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()


def test_live_loop_keeps_the_batcher(new_loop: NewLoop) -> None:
    """Fault F48."""
    batcher = DynBatcher(Echo)
    first, second = new_loop(), new_loop()
    assert first.run_until_complete(batcher.process_batched(1)) == 1
    for use in (
        lambda: batcher.process_batched(2),
        lambda: batcher.process_many([2]),
        lambda: batcher.open(),
        lambda: batcher.aclose(),
    ):
        with pytest.raises(RuntimeError, match="another event loop than the batcher's"):
            second.run_until_complete(use())

    async def use_from_thread() -> None:
        def elsewhere() -> None:
            with pytest.raises(
                RuntimeError, match=r"from other threads use submit\(\) for one input, or asyncio"
            ):
                asyncio.run(batcher.process_batched(1))

        # With calls of this loop under way, and without.
        mine = call(batcher, "mine")
        await asyncio.to_thread(elsewhere)
        assert await outcome(mine) == "mine"
        await asyncio.to_thread(elsewhere)
        await batcher.aclose()

    first.run_until_complete(use_from_thread())
    first.run_until_complete(first.shutdown_default_executor())


@pytest.mark.parametrize("loads", [True, False], ids=["while it loads", "while it is started"])
def test_loop_closes_before_worker_is_ready(run: Run, gate: Gate, loads: bool) -> None:
    """The starter thread tells a loop that never turns again, or is closed."""
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,), stop_timeout=0.0)

    async def begin() -> None:
        await batcher.open(wait_ready=False)
        if loads:
            await gate.visit()

    run(begin())
    gate.close()

    async def use() -> Any:
        return await batcher.process_batched(1, timeout=LIMIT)

    assert run(use()) == 1
    assert batcher.state == "open"
    batcher.stop()


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", ["idle", "loading", "plainly", "holding the GIL", "ignoring SIGTERM"]
)
def test_no_worker_outlives_its_parent(program: Start, gate: Gate, state: str) -> None:
    """Fault F40: a worker that is idle, loads, or computes."""
    model = f"models.crashing.Stuck, model_args=({gate.path!r}, {state!r})"
    if state == "loading":
        model = f"models.loading.NeverLoads, model_args=({gate.path!r},)"
    running = program(
        f"""
        async def main():
            batcher = DynBatcher({model}, num_workers={2 if state == "idle" else 1})
            await batcher.open(wait_ready={state != "loading"})
            tell([one.pid for one in opening_of(batcher).pool.alive()])
            if {state!r} != "idle":
                await batcher.process_batched(1)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    pids = running.tells()
    if state != "idle":
        pids = [gate.wait().pid]
    what = f"workers are gone after their parent was killed ({state})"
    with Watch(pids) as workers, measured(1.0, what):
        running.kill()
        assert workers.survivors(LIMIT) == []


@pytest.mark.parametrize(
    ("keeps", "state", "fails"),
    [
        *[(True, one, False) for one in ("idle", "plainly", "holding the GIL", "ignoring SIGTERM")],
        *[(False, one, False) for one in ("idle", "plainly")],
        (True, "idle", True),
    ],
)
def test_program_without_stop_exits(
    program: Start, gate: Gate, keeps: bool, state: str, fails: bool
) -> None:
    """Whether anything still refers to the batchers when the interpreter ends, or not."""
    running = program(
        f"""
        import gc

        kept = []

        async def main():
            for name in ("first", "second"):
                arguments = {gate.path!r}, {state!r}
                batcher = DynBatcher(models.crashing.Stuck, model_args=arguments, name=name)
                await batcher.open()
                if {keeps}:
                    kept.append(batcher)
                if {state!r} != "idle":
                    batcher.submit(1)
                    while not batcher.stats.running:
                        await asyncio.sleep(0)
                tell(opening_of(batcher).pool.alive()[0].pid)

        asyncio.run(main())
        gc.collect()
        if {fails}:
            raise ZeroDivisionError
        """
    )
    with Watch([running.tells(), running.tells()]) as workers:
        if state != "idle":
            gate.wait()
            gate.wait()
        what = f"a program that forgot to stop has ended (its workers: {state})"
        with measured(3.0, what):
            status, stderr = running.finish()
        assert workers.survivors(0.0) == []
    if fails:
        assert (status, stderr.count("Traceback")) == (1, 1)
        assert "ZeroDivisionError" in stderr
    else:
        # The interpreter ends batchers without a word, but not those that it has dropped before.
        dropped = stderr.count(": an open batcher was dropped")
        assert (status, dropped) == (0, 0 if keeps else 2)
        assert stderr == "" or not keeps


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_program_with_daemon_loop_exits_silently(program: Start, kind: str) -> None:
    """The thread runs on while the interpreter ends, and its loop sees the workers die."""
    running = program(
        f"""
        import atexit
        import {kind}
        from fast_batcher._parent.pool import end_forgotten_pools

        is_open = threading.Event()

        async def main():
            global batchers, loop
            loop = asyncio.get_running_loop()
            batchers = [DynBatcher(models.base.Echo, num_workers=2, name=name) for name in "abc"]
            for batcher in batchers:
                await batcher.open()
            pools = [opening_of(batcher).pool for batcher in batchers]
            tell([one.pid for pool in pools for one in pool.alive()])
            is_open.set()
            await asyncio.Event().wait()

        def call_late():
            waiting = [batcher.submit(1) for batcher in batchers]
            for _ in range(10):
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
            tell([future.done() for future in waiting])

        # What is registered first is called last.
        atexit.unregister(end_forgotten_pools)
        atexit.register(call_late)
        atexit.register(end_forgotten_pools)
        threading.Thread(target={kind}.run, args=(main(),), daemon=True).start()
        is_open.wait()
        """
    )
    with Watch(running.tells()) as workers:
        assert running.tells() == [False] * 3
        assert running.finish() == (0, "")
        assert workers.survivors(0.0) == []


def test_missing_main_guard_is_named(program: Start) -> None:
    running = program(
        """
        async def main():
            async with DynBatcher(models.base.Echo) as batcher:
                tell(await batcher.process_batched(1))

        asyncio.run(main())
        """,
        guarded=False,
    )
    status, stderr = running.finish()
    assert status != 0
    assert "if __name__ == '__main__':" in stderr


def test_ctrl_c_does_not_kill_the_batch(program: Start, gate: Gate) -> None:
    """Fault F42: the terminal sends SIGINT to the whole group; the program decides what follows."""
    running = program(
        f"""
        async def main():
            interrupted = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
            async with DynBatcher(models.ordinary.Gated, model_args=({gate.path!r},)) as batcher:
                call = asyncio.create_task(batcher.process_batched("answer"))
                await interrupted.wait()
                tell("interrupted")
                tell(await call)
                tell(batcher.stats.restarts)

        asyncio.run(main())
        """
    )
    visit = gate.wait()
    running.interrupt()
    assert running.tells() == "interrupted"
    visit.let_on()
    assert running.tells() == "answer"
    assert running.tells() == 0
    assert running.finish() == (0, "")


def test_ctrl_c_during_start_shows_one_traceback(program: Start, gate: Gate) -> None:
    running = program(
        f"""
        async def main():
            async with DynBatcher(models.loading.NeverLoads, model_args=({gate.path!r},)):
                pass

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            tell("interrupted")
        """
    )
    visit = gate.wait()
    with Watch([visit.pid]) as workers:
        running.interrupt()
        assert running.tells() == "interrupted"
        assert running.finish() == (0, "")
        assert workers.survivors(0.0) == []


# The end of a forked child prints a traceback, and that of its parent hangs while the child lives.
forks_and_exits = pytest.mark.skipif(
    sys.version_info[:2] == (3, 13),
    reason="CPython issues 140485 and 146313 of the resource tracker of multiprocessing",
)


@pytest.mark.parametrize(
    "use",
    [
        *("process_batched", "process_many", "submit", "open"),
        pytest.param("exit", marks=forks_and_exits),
    ],
)
def test_forked_copy_is_rejected(program: Start, use: str) -> None:
    """Fault F49."""
    running = program(
        f"""
        batcher = DynBatcher(models.ordinary.Whereabouts)

        async def use():
            if {use!r} == "process_many":
                await batcher.process_many([1])
            elif {use!r} == "submit":
                batcher.submit(1)
            elif {use!r} == "open":
                await batcher.open()
            else:
                await batcher.process_batched(1)

        loop = asyncio.new_event_loop()
        pid = loop.run_until_complete(batcher.process_batched(None))
        child = os.fork()
        if child == 0:
            if {use!r} == "exit":
                sys.exit(0)
            try:
                asyncio.run(use())
            except RuntimeError as error:
                tell(str(error))
            asyncio.run(batcher.aclose())
            batcher.stop()
            os._exit(0)
        os.waitpid(child, 0)
        tell(loop.run_until_complete(batcher.process_batched(None)) == pid)
        loop.run_until_complete(batcher.aclose())
        loop.close()
        """
    )
    if use != "exit":
        assert "in another process" in running.tells()
    assert running.tells() is True
    status, stderr = running.finish()
    assert (status, "Traceback" in stderr) == (0, False)


@forks_and_exits
@pytest.mark.parametrize("end", ["stop", "exit"])
def test_forked_child_does_not_keep_workers_alive(program: Start, end: str) -> None:
    """Its copies of the pipes would keep the workers from reading an end of file."""
    running = program(
        f"""
        batcher = DynBatcher(models.ordinary.Whereabouts, stop_timeout=1000.0)
        loop = asyncio.new_event_loop()
        pid = loop.run_until_complete(batcher.process_batched(None))
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        tell(child)
        tell(loop.run_until_complete(batcher.process_batched(None)) == pid)
        if {end!r} == "stop":
            batcher.stop()
        loop.close()
        """
    )
    child = running.tells()
    with Watch([running.pid]) as parent:
        assert running.tells() is True
        assert parent.survivors(LIMIT) == []
    os.kill(child, signal.SIGKILL)
    assert running.finish() == (0, "")


def test_failed_fork_is_a_startup_error_without_leaks(program: Start) -> None:
    """Fault F52: with one more file descriptor each time, the start fails at the next step."""
    running = program(
        """
        import resource
        from multiprocessing import resource_tracker

        def descriptors():
            return sorted(os.listdir("/proc/self/fd"))

        async def main():
            resource_tracker.ensure_running()
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            before = descriptors()
            highest = max(map(int, before))
            batcher = DynBatcher(models.base.Echo)
            for extra in range(40):
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + extra, hard))
                try:
                    await batcher.open()
                except Exception as error:
                    tell([type(error).__name__, str(error)])
                else:
                    tell(await batcher.process_batched("enough"))
                    break
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                    await batcher.aclose()
            tell(descriptors() == before)

        asyncio.run(main())
        """
    )
    told = []
    while (one := running.tells()) != "enough":
        told.append(one)
    assert len(told) > 2
    for name, text in told:
        assert name == "WorkerStartupError"
        assert "worker 0 could not be started: OSError" in text
    assert running.tells() is True
    assert running.finish() == (0, "")


def test_suspended_process_group_loses_no_worker(program: Start) -> None:
    """Fault F55: its requests have expired, and its silence does not count as death."""
    running = program(
        """
        from fast_batcher._core import supervision
        from fast_batcher._parent import pool

        supervision.HEARTBEAT_INTERVAL = pool.HEARTBEAT_INTERVAL = 2.0

        async def main():
            async with DynBatcher(models.ordinary.Whereabouts) as batcher:
                tell(await batcher.process_batched(None))
                # It would wake up and answer while nobody looks at the clock.
                slow = DynBatcher(models.ordinary.Slow, model_args=(1000.0,), stop_timeout=0.1)
                async with slow:
                    late = asyncio.create_task(slow.process_batched(None, timeout=1.0))
                    while not slow.stats.running:
                        await asyncio.sleep(0)
                    tell("stop me")
                    try:
                        tell(await late)
                    except Exception as error:
                        tell(type(error).__name__)
                    beats = set()
                    while len(beats) < 4:
                        beats.add(opening_of(batcher).pool._heartbeat_timer)
                        await asyncio.sleep(0)
                tell(await batcher.process_batched(None))
                tell(batcher.stats.restarts)

        asyncio.run(main())
        """
    )
    pid = running.tells()
    assert running.tells() == "stop me"
    os.killpg(running.pid, signal.SIGSTOP)
    # The fault itself: it lasts longer than the interval of the heart and the usual lateness.
    select.select([], [], [], 5.0)
    os.killpg(running.pid, signal.SIGCONT)
    assert running.tells() == "DeadlineExceededError"
    assert running.tells() == pid
    assert running.tells() == 0
    assert running.finish()[0] == 0


# As a program of PyInstaller: its executable starts the program.
FROZEN = """\
import asyncio, sys
from multiprocessing import spawn
sys.frozen, sys.executable = True, {executable!r}
spawn.set_executable(sys.executable)
from fast_batcher import DynBatcher

with open({starts!r}, "a") as file:
    file.write("started\\n")
with open({starts!r}) as file:
    if len(file.readlines()) > 9:
        sys.exit("it starts itself again and again")

async def main():
    async with DynBatcher("models.base:Echo", **{options!r}) as batcher:
        await batcher.process_batched(1)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, r"multiprocessing\.freeze_support\(\)"),
        ({"shared": True}, "shared=True: a frozen program.*omit the option"),
        ({"shared": "name"}, "shared='name': a frozen program.*omit the option"),
    ],
)
def test_frozen_program_does_not_start_itself_again_and_again(
    options: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    executable, code, starts = tmp_path / "app", tmp_path / "app.py", tmp_path / "starts"
    code.write_text(FROZEN.format(executable=str(executable), starts=str(starts), options=options))
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
    executable.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_command([str(executable)], env=environment)
    assert done.returncode != 0
    assert re.search(remedy, done.stderr), done.stderr
    # The program itself, and at most a worker and the resource tracker of `multiprocessing`.
    assert len(starts.read_text().splitlines()) == (1 if options else 3)
