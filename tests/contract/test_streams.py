"""Streams of a `SteppedModel`, with real workers: chunks, ends, faults, slow readers."""

import asyncio
import gc
import math
import os
import random
import signal
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from models.base import Echo
from models.ordinary import Slow
from models.stepped import (
    Counter,
    Crowded,
    Fixed,
    Growing,
    Large,
    Plan,
    Refused,
    Sized,
    Swelling,
)
from openings import PLACES, block_until_host_answers, every_place, host_of, opening_of
from streams import read, whole
from waits import LIMIT, SOON_IN_WORKER, assert_balance, both_loops, one_loop, outcome, turns, until

from fast_batcher import (
    BatcherClosedError,
    BatcherError,
    ConfigurationError,
    DeadlineExceededError,
    Done,
    DynBatcher,
    Grow,
    InferenceError,
    PoisonRequestError,
    QueueFullError,
    SlowReaderError,
    SteppedModel,
    Stream,
    StreamedModel,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher._core.scaling import PATIENCE
from fast_batcher._opening.streams import MOST_BUFFERED
from fast_batcher.caching import LRUCache
from fast_batcher.testing import BatcherKit, WorkerKind

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Tests that wait for seconds; threads have the same session as processes.
own_and_shared = pytest.mark.parametrize("place", [{}, {"shared": True}], ids=["own", "shared"])

# Longer than any test.
ENDLESS = 10**9


def is_full(stream: Stream[Any]) -> bool:
    """Return whether a stream has as many unread chunks as make it pause."""
    return len(stream._queue.chunks) >= MOST_BUFFERED


async def live(batcher: DynBatcher[Plan, list[Any]]) -> int:
    """Return the number of streams in the worker, besides the one that asks."""
    (balance,) = await batcher.process_batched(Plan("balance", 1))
    return int(balance) - 1


class EndlessWarmUp(Counter):
    """Its warm-up never ends."""

    def warmup_inputs(self) -> list[Plan]:
        return [Plan("endless", ENDLESS)]


@both_loops
@every_place
async def test_streams_join_and_leave_between_steps(place: Any) -> None:
    plans = [Plan(f"p{number}", 1 + number % 9) for number in range(40)]
    async with DynBatcher(Counter, **place, max_batch_size=4) as batcher:
        assert await asyncio.gather(*[read(batcher, plan) for plan in plans]) == [
            *map(whole, plans)
        ]
        await until(lambda: batcher.stats.completed == len(plans))
        stats = assert_balance(batcher)
    assert max(stats.batch_sizes) <= 4


@one_loop
@every_place
async def test_a_call_for_whole_answers_gets_all_chunks(place: Any) -> None:
    async with DynBatcher(Counter, **place) as batcher:
        assert await batcher.process_batched(Plan("a", 3)) == ["a:1", "a:2", "a:3"]
        assert await batcher.process_many([Plan("b", 1), Plan("c", 2)]) == [["b:1"], ["c:1", "c:2"]]


@one_loop
@every_place
async def test_none_is_no_chunk_and_done_alone_is_an_end(place: Any) -> None:
    async with DynBatcher(Counter, **place) as batcher:
        assert await read(batcher, Plan("n", 3, 2, "none")) == ["n:1", "n:3"]
        assert await read(batcher, Plan("e", 9, 2, "end")) == ["e:1"]
        assert await read(batcher, Plan("e", 9, 1, "end")) == []


@one_loop
@pytest.mark.parametrize(("what", "at"), [("join", 0), ("fail", 3), ("lambda", 3)])
async def test_a_faulty_stream_fails_alone(what: str, at: int) -> None:
    plans = [Plan(f"p{number}", 6) for number in range(3)]
    async with DynBatcher(Counter) as batcher:
        *others, faulty = await asyncio.gather(
            *[read(batcher, plan) for plan in [*plans, Plan("f", 6, at, what)]]
        )
        assert others == [*map(whole, plans)]
        assert faulty[:-1] == [f"f:{count}" for count in range(1, at)]
        assert isinstance(faulty[-1], InferenceError)
        assert isinstance(faulty[-1], Refused) or what == "lambda"
        assert await live(batcher) == 0


@one_loop
async def test_an_end_of_an_iteration_is_no_end_of_a_stream() -> None:
    async with DynBatcher(Counter) as batcher:
        *chunks, error = await read(batcher, Plan("s", 9, 3, "stop"))
        assert chunks == ["s:1", "s:2"]
        assert type(error) is InferenceError


@one_loop
@every_place
async def test_a_step_that_raises_ends_the_streams_of_that_step(place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        other = asyncio.create_task(_exhaust(await batcher.stream(Plan("long", ENDLESS))))
        *_, refused = await read(batcher, Plan("r", 9, 3, "raise"))
        assert isinstance(refused, Refused)
        assert isinstance(await outcome(other), Refused)
        assert await live(batcher) == 0
        assert await read(batcher, Plan("p", 2)) == ["p:1", "p:2"]


@one_loop
@every_place
@pytest.mark.parametrize("way", ["close", "drop", "cancel", "first", "with"])
async def test_a_caller_that_goes_leaves_the_next_step(way: str, place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS))
        assert await anext(stream) == "long:1"
        if way == "close":
            await stream.aclose()
        elif way == "cancel":
            task = asyncio.ensure_future(_exhaust(stream))
            await until(lambda: batcher.stats.batches > 5)
            task.cancel()
            await asyncio.wait([task])
        elif way == "first":
            first = asyncio.ensure_future(batcher.stream(Plan("silent", ENDLESS, 0, "silent")))
            await until(lambda: batcher.stats.running == 2)
            first.cancel()
            await asyncio.wait([first])
            await until(lambda: batcher.stats.running == 1)
            del stream
        elif way == "with":
            async with stream:
                pass
        else:
            del stream
            gc.collect()
            await turns()  # it leaves in the next turn
        await until(lambda: batcher.stats.running == 0)
        assert await live(batcher) == 0


@one_loop
@own_and_shared
async def test_a_cancelled_read_loses_no_chunk(place: Any) -> None:
    """A reader that waits with a limit gets the whole answer, however often it gives up."""
    plan = Plan("long", 2000)
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(plan)
        chunks: list[Any] = []
        gave_up = 0
        while len(chunks) < plan.length:
            read_one = asyncio.ensure_future(anext(stream))
            for _ in range(gave_up % 5):
                await asyncio.sleep(0)
            read_one.cancel()
            await asyncio.wait([read_one])
            if read_one.cancelled():
                gave_up += 1
            else:
                chunks.append(read_one.result())
        assert chunks == whole(plan)
        assert gave_up
        for _ in range(2):  # the normal end stays the normal end, also behind `aclose`
            assert [chunk async for chunk in stream] == []
            await stream.aclose()


@one_loop
@own_and_shared
@pytest.mark.parametrize("way", ["closed", "failed"])
async def test_reading_behind_an_early_end_raises(way: str, place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS, 9, "fail"))
        if way == "closed":
            await stream.aclose()
        else:
            with pytest.raises(Refused):
                await _exhaust(stream)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed before its end, or has raised"):
                await anext(stream)


