"""Large inputs of a process whose part of the shared memory is taken: they wait for room."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from openings import host_of, own_directory
from shared_client import make
from waits import LIMIT, ONE_LOOP, Gate, call, order_of_ends, outcome, turns

from fast_batcher import DeadlineExceededError, DynBatcher, QueueFullError

__all__ = ["own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("own_directory")]

SIZE = 200_000
# A process has a fourth of the memory, which has room for four of these arrays.
ROOM = 4
OPTIONS: Any = {"max_batch_size": 2, "max_shared_bytes": 4 * 2**20, "timeout": None}


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return ONE_LOOP


def array(filling: int) -> Any:
    return np.full(SIZE, filling, np.uint8)


@asynccontextmanager
async def open_batcher(gate: Gate, **options: Any) -> AsyncIterator[DynBatcher[Any, Any]]:
    """Open one whose process uses shared memory, as it does after the first large input."""
    async with make("shared:PlacesAtGate", {**OPTIONS, **options}, [gate.path]) as batcher:
        first = call(batcher, array(1))
        (await gate.visit()).let_on()
        assert await first == (SIZE, False)
        yield batcher


async def test_more_inputs_than_there_is_room_for_reach_the_worker_without_a_pickle(
    gate: Gate,
) -> None:
    async with open_batcher(gate) as batcher:
        calls = [call(batcher, array(number)) for number in range(5 * ROOM)]
        await gate.visit()
        gate.close()
        assert await asyncio.gather(*calls) == [(SIZE * one, True) for one in range(5 * ROOM)]


async def test_small_input_waits_for_no_room(gate: Gate) -> None:
    async with open_batcher(gate, max_batch_size=1) as batcher:
        calls = [call(batcher, array(1)) for _ in range(2 * ROOM)]
        visit = await gate.visit()
        small = call(batcher, np.ones(10, np.uint8), priority=1)
        await turns()
        for _ in range(3):  # two batches are sent ahead
            visit.let_on()
            visit = await gate.visit()
        assert await small == (10, False)
        assert not all(one.done() for one in calls[:ROOM])
        gate.close()
        assert await asyncio.gather(*calls) == [(SIZE, True)] * (2 * ROOM)


async def test_waiting_input_may_leave_or_be_late(gate: Gate) -> None:
    async with open_batcher(gate) as batcher:
        calls = [call(batcher, array(1)) for _ in range(ROOM)]
        await gate.visit()
        cancelled, late, last = (
            call(batcher, array(2)),
            call(batcher, array(3), timeout=0.05),
            call(batcher, array(4)),
        )
        await turns()
        cancelled.cancel()
        error = await outcome(late)
        assert isinstance(error, DeadlineExceededError)
        assert "shared memory had no room for its large input within its timeout" in str(error)
        gate.close()
        assert await asyncio.gather(*calls, last) == [(SIZE, True)] * ROOM + [(4 * SIZE, True)]
        assert isinstance(await outcome(cancelled), asyncio.CancelledError)


async def test_no_more_inputs_wait_than_a_queue_has_room_for(gate: Gate) -> None:
    async with open_batcher(gate, max_queue_size=ROOM) as batcher:
        calls = [call(batcher, array(1)) for _ in range(ROOM)]
        await gate.visit()
        calls += [call(batcher, array(1)) for _ in range(2 * ROOM)]
        await turns()
        gate.close()
        outcomes = [await outcome(one) for one in calls]
        assert outcomes[: 2 * ROOM] == [(SIZE, True)] * (2 * ROOM)
        for error in outcomes[2 * ROOM :]:
            assert isinstance(error, QueueFullError)
            assert "4 large inputs wait for room in this process's part of max_sh" in str(error)


async def test_smaller_input_does_not_overtake_one_that_waits(gate: Gate) -> None:
    async with open_batcher(gate, max_batch_size=1) as batcher:
        calls = [call(batcher, array(1)) for _ in range(ROOM)]
        larger = call(batcher, np.ones((ROOM - 1) * SIZE, np.uint8))
        (await gate.visit()).let_on()
        await calls[0]
        # There is room for this one now.
        smaller = call(batcher, array(1))
        ends = asyncio.create_task(order_of_ends(smaller, larger))
        await gate.visit()
        gate.close()
        assert await ends == [1, 0]
        assert await larger == ((ROOM - 1) * SIZE, True)
        await asyncio.gather(*calls)


async def test_order_of_arrival_is_kept_when_no_call_is_left_to_wait_for(gate: Gate) -> None:
    async with open_batcher(gate, max_batch_size=1) as batcher:
        calls = [call(batcher, array(1)) for _ in range(ROOM)]
        await gate.visit()
        first = call(batcher, array(1))
        await turns()
        for one in calls:  # the worker has their inputs
            one.cancel()
        second = call(batcher, array(1))
        ends = asyncio.create_task(order_of_ends(second, first))
        await asyncio.wait(calls)
        gate.close()
        assert await ends == [1, 0]


async def test_waiting_inputs_survive_the_host(gate: Gate) -> None:
    async with open_batcher(gate) as batcher:
        calls = [call(batcher, array(1)) for _ in range(3 * ROOM)]
        await gate.visit()
        host = psutil.Process(host_of(batcher))
        os.kill(host.pid, signal.SIGKILL)
        await gate.visit()  # of the next host's worker
        gate.close()
        assert await asyncio.gather(*calls) == [(SIZE, True)] * (3 * ROOM)


async def test_inputs_that_the_model_keeps_stop_no_other() -> None:
    """No room comes free again, so that the inputs go through the socket."""
    async with make("large:KeepsInputs", {**OPTIONS, "max_batch_size": 1}, []) as batcher:
        # From the first on, large inputs use shared memory.
        assert await batcher.process_batched(array(1)) == [SIZE]
        calls = [call(batcher, array(1)) for _ in range(3 * ROOM)]
        assert await calls[-1] == [SIZE] * (1 + 3 * ROOM)
        assert len(await asyncio.gather(*calls)) == 3 * ROOM


async def test_calls_that_left_while_they_waited_occupy_no_queue(gate: Gate) -> None:
    async with open_batcher(gate, max_queue_size=ROOM) as batcher:
        calls = [call(batcher, array(1)) for _ in range(2 * ROOM)]
        await gate.visit()
        for one in calls[-2:]:  # another waits before them
            one.cancel()
        await asyncio.wait(calls[-2:])
        later = [call(batcher, array(1)) for _ in range(2)]
        await turns()
        gate.close()
        assert await asyncio.gather(*calls[:-2], *later) == [(SIZE, True)] * (2 * ROOM)


async def test_share_whose_inputs_wait_leaves_room_for_another_share(gate: Gate) -> None:
    async with open_batcher(gate, max_queue_size=2 * ROOM) as batcher:
        calls = [call(batcher, array(1), share="a") for _ in range(ROOM)]
        await gate.visit()
        calls += [call(batcher, array(1), share="a") for _ in range(3 * ROOM)]
        other = call(batcher, array(2), share="b")
        await turns()
        gate.close()
        assert await outcome(other) == (2 * SIZE, True)
        outcomes = [await outcome(one) for one in calls]
        assert outcomes[: 2 * ROOM] == [(SIZE, True)] * (2 * ROOM)
        assert isinstance(outcomes[-1], QueueFullError)


async def test_running_inputs_do_not_count_as_bytes_of_the_queue(gate: Gate) -> None:
    async with open_batcher(gate, max_queue_bytes=ROOM * SIZE) as batcher:
        # A batch of two runs, and another was sent ahead.
        calls = [call(batcher, array(1)) for _ in range(ROOM)]
        await gate.visit()
        calls += [call(batcher, array(1)) for _ in range(ROOM)]
        gate.close()
        assert await asyncio.gather(*calls) == [(SIZE, True)] * (2 * ROOM)


async def test_inputs_do_not_wait_for_the_end_of_a_stream() -> None:
    """It comes when the reader has read all, and the reader may wait for another call before."""
    options = {**OPTIONS, "max_batch_size": 2 * ROOM, "stepped": True}
    async with make("stepped:Endless", options, []) as batcher, AsyncExitStack() as streams:
        # From the first on, large inputs use shared memory.
        for _ in range(2 * ROOM):
            async with asyncio.timeout(LIMIT):
                stream = await streams.enter_async_context(await batcher.stream(array(1)))
                assert await anext(stream) == SIZE
