"""Statistics and events of streams, with real workers."""

import asyncio
from typing import Any

import pytest
from models.base import Echo
from models.stepped import Counter, Plan
from sessions import Make, make_any, own_directory
from waits import both_loops, one_loop, until

from fast_batcher import DynBatcher

__all__ = ["make_any", "own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Longer than any test.
ENDLESS = 10**9


async def read(batcher: DynBatcher[Plan, list[Any]], plan: Plan) -> int:
    """Return the number of chunks of a stream."""
    return len([chunk async for chunk in await batcher.stream(plan)])


@both_loops
async def test_figures_of_streams(make_any: Make) -> None:
    async with make_any(Counter, num_workers=2, max_batch_size=4, model_args=(0.001,)) as batcher:
        await until(lambda: batcher.stats.places == 8)
        assert batcher.stats.chunks == batcher.stats.live_streams == 0
        assert batcher.stats.first_chunk_p50 is batcher.stats.chunk_gap_p95 is None
        streams = [await batcher.stream(Plan(f"p{number}", ENDLESS)) for number in range(3)]
        await until(lambda: batcher.stats.live_streams == 3)
        lengths = [2, 5, 9]
        plans = [Plan(f"q{length}", length) for length in lengths]
        assert await asyncio.gather(*[read(batcher, plan) for plan in plans]) == lengths
        await until(lambda: batcher.stats.completed == 3)
        stats = batcher.stats
        assert stats.chunks >= 3 + sum(lengths)
        assert sum(size * count for size, count in stats.batch_sizes.items()) == stats.chunks
        assert stats.queue_wait_p50 is not None
        assert stats.first_chunk_p50 is not None
        assert stats.first_chunk_p95 is not None
        assert stats.queue_wait_p50 < stats.first_chunk_p50 <= stats.first_chunk_p95
        assert stats.chunk_gap_p50 is not None
        assert stats.chunk_gap_p95 is not None
        assert 0.001 <= stats.chunk_gap_p50 <= stats.chunk_gap_p95
        for stream in streams:
            await stream.aclose()
        await until(lambda: batcher.stats.live_streams == 0)
        assert batcher.stats.places == 8
    assert (batcher.stats.places, batcher.stats.live_streams) == (0, 0)


@one_loop
async def test_streams_without_a_place_are_not_live() -> None:
    async with DynBatcher(Counter, workers="threads", max_batch_size=2) as batcher:
        streams = [asyncio.create_task(read(batcher, Plan("p", ENDLESS))) for _ in range(6)]
        await until(lambda: batcher.stats.submitted == 6)
        assert (batcher.stats.live_streams, batcher.stats.places) == (2, 2)
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        await until(lambda: batcher.stats.live_streams == 0)


@one_loop
async def test_other_models_have_no_figures_of_streams(make_any: Make) -> None:
    async with make_any(Echo) as batcher:
        assert await batcher.process_batched(1) == 1
        stats = batcher.stats
    for found in (stats, batcher.stats):
        assert (found.places, found.live_streams, found.chunks) == (None, 0, 0)
        assert found.first_chunk_p50 is found.chunk_gap_p50 is None