@one_loop
async def test_a_stream_has_one_reader() -> None:
    async with DynBatcher(Counter, workers="threads", model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS, 1, "silent"))
        assert await anext(stream) == "long:1"
        reader = asyncio.create_task(_exhaust(stream))
        await asyncio.sleep(0)  # the reader waits now
        with pytest.raises(RuntimeError, match="another task waits"):
            await anext(stream)
        await stream.aclose()
        with pytest.raises(RuntimeError, match="closed before its end"):
            await reader


@every_place
def test_a_stream_can_be_closed_after_its_loop(place: Any) -> None:
    batcher = DynBatcher(Counter, **place, model_args=(0.001,))

    async def begin() -> Any:
        return await batcher.stream(Plan("long", ENDLESS))

    async def close(stream: Any) -> None:
        await stream.aclose()
        with pytest.raises(RuntimeError, match="closed before its end"):
            await anext(stream)

    stream = asyncio.run(begin())
    asyncio.run(close(stream))
    batcher.stop()
    assert_balance(batcher)


async def _exhaust(stream: Any, chunks: list[Any] | None = None) -> None:
    async for chunk in stream:
        if chunks is not None:
            chunks.append(chunk)


@both_loops
async def test_a_call_of_stream_is_a_coroutine() -> None:
    """For tasks, and for their cancellation."""
    async with DynBatcher(Counter, workers="threads", model_args=(0.001,)) as batcher:
        async with await asyncio.create_task(batcher.stream(Plan("task", 2))) as stream:
            assert [chunk async for chunk in stream] == ["task:1", "task:2"]
        cancelled = asyncio.create_task(batcher.stream(Plan("long", ENDLESS)))
        await turns(1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        call = batcher.stream(Plan("iterated", 2))
        with pytest.raises(TypeError, match="must be awaited"):
            async for _ in call:  # type: ignore[attr-defined]
                pass
        await until(lambda: batcher.stats.waiting + batcher.stats.running == 0)
        assert_balance(batcher)


@one_loop
@own_and_shared
async def test_a_slow_reader_pauses_its_stream_and_misses_nothing(place: Any) -> None:
    async with DynBatcher(Counter, **place, timeout=LIMIT, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", 3000))
        await until(lambda: is_full(stream))
        # Others are not hindered.
        assert await read(batcher, Plan("p", 3)) == ["p:1", "p:2", "p:3"]
        assert len(stream._queue.chunks) < 2000
        assert [chunk async for chunk in stream] == whole(Plan("long", 3000))


@one_loop
@own_and_shared
async def test_infer_timeout_does_not_end_a_paused_worker(place: Any) -> None:
    options: dict[str, Any] = {"timeout": LIMIT, "infer_timeout": 2.0, **place}
    async with DynBatcher(Counter, model_args=(0.001,), **options) as batcher:
        stream = await batcher.stream(Plan("long", 2000))
        await until(lambda: is_full(stream))
        async with DynBatcher(Counter, workers="threads", model_args=(3.0,)) as clock:
            await clock.process_batched(Plan("three seconds", 1))
        assert [chunk async for chunk in stream] == whole(Plan("long", 2000))
        assert batcher.stats.restarts == 0


@one_loop
async def test_infer_timeout_counts_again_when_a_paused_stream_is_read() -> None:
    """No timer is set while all streams of the worker are paused."""
    options: dict[str, Any] = {"infer_timeout": SOON_IN_WORKER, "stop_timeout": 0.2}
    async with DynBatcher(Counter, model_args=(0.001,), timeout=None, **options) as batcher:
        stream = await batcher.stream(Plan("hangs", ENDLESS, 2000, "hang"))
        await until(lambda: is_full(stream))
        session = opening_of(batcher)
        await until(lambda: session.scheduler.next_expiry == math.inf)
        for count in range(1, 2000):
            assert await anext(stream) == f"hangs:{count}"
            assert session._is_scheduled or not session.scheduler.is_poll_due
        with pytest.raises(DeadlineExceededError, match="infer_timeout"):
            await anext(stream)


@one_loop
@own_and_shared
async def test_a_stream_that_is_not_read_fails(place: Any) -> None:
    async with DynBatcher(Counter, **place) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS), timeout=2.0)
        await until(lambda: batcher.stats.expired == 1)
        assert await live(batcher) == 0
        with pytest.raises(SlowReaderError):
            await _exhaust(stream)


