"""`reload`: workers whose model has other arguments, under load."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from models.versions import Versioned
from sessions import pids_of
from waits import ONE_LOOP, assert_balance, outcome, until

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DynBatcher,
    NotReadyError,
    WorkerStartupError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop: the pool decides."""
    return ONE_LOOP


class Load:
    """Callers that ask again as soon as they are answered."""

    def __init__(self, batcher: DynBatcher[Any, Any], callers: int = 8) -> None:
        self.batcher = batcher
        self.versions: Counter[str] = Counter()
        self.fewest_ready = batcher.stats.workers_ready
        self._is_over = False
        self._tasks = [asyncio.create_task(self._call()) for _ in range(callers)]

    async def _call(self) -> None:
        while not self._is_over:
            version, _ = await self.batcher.process_batched(None)
            self.versions[version] += 1
            self.fewest_ready = min(self.fewest_ready, self.batcher.stats.workers_ready)

    async def end(self) -> None:
        """End; raises the first error of a caller."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def versions_of(batcher: DynBatcher[Any, Any]) -> set[str]:
    """The versions of all idle workers."""
    answers = await asyncio.gather(*(batcher.process_batched(None) for _ in range(40)))
    return {version for version, _ in answers}


async def test_a_reload_under_load_loses_nothing_and_keeps_every_worker_ready() -> None:
    batcher = DynBatcher(
        Versioned, 4, num_workers=2, model_args=("one",), model_kwargs={"seconds": 0.002}
    )
    async with batcher:
        load = Load(batcher)
        await until(lambda: load.versions["one"] > 20)
        before = set(pids_of(batcher))
        await batcher.reload(model_args=("two",))
        count = load.versions["two"]
        await until(lambda: load.versions["two"] > count + 20)
        await load.end()
        assert load.fewest_ready == 2
        assert set(load.versions) == {"one", "two"}
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
async def test_a_reload_that_fails_loses_nothing_and_raises_the_reason(version: str) -> None:
    batcher = DynBatcher(Versioned, 4, num_workers=2, model_args=("one",), restart_backoff=0.01)
    async with batcher:
        load = Load(batcher)
        reason = "no weights for bad" if version == "bad" else "SIGKILL"
        for _ in range(2):
            with pytest.raises(WorkerStartupError, match=reason):
                await batcher.reload(model_args=(version,))
        await load.end()
        assert load.fewest_ready == 2
        assert set(load.versions) == {"one"}
        stats = assert_balance(batcher)
        assert (stats.failed, stats.expired, stats.generation) == (0, 0, 0)
        await batcher.reload(model_args=("two",))
        assert await versions_of(batcher) == {"two"}


async def test_workers_that_were_replaced_go_back_when_a_later_one_fails(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    batcher = DynBatcher(Versioned, 4, num_workers=2, model_args=("one",))
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


async def test_a_worker_that_dies_meanwhile_is_replaced_too() -> None:
    batcher = DynBatcher(Versioned, 4, num_workers=2, model_args=("one",), restart_backoff=0.01)
    async with batcher:
        load = Load(batcher)
        workers = pids_of(batcher)
        task = asyncio.create_task(batcher.reload(model_args=("two",)))
        await until(lambda: len(pids_of(batcher)) == 3)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        await task
        await load.end()
        await until(lambda: batcher.stats.workers_ready == 2)
        assert await versions_of(batcher) == {"two"}
        assert assert_balance(batcher).restarts > 0


async def test_a_caller_that_leaves_does_not_stop_a_reload(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    async with DynBatcher(Versioned, model_args=("one",)) as batcher:
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
async def test_a_reload_ends_with_its_batcher(end: str, tmp_path: Path) -> None:
    batcher = DynBatcher(Versioned, model_args=("one",))
    await batcher.open()
    task = asyncio.create_task(batcher.reload(model_args=(f"waits {tmp_path / 'weights'}",)))
    await until(lambda: len(pids_of(batcher)) == 2)
    if end == "aclose":
        await batcher.aclose()
    else:
        batcher.stop()
    assert isinstance(await outcome(task), BatcherClosedError)
    assert_balance(batcher)


@pytest.mark.parametrize("how", ["start failed", "restarts spent"])
async def test_reload_of_a_broken_batcher_opens_it(how: str) -> None:
    deaths: Any = {"max_restarts": 0, "restart_window": 600.0}
    version = "bad" if how == "start failed" else "first"
    batcher = DynBatcher(Versioned, model_args=(version,), **deaths)
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


async def test_one_reload_of_a_broken_batcher_runs_at_a_time() -> None:
    batcher = DynBatcher(Versioned, model_args=("bad",))
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


async def test_what_a_reload_refuses() -> None:
    batcher = DynBatcher(Versioned, auto_open=False)
    with pytest.raises(NotReadyError):
        await batcher.reload()
    async with batcher:
        with pytest.raises(ConfigurationError, match="model_args is of type str"):
            await batcher.reload(model_args="weights.pt")
    with pytest.raises(BatcherClosedError):
        await batcher.reload()
    async with DynBatcher(Versioned, shared=True) as shared:
        with pytest.raises(ConfigurationError, match="without shared=True only"):
            await shared.reload()
