"""Streams of a `SteppedModel` on actors: chunks, ends, large inputs, deaths."""

import asyncio

import numpy as np
import pytest
from models.stepped import Counter, Plan, Sums
from ray_nodes import RayCluster, needs_ray
from streams import read, whole
from waits import assert_balance, one_loop

from fast_batcher import DynBatcher, InferenceError, WorkerLostError
from fast_batcher.ray import RayWorkers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_ray, one_loop]


async def test_streams_join_and_leave_between_steps(cluster: RayCluster) -> None:
    plans = [Plan(f"p{number}", 1 + number % 9) for number in range(40)]
    async with DynBatcher(Counter, workers=RayWorkers(), max_batch_size=4) as batcher:
        found = await asyncio.gather(*[read(batcher, plan) for plan in plans])
        assert found == [*map(whole, plans)]
        assert await batcher.process_batched(Plan("a", 3)) == ["a:1", "a:2", "a:3"]
        *chunks, error = await read(batcher, Plan("f", 6, 3, "fail"))
        assert chunks == ["f:1", "f:2"]
        assert isinstance(error, InferenceError)
        # A caller that leaves frees its place.
        async with await batcher.stream(Plan("long", 10**9)) as stream:
            assert await anext(stream) == "long:1"
        assert await batcher.process_batched(Plan("balance", 1)) == [1]
        assert_balance(batcher)


async def test_large_inputs_of_streams(cluster: RayCluster) -> None:
    inputs = [np.full(300_000, at, "int64") for at in range(12)]
    async with DynBatcher(Sums, workers=RayWorkers(), max_batch_size=8) as batcher:
        found = await asyncio.gather(*[read(batcher, value) for value in inputs])
    assert found == [[300_000 * at] * 3 for at in range(12)]


async def test_streams_of_a_dead_actor(cluster: RayCluster) -> None:
    """A stream with chunks ends with an error behind them; the others begin again."""
    async with DynBatcher(Counter, workers=RayWorkers(), model_args=[0.002]) as batcher:
        running = asyncio.create_task(read(batcher, Plan("long", 10**9)))
        killer = asyncio.create_task(read(batcher, Plan("k", 9, 3, "kill")))
        for task in (running, killer):
            *chunks, error = await task
            assert isinstance(error, WorkerLostError)
            assert [chunk.partition(":")[2] for chunk in chunks] == [
                *map(str, range(1, 1 + len(chunks)))
            ]
        assert await read(batcher, Plan("p", 2)) == ["p:1", "p:2"]
        assert batcher.stats.restarts == 1


async def test_drain_lets_streams_end(cluster: RayCluster) -> None:
    batcher = await DynBatcher(Counter, workers=RayWorkers(), model_args=[0.005]).__aenter__()
    stream = await batcher.stream(Plan("p", 50))
    stopping = asyncio.create_task(batcher.aclose())
    assert [chunk async for chunk in stream] == whole(Plan("p", 50))
    await stopping