@one_loop
@own_and_shared
async def test_the_timeout_is_that_of_the_next_chunk(place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.08,)) as batcher:
        assert len(await read(batcher, Plan("p", 60), timeout=4.0)) == 60
    async with DynBatcher(Counter, **place, model_args=(1.0,)) as batcher:
        with pytest.raises(DeadlineExceededError):
            await batcher.stream(Plan("p", 9), timeout=0.5)


@one_loop
async def test_after_a_death_streams_without_chunks_begin_again_and_others_fail() -> None:
    async with DynBatcher(Counter, max_batch_size=2, model_args=(0.1,)) as batcher:
        outcomes = await asyncio.gather(
            read(batcher, Plan("k", 9, 3, "kill")),
            *[read(batcher, Plan(f"p{number}", 5)) for number in range(5)],
            batcher.process_batched(Plan("w", 5)),
        )
        assert outcomes[0][:2] == ["k:1", "k:2"]
        assert isinstance(outcomes[0][2], WorkerLostError)
        assert isinstance(outcomes[1][-1], WorkerLostError)
        assert outcomes[2:] == [
            *[whole(Plan(f"p{n}", 5)) for n in range(1, 5)],
            whole(Plan("w", 5)),
        ]


@one_loop
async def test_a_poisonous_request_fails_alone_if_others_have_no_chunk() -> None:
    async with DynBatcher(Counter, max_batch_size=8) as batcher:
        outcomes = await asyncio.gather(
            *[batcher.process_batched(Plan(f"p{number}", 50)) for number in range(5)],
            batcher.process_batched(Plan("k", 9, 0, "kill")),
            return_exceptions=True,
        )
    assert outcomes[:-1] == [whole(Plan(f"p{number}", 50)) for number in range(5)]
    assert isinstance(outcomes[-1], PoisonRequestError)


@one_loop
@every_place
async def test_draining_and_reloading_finish_streams(place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.002,)) as batcher:
        stream = await batcher.stream(Plan("p", 200))
        await batcher.reload()
        assert await read(batcher, Plan("q", 2)) == ["q:1", "q:2"]
        other = await batcher.stream(Plan("r", 100))
        batcher.begin_drain()
        with pytest.raises(BatcherClosedError):
            await batcher.stream(Plan("s", 1))
        closing = asyncio.create_task(batcher.aclose())
        assert [chunk async for chunk in stream] == whole(Plan("p", 200))
        assert [chunk async for chunk in other] == whole(Plan("r", 100))
        await closing


@one_loop
async def test_errors_before_the_first_chunk_come_from_the_call() -> None:
    async with DynBatcher(Counter, max_batch_size=1, max_queue_size=1) as batcher:
        streams = [await batcher.stream(Plan("long", ENDLESS))]
        tasks = [asyncio.create_task(batcher.stream(Plan("p", 1))) for _ in range(3)]
        for task in tasks[1:]:  # all came in one turn, before any could be sent
            with pytest.raises(QueueFullError):
                await task
        await streams[0].aclose()
        assert [chunk async for chunk in await tasks[0]] == ["p:1"]
    with pytest.raises(ConfigurationError, match="SteppedModel"):
        await DynBatcher(Slow).stream(1)


@one_loop
@own_and_shared
async def test_a_stream_that_would_wait_too_long_for_a_place_is_rejected(place: Any) -> None:
    options: dict[str, Any] = {"max_batch_size": 1, "model_args": (0.1,), "max_latency": 0.001}
    async with DynBatcher(Counter, **place, **options) as batcher:
        assert len(await read(batcher, Plan("known", 30))) == 30
        stream = await batcher.stream(Plan("long", ENDLESS))
        with pytest.raises(DeadlineExceededError, match="the first chunk would take") as caught:
            await batcher.stream(Plan("late", 1))
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 0
        batcher.reconfigure(max_latency=LIMIT)
        waiting = asyncio.create_task(read(batcher, Plan("in time", 1)))
        await until(lambda: batcher.stats.submitted == 3)
        await stream.aclose()
        assert await waiting == ["in time:1"]
        assert_balance(batcher)


def names(chunks: list[Any]) -> list[Any]:
    """Return the chunks of a `Fixed` without the size of their batch, and the type of an error."""
    return [
        chunk.partition(" ")[0] if isinstance(chunk, str) else Refused
        for chunk in chunks
        if isinstance(chunk, str | Refused)
    ]


