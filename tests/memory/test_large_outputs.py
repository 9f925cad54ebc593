"""Large outputs of real workers: that they come back whole, whatever happens meanwhile."""

import asyncio
import logging
import os
from time import monotonic
from typing import Any

import numpy as np
import pytest
from models.children import TalksNonsense
from models.large import LARGE, GivesViews, MakesLarge, fingerprint, make_large
from openings import opening_of, pids_of
from packed_frames import pack
from sender_harness import DYING, LOST, MEBI, SMALL, ask_amid_deaths, copier_held, free, opened
from waits import LIMIT, call, outcome, turns, until

from fast_batcher import DynBatcher
from fast_batcher._parent.staging import LARGEST_COPY_ON_LOOP
from fast_batcher._shared_memory.outbox import OutboxReader
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import dumps
from fast_batcher.errors import DeadlineExceededError, TransportError

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

# An answer that is copied at once, and one that is copied aside.
ASIDE = LARGEST_COPY_ON_LOOP + 1
# Around everything that makes a difference.
SIZES = sorted(
    size + more
    for size in (0, 4096, 16384, 65536, 262_144, LARGEST_COPY_ON_LOOP, 3 * MEBI)
    for more in (-1, 0, 1)
    if size + more >= 0
)


def outboxes_of(batcher: DynBatcher[Any, Any]) -> list[OutboxReader]:
    return [
        one.outbox for one in opening_of(batcher).pool.workers.values() if one.outbox is not None
    ]


def is_used(batcher: DynBatcher[Any, Any]) -> bool:
    """Whether an answer came by an outbox."""
    return any(outbox.is_used for outbox in outboxes_of(batcher))


async def until_answered(batcher: DynBatcher[Any, Any], count: int = 1) -> None:
    """So many answers have come and wait to be copied."""
    await until(lambda: len(opening_of(batcher).scheduler._workers.copying_out) == count)


