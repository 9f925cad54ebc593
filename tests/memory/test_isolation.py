"""Models that fail for some inputs, run out of memory, break their device or leak."""

import asyncio
import gc
import logging
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
from models.loading import NeedsFile
from models.ordinary import Leaks, Reuses, Whereabouts
from models.raising import BrokenAndRaises, FailsTogether, OutOfMemory, Says
from openings import opening_of
from waits import LIMIT, assert_balance, call, measured, outcome, until

from fast_batcher import DynBatcher, InferenceError
from fast_batcher._core import supervision
from fast_batcher._parent import pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


MEBI = 2**20


# --- failing batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 5, 31])
async def test_only_guilty_request_fails(position: int) -> None:
    """Fault F25."""
    async with DynBatcher(FailsTogether, 32) as batcher:
        values = ["good"] * 32
        values[position] = "bad"
        outcomes = [await outcome(task) for task in [call(batcher, value) for value in values]]
        bad = outcomes.pop(position)
        assert isinstance(bad, ValueError)
        assert isinstance(bad, InferenceError)
        # One call for all of them, and ten more to find one of thirty-two.
        assert max(outcomes) <= 11
        stats = assert_balance(batcher)
        assert (stats.failed, stats.completed, stats.restarts) == (1, 31, 0)


@pytest.mark.parametrize("setting", ["isolate_errors", "idempotent"])
async def test_failing_batch_fails_whole_without_isolation(setting: str) -> None:
    """Fault F25."""
    off: dict[str, Any] = {setting: False}
    async with DynBatcher(FailsTogether, 4, **off) as batcher:
        calls = [call(batcher, value) for value in ("good", "bad", "good")]
        assert all([isinstance(await outcome(task), ValueError) for task in calls])
        assert await batcher.process_batched("good") == 2


async def test_always_failing_model_is_called_boundedly_often() -> None:
    """Fault F25."""
    async with DynBatcher(BrokenAndRaises, 16) as batcher:
        calls = [call(batcher, number) for number in range(16)]
        assert all([isinstance(await outcome(task), ValueError) for task in calls])
        assert assert_balance(batcher).batches == 2 * 16 - 1


async def test_out_of_memory_halves_batch_and_sets_cap() -> None:
    """Fault F33."""
    async with DynBatcher(OutOfMemory, 32, model_args=(5,)) as batcher:
        calls = [call(batcher, number) for number in range(96)]
        sizes = [await outcome(task) for task in calls]
        assert all(1 <= size <= 5 for size in sizes)
        stats = assert_balance(batcher)
        assert (stats.failed, stats.restarts) == (0, 0)
        # The first batch found the cap; the others had it.
        assert stats.batch_sizes[32] <= 2
        assert await batcher.process_many(range(40)) == [4] * 40


async def test_single_input_out_of_memory_fails() -> None:
    """Fault F33."""
    async with DynBatcher(OutOfMemory, 4, model_args=(0,)) as batcher:
        error = await outcome(call(batcher, "large"))
        assert isinstance(error, MemoryError)
        assert isinstance(error, InferenceError)
        assert batcher.stats.restarts == 0