@one_loop
@every_place
async def test_a_refused_fixed_batch_is_computed_one_by_one(place: Any) -> None:
    plans = [Plan("a", 3), Plan("b", 3, 0, "join"), Plan("c", 2), Plan("d", 4)]
    async with DynBatcher(Fixed, **place, max_batch_size=4) as batcher:
        outcomes = await asyncio.gather(*[read(batcher, plan) for plan in plans])
    assert [*map(names, outcomes)] == [whole(plans[0]), [Refused], *map(whole, plans[2:])]


@one_loop
@own_and_shared
@pytest.mark.parametrize("what", ["", "raise"])
async def test_a_slow_reader_of_a_fixed_batch_misses_nothing(what: str, place: Any) -> None:
    """Neither the chunks before the end, nor the error behind them."""
    slow, quick = Plan("slow", 4000, 3000, what), Plan("quick", 2500)
    options: dict[str, Any] = {**place, "timeout": LIMIT, "model_args": (0.0002,)}
    async with DynBatcher(Fixed, **options) as batcher:
        # Both wait in the worker for its end, and are one batch.
        before = await batcher.stream(Plan("before", ENDLESS))
        calls = [asyncio.create_task(batcher.stream(plan)) for plan in (slow, quick)]
        await until(lambda: batcher.stats.running == 3)
        await before.aclose()
        stream, other = [await one for one in calls]
        assert names([chunk async for chunk in other]) == whole(quick)
        chunks: list[Any] = []
        try:
            async for chunk in stream:
                chunks += [chunk]
        except Refused as error:
            chunks += [error]
        expected: list[Any] = [*whole(slow)[:2999], Refused] if what else whole(slow)
        assert names(chunks) == expected
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_a_generator_ends_with_its_last_stream(place: Any) -> None:
    async with DynBatcher(Fixed, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS))
        await stream.aclose()
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_closing_ends_streams_that_have_no_end(place: Any) -> None:
    """The model's `leave` and `close` are called; the workers are not killed."""
    options: dict[str, Any] = {"drain_timeout": 0.1, "stop_timeout": LIMIT, **place}
    async with DynBatcher(Counter, model_args=(0.001,), **options) as batcher:
        running = await batcher.stream(Plan("long", ENDLESS))
        paused = await batcher.stream(Plan("paused", ENDLESS))
        reading = asyncio.create_task(_exhaust(running))
        await until(lambda: is_full(paused))
        await asyncio.wait_for(batcher.aclose(), LIMIT / 2)
        for ended in (reading, asyncio.create_task(_exhaust(paused))):
            with pytest.raises(BatcherClosedError):
                await ended


@one_loop
@every_place
async def test_a_reader_of_large_chunks_pauses_its_stream(place: Any) -> None:
    """Long before it has a thousand of them."""
    async with DynBatcher(Large, **place, timeout=LIMIT) as batcher:
        stream = await batcher.stream(100)
        await until(lambda: len(stream._queue.chunks) >= 16)
        # Others are not hindered, and get their chunks while this one waits.
        for _ in range(20):
            assert [len(chunk) async for chunk in await batcher.stream(1)] == [2**20]
        assert len(stream._queue.chunks) < 30
        assert [len(chunk) async for chunk in stream] == [2**20] * 100


@one_loop
@pytest.mark.parametrize("place", [PLACES["threads"], PLACES["processes"]], ids=str)
async def test_each_read_of_a_paused_stream_renews_its_deadline(place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS), timeout=LIMIT)
        await until(lambda: is_full(stream))
        for count in range(1, 4):
            before = stream._request.deadline
            assert await anext(stream) == f"long:{count}"
            assert stream._queue.is_paused
            assert stream._request.deadline > before
        await stream.aclose()


@one_loop
@own_and_shared
async def test_a_stream_without_a_further_chunk_in_time_fails_and_leaves(place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        chunk, error = await read(batcher, Plan("s", ENDLESS, 1, "silent"), timeout=2.0)
        assert chunk == "s:1"
        assert isinstance(error, DeadlineExceededError)
        assert "no further chunk" in str(error)
        assert await live(batcher) == 0


@one_loop
@every_place
@pytest.mark.parametrize(("what", "at"), [("fatal", 3), ("fatal join", 0)])
async def test_a_lost_device_ends_the_loop_and_leaves_no_stream_waiting(
    what: str, at: int, place: Any
) -> None:
    """Neither a paused one, whose chunks come before the error, nor one without a place."""
    options: dict[str, Any] = {**place, "max_batch_size": 2, "model_args": (0.001,)}
    async with DynBatcher(Counter, **options) as batcher:
        names = [one for one in threading.enumerate() if "worker-Counter" in one.name]
        paused = await batcher.stream(Plan("paused", ENDLESS))
        await until(lambda: is_full(paused))
        culprit = asyncio.create_task(read(batcher, Plan("f", 9, at, what)))
        waiting = [asyncio.create_task(read(batcher, Plan(f"p{n}", 2))) for n in range(3)]
        *chunks, error = await culprit
        assert len(chunks) == max(0, at - 1)
        assert "device-side assert" in str(error)
        for number, task in enumerate(waiting):
            assert await task == whole(Plan(f"p{number}", 2))
        unread = len(paused._queue.chunks)
        for count in range(1, unread + 1):
            assert await anext(paused) == f"paused:{count}"
        with pytest.raises(WorkerLostError):
            await anext(paused)
        await until(lambda: batcher.stats.restarts == 1)
        for one in names:
            await asyncio.to_thread(one.join)


@one_loop
async def test_a_lost_device_fails_all_streams_of_the_step() -> None:
    async with DynBatcher(Counter, model_args=(0.001,)) as batcher:
        streams = [await batcher.stream(Plan(f"p{number}", ENDLESS)) for number in range(3)]
        running = [asyncio.create_task(_exhaust(stream)) for stream in streams]
        *_, last = await read(batcher, Plan("f", 9, 3, "fatal"))
        for error in (last, *[await outcome(task) for task in running]):
            assert isinstance(error, InferenceError)
            assert "device-side assert" in str(error)
        assert await read(batcher, Plan("p", 2)) == ["p:1", "p:2"]
        assert batcher.stats.restarts == 1


@one_loop
@every_place
async def test_a_step_without_memory_ends_its_youngest_stream_alone(place: Any) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("old", 50))
        *chunks, error = await read(batcher, Plan("young", 9, 3, "oom"))
        assert chunks == ["young:1", "young:2"]
        assert isinstance(error, InferenceError)
        assert isinstance(error, MemoryError)
        assert [chunk async for chunk in stream] == whole(Plan("old", 50))


