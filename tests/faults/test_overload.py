"""Overload on real workers: every caller gets an answer or an error, and the workers go on.

How much is lost is shown in virtual time, in `tests/unit/test_admission.py`.
"""

import asyncio

import pytest
from models.base import Echo
from models.ordinary import BatchSize, Slow
from waits import LIMIT, assert_balance, call, turns

from fast_batcher import BatcherError, DeadlineExceededError, DynBatcher, QueueFullError

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_overload_rejects_only_the_excess() -> None:
    """Fault F60: bursts of five times what can be answered by the target, one after the other."""
    target, seconds = 0.2, 0.02
    refused = answered = 0
    async with DynBatcher(Slow, 1, model_args=(seconds,), max_latency=target) as batcher:
        await batcher.process_many(range(8))
        for _ in range(10):
            calls = [call(batcher, number) for number in range(50)]
            await turns()
            most_waiting = batcher.stats.waiting
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            late = [one for one in outcomes if isinstance(one, BaseException)]
            for one in late:
                assert isinstance(one, DeadlineExceededError)
                assert one.retry_after is not None
            # By what batches have taken at least: no more are let in than can be in time.
            assert most_waiting <= target / seconds
            refused += len(late)
            answered += len(outcomes) - len(late)
        assert answered >= 10, "an idle batcher takes at least one"
        assert refused >= 10 * (50 - target / seconds - 2)
        assert await batcher.process_batched("after") == "after"
        assert_balance(batcher)


async def test_every_request_after_a_pulse_is_answered() -> None:
    """Fault F61."""
    async with DynBatcher(Slow, 4, model_args=(0.005,), max_latency=0.5) as batcher:
        await batcher.process_many(range(8))
        pulse = [call(batcher, number) for number in range(2000)]
        outcomes = await asyncio.gather(*pulse, return_exceptions=True)
        refused = [one for one in outcomes if isinstance(one, BatcherError)]
        assert {type(one) for one in refused} == {DeadlineExceededError, QueueFullError}
        assert len(refused) >= 2000 - 0.5 / 0.005, "by what batches have taken at least"
        assert [await batcher.process_batched(number) for number in range(20)] == [*range(20)]
        assert_balance(batcher)


async def test_impossible_deadlines_do_not_stop_the_service() -> None:
    """Fault F63."""
    async with DynBatcher(Slow, 4, model_args=(0.02,)) as batcher:
        for number in range(20):
            impossible = [call(batcher, number, timeout=0.001) for _ in range(3)]
            outcomes = await asyncio.gather(*impossible, return_exceptions=True)
            # A loop that stood still for so long may hear of an answer and its deadline at once.
            assert all(isinstance(one, BatcherError) or one == number for one in outcomes)
            assert await batcher.process_batched("usual", timeout=LIMIT) == "usual"
        assert_balance(batcher)


async def test_giant_input_runs_alone() -> None:
    """Fault F65."""
    async with DynBatcher(BatchSize, 32, cost=len, max_batch_cost=640) as batcher:
        costs = [*[10] * 50, 8192, *[10] * 50]
        sizes = await asyncio.gather(*[call(batcher, "x" * cost) for cost in costs])
    assert sizes[50] == 1
    assert max(sizes) <= 32


async def test_large_call_leaves_room_for_others() -> None:
    """Fault F66."""
    async with DynBatcher(Echo, 8, max_queue_size=64) as batcher:
        many = asyncio.create_task(batcher.process_many(range(10_000)))
        await turns()
        others = 0
        while not many.done():
            assert await batcher.process_batched("other") == "other"
            others += 1
            assert batcher.stats.waiting <= 64
        assert await many == [*range(10_000)]
        # One batch of its own goes before each of the others at most a few times.
        assert others > 100
        assert batcher.stats.rejected == 0
        assert_balance(batcher)
