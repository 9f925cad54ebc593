"""Large batches through shared memory: which way they take, in which order, and what is left.

First without a worker, with real slabs; then with real workers.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from memory_files import memory_of, refuse_memory
from models.large import Digests, ForksAndKeeps, KeepsInputs, digest
from models.raising import KeepsErrors
from openings import opening_of
from sender_harness import (
    DYING,
    LARGE,
    LOST,
    MEBI,
    SIZE,
    SMALL,
    SenderHarness,
    ask_amid_deaths,
    copier_held,
    filled,
    free,
    give_back_unused,
    has_slabs,
    no_threads,
    opened,
    slabs_of,
    stage_inputs,
    until_copying,
    wait_until_copied,
)
from waits import LIMIT, Gate, call, outcome, turns, until

from fast_batcher import DynBatcher
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import loads
from fast_batcher.errors import UnsendableValueError

pytestmark = pytest.mark.slow


@pytest.fixture
def harness() -> Iterator[SenderHarness]:
    """One that has seen no large input yet."""
    harness = SenderHarness()
    yield harness
    harness.close()


def test_an_input_is_locked_until_it_is_copied(harness: SenderHarness) -> None:
    by_loop, by_thread = bytearray(SMALL), bytearray(LARGE)
    harness.batch(by_loop)
    by_loop.append(1)
    harness.batch(by_thread)
    with pytest.raises(BufferError):
        by_thread.append(1)
    harness.run_jobs()
    by_thread.append(1)


def test_slabs_visible_to_orphans_stay_occupied(harness: SenderHarness) -> None:
    for _ in range(3):
        harness.batch(np.zeros(SMALL, np.uint8))
    harness.read()
    harness.free()
    # Of the two batches that are left, the worker had the first when it forked.
    (start, *_), _ = loads(harness.queue[0][2])
    harness.lose_worker(inherited=1)
    assert harness.slabs.count == 1
    assert [*harness.slabs._ranges._taken] == [start]


def test_worker_cannot_free_a_foreign_batch(harness: SenderHarness) -> None:
    harness.batch(np.zeros(SMALL, np.uint8))
    with pytest.raises(KeyError):
        harness.free(17)


@pytest.mark.parametrize("stages", [1, 2])
def test_batch_without_room_uses_the_pipe(
    harness: SenderHarness, caplog: pytest.LogCaptureFixture, stages: int
) -> None:
    harness.worker.stages = stages
    arrays = [np.full(5_000_000, number, np.uint8) for number in range(5)]
    for array in arrays:
        harness.batch(array)
        harness.run_jobs()
    assert harness.kinds == [*[Kind.SHARED] * 3, *[Kind.PART, Kind.ITEMS] * 2]
    for array in arrays:
        assert np.array_equal(harness.read()[0], array)
    (record,) = caplog.records
    assert "name: large inputs go through a pipe" in record.message
    assert f"max_shared_bytes={SIZE}" in record.message
    # Three are in shared memory. A worker with one stage needs two of them, with two stages all.
    has_kept = "keeps views of the inputs of at least 1 batches" in record.message
    assert has_kept == (stages == 1)


def test_input_unpicklable_the_second_time_is_rejected(harness: SenderHarness) -> None:
    class Once:
        def __init__(self) -> None:
            self._is_used = False

        def __reduce__(self) -> Any:
            if self._is_used:
                raise ValueError("twice")
            self._is_used = True
            return str, ("once",)

    harness.batch(np.zeros(LARGE, np.uint8))  # the first large batch is pickled once more
    harness.run_jobs()
    harness.read()
    refuse_memory(harness.slabs._fd)
    batch = harness.batch(Once(), np.zeros(LARGE, np.uint8))
    harness.run_jobs()
    ((request, error),) = harness.refused
    assert request is batch.requests[0]
    assert isinstance(error, UnsendableValueError)
    (got,) = harness.read()
    assert len(got) == LARGE


# --- real workers ---------------------------------------------------------------------------------

anyio = pytest.mark.anyio


def payloads(count: int) -> list[Any]:
    """Of all sizes and kinds."""
    random = np.random.default_rng(1)
    sizes = np.exp(random.uniform(0, np.log(3 * MEBI), count)).astype(int)
    kinds: list[Callable[[bytes], Any]] = [
        bytes,
        bytearray,
        lambda raw: np.frombuffer(raw, np.uint8),
        lambda raw: np.frombuffer(raw, np.uint8).copy(),
    ]
    return [kinds[number % 4](random.bytes(size)) for number, size in enumerate(sizes)]


def arrays_of_few_layouts(count: int) -> list[Any]:
    """They share slabs."""
    random = np.random.default_rng(1)
    sizes = random.choice([20_000, SMALL, SMALL + 1, LARGE, 3 * MEBI], count)
    return [random.integers(0, 255, size, np.uint8) for size in sizes]


@anyio
@pytest.mark.parametrize(
    ("make", "stages", "size"),
    [
        pytest.param(payloads, False, 8 * MEBI, id="any"),
        pytest.param(arrays_of_few_layouts, True, 12 * MEBI, id="arrays", marks=pytest.mark.long),
    ],
)
async def test_payloads_survive_deaths_and_cancellations(
    make: Callable[[int], list[Any]], stages: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Random kills and cancellations, and a memory that is too small for all."""
    values = make(400)
    caplog.set_level(logging.ERROR)
    async with opened(Digests, stages=stages, max_shared_bytes=size, **DYING) as batcher:
        outcomes = await ask_amid_deaths(batcher, values, b"whereabouts")
        for value, got in zip(values, outcomes, strict=True):
            assert isinstance(got, LOST) or got == digest(value)
        await free(batcher)