@one_loop
@every_place
@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_caller_without_chunks_begins_again_when_there_is_memory(
    place: Any, *, is_whole: bool
) -> None:
    async with DynBatcher(Counter, **place, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("old", ENDLESS))
        young = Plan("young", 3, 3 if is_whole else 1, "oom")
        call = batcher.process_batched(young) if is_whole else read(batcher, young)
        task = asyncio.create_task(call)
        await until(lambda: batcher.stats.submitted == 2)
        steps = batcher.stats.batches
        await until(lambda: batcher.stats.batches > steps + 20)
        assert not task.done()
        await stream.aclose()
        assert await task == whole(young)
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_few_steps_run_out_of_memory(place: Any) -> None:
    """After a failure only as many streams run as fit; one more is tried after four have left."""
    plans = [Plan(f"p{number}", 3) for number in range(40)]
    async with DynBatcher(Crowded, **place, max_batch_size=16) as batcher:
        assert await batcher.process_many(plans) == [*map(whole, plans)]
        (failures,) = await batcher.process_batched(Plan("failures", 1))
        assert 1 <= failures <= (16 - 3) + len(plans) / 4


@one_loop
async def test_without_memory_for_one_stream_it_fails() -> None:
    async with DynBatcher(Counter, model_args=(0.001,)) as batcher:
        (error,) = await read(batcher, Plan("large", 9, 1, "memory"))
        assert isinstance(error, MemoryError)
        stream = await batcher.stream(Plan("old", 50))
        other = asyncio.create_task(read(batcher, Plan("large", 9, 1, "memory")))
        assert [chunk async for chunk in stream] == whole(Plan("old", 50))
        (error,) = await other
        assert isinstance(error, MemoryError)


@one_loop
async def test_what_may_not_be_computed_twice_does_not_begin_again() -> None:
    async with DynBatcher(Counter, idempotent=False, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("old", ENDLESS))
        (error,) = await read(batcher, Plan("young", 3, 1, "oom"))
        assert isinstance(error, MemoryError)
        await stream.aclose()


@one_loop
async def test_a_fixed_batch_without_memory_fails() -> None:
    async with DynBatcher(Fixed, workers="threads") as batcher:
        plans = [Plan("a", 3, 2, "memory"), Plan("b", 3)]
        for chunks in await asyncio.gather(*[read(batcher, plan) for plan in plans]):
            assert isinstance(chunks[-1], MemoryError)


@one_loop
@every_place
async def test_streams_join_by_their_costs(place: Any) -> None:
    options: dict[str, Any] = {"cost": lambda plan: plan.length, "max_batch_cost": 8}
    # A step takes a while: otherwise a stream may end before the next comes.
    async with DynBatcher(Counter, model_args=(0.01,), **place, **options) as batcher:
        plans = [Plan(f"p{number}", 4) for number in range(9)] + [Plan("alone", 20)]
        chunks = await asyncio.gather(*[read(batcher, plan) for plan in plans])
        assert chunks == [*map(whole, plans)]
        await until(lambda: batcher.stats.completed == len(plans))
        assert max(batcher.stats.batch_sizes) == 2


def _growing(most: int, **options: Any) -> DynBatcher[Plan, list[Any]]:
    return DynBatcher(Growing, cost=lambda _: 1, max_batch_cost=most, **options)


@one_loop
@every_place
@pytest.mark.parametrize("length", [5, 20, 40])
async def test_streams_that_grow_wait_for_others(length: int, place: Any) -> None:
    """Also those that are too large even alone."""
    # Otherwise one that joins late may begin again.
    async with _growing(20, **place, idempotent=False) as batcher:
        plans = [Plan(f"p{number}", length) for number in range(9)]
        chunks = await asyncio.gather(*[read(batcher, plan) for plan in plans])
        assert chunks == [*map(whole, plans)]
        ((joined, highest),) = await batcher.process_batched(Plan("balance", 1))
        assert joined == len(plans) + 1
        assert highest <= 20
        assert_balance(batcher)


