"""`reload`: workers whose model has other arguments, under load."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from models.versions import Versioned
from openings import Make, host_of, make, own_directory, pids_of
from recorder import Load
from shared_client import client
from shared_client import make as shared
from waits import assert_balance, call, outcome, until

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DynBatcher,
    NotReadyError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.caching import LRUCache

__all__ = ["make", "own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def versions_of(batcher: DynBatcher[Any, Any]) -> set[str]:
    """The versions of all idle workers."""
    answers = await asyncio.gather(*(batcher.process_batched(None) for _ in range(40)))
    return {version for version, _ in answers}


async def test_reload_under_load_loses_no_request(make: Make) -> None:
    batcher = make(
        Versioned, 4, num_workers=2, model_args=("one",), model_kwargs={"seconds": 0.002}
    )
    async with batcher:
        load = Load(batcher)
        await until(lambda: load.answers["one"] > 20)
        before = set(pids_of(batcher))
        await batcher.reload(model_args=("two",))
        count = load.answers["two"]
        await until(lambda: load.answers["two"] > count + 20)
        await load.end()
        assert load.fewest_ready == 2
        assert set(load.answers) == {"one", "two"}
        await until(lambda: len(pids_of(batcher)) == 2)
        assert before.isdisjoint(pids_of(batcher))
        stats = assert_balance(batcher)
        found = stats.failed, stats.expired, stats.generation, stats.restarts
        assert found == (0, 0, 1, 0)
    # The next opening has the arguments of the reload, and the keyword arguments of before.
    async with batcher:
        assert await versions_of(batcher) == {"two"}


@pytest.mark.parametrize("version", ["bad", "deadly"])
@pytest.mark.filterwarnings("ignore:num_workers")
async def test_failed_reload_loses_no_request(make: Make, version: str) -> None:
    batcher = make(Versioned, 4, num_workers=2, model_args=("one",), restart_backoff=0.01)
    async with batcher:
        load = Load(batcher)
        reason = "no weights for bad" if version == "bad" else "SIGKILL"
        for _ in range(2):
            with pytest.raises(WorkerStartupError, match=reason):
                await batcher.reload(model_args=(version,))
        await load.end()
        assert load.fewest_ready == 2
        assert set(load.answers) == {"one"}
        stats = assert_balance(batcher)
        assert (stats.failed, stats.expired, stats.generation) == (0, 0, 0)
        await batcher.reload(model_args=("two",))
        assert await versions_of(batcher) == {"two"}


async def test_replaced_workers_roll_back_when_reload_fails(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    batcher = make(Versioned, 4, num_workers=2, model_args=("one",))
    async with batcher:
        load = Load(batcher)
        # The first replacement takes the file, so that the second one cannot load it.
        with pytest.raises(WorkerStartupError, match="FileNotFoundError"):
            await batcher.reload(model_args=(f"takes {weights}",))
        await load.end()
        await until(lambda: len(pids_of(batcher)) == 2)
        assert await versions_of(batcher) == {"one"}
        assert load.fewest_ready == 2
        stats = assert_balance(batcher)
        assert (stats.generation, stats.restarts) == (0, 0)


async def test_worker_death_during_reload_is_repaired(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    batcher = make(Versioned, 4, num_workers=2, model_args=("one",), restart_backoff=0.01)
    async with batcher:
        load = Load(batcher)
        workers = pids_of(batcher)
        task = asyncio.create_task(batcher.reload(model_args=(f"waits {weights}",)))
        await until(lambda: len(pids_of(batcher)) == 3)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: batcher.stats.restarts > 0)
        weights.touch()
        await task
        await load.end()
        await until(lambda: batcher.stats.workers_ready == 2)
        assert await versions_of(batcher) == {f"waits {weights}"}
        assert_balance(batcher)


async def test_cancelled_call_does_not_stop_reload(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    async with make(Versioned, model_args=("one",)) as batcher:
        task = asyncio.create_task(batcher.reload(model_args=(f"waits {weights}",)))
        await until(lambda: len(pids_of(batcher)) == 2)
        with pytest.raises(ConfigurationError, match="a reload runs; wait for its end"):
            await batcher.reload(model_args=("three",))
        task.cancel()
        await outcome(task)
        weights.touch()
        await until(lambda: batcher.stats.generation == 1)
        assert await versions_of(batcher) == {f"waits {weights}"}


@pytest.mark.parametrize("end", ["aclose", "stop"])
@pytest.mark.parametrize("has_begun", [False, True], ids=["called", "begun"])
async def test_a_reload_ends_with_its_batcher(
    make: Make, end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, has_begun: bool
) -> None:
    batcher = make(Versioned, model_args=("one",))
    await batcher.open()
    workers = pids_of(batcher)
    await versions_of(batcher)
    task = asyncio.create_task(batcher.reload(model_args=(f"waits {tmp_path / 'weights'}",)))
    await asyncio.sleep(0)  # the call has made the task of the reload, which has not run
    if has_begun:
        await until(lambda: len(pids_of(batcher)) == 2)
        workers = pids_of(batcher)
    if end == "aclose":
        await batcher.aclose()
    else:
        batcher.stop()
    assert not any(map(psutil.pid_exists, workers))
    assert isinstance(await outcome(task), BatcherClosedError)
    assert assert_balance(batcher).completed == 40
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_stop_ends_the_opening_of_a_broken_batcher(make: Make) -> None:
    batcher = make(Versioned, model_args=("bad",))
    assert isinstance(await outcome(asyncio.create_task(batcher.open())), WorkerStartupError)
    opening = asyncio.create_task(batcher.open())
    await asyncio.sleep(0)  # it waits for the end of the broken session
    batcher.stop()
    assert isinstance(await outcome(opening), BatcherClosedError)
    assert batcher.state == "closed"


def test_closed_event_loop_ends_a_reload(tmp_path: Path) -> None:
    """The program keeps the task of the reload, which its loop has left behind."""
    batcher: DynBatcher[Any, Any] = DynBatcher(Versioned, num_workers=2, model_args=("one",))
    kept: list[Any] = []

    async def begin() -> None:
        await batcher.open()
        args = (f"waits {tmp_path / 'weights'}",)
        kept.append(asyncio.create_task(batcher.reload(model_args=args)))
        await until(lambda: len(pids_of(batcher)) == 3)

    async def go_on() -> None:
        assert await versions_of(batcher) == {"one"}
        await batcher.reload(model_args=("three",))
        assert await versions_of(batcher) == {"three"}
        assert batcher.stats.generation == 1
        await batcher.aclose()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(go_on())


@pytest.mark.parametrize("how", ["start failed", "restarts spent"])
async def test_reload_of_a_broken_batcher_opens_it(make: Make, how: str) -> None:
    deaths: Any = {"max_restarts": 0, "restart_window": 600.0}
    version = "bad" if how == "start failed" else "first"
    batcher = make(Versioned, model_args=(version,), **deaths)
    try:
        if how == "start failed":
            await outcome(asyncio.create_task(batcher.open()))
        else:
            await batcher.open()
            os.kill(pids_of(batcher)[0], signal.SIGKILL)
        await until(lambda: batcher.state == "broken")
        with pytest.raises(WorkerStartupError, match="no weights for bad again"):
            await batcher.reload(model_args=("bad again",))
        assert (batcher.state, batcher.stats.generation) == ("broken", 0)
        await batcher.reload(model_args=("good",))
        assert await versions_of(batcher) == {"good"}
        assert batcher.stats.generation == 1
        assert_balance(batcher)
    finally:
        await batcher.aclose()


async def test_broken_batcher_reloads_one_at_a_time(make: Make) -> None:
    batcher = make(Versioned, model_args=("bad",))
    try:
        await outcome(asyncio.create_task(batcher.open()))
        both = [
            asyncio.create_task(batcher.reload(model_args=("bad again",))),
            asyncio.create_task(batcher.reload(model_args=("good",))),
        ]
        first, second = [await outcome(one) for one in both]
        assert isinstance(first, WorkerStartupError)
        assert isinstance(second, ConfigurationError)
        assert (batcher.state, batcher.stats.generation) == ("broken", 0)
        await batcher.reload(model_args=("good",))
        assert await versions_of(batcher) == {"good"}
    finally:
        await batcher.aclose()


async def test_reload_rejects_invalid_calls(make: Make) -> None:
    batcher = make(Versioned, auto_open=False)
    with pytest.raises(NotReadyError):
        await batcher.reload()
    async with batcher:
        with pytest.raises(ConfigurationError, match="model_args is of type str"):
            await batcher.reload(model_args="weights.pt")
    with pytest.raises(BatcherClosedError):
        await batcher.reload()


# --- the processes of a shared batcher ------------------------------------------------------------

ARGUMENTS: Any = "versions:Versioned", {"restart_backoff": 0.01}, ["one"]


@pytest.mark.usefixtures("own_directory")
async def test_all_processes_follow_a_reload() -> None:
    with client(*ARGUMENTS) as other:
        assert await other.receive() == "open"
        async with shared(*ARGUMENTS) as batcher, shared(*ARGUMENTS) as second:
            await batcher.reload(model_args=("two",))
            other.send(None)
            assert (await other.receive())[0][0] == "two"
            with client(*ARGUMENTS) as later:
                assert await later.receive() == "open"
                later.send(None)
                assert (await later.receive())[0][0] == "two"
            await until(lambda: second.stats.generation == 1)
            # It keeps the positional arguments of the reload.
            await second.reload(model_kwargs={"seconds": 0.001})
            assert await versions_of(batcher) == {"two"}
            assert second.stats.generation == 2


@pytest.mark.usefixtures("own_directory")
async def test_cache_of_another_process_follows_a_reload() -> None:
    options = {**ARGUMENTS[1], "cache": LRUCache(9)}
    arguments = ARGUMENTS[0], options, ARGUMENTS[2]
    async with shared(*arguments) as batcher, shared(*arguments) as second:
        assert [(await second.process_batched(1))[0] for _ in range(2)] == ["one"] * 2
        await batcher.reload(model_args=("two",))
        await until(lambda: second.stats.generation == 1)
        assert [(await second.process_batched(1))[0] for _ in range(2)] == ["two"] * 2
        assert second.stats.cache_hits == 2


@pytest.mark.usefixtures("own_directory")
async def test_next_host_has_model_of_last_reload() -> None:
    async with shared(*ARGUMENTS) as batcher, shared(*ARGUMENTS) as second:
        with pytest.raises(WorkerStartupError):
            await second.reload(model_args=("bad",))
        await second.reload(model_args=("two",))
        with pytest.raises(WorkerStartupError):
            await second.reload(model_args=("bad",))
        for _ in range(2):
            os.kill(host_of(batcher), signal.SIGKILL)
            answers = await asyncio.gather(*[one.process_batched(0) for one in (batcher, second)])
            assert {version for version, _ in answers} == {"two"}
        assert batcher.stats.generation == second.stats.generation == 1


@pytest.mark.usefixtures("own_directory")
async def test_reload_whose_host_dies_fails_and_is_forgotten(tmp_path: Path) -> None:
    async with shared(*ARGUMENTS) as batcher:
        version = f"waits {tmp_path / 'weights'}"
        task = asyncio.create_task(batcher.reload(model_args=(version,)))
        await until(lambda: len(pids_of(batcher)) == 2)
        os.kill(host_of(batcher), signal.SIGKILL)
        assert isinstance(await outcome(task), WorkerLostError)
        assert await versions_of(batcher) == {"one"}
        assert batcher.stats.generation == 0
        await batcher.reload(model_args=("two",))
        assert await versions_of(batcher) == {"two"}


@pytest.mark.usefixtures("own_directory")
async def test_model_that_the_next_host_cannot_load_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    options = {**ARGUMENTS[1], "max_restarts": None}
    async with shared(ARGUMENTS[0], options, [f"takes {weights}"]) as batcher:
        os.kill(host_of(batcher), signal.SIGKILL)
        answer = call(batcher, None)
        await until(lambda: answer.done() or "FileNotFoundError" in caplog.text)
        weights.touch()
        assert (await answer)[0] == f"takes {weights}"
        assert batcher.state == "open"


@pytest.mark.usefixtures("own_directory")
async def test_reload_opens_broken_batchers_of_all_processes() -> None:
    arguments = *ARGUMENTS[:2], ["bad"]
    batchers = [shared(*arguments) for _ in range(2)]
    try:
        for batcher in batchers:
            await batcher.open(wait_ready=False)
        await until(lambda: {batcher.state for batcher in batchers} == {"broken"})
        await batchers[0].reload(model_args=("good",))
        await until(lambda: batchers[1].state == "open")
        for batcher in batchers:
            assert await versions_of(batcher) == {"good"}
            assert (batcher.stats.generation, batcher.start_error) == (1, None)
    finally:
        for batcher in batchers:
            await batcher.aclose()


@pytest.mark.parametrize("is_bad", [False, True])
@pytest.mark.usefixtures("own_directory")
async def test_last_reload_wins_over_process_that_missed_it(
    tmp_path: Path, *, is_bad: bool
) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    async with shared(*ARGUMENTS) as second:
        async with shared(*ARGUMENTS) as first:
            await first.reload(model_args=(f"takes {weights}",))
            await until(lambda: second.stats.generation == 1)
        # The host was killed before it had told this process.
        second._model.end_reload(second._model.first)
        second._ledger.counters.generation = 0
        os.kill(host_of(second), signal.SIGKILL)
        assert (await second.process_batched(None))[0] == "one"
        if not is_bad:
            weights.touch()
        async with first:
            await until(lambda: second.stats.generation == (2 if is_bad else 1))
            for batcher in (first, second):
                assert await versions_of(batcher) == {"one" if is_bad else f"takes {weights}"}
            assert first.stats.generation == second.stats.generation


@pytest.mark.usefixtures("own_directory")
async def test_host_with_reloaded_files_takes_further_processes(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("old")
    arguments = ARGUMENTS[0], ARGUMENTS[1], [str(weights)]
    async with shared(*arguments) as batcher:
        weights.write_text("longer")
        await batcher.reload()
        async with shared(*arguments) as later:
            assert host_of(later) == host_of(batcher)
