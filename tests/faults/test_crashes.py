"""Every way a worker can end in the middle of a batch, with real processes.

The callers of the batch are told how it ended, those that wait are served by its replacement.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from models.crashing import CRASHES, Crashes, CrashesAbove
from models.loading import NeedsFile
from models.ordinary import Grows, Holds
from models.raising import AlarmedLate
from openings import opening_of, pids_of
from waits import LIMIT, SOON_IN_WORKER, Gate, assert_balance, call, measured, outcome, turns, until

from fast_batcher import (
    BatcherClosedError,
    DynBatcher,
    NotReadyError,
    PoisonRequestError,
    WorkerLostError,
)
from fast_batcher._parent.worker_process import WorkerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


ENDS = {
    "exit 0": "exit code 0",
    "exit 3": "exit code 3",
    "killed": "signal 9 (SIGKILL, possibly out of memory)",
    "segfault": "signal 11 (SIGSEGV)",
    "abort": "signal 6 (SIGABRT)",
    "hung up": "signal 1 (SIGHUP)",
}


@pytest.mark.parametrize("way", CRASHES)
async def test_callers_learn_how_their_worker_ended(way: str) -> None:
    """Faults F06, F07 and F08."""
    async with DynBatcher(Crashes, 4, idempotent=False) as batcher:
        # One turn, so they share a batch; those behind do not fill one, so they wait.
        lost = [call(batcher, text) for text in ("a", way, "b", "c")]
        waiting = [call(batcher, text) for text in ("d", "e")]
        for task in lost:
            error = await outcome(task)
            assert isinstance(error, WorkerLostError)
            assert str(error) == f"worker 0 ended with {ENDS[way]} while it had this request"
        assert [await outcome(task) for task in waiting] == ["d", "e"]
        stats = assert_balance(batcher)
        assert (stats.failed, stats.completed, stats.restarts) == (4, 2, 1)


async def test_batch_behind_fatal_batch_is_kept(gate: Gate) -> None:
    async with DynBatcher(Holds, 2, model_args=(gate.path,), idempotent=False) as batcher:
        running = [call(batcher, "hold"), call(batcher, 0)]
        visit = await gate.visit()
        # A full batch is sent to the busy worker; one more request waits.
        behind = [call(batcher, number) for number in (1, 2)]
        waiting = call(batcher, "waiting")
        await turns()
        assert assert_balance(batcher).running == 4
        os.kill(visit.pid, signal.SIGKILL)
        for task in running:
            assert isinstance(await outcome(task), WorkerLostError)
        # The worker had not begun with these, so they are not computed twice.
        assert [await outcome(task) for task in behind] == [1, 2]
        assert await outcome(waiting) == "waiting"


async def test_death_during_large_answer_fails_one_batch() -> None:
    """Fault F04."""
    async with DynBatcher(Grows, idempotent=False, max_shared_bytes=0) as batcher:
        large = call(batcher, 50 * 2**20)
        (handle,) = opening_of(batcher).pool.alive()
        assert isinstance(handle, WorkerProcess)
        assert handle._live is not None
        reader = handle._live.channel._reader
        # The first part of it has come, and the worker waits for us to take the rest.
        await until(lambda: reader._large is not None)
        os.kill(pids_of(batcher)[0], signal.SIGKILL)
        assert isinstance(await outcome(large), WorkerLostError)
        assert await batcher.process_batched(3) == b"xxx"
        assert_balance(batcher)


async def test_possible_out_of_memory_death_reduces_batch_size() -> None:
    """Fault F09."""
    async with DynBatcher(CrashesAbove, 8, model_args=(4,)) as batcher:
        calls = [call(batcher, number) for number in range(8)]
        # One by one after the death, and then in halves.
        assert [await outcome(task) for task in calls] == [1] * 8
        assert await batcher.process_many(range(16)) == [4] * 16
        assert batcher.stats.restarts == 1


# --- trying again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["killed", "abort"])
async def test_poisonous_request_fails_alone_after_two_deaths(way: str) -> None:
    """Fault F15."""
    async with DynBatcher(Crashes, 8) as batcher:
        calls = [call(batcher, text) for text in ("a", "b", "c", way, "d", "e", "f", "g")]
        outcomes = [await outcome(task) for task in calls]
        poison = outcomes.pop(3)
        assert outcomes == ["a", "b", "c", "d", "e", "f", "g"]
        assert isinstance(poison, PoisonRequestError)
        assert str(poison) == (
            f"worker 0 ended with {ENDS[way]} while it had this request, as another had before; "
            "it is not tried again"
        )
        assert await batcher.process_batched("next") == "next"
        assert (batcher.stats.restarts, assert_balance(batcher).failed) == (2, 1)


async def test_another_worker_answers_requests_of_killed_worker(gate: Gate) -> None:
    """Fault F02: the other worker need not wait for the replacement, which never loads."""
    settings: dict[str, Any] = {"num_workers": 2, "restart_backoff": 1000.0}
    async with DynBatcher(Holds, 4, model_args=(gate.path,), **settings) as batcher:
        calls = [call(batcher, value) for value in ("hold", 1, 2)]
        first = await gate.visit()
        os.kill(first.pid, signal.SIGKILL)
        second = await gate.visit()
        assert second.pid != first.pid
        second.let_on()
        assert [await outcome(task) for task in calls] == ["hold", 1, 2]
        assert batcher.stats.releases["retry"] == 3


async def test_request_waits_for_replacement_until_deadline(gate: Gate) -> None:
    """Fault F02."""
    settings: dict[str, Any] = {"restart_backoff": 1000.0}
    async with DynBatcher(Holds, model_args=(gate.path,), **settings) as batcher:
        held = call(batcher, "hold", timeout=SOON_IN_WORKER)
        visit = await gate.visit()
        os.kill(visit.pid, signal.SIGKILL)
        with measured(SOON_IN_WORKER, "a request of a dead worker fails at its deadline"):
            error = await outcome(held)
        assert isinstance(error, NotReadyError)


# --- the budget of restarts -----------------------------------------------------------------------


async def test_constantly_dying_worker_breaks_the_batcher() -> None:
    """Fault F11."""
    settings: dict[str, Any] = {"max_restarts": 2, "restart_backoff": 0.01, "idempotent": False}
    async with DynBatcher(Crashes, restart_window=LIMIT, **settings) as batcher:
        for _ in range(2):
            assert isinstance(await outcome(call(batcher, "killed")), WorkerLostError)
        assert isinstance(await outcome(call(batcher, "killed")), WorkerLostError)
        await until(lambda: batcher.state == "broken")
        assert not batcher.is_ready
        with measured(0.01, "a call to a broken batcher fails"):
            async with asyncio.timeout(LIMIT):
                error = await outcome(call(batcher, "fine"))
        assert isinstance(error, NotReadyError)
        assert "restarted max_restarts=2 times within restart_window=300.0 seconds" in str(error)
        assert error.retry_after is not None
        assert 0 < error.retry_after <= LIMIT
        assert "max_restarts=2" in str(batcher.start_error)
        assert_balance(batcher)
    assert batcher.start_error is None
    with pytest.raises(BatcherClosedError):
        await batcher.process_batched("fine")


async def test_broken_batcher_recovers_after_the_window() -> None:
    """Fault F11."""
    settings: dict[str, Any] = {"max_restarts": 0, "restart_window": 0.2, "idempotent": False}
    async with DynBatcher(Crashes, **settings) as batcher:
        assert isinstance(await outcome(call(batcher, "killed")), WorkerLostError)
        await until(lambda: batcher.state == "broken")
        await until(lambda: batcher.is_ready)
        assert await batcher.process_batched("fine") == "fine"
        assert batcher.state == "open"


async def test_calls_in_turn_of_last_restart_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault F11: they come in the moment between the news and the next turn of the loop."""
    needed = tmp_path / "weights"
    needed.touch()
    settings: dict[str, Any] = {"max_restarts": 0}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **settings) as batcher:
        told: list[asyncio.Task[Any]] = []
        workers_given_up = opening_of(batcher).workers_given_up

        def tell(reason: str, seconds: float) -> None:
            told.append(call(batcher, "in the same turn"))
            opening_of(batcher).run_soon()
            workers_given_up(reason, seconds)

        monkeypatch.setattr(opening_of(batcher), "workers_given_up", tell)
        needed.unlink()
        os.kill(pids_of(batcher)[0], signal.SIGKILL)
        await until(lambda: batcher.state == "broken")
        (late,) = told
        error = await outcome(late)
        assert isinstance(error, NotReadyError)
        # And not because its time was over.
        assert "max_restarts=0" in str(error)
        assert batcher.stats.waiting == 0


