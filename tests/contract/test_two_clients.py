"""Two processes, or two batchers of one process, feed the workers of one host."""

import asyncio
import itertools
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import psutil
import pytest
from memory_files import memory_of
from models.large import digest
from models.shared import Batches
from openings import host_of, own_directory
from programs import run_command
from shared_client import client, decode, make
from waits import ONE_LOOP, Gate, Watch, call, outcome, turns, until

from fast_batcher import ConfigurationError, DynBatcher
from fast_batcher._host.client import RemoteOpening
from fast_batcher._host.protocol import MAX_RANGES
from fast_batcher._shared_memory.inputs import Slabs

__all__ = ["own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("own_directory")]


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return ONE_LOOP


# Batches leave when they are full.
TOGETHER: dict[str, Any] = {"policy": "fixed", "max_delay": 1000.0, "timeout": None}


async def test_two_processes_share_batches_and_no_answers(gate: Gate) -> None:
    arguments = "shared:Batches", {**TOGETHER, "max_batch_size": 8, "grouped": True}, [gate.path]
    with client(*arguments) as other:
        assert await other.receive() == "open"
        async with make(*arguments) as batcher:
            for first in range(3):
                mine = [("group", first, number) for number in range(4)]
                theirs = [("group", first + 100, number) for number in range(4)]
                other.send(*theirs)
                outputs = await asyncio.gather(*map(batcher.process_batched, mine))
                told = [[[*map(tuple, one)]][0] for one in await other.receive()]
                assert {*map(tuple, outputs[0])} == {*mine, *theirs}
                assert outputs == told == [outputs[0]] * 4


async def test_two_batchers_of_one_process_share_workers() -> None:
    batchers = [make("large:Digests", {"max_batch_size": 16}, []) for _ in range(2)]
    async with batchers[0], batchers[1]:
        pids = await asyncio.gather(*[one.process_batched(b"whereabouts") for one in batchers])
        assert pids[0] == pids[1]
        sizes = [10, 70_000, 2_000_000] * 4
        for _ in range(3):
            arrays = [[np.random.default_rng().bytes(size) for size in sizes] for _ in batchers]
            inputs = [[np.frombuffer(one, np.uint8) for one in several] for several in arrays]
            calls = [
                call(batcher, one)
                for batcher, several in zip(batchers, inputs, strict=True)
                for one in several
            ]
            assert await asyncio.gather(*calls) == [*map(digest, itertools.chain(*arrays))]
        await batchers[0].aclose()
        assert await batchers[1].process_batched(b"whereabouts") == pids[0]


async def test_worker_computes_rows_of_killed_process(gate: Gate) -> None:
    arguments = "shared:SumsAtGate", {"max_batch_size": 4}, [gate.path]
    rows = [["array", 200_000, number] for number in range(1, 5)]
    async with make(*arguments) as batcher:
        with client(*arguments) as other:
            assert await other.receive() == "open"
            other.send(["array", 200_000, 1])
            (await gate.visit()).let_on()
            assert await other.receive() == [200_000]
            other.send(*rows)
            visit = await gate.visit()
            os.kill(other.pid, signal.SIGKILL)
        # The next process has a range of its own, and fills it.
        with client(*arguments) as third:
            assert await third.receive() == "open"
            third.send(*[["array", 200_000, 9]] * 4)
            mine = call(batcher, decode(["array", 200_000, 7]))
            await turns()
            visit.let_on()
            seen: list[int] = []
            while len(seen) < 5:
                visit = await gate.visit()
                seen += visit.note
                visit.let_on()
            assert {*seen} == {1_400_000, 1_800_000}
            gate.close()
            assert await mine == 1_400_000
            assert await third.receive() == [1_800_000] * 4


async def test_stopped_process_blocks_no_other(gate: Gate) -> None:
    """Its input is needed once more, because the worker that had it is dead."""
    options: Any = {**TOGETHER, "max_batch_size": 2, "max_restarts": None, "restart_backoff": 0.01}
    arguments = "shared:SumsAtGate", options, [gate.path]
    with client(*arguments) as other:
        assert await other.receive() == "open"
        async with make(*arguments) as batcher:
            other.send(["array", 200_000, 1])
            mine = call(batcher, np.full(200_000, 2, np.uint8))
            (await gate.visit()).let_on()
            assert await other.receive() == [200_000]
            assert await mine == 400_000
            # Only the first large inputs are no rows.
            other.send(["array", 200_000, 1])
            mine = call(batcher, np.full(200_000, 2, np.uint8))
            visit = await gate.visit()
            assert sorted(visit.note) == [200_000, 400_000]
            os.kill(other.pid, signal.SIGSTOP)
            os.kill(visit.pid, signal.SIGKILL)
            (await gate.visit()).let_on()
            assert await mine == 400_000
            gate.close()
            os.kill(other.pid, signal.SIGCONT)
            # The second if the two were tried apart, and this one behind.
            assert await other.receive() in (["UnsendableValueError"], [200_000])


async def test_stopped_log_receiver_takes_no_memory() -> None:
    arguments: Any = "shared:Chatty", {"max_batch_size": 1}, []
    with client(*arguments) as other:
        assert await other.receive() == "open"
        async with make(*arguments) as batcher:
            assert await batcher.process_batched(0) == 0
            host = psutil.Process(host_of(batcher))
            os.kill(other.pid, signal.SIGSTOP)
            before = 0
            for _ in range(3):
                before = host.memory_info().rss
                assert len(await batcher.process_many(range(700))) == 700
            assert host.memory_info().rss - before < 10 * 2**20
            os.kill(other.pid, signal.SIGCONT)
            with Watch([host.pid]) as watch:
                await batcher.aclose()
                other.finish()
                await watch.until_dead()


async def test_unpicklable_key_fails_its_request_alone() -> None:
    async with DynBatcher(Batches, group_by=lambda value: value, shared=True) as batcher:
        calls = [call(batcher, value) for value in (1, lambda: None, 1)]
        one, refused, two = [await outcome(task) for task in calls]
    assert one == two == [1, 1]
    assert isinstance(refused, ConfigurationError)
    assert "cannot be pickled" in str(refused)


async def test_kept_array_keeps_its_memory() -> None:
    """Although its batcher is closed; and they get its memory once it is dropped."""
    async with make(*DIGESTS):
        async with make(*DIGESTS) as batcher:
            kept = batcher.allocate_input(200_000, "uint8")
            assert is_shared(kept)
        kept[:] = 1
        assert await count_shared(filling=2) == MAX_RANGES - 2
        assert kept.max() == 1
        del kept
        while await count_shared(filling=2) != MAX_RANGES - 1:
            pass


async def test_process_returns_memory_that_it_has_not_used_for_a_while() -> None:
    async with make(*DIGESTS) as batcher:
        array = np.ones(2_000_000, np.uint8)
        for _ in range(2):  # only the first large input is sent through the socket
            await batcher.process_batched(array)
        assert isinstance(batcher._opening, RemoteOpening)
        memory = batcher._opening._inputs.memory
        slabs = memory.slabs
        assert isinstance(slabs, Slabs)
        # The file has the memory of the host, too.
        used = memory_of(slabs._fd)

        def is_returned() -> bool:
            memory.rests_at = 0.0  # the while is over
            return memory_of(slabs._fd) <= used - array.nbytes

        await until(is_returned)
        assert await batcher.process_batched(array) == digest(bytes(array))


FORKS = """
import asyncio, json, os, signal, sys
sys.path[:] = json.loads(sys.argv[1])
from programs import run_command
from openings import host_of, own_directory
from shared_client import make, tell
async def main():
    batcher = make("large:Digests", {}, [])
    await batcher.open()
    kept = batcher.allocate_input(200_000, "uint8")
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        signal.pause()
    tell(child)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_array_in_forked_child_keeps_its_memory() -> None:
    """Although the process that allocated it is dead."""
    async with make(*DIGESTS):
        dead = run_command([sys.executable, "-c", FORKS, json.dumps(sys.path)])
        child = json.loads(dead.stdout)
        try:
            assert await count_shared(filling=2) == MAX_RANGES - 2
        finally:
            os.kill(child, signal.SIGKILL)
        while await count_shared(filling=2) != MAX_RANGES - 1:
            pass


DIGESTS: Any = "large:Digests", {}, []


async def count_shared(filling: int) -> int:
    """Open more clients than the host has ranges; return how many get one."""
    async with AsyncExitStack() as stack:
        arrays = []
        for _ in range(MAX_RANGES):
            batcher = await stack.enter_async_context(make(*DIGESTS))
            arrays.append(batcher.allocate_input(200_000, "uint8"))
            arrays[-1][:] = filling
        count = sum(map(is_shared, arrays))
        del arrays
        return count


def is_shared(array: Any) -> bool:
    return array.base is not None