# Whether large inputs are staged at once, or only after the first large batch.
both_ways = pytest.mark.parametrize("stages", [False, True])


@anyio
@both_ways
async def test_kept_views_do_not_change_other_inputs(
    stages: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers with the sums of all that it has kept so far."""
    settings: dict[str, Any] = {"max_batch_size": 1, "max_shared_bytes": 8 * MEBI}
    async with opened(KeepsInputs, stages=stages, **settings) as batcher:
        for number in range(8):
            got = await batcher.process_batched(filled(number, LARGE))
            assert got == [LARGE * one for one in range(number + 1)]
        assert "keeps views of the inputs of at least" in caplog.text
        assert slabs_of(batcher).count
        await batcher.process_batched("forget")
        # What has died is told with the next answer.
        await batcher.process_batched("next")
        await free(batcher)


@anyio
@both_ways
async def test_inputs_seen_by_forked_model_stay(gate: Gate, stages: bool) -> None:
    async with opened(ForksAndKeeps, gate.path, max_batch_size=1, stages=stages) as batcher:
        assert await batcher.process_batched(filled(1, LARGE)) == "forked"
        visit = await gate.visit()
        for number in range(2, 6):
            await batcher.process_batched(filled(number, LARGE))
        visit.let_on()
        assert (await gate.visit()).note == LARGE
        gate.close()


@anyio
async def test_kept_error_keeps_no_inputs() -> None:
    async with opened(KeepsErrors, max_batch_size=1) as batcher:
        for _ in range(3):
            got = await outcome(call(batcher, np.zeros(SMALL, np.uint8)))
            assert isinstance(got, ValueError)
        await free(batcher)


@anyio
@both_ways
async def test_closing_answers_batches_being_copied(stages: bool) -> None:
    arrays = [filled(number, LARGE) for number in range(6)]
    settings: dict[str, Any] = {"timeout": None, "drain_timeout": 10 * LIMIT}
    async with opened(Digests, max_batch_size=2, stages=stages, **settings) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, array) for array in arrays]
            await until_copying(batcher)
            closing = asyncio.create_task(batcher.aclose())
            await turns()
            assert not closing.done()
        await asyncio.wait_for(closing, LIMIT)
        assert [await outcome(task) for task in tasks] == [digest(array) for array in arrays]


@anyio
@pytest.mark.parametrize("is_used", [False, True])
async def test_the_copier_thread_gives_the_memory_back(is_used: bool) -> None:
    async with opened(Digests) as batcher:
        if is_used:
            await batcher.process_batched(bytes(LARGE))
        slabs = slabs_of(batcher)
        with copier_held(batcher):
            closing = asyncio.create_task(batcher.aclose())
            await until_copying(batcher)
            assert slabs._fd != -1
        await closing
    assert slabs._fd == -1


@anyio
async def test_worker_is_recycled_after_the_copied_batch() -> None:
    values = payloads(60)
    async with opened(Digests, max_batch_size=2, max_batches_per_worker=3) as batcher:
        digests = await asyncio.gather(*map(batcher.process_batched, values))
        assert digests == [digest(value) for value in values]


@anyio
async def test_loop_copies_if_no_thread_starts() -> None:
    value = bytes(LARGE)
    async with opened(Digests, max_batch_size=1, restart_backoff=0.01) as batcher:
        with no_threads():
            assert await batcher.process_batched(value) == digest(value)
            await free(batcher)
            slabs = slabs_of(batcher)
            assert memory_of(slabs._fd)
            for _ in range(2):
                give_back_unused(batcher)
            await free(batcher)
            assert memory_of(slabs._fd) == 0
            (handle,) = opening_of(batcher).pool.alive()
            handle.kill()
            assert await batcher.process_batched(value) == digest(value)
        assert await batcher.process_batched(value) == digest(value)


@anyio
async def test_another_worker_gets_the_copied_batch(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(Digests, max_batch_size=1, restart_backoff=0.01) as batcher:
        with copier_held(batcher):
            tasks = [call(batcher, bytes(LARGE)) for _ in range(3)]
            await until_copying(batcher)
            (handle,) = opening_of(batcher).pool.alive()
            handle.kill()
            await until(lambda: batcher.stats.restarts == 1)
            # Its memory is that of the batch which was to be copied first.
            assert slabs_of(batcher).count
        for task in tasks:
            assert await outcome(task) == digest(bytes(LARGE))
        await free(batcher)
    assert "go through a pipe" not in caplog.text


@both_ways
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_another_loop_continues_after_closed_loop(size: int, stages: bool) -> None:
    batcher: DynBatcher[Any, Any] = DynBatcher(Digests, max_batch_size=2)
    tasks: list[Any] = []

    async def begin() -> None:
        tasks.extend(call(batcher, filled(number, size)) for number in range(5))
        await (until_copying(batcher) if size == LARGE else turns())

    async def go_on() -> None:
        # It waits in the pipe behind what was copied. Nothing more is, which would tell of that.
        assert await outcome(call(batcher, b"small")) == digest(b"small")
        array = filled(7, size)
        assert await outcome(call(batcher, array)) == digest(array)
        await free(batcher)
        await batcher.aclose()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(batcher.open())
    if stages:
        stage_inputs(batcher)
    with copier_held(batcher):
        loop.run_until_complete(begin())
        loop.close()
    # Nobody tells that loop, or the next one, that they have been copied.
    wait_until_copied(batcher)
    for task in tasks:
        # Nobody is going to await it, and asyncio would say so.
        task._log_destroy_pending = False
    tasks.clear()
    gc.collect()
    asyncio.run(go_on())


@anyio
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_pipe_is_used_without_shared_memory(size: int) -> None:
    async with opened(Digests, max_shared_bytes=0) as batcher:
        assert not has_slabs(batcher)
        for value in (bytes(size), np.zeros(size, np.uint8), bytearray(size)):
            assert await batcher.process_batched(value) == digest(bytes(size))