async def test_other_worker_serves_after_one_gave_up(tmp_path: Path) -> None:
    """Fault F14."""
    needed = tmp_path / "weights"
    needed.touch()
    settings: dict[str, Any] = {"num_workers": 2, "max_restarts": 1, "restart_backoff": 0.01}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **settings) as batcher:
        needed.unlink()
        first, second = pids_of(batcher)
        os.kill(first, signal.SIGKILL)
        await until(lambda: opening_of(batcher).pool.fleet.is_failing)
        assert (batcher.state, batcher.stats.workers_ready) == ("open", 1)
        assert await batcher.process_batched("fine") == "fine"
        os.kill(second, signal.SIGKILL)
        await until(lambda: batcher.state == "broken")
        assert isinstance(await outcome(call(batcher, "fine")), NotReadyError)


async def test_returned_worker_serves_after_neighbour_gives_up(tmp_path: Path) -> None:
    """Fault F14: it is back after the window, and serves on when its neighbour is given up."""
    needed = tmp_path / "weights"
    needed.touch()
    settings: dict[str, Any] = {"num_workers": 2, "max_restarts": 0, "restart_window": 0.2}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **settings) as batcher:
        pool = opening_of(batcher).pool

        def kill(index: int) -> None:
            (handle,) = [handle for handle in [*pool.workers.values()] if handle.index == index]
            handle.kill()

        kill(0)
        await until(lambda: pool.fleet.replicas[0].is_given_up)
        await until(lambda: batcher.stats.workers_ready == 2)
        needed.unlink()
        kill(1)
        await until(lambda: pool.fleet.replicas[1].is_given_up)
        assert batcher.state == "open"
        assert await batcher.process_batched("fine") == "fine"


async def test_late_model_timeout_ends_worker_with_traceback(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It ends the worker, which says why."""
    async with DynBatcher(AlarmedLate) as batcher:
        assert await batcher.process_batched(1) == 1
        await until(lambda: batcher.stats.restarts == 1)
    assert "TimeoutError: infer took too long" in capfd.readouterr().err
    assert "ended with exit code 1" in caplog.text
