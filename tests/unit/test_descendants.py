"""Processes that a model has started: they end with its worker, if they are of its session."""

import asyncio
import os
import signal
from typing import Any

import pytest
from models.children import Executes, StartsProcesses
from openings import opening_of
from waits import LIMIT, Watch, one_loop

from fast_batcher import DynBatcher

pytestmark = [pytest.mark.anyio, one_loop, pytest.mark.slow]

COMMANDS = {
    "a child": "echo $$; exec sleep 1000",
    "one that ignores SIGTERM": "trap '' TERM; echo $$; exec sleep 1000",
    "a grandchild": "sleep 1000 & echo $!; wait",
}
commands = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


async def close(batcher: DynBatcher[Any, Any]) -> None:
    async with asyncio.timeout(LIMIT):
        await batcher.aclose()


async def test_closing_ends_processes_of_a_models_executor() -> None:
    batcher = DynBatcher(Executes, stop_timeout=10 * LIMIT)
    pids = await batcher.process_batched(None)
    assert len(pids) == 2
    with Watch(pids) as processes:
        await close(batcher)
        assert processes.survivors(LIMIT) == []


@commands
async def test_children_of_model_end_with_worker(command: str) -> None:
    batcher = DynBatcher(StartsProcesses, stop_timeout=10 * LIMIT)
    pid = await batcher.process_batched(command)
    with Watch([pid]) as process:
        await close(batcher)
        assert process.survivors(LIMIT) == []


@commands
async def test_children_of_model_end_with_killed_worker(command: str) -> None:
    async with DynBatcher(StartsProcesses) as batcher:
        pid = await batcher.process_batched(command)
        with Watch([pid]) as process:
            (handle,) = opening_of(batcher).pool.alive()
            handle.kill()
            await process.until_dead()


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
async def test_children_in_their_own_session_survive(is_killed: bool) -> None:
    batcher = DynBatcher(StartsProcesses, model_kwargs={"in_own_session": True})
    pid = await batcher.process_batched(COMMANDS["a child"])
    with Watch([pid]) as process:
        if is_killed:
            (handle,) = opening_of(batcher).pool.alive()
            handle.kill()
        await close(batcher)
        assert process.survivors(0.0) == [pid]
        os.kill(pid, signal.SIGKILL)
        assert process.survivors(LIMIT) == []