@one_loop
@every_place
@pytest.mark.parametrize("idempotent", [False, True])
async def test_streams_without_chunks_make_room_for_older_ones(
    *, idempotent: bool, place: Any
) -> None:
    async with _growing(20, **place, idempotent=idempotent) as batcher:
        plans = [Plan(f"p{number}", 12, 0, "quiet") for number in range(6)]
        chunks = await asyncio.gather(*[read(batcher, plan) for plan in plans])
        assert chunks == [[whole(plan)[-1]] for plan in plans]
        ((joined, highest),) = await batcher.process_batched(Plan("balance", 1))
        assert (joined > len(plans) + 1) is idempotent
        assert highest <= 20


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_a_cost_to_grow_to_is_a_number(cost: float) -> None:
    with pytest.raises(ValueError, match="Grow"):
        Grow(cost)
    assert Growing().infer([Plan("a", 3)]) == [whole(Plan("a", 3))]


class Careless(SteppedModel[int, int]):
    """Ends its streams by the class `Done`, and refuses 0 in `join`."""

    def join(self, inputs: list[int]) -> list[Any]:
        return [value or ValueError("0") for value in inputs]

    def step(self, states: list[int]) -> list[Any]:
        return [Done if value > 1 else Last(value) for value in states]


class Last(Done[int]):
    """An end of the model's own."""


@pytest.mark.parametrize("inputs", [[0, 1, 2], [2, 1]])
def test_whole_answers_have_errors_in_their_places(inputs: list[int]) -> None:
    outcomes = Careless().infer(inputs)
    kinds = {0: ValueError, 2: TypeError}
    for value, found in zip(inputs, outcomes, strict=True):
        assert found == [1] if value == 1 else isinstance(found, kinds[value])


@one_loop
async def test_careless_ends_of_streams_are_ends() -> None:
    async with DynBatcher(Careless, workers="threads") as batcher:
        assert [chunk async for chunk in await batcher.stream(1)] == [1]
        with pytest.raises(TypeError, match="the class Done; return an instance"):
            await batcher.stream(2)


class NoGenerator(StreamedModel[int, int]):
    """Returns all parts at once."""

    def infer_stream(self, inputs: list[int]) -> Any:
        return [[0 for _ in inputs]]


def test_a_streamed_model_without_a_generator_is_told() -> None:
    with pytest.raises(TypeError, match="object of type list: write it as a generator"):
        NoGenerator().infer([1])


@one_loop
@every_place
async def test_a_fixed_batch_is_streamed_by_the_same_loop(place: Any) -> None:
    async with DynBatcher(Fixed, **place, max_batch_size=4) as batcher:
        plans = [Plan(f"p{number}", 1 + number) for number in range(9)]
        for plan, chunks in zip(
            plans, await asyncio.gather(*[read(batcher, plan) for plan in plans]), strict=True
        ):
            assert [chunk.partition(" ")[0] for chunk in chunks] == whole(plan)
            assert len({chunk.partition(" ")[2] for chunk in chunks}) == 1


class Rows(SteppedModel[Any, Any]):
    """Gives each stream its input, then two rows of an array that it fills again."""

    def __init__(self) -> None:
        self._rows = np.zeros((8, 2))

    def join(self, inputs: list[Any]) -> list[Any]:
        return [[value, 0] for value in inputs]

    def step(self, states: list[Any]) -> Any:
        for state in states:
            state[1] += 1
        if states[0][1] == 1:
            return [value for value, _ in states]
        if states[0][1] > 3:
            return [Done() for _ in states]
        self._rows[: len(states)] += 1
        return self._rows[: len(states)]


@one_loop
@pytest.mark.parametrize("kind", [None, "threads", "processes"])
async def test_a_thread_passes_values_as_they_are(kind: WorkerKind | None) -> None:
    value = threading.Lock()  # which no process could get
    with nullcontext() if kind is None else BatcherKit(kind):
        async with DynBatcher(Rows, workers="threads") as batcher:
            found, *rows = [chunk async for chunk in await batcher.stream(value)]
            assert found is value
            assert [row.tolist() for row in rows] == [[1.0, 1.0], [2.0, 2.0]]


@one_loop
async def test_the_kit_pickles_chunks_where_processes_do() -> None:
    with BatcherKit("threads"):
        async with DynBatcher(Counter) as batcher:
            chunks = await read(batcher, Plan("f", 6, 3, "lambda"))
            assert chunks[:2] == ["f:1", "f:2"]
            assert isinstance(chunks[-1], InferenceError)


@one_loop
async def test_the_kit_without_timeouts_has_none_between_chunks() -> None:
    with BatcherKit("threads", timeouts=False):
        async with DynBatcher(Counter, model_args=(0.2,)) as batcher:
            assert await read(batcher, Plan("p", 3), timeout=0.01) == whole(Plan("p", 3))


@one_loop
@every_place
async def test_a_thread_that_is_no_event_loops_gets_whole_answers(place: Any) -> None:
    async with DynBatcher(Counter, **place) as batcher:
        assert await asyncio.wrap_future(batcher.submit(Plan("p", 3))) == whole(Plan("p", 3))


@one_loop
async def test_a_step_of_a_thread_that_takes_too_long_ends_its_streams() -> None:
    options: dict[str, Any] = {"model_args": (1.0,), "infer_timeout": 0.2, "timeout": LIMIT}
    async with DynBatcher(Counter, workers="threads", **options) as batcher:
        threads = [one for one in threading.enumerate() if "worker-Counter" in one.name]
        (error,) = await read(batcher, Plan("p", 2))
        assert isinstance(error, DeadlineExceededError)
        await until(lambda: batcher.stats.restarts == 1)
        for one in threads:  # the late step runs on, and is the last one
            await asyncio.to_thread(one.join)


