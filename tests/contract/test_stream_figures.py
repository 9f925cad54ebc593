"""Statistics and events of streams, with real workers."""

import asyncio
from typing import Any

import pytest
from models.base import Echo
from models.stepped import Counter, Plan
from openings import Make, make_any, own_directory
from recorder import Recorder
from waits import LIMIT, both_loops, one_loop, until

from fast_batcher import DynBatcher, InferenceError, WorkerLostError
from fast_batcher.observing import (
    BatchAnswered,
    BatchDispatched,
    BatchLost,
    ChunkTimes,
    RequestEnded,
)

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
        await until(lambda: "4 places of a worker" in str(batcher.explain()))
        assert batcher.explain().advice.startswith("nothing to change")
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


# Events.


class Follower(Recorder):
    """Keeps the events of dispatches and of losses, too."""

    def batch_dispatched(self, event: BatchDispatched) -> None:
        self._keep(event)

    batch_lost = Recorder._keep


def check(chunks: ChunkTimes, count: int) -> None:
    """Check the times of a stream with so many chunks."""
    assert chunks.count == count
    assert chunks.arrived_at < chunks.first_at <= chunks.last_at
    assert chunks.first_seconds == chunks.first_at - chunks.arrived_at
    assert (chunks.mean_gap is None) is (count == 1)


def test_chunk_times_before_the_first_and_the_second_chunk() -> None:
    assert ChunkTimes(5.0).first_seconds is ChunkTimes(5.0).mean_gap is None
    one, three = ChunkTimes(5.0, 6.0, 6.0, 1), ChunkTimes(5.0, 6.0, 8.0, 3)
    assert (one.first_seconds, one.mean_gap) == (1.0, None)
    assert (three.first_seconds, three.mean_gap) == (1.0, 1.0)


@both_loops
async def test_the_end_of_a_stream_is_an_event_with_its_chunks(make_any: Make) -> None:
    recorder = Recorder()
    options: Any = {"observers": [recorder], "model_args": (0.001,)}
    async with make_any(Counter, **options) as batcher:
        assert await read(batcher, Plan("p", 3)) == 3
        assert await batcher.process_batched(Plan("w", 2)) == ["w:1", "w:2"]
        assert await read(batcher, Plan("e", 1, 1, "end")) == 0
        await until(lambda: len(recorder.answered) == 3)
        with pytest.raises(InferenceError):
            await read(batcher, Plan("f", 9, 3, "fail"))
        await until(lambda: len(recorder.answered) == 4)
        async with await batcher.stream(Plan("long", ENDLESS)) as stream:
            assert await anext(stream) == "long:1"
        await until(lambda: len(recorder.of(RequestEnded)) == 1)
    events = recorder.of(BatchAnswered)
    assert [(event.size, event.requests[0].outcome) for event in events] == [
        *[(1, "completed")] * 3,
        (1, "failed"),
    ]
    for event, count in zip(events, [3, 2, 0, 2], strict=True):
        if count:
            check(event.chunks, count)
        assert event.chunks.count == count
        assert event.dispatched_at <= event.began_at
        assert event.began_at + event.infer_seconds <= event.answered_at
        assert event.chunks.last_at <= event.answered_at
        (request,) = event.requests
        assert 0 <= request.queue_wait <= request.total - event.infer_seconds
    (left,) = recorder.of(RequestEnded)
    assert (left.outcome, left.reason) == ("cancelled", "running")
    check(left.chunks, left.chunks.count)
    assert left.chunks.first_seconds < left.wait


@one_loop
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
async def test_a_lost_stream_is_an_event_with_its_chunks(own_directory: None, shared: bool) -> None:
    follower = Follower(needs_context=True)
    options: Any = {"observers": [follower], "timeout": LIMIT, "shared": shared}
    async with DynBatcher(Counter, **options) as batcher:
        with pytest.raises(WorkerLostError):
            await read(batcher, Plan("k", 9, 3, "kill"))
        assert await read(batcher, Plan("p", 1)) == 1
        await until(lambda: len(follower.answered) == 1)
    (lost,) = follower.of(BatchLost)
    (ended,) = follower.of(RequestEnded)
    assert (lost.reason, ended.reason) == ("worker lost", "worker lost")
    assert lost.chunks == ended.chunks
    check(lost.chunks, 2)
    assert [event.is_stream for event in follower.of(BatchDispatched)] == [True, True]


@one_loop
async def test_events_of_other_models_have_no_chunks(make_any: Make) -> None:
    follower = Follower(needs_context=True)
    async with make_any(Echo, observers=[follower]) as batcher:
        assert await batcher.process_batched(1) == 1
        await until(lambda: len(follower.answered) == 1)
    (dispatched,) = follower.of(BatchDispatched)
    assert not dispatched.is_stream
    (answered,) = follower.of(BatchAnswered)
    assert answered.chunks is None