@pytest.mark.parametrize("kind", LARGE)
async def test_every_kind_and_size_comes_back_whole(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind in ("tensor", "bfloat16"):
        pytest.importorskip("torch")
    sizes = [size for size in SIZES if size < MEBI or kind != "numbers"]
    asked = [(kind, size, number) for number, size in enumerate([*sizes, *reversed(sizes)])]
    expected = [fingerprint(make_large(*one)) for one in asked]
    for max_batch_size in (1, 8):
        async with opened(MakesLarge, max_batch_size=max_batch_size) as batcher:
            got = await asyncio.gather(*map(batcher.process_batched, asked))
            assert [fingerprint(one) for one in got] == expected
            assert is_used(batcher)
    assert "through a pipe" not in caplog.text


async def test_large_answers_survive_deaths_and_cancellations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random kills and cancellations, and an outbox that is too small for all."""
    random = np.random.default_rng(2)
    caplog.set_level(logging.ERROR)
    kinds = ["array", "bytes", "strided", "nested", "dataclass"]
    sizes = np.exp(random.uniform(0, np.log(3 * MEBI), 400)).astype(int)
    asked = [(kinds[number % 5], int(size), number) for number, size in enumerate(sizes)]
    async with opened(MakesLarge, max_shared_bytes=6 * MEBI, **DYING) as batcher:
        outcomes = await ask_amid_deaths(batcher, asked, "pid")
        for one, got in zip(asked, outcomes, strict=True):
            assert isinstance(got, LOST) or fingerprint(got) == fingerprint(make_large(*one))


@pytest.mark.parametrize("size", [SMALL, ASIDE])
async def test_outputs_may_be_views_of_inputs(size: int) -> None:
    async with opened(GivesViews, max_batch_size=4) as batcher:
        arrays = [np.random.default_rng(number).bytes(size) for number in range(8)]
        values = [np.frombuffer(one, np.uint8) for one in arrays]
        for value, (all_of_it, every_other, end) in zip(
            values, await batcher.process_many(values), strict=True
        ):
            assert np.array_equal(all_of_it, value)
            assert np.array_equal(every_other, value[::2])
            assert np.array_equal(end, value[5:])
        # The inputs' memory is free again.
        await free(batcher)


async def test_copied_answer_outlives_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    asked = [("array", ASIDE, number) for number in range(3)]
    async with opened(MakesLarge, max_batch_size=1, restart_backoff=0.01) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, one) for one in asked]
            await until_answered(batcher, 3)
            (old,) = outboxes_of(batcher)
            os.kill(pids_of(batcher)[0], 9)
            await until(lambda: batcher.stats.restarts == 1)
            assert outboxes_of(batcher) != [old]
            assert batcher.stats.running == 3
        for one, task in zip(asked, tasks, strict=True):
            assert fingerprint(await outcome(task)) == fingerprint(make_large(*one))
        assert not old.is_open
        # They were computed once.
        assert batcher.stats.batches == 3
    assert "signal 9" in caplog.text


async def test_small_answers_overtake_large_ones() -> None:
    async with opened(MakesLarge, max_batch_size=1) as batcher:
        with copier_held(batcher):
            task = call(batcher, ("array", ASIDE, 1))
            await until_answered(batcher)
            assert len(await outcome(call(batcher, ("array", SMALL, 2)))) == SMALL
            assert batcher.stats.running == 1
            assert not task.done()
        assert len(await outcome(task)) == ASIDE


async def test_no_deadline_counts_while_an_answer_is_copied() -> None:
    """It has come in time."""
    async with opened(MakesLarge, max_batch_size=1) as batcher:
        with copier_held(batcher):
            task = call(batcher, ("array", ASIDE, 1), timeout=LIMIT)
            await until_answered(batcher)
            # It is brought forward: one that was so near before might have come first.
            (batch,) = opening_of(batcher).scheduler._workers.copying_out.values()
            batch.deadline = batch.requests[0].deadline = monotonic()
            opening_of(batcher).scheduler._workers.next_expiry = batch.deadline
            # It is behind the other in every queue, and so is what follows from it.
            with pytest.raises(DeadlineExceededError):
                await batcher.process_batched(("array", ASIDE, 2), timeout=1e-9)
            assert not task.done()
        assert len(await outcome(task)) == ASIDE


async def test_closing_waits_for_copied_answers() -> None:
    asked = [("array", ASIDE, number) for number in range(6)]
    async with opened(
        MakesLarge, max_batch_size=2, timeout=None, drain_timeout=10 * LIMIT
    ) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, one) for one in asked]
            await until_answered(batcher, 3)
            closing = asyncio.create_task(batcher.aclose())
            await turns()
            assert not closing.done()
        await asyncio.wait_for(closing, LIMIT)
        for one, task in zip(asked, tasks, strict=True):
            assert fingerprint(await outcome(task)) == fingerprint(make_large(*one))


GARBAGE: dict[str, Any] = {
    "not five": 5,
    "before the start": (-64, [100], [], [(100, 0)], {}),
    "behind the end": (2**40, [100], [], [(100, 0)], {}),
    "too long": (0, [2**50], [], [(2**50, 0)], {}),
    "negative": (0, [-5], [], [(-5, 0)], {}),
    "no numbers": ("0", ["5"], [], [("5", 0)], {}),
    "nothing": (0, [], [], [(0, 0)], {}),
    "nothing read-only": (0, [100], 5, [(100, 0)], {}),
    "no items": (0, [100], [], 5, {}),
    "items of something else": (0, [100], [], [(99, 0)], {}),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_worker_with_false_outbox_claim_is_replaced(
    garbage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(TalksNonsense, restart_backoff=0.01) as batcher:
        got = await outcome(call(batcher, pack(Kind.SHARED, 0, dumps((garbage, None)))))
        assert isinstance(got, TransportError)
        assert await batcher.process_batched(b"") == b""
        assert "is replaced" in caplog.text
        # For what it has said, and not for the answer that follows.
        assert "which it does not have" not in caplog.text
        assert batcher.stats.restarts == 1