@every_place
def test_streams_end_with_their_event_loop(place: Any) -> None:
    """The next loop has a session of its own; a stream of the first is not of it."""
    batcher = DynBatcher(Counter, **place, model_args=(0.001,))
    streams: list[Any] = []

    async def begin() -> None:
        streams.append(await batcher.stream(Plan("long", ENDLESS)))

    async def go_on() -> None:
        assert await read(batcher, Plan("p", 2)) == ["p:1", "p:2"]
        assert await live(batcher) == 0

    asyncio.run(begin())
    asyncio.run(go_on())
    streams.clear()
    gc.collect()
    batcher.stop()
    assert_balance(batcher)


OPTIONS_OF_BATCHES: list[dict[str, Any]] = [
    {"cache": LRUCache(9)},
    {"cost_is_padded": False, "cost": len},
    {"group_by": len},
    {"isolate_errors": False},
    {"max_delay": 0.1},
    {"policy": "greedy"},
]


@pytest.mark.parametrize("option", OPTIONS_OF_BATCHES, ids=lambda option: next(iter(option)))
def test_options_that_mean_nothing_for_streams_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))}.*SteppedModel"):
        DynBatcher(Counter, **option)


def test_changes_that_mean_nothing_for_streams_are_refused() -> None:
    batcher = DynBatcher(Counter)
    with pytest.raises(ConfigurationError, match="SteppedModel"):
        batcher.reconfigure(max_batch_size=8)
    batcher.reconfigure(max_queue_size=9, num_workers=2)


async def act(batcher: DynBatcher[Plan, list[Any]], rng: random.Random, name: str) -> None:
    """Do what one caller may do, and check what it gets."""
    length = min(1 + int(rng.expovariate(0.2)), 40)
    fault = rng.choices(["", "fail", "lambda", "join", "end"], [20, 1, 1, 1, 1])[0]
    at = 0 if fault == "join" else rng.randint(1, length)
    plan = Plan(name, length, at, fault)
    expected = whole(plan)[: at - 1] if fault and at else [] if fault else whole(plan)
    what = rng.choices(["read", "whole", "leave", "cancel", "slow"], [6, 2, 2, 2, 1])[0]
    if what == "whole":
        try:
            assert await batcher.process_batched(plan) == expected
        except InferenceError:
            assert fault not in ("", "end")
        return
    got: list[Any] = []
    task = asyncio.create_task(_collect(batcher, plan, got, rng.random() < 0.5 and what == "slow"))
    if what in ("leave", "cancel"):
        for _ in range(rng.randint(0, 30)):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    error = None if task.cancelled() else task.exception()
    assert got == expected[: len(got)], (plan, got)
    if task.cancelled():
        return
    assert got == expected
    assert isinstance(error, InferenceError) if fault not in ("", "end") else error is None


async def _collect(batcher: Any, plan: Plan, got: list[Any], is_slow: bool) -> None:
    async with await batcher.stream(plan) as stream:
        async for chunk in stream:
            got.append(chunk)
            if is_slow:
                await asyncio.sleep(0.001)


@one_loop
@pytest.mark.parametrize("model", [Counter, Swelling])
@pytest.mark.parametrize("kind", ["threads", "processes"])
async def test_random_schedules(kind: Any, model: Any) -> None:
    """In each of many schedules every stream gets exactly its chunks, in order, or its error."""
    rounds = int(os.environ.get("STREAM_ROUNDS", "20"))
    costs: Any = {"cost": lambda _: 1, "max_batch_cost": 30} if model is Swelling else {}
    with BatcherKit(kind) as kit:
        async with DynBatcher(model, max_batch_size=6, **costs) as batcher:
            for seed in range(rounds):
                rng = random.Random(seed)
                callers = [
                    act(batcher, rng, f"s{seed}.{number}") for number in range(rng.randint(1, 25))
                ]
                await asyncio.gather(*callers)
                kit.reset()
            await until(lambda: batcher.stats.running == 0)
            assert await live(batcher) == 0
            assert_balance(batcher)


# Asyncio runs a callback that is due before it reads a socket, uvloop may do the reverse.
@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"], indirect=True
)
@pytest.mark.parametrize("model", [Counter, Echo], ids=["stepped", "ordinary"])
async def test_a_caller_may_leave_in_the_turn_in_which_the_host_answers(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with DynBatcher(model, shared=True) as batcher:
        value = Plan("first", 1) if model is Counter else 0
        await batcher.process_batched(value)
        pid = host_of(batcher)
        call = asyncio.create_task(batcher.process_batched(value))
        await turns()
        block_until_host_answers(batcher)
        # The loop runs it before it reads what the host has sent.
        asyncio.get_running_loop().call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
        await batcher.process_batched(value)
        assert host_of(batcher) == pid
    assert "protocol" not in caplog.text


@one_loop
async def test_random_schedules_of_a_shared_batcher() -> None:
    rounds = int(os.environ.get("STREAM_ROUNDS", "20"))
    async with DynBatcher(Counter, shared=True, max_batch_size=6) as batcher:
        for seed in range(rounds):
            rng = random.Random(seed)
            callers = rng.randint(1, 25)
            await asyncio.gather(*[act(batcher, rng, f"s{seed}.{at}") for at in range(callers)])
        assert await live(batcher) == 0
        await until(lambda: batcher.stats.running == 0)
        assert_balance(batcher)


@one_loop
@every_place
async def test_streams_end_soon_after_a_reload(place: Any) -> None:
    """Otherwise an endless stream would keep two models in memory."""
    options: dict[str, Any] = {**place, "drain_timeout": 0.3, "model_args": (0.001,)}
    async with DynBatcher(Counter, **options) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS))
        await batcher.reload()
        assert await read(batcher, Plan("p", 3)) == whole(Plan("p", 3))
        chunks: list[Any] = ["long:1"]
        assert await anext(stream) == "long:1"
        with pytest.raises(WorkerLostError, match="drain_timeout"):
            await _exhaust(stream, chunks)
        assert chunks == whole(Plan("long", len(chunks)))
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_a_model_named_by_a_text(place: Any) -> None:
    name: Any = "models.stepped:Counter"
    if place != PLACES["threads"]:
        async with DynBatcher(name, **place, stepped=True) as batcher:
            assert await read(batcher, Plan("p", 3)) == whole(Plan("p", 3))
    with pytest.raises(WorkerStartupError, match="stepped=True"):
        async with DynBatcher(name, **place):
            pass


