"""The number of workers while a batcher runs: changed by `reconfigure`, or by the load."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from models.loading import NeedsFile
from models.ordinary import Gated, GatedOnLoad, Slow
from models.versions import Versioned
from openings import host_of, opening_of, own_directory, pids_of
from recorder import Load, Recorder
from shared_client import make
from waits import LIMIT, Gate, Watch, assert_balance, call, until

from fast_batcher import ConfigurationError, DynBatcher

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:num_workers=:RuntimeWarning"),
]

__all__ = ["own_directory"]


async def test_changing_worker_number_loses_no_request() -> None:
    changes = Recorder()
    batcher = DynBatcher(Slow, 2, model_args=(0.001,), observers=[changes])
    async with batcher:
        (first,) = pids_of(batcher)
        load = Load(batcher, 12)
        batcher.reconfigure(num_workers=3)
        assert batcher.stats.num_workers == 3
        await until(lambda: batcher.stats.workers_ready == 3)
        batcher.reconfigure(num_workers=2)
        batcher.reconfigure(num_workers=1)
        assert batcher.stats.num_workers == 1
        await until(lambda: pids_of(batcher) == [first])
        # The index of a removed worker is free again.
        batcher.reconfigure(num_workers=2)
        await until(lambda: batcher.stats.workers_ready == 2)
        await load.end()
        assert load.fewest_ready >= 1
        assert sorted(changes.workers("ready")) == [0, 1, 1, 2]
        assert changes.workers("removed") == [2, 1]
        stats = assert_balance(batcher)
        assert (stats.failed, stats.expired, stats.rejected, stats.restarts) == (0, 0, 0, 0)


async def test_a_removed_worker_finishes_its_batches(gate: Gate) -> None:
    async with DynBatcher(Gated, 1, model_args=(gate.path,), num_workers=2) as batcher:
        calls = [call(batcher, number) for number in range(2)]
        visits = [await gate.visit(), await gate.visit()]
        batcher.reconfigure(num_workers=1)
        await until(lambda: batcher.stats.workers_ready == 1)
        for visit in visits:
            visit.let_on()
        assert await asyncio.gather(*calls) == [0, 1]
        await until(lambda: len(pids_of(batcher)) == 1)
        assert_balance(batcher)


async def test_loading_worker_ends_if_not_wanted(gate: Gate) -> None:
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,))
    opening = asyncio.create_task(batcher.open())
    (await gate.visit()).let_on()
    await opening
    batcher.reconfigure(num_workers=2)
    loading = await gate.visit()
    with Watch([loading.pid]) as watch:
        batcher.reconfigure(num_workers=1)
        await watch.until_dead()
    assert await batcher.process_batched("fine") == "fine"
    assert (batcher.stats.workers_ready, batcher.stats.restarts) == (1, 0)
    await batcher.aclose()


@pytest.mark.parametrize("kept", [0, 1])
async def test_opening_ends_with_the_workers_that_are_wanted(gate: Gate, kept: int) -> None:
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,), num_workers=2)
    opening = asyncio.create_task(batcher.open())
    visits = [await gate.visit(), await gate.visit()]
    index_of = {worker.pid: worker.index for worker in opening_of(batcher).pool.workers.values()}
    (first,) = [visit for visit in visits if index_of[visit.pid] == kept]
    first.let_on()
    await until(lambda: batcher.stats.workers_ready == 1)
    assert batcher.state == "opening"
    batcher.reconfigure(num_workers=1)
    await opening
    await until(lambda: pids_of(batcher) == [first.pid])
    await batcher.aclose()


async def test_worker_number_changes_after_a_reload(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    version = f"waits {weights}"
    async with DynBatcher(Versioned, model_args=("one",)) as batcher:
        reload = asyncio.create_task(batcher.reload(model_args=(version,)))
        await until(lambda: len(pids_of(batcher)) == 2)
        batcher.reconfigure(num_workers=2)
        assert batcher.stats.num_workers == 2
        weights.touch()
        await reload
        await until(lambda: batcher.stats.workers_ready == 2)
        answers = await asyncio.gather(*(batcher.process_batched(None) for _ in range(40)))
        assert {answered_by for answered_by, _ in answers} == {version}


async def test_a_worker_that_is_not_ready_is_removed_first(tmp_path: Path) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    options: dict[str, Any] = {"num_workers": 2, "max_restarts": 0, "restart_window": LIMIT}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **options) as batcher:
        pool = opening_of(batcher).pool
        index_of = {worker.index: worker for worker in pool.workers.values()}
        needed.unlink()
        index_of[0].kill()
        await until(lambda: pool.fleet.replicas[0].is_given_up)
        batcher.reconfigure(num_workers=1)
        await until(lambda: list(pool.fleet.replicas) == [1])
        assert await batcher.process_batched("fine") == "fine"
        assert (batcher.state, batcher.stats.workers_ready) == ("open", 1)
        assert pids_of(batcher) == [index_of[1].pid]
        needed.touch()
        await batcher.reload()
        # The index of the removed worker is free again.
        batcher.reconfigure(num_workers=2)
        await until(lambda: batcher.stats.workers_ready == 2)
        assert sorted(worker.index for worker in pool.workers.values()) == [0, 1]
        assert batcher.stats.restarts == 0


async def test_a_further_worker_revives_a_broken_batcher(tmp_path: Path) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    options: dict[str, Any] = {"max_restarts": 0, "restart_window": LIMIT}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **options) as batcher:
        (worker,) = opening_of(batcher).pool.workers.values()
        worker.kill()
        await until(lambda: batcher.state == "broken")
        batcher.reconfigure(num_workers=2)
        await until(lambda: batcher.state == "open")
        assert await batcher.process_batched("fine") == "fine"


async def test_additional_worker_failing_to_load_affects_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    options: dict[str, Any] = {"max_restarts": None, "restart_backoff": 0.01}
    async with DynBatcher(NeedsFile, model_args=(str(needed),), **options) as batcher:
        needed.unlink()
        batcher.reconfigure(num_workers=2)
        await until(lambda: "could not load NeedsFile" in caplog.text)
        assert (batcher.state, batcher.is_ready) == ("open", True)
        assert await batcher.process_batched("fine") == "fine"
        needed.touch()
        await until(lambda: batcher.stats.workers_ready == 2)
        assert batcher.stats.restarts == 0


def test_number_changed_between_loop_runs_applies() -> None:
    loop = asyncio.new_event_loop()
    batcher = DynBatcher(Slow, model_args=(0.0,))
    loop.run_until_complete(batcher.open())
    batcher.reconfigure(num_workers=2)
    loop.run_until_complete(until(lambda: batcher.stats.workers_ready == 2))
    loop.run_until_complete(batcher.aclose())
    loop.close()


async def test_devices_give_their_number_of_workers() -> None:
    async with DynBatcher(Slow, model_args=(0.0,), devices="cpu") as batcher:
        batcher.reconfigure(num_workers=1, max_batch_size=4)
        with pytest.raises(ConfigurationError, match="open a batcher with other devices"):
            batcher.reconfigure(num_workers=2, max_batch_size=8)
        assert batcher.stats.num_workers == 1
        assert batcher._settings.max_batch_size == 4


# Shared.


@pytest.mark.usefixtures("own_directory")
async def test_the_host_changes_the_number_for_all_processes() -> None:
    first, other = [make("ordinary:Slow", {}, [0.0]) for _ in range(2)]
    async with first, other:
        first.reconfigure(num_workers=2)
        await until(lambda: other.stats.workers_ready == other.stats.num_workers == 2)
        # The process that changes another setting does not know the number.
        other.reconfigure(max_queue_size=1)
        assert await other.process_batched(1) == 1
        await until(lambda: other.stats.completed == 1)
        assert other.stats.num_workers == 2
        first.reconfigure(num_workers=1)
        await until(lambda: other.stats.workers_ready == other.stats.num_workers == 1)
        assert await first.process_batched(1) == 1


@pytest.mark.usefixtures("own_directory")
async def test_the_last_change_counts_after_the_death_of_the_host() -> None:
    first, other = [make("ordinary:Slow", {"num_workers": 2}, [0.0]) for _ in range(2)]
    async with first, other:
        first.reconfigure(num_workers=3, max_batch_size=4)
        await until(lambda: other.stats.num_workers == 3)
        other.reconfigure(num_workers=1)
        await until(lambda: first.stats.num_workers == 1)
        for _ in range(3):
            before = host_of(first)
            os.kill(before, signal.SIGKILL)
            for batcher in (first, other):
                assert await batcher.process_batched(1) == 1
            await until(lambda: first.stats.num_workers == other.stats.num_workers == 1)
            for batcher in (first, other):
                assert batcher.settings["num_workers"] == (1, "reconfigure")
                assert batcher.settings["max_batch_size"] == (4, "reconfigure")
            assert host_of(first) == host_of(other) != before


@pytest.mark.usefixtures("own_directory")
async def test_a_process_that_opens_again_joins_the_host_of_the_others() -> None:
    first, other = [make("ordinary:Slow", {}, [0.0]) for _ in range(2)]
    async with first:
        async with other:
            other.reconfigure(max_queue_size=7)
        first.reconfigure(num_workers=2)
        # Before it opens; the others hear of it then.
        other.reconfigure(max_batch_size=5)
        async with other:
            assert host_of(other) == host_of(first)
            await until(lambda: first.settings["max_batch_size"].value == 5)
            await until(lambda: other.settings["num_workers"].value == 2)
            for batcher in (first, other):
                found = [batcher.settings[name].value for name in ("max_queue_size", "num_workers")]
                assert found == [7, 2]
            assert await other.process_batched(1) == 1


@pytest.mark.usefixtures("own_directory")
async def test_the_last_change_counts_whatever_host_it_was_made_in() -> None:
    first, other = [make("ordinary:Slow", {}, [0.0]) for _ in range(2)]
    async with first:
        for size in (11, 12, 13):
            first.reconfigure(max_batch_size=size)
        first.reconfigure(max_queue_size=7)
    # The host has ended; the next one has only heard of fewer changes.
    async with other:
        other.reconfigure(max_batch_size=40)
        async with first:
            await until(lambda: first.settings["max_batch_size"].value == 40)
            await until(lambda: other.settings["max_queue_size"].value == 7)


@pytest.mark.usefixtures("own_directory")
async def test_a_change_that_no_host_has_confirmed_goes_to_the_next() -> None:
    async with make("ordinary:Slow", {}, [0.0]) as batcher:
        os.kill(host_of(batcher), signal.SIGSTOP)
        batcher.reconfigure(num_workers=2)
        os.kill(host_of(batcher), signal.SIGKILL)
        assert await batcher.process_batched(1) == 1
        await until(lambda: batcher.stats.num_workers == 2)
        assert batcher.settings["num_workers"] == (2, "reconfigure")


# A range.


async def test_other_changes_do_not_delay_a_further_worker() -> None:
    batcher = DynBatcher(Slow, 4, model_args=(0.05,), num_workers=(1, 2))
    async with batcher:
        load = Load(batcher, 40)
        size = 1000
        async with asyncio.timeout(LIMIT):
            while batcher.stats.workers_ready < 2:
                size += 1
                batcher.reconfigure(max_queue_size=size)
                await batcher.process_batched(None)
        await load.end()


async def test_a_backlog_starts_a_further_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fast_batcher")
    batcher = DynBatcher(Slow, 4, model_args=(0.05,), num_workers=(1, 2), name="slow")
    async with batcher:
        assert (batcher.stats.num_workers, batcher.state) == (1, "open")
        # Two seconds of work wait at any moment.
        load = Load(batcher, 40)
        await until(lambda: batcher.stats.workers_ready == 2)
        await load.end()
        assert batcher.stats.num_workers == 2
        stats = assert_balance(batcher)
        assert (stats.failed, stats.expired, stats.rejected, stats.restarts) == (0, 0, 0, 0)
        assert stats.backlog == 0.0
        # Another range, and a fixed number.
        batcher.reconfigure(num_workers=(3, 4))
        assert batcher.stats.num_workers == 3
        batcher.reconfigure(num_workers=1)
        await until(lambda: len(pids_of(batcher)) == 1)
    (line,) = [text for text in caplog.messages if "instead of" in text]
    assert line.startswith("slow: 2 workers instead of 1: the backlog is ")