async def test_fatal_device_error_replaces_worker_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fault F32."""
    async with DynBatcher(Says, 4) as batcher:
        text = "CUDA error: device-side assert triggered"
        with measured(1.0, "a request after a fatal device error is answered by a new worker"):
            calls = [call(batcher, text), call(batcher, "mate")]
            for task in calls:
                error = await outcome(task)
                assert isinstance(error, InferenceError)
                assert text in str(error)
            assert await batcher.process_batched("fine") == "fine"
        stats = assert_balance(batcher)
        assert (stats.restarts, stats.failed, stats.batches) == (1, 2, 2)
    assert "its device cannot be used any more" in caplog.text


async def test_answers_are_snapshots_of_reused_buffers() -> None:
    """Fault F29."""
    async with DynBatcher(Reuses, 1) as batcher:
        answers = [await batcher.process_batched(number) for number in (1, 2, 3)]
        assert answers == [bytes([number]) * 8 for number in (1, 2, 3)]


# --- recycling ------------------------------------------------------------------------------------


async def test_recycling_delays_no_request() -> None:
    async with DynBatcher(Whereabouts, max_batches_per_worker=10) as batcher:
        pids: list[int] = []
        while len(set(pids)) < 4:
            pids.append(await batcher.process_batched(None))
            assert batcher.stats.workers_ready >= 1
        # Each has done its ten before another was begun.
        first = pids[0]
        assert pids[:10] == [first] * 10
        stats = assert_balance(batcher)
        assert (stats.failed, stats.releases.get("retry", 0)) == (0, 0)


async def test_leaking_worker_is_recycled_without_failures() -> None:
    """Fault F34."""
    settings: dict[str, Any] = {"max_rss_bytes": 200 * MEBI}
    async with DynBatcher(Leaks, 4, model_args=(10 * MEBI,), **settings) as batcher:
        pids: set[int] = set()
        async with asyncio.timeout(LIMIT):
            while len(pids) < 3:
                pids |= set(await asyncio.gather(*(call(batcher, None) for _ in range(8))))
        stats = assert_balance(batcher)
        assert (stats.failed, stats.expired) == (0, 0)


@pytest.mark.parametrize("way", ["recycled", "killed", "closed"])
async def test_ended_worker_needs_no_garbage_collection(way: str) -> None:
    """Its channel has a buffer of 256 KiB, and it may be minutes until the collector comes."""
    settings: dict[str, Any] = {"max_batches_per_worker": 1} if way == "recycled" else {}
    gc.collect()
    gc.disable()
    try:
        async with DynBatcher(Whereabouts, **settings) as batcher:
            worker = weakref.ref(next(iter(opening_of(batcher).pool.workers.values())))
            assert worker() is not None
            pid = await batcher.process_batched(None)
            if way == "killed":
                os.kill(pid, signal.SIGKILL)
            if way != "closed":
                await until(lambda: worker() is None)
        await until(lambda: worker() is None)
    finally:
        gc.enable()


async def test_worker_continues_if_successor_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    settings: dict[str, Any] = {"max_batches_per_worker": 2}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **settings) as batcher:
        needed.unlink()
        number = 0
        while "the worker before it goes on" not in caplog.text:
            assert await batcher.process_batched(number) == number
            number += 1
        assert await batcher.process_batched("on") == "on"
        assert (batcher.stats.workers_ready, batcher.stats.restarts) == (1, 0)


# --- idle workers ---------------------------------------------------------------------------------


@pytest.fixture
def fast_heartbeat(monkeypatch: pytest.MonkeyPatch) -> float:
    """A heart that beats often, so that a test need not wait ten seconds for it.

    An answer to a ping may take as long, on a busy machine too.
    """
    interval = 2.0
    monkeypatch.setattr(supervision, "HEARTBEAT_INTERVAL", interval)
    monkeypatch.setattr(pool, "HEARTBEAT_INTERVAL", interval)
    return interval


async def test_stopped_idle_worker_is_replaced(
    fast_heartbeat: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault F22."""
    async with DynBatcher(Whereabouts) as batcher:
        first = await batcher.process_batched(None)
        os.kill(first, signal.SIGSTOP)
        with measured(2 * fast_heartbeat + 1.0, "an idle worker that is stopped is replaced"):
            await until(lambda: batcher.stats.restarts == 1)
        assert await batcher.process_batched(None) != first
    assert f"it was idle and has not answered for {fast_heartbeat:g} seconds" in caplog.text


async def test_replacement_answers_requests_of_stopped_worker(fast_heartbeat: float) -> None:
    """Fault F22."""
    async with DynBatcher(Whereabouts) as batcher:
        first = await batcher.process_batched(None)
        os.kill(first, signal.SIGSTOP)
        await until(lambda: bool(opening_of(batcher).pool.heartbeat._pending))
        assert await batcher.process_batched(None) != first


async def test_worker_answering_pings_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Fault F22."""
    caplog.set_level(logging.WARNING)
    async with DynBatcher(Whereabouts) as batcher:
        first = await batcher.process_batched(None)
        beats = {opening_of(batcher).pool._heartbeat_timer}

        def has_beaten() -> bool:
            beats.add(opening_of(batcher).pool._heartbeat_timer)
            return len(beats) > 2

        await until(has_beaten)
        assert await batcher.process_batched(None) == first
    assert caplog.text == ""