@one_loop
async def test_waiting_streams_bring_further_workers() -> None:
    options: dict[str, Any] = {"max_batch_size": 2, "model_args": (0.02,), "timeout": LIMIT}
    async with DynBatcher(Counter, num_workers=(1, 2), **options) as batcher:

        async def ask_until_two_answer() -> None:
            while batcher.stats.workers_ready < 2:
                assert await read(batcher, Plan("p", 20)) == whole(Plan("p", 20))

        await asyncio.gather(*[ask_until_two_answer() for _ in range(20)])


@one_loop
async def test_a_warm_up_without_an_end_is_told() -> None:
    with pytest.raises(WorkerStartupError, match=r"warmup_inputs\(\) without an end is another"):
        await DynBatcher(EndlessWarmUp, start_timeout=SOON_IN_WORKER).open()


@one_loop
async def test_a_running_stream_alone_brings_no_further_worker() -> None:
    """It runs for longer than a backlog must last, and nobody waits."""
    options: dict[str, Any] = {"max_batch_size": 1, "model_args": (0.02,)}
    async with DynBatcher(Counter, num_workers=(1, 2), **options) as batcher:
        await read(batcher, Plan("short", 3))
        plan = Plan("long", round(2.5 * PATIENCE / 0.02))
        assert await read(batcher, plan) == whole(plan)
        assert batcher.stats.num_workers == 1


@one_loop
async def test_streams_of_a_dead_host() -> None:
    """A stream with chunks ends with an error behind them; a whole answer begins again."""
    async with DynBatcher(Counter, shared=True, model_args=(0.001,)) as batcher:
        stream = await batcher.stream(Plan("long", ENDLESS))
        chunks = [await anext(stream)]
        answer = asyncio.create_task(batcher.process_batched(Plan("w", 500)))
        await until(lambda: len(stream._queue.chunks) > 100)
        os.kill(host_of(batcher), signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await _exhaust(stream, chunks)
        assert len(chunks) > 100
        assert chunks == whole(Plan("long", len(chunks)))
        assert await answer == whole(Plan("w", 500))
        assert await read(batcher, Plan("p", 2)) == ["p:1", "p:2"]


@every_place
@one_loop
async def test_warm_up_computes_every_allowed_number_of_streams(place: dict[str, Any]) -> None:
    async with DynBatcher(Sized, max_batch_size=4, **place) as batcher:
        for count in (1, 2, 3, 4):
            answers = await batcher.process_many([3] * count)
            assert all(is_known for chunks in answers for _, is_known in chunks), answers


@one_loop
async def test_more_places_than_the_largest_allowed_number_of_streams_are_refused() -> None:
    with pytest.raises(WorkerStartupError, match="give max_batch_size=4, or a larger size"):
        await DynBatcher(Sized, max_batch_size=5).open()


@one_loop
async def test_random_deaths() -> None:
    """Each stream gets its chunks in order, and then its end or a typed error."""
    rounds = int(os.environ.get("STREAM_ROUNDS", "20")) // 10
    rng = random.Random(1)
    options: dict[str, Any] = {"max_restarts": 10**6, "model_args": (0.0005,), "num_workers": 2}
    async with DynBatcher(Counter, max_batch_size=6, **options) as batcher:
        for _ in range(rounds):
            plans = [Plan(f"p{number}", rng.randint(1, 60)) for number in range(30)]
            calls = [asyncio.create_task(read(batcher, plan)) for plan in plans]
            whole_call = asyncio.create_task(batcher.process_batched(Plan("w", 60)))
            await asyncio.sleep(rng.random() * 0.05)
            workers = batcher._opening.pool.workers.values()  # type: ignore[union-attr]
            pids = [worker.pid for worker in workers if worker.is_serving]
            if pids:
                os.kill(rng.choice(pids), signal.SIGKILL)
            for plan, chunks in zip(plans, await asyncio.gather(*calls), strict=True):
                if chunks and isinstance(chunks[-1], BatcherError):
                    assert isinstance(chunks[-1], WorkerLostError), chunks[-1]
                    assert len(chunks) > 1, "before the first chunk it begins again"
                    assert chunks[:-1] == whole(plan)[: len(chunks) - 1]
                else:
                    assert chunks == whole(plan)
            assert await whole_call == whole(Plan("w", 60))
        assert_balance(batcher)
