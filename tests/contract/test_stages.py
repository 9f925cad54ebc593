"""Models with `prepare` and `finish`: stages of several batches run at the same time."""

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
from models.stages import (
    Entered,
    Halves,
    InStages,
    InStagesWithMethod,
    Reuses,
    SeesContexts,
    Threads,
    WarmsUp,
)
from openings import opening_of
from waits import SOON_IN_WORKER, Gate, assert_balance, call, outcome, turns, until

from fast_batcher import (
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    PoisonRequestError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher.observing import BatchDispatched, Observer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# One waits in each stage.
IN_STAGES = ("finish waits", "infer waits", "prepare waits")


class Follower(Observer):
    """Gives each batch a context of its own."""

    needs_context = True

    def batch_dispatched(self, event: BatchDispatched) -> Entered:
        """Return the context."""
        return Entered(event.batch_id)


def last_begun(batcher: DynBatcher[Any, Any]) -> int | None:
    """The batch that the only worker began to compute last."""
    (worker,) = opening_of(batcher).pool.alive()
    return worker.read_begun()


async def test_each_stage_has_a_batch_of_its_own(gate: Gate) -> None:
    async with DynBatcher(InStages, 1, stage_threads=2, model_args=(gate.path,)) as batcher:
        calls, visits = {}, {}
        for value in IN_STAGES:
            calls[value] = call(batcher, value)
            visits[value] = await gate.visit()
            assert visits[value].note == value
        calls["behind"] = call(batcher, "behind")
        calls["waiting"] = call(batcher, "waiting")
        await turns()
        # One batch waits at the worker, and the next one in the queue.
        assert (batcher.stats.running, batcher.stats.waiting) == (4, 1)
        for visit in visits.values():
            visit.let_on()
        for value, task in calls.items():
            assert await outcome(task) == (value, 1)
        assert_balance(batcher)


@pytest.mark.parametrize("stage", ["prepare", "finish"])
async def test_error_of_prepare_or_finish_fails_one_request(gate: Gate, stage: str) -> None:
    async with DynBatcher(
        InStages, 4, stage_threads=2, model_args=(gate.path,), isolate_errors=False
    ) as batcher:
        bad = f"{stage} raises"
        values = ["a", bad, "infer rejects", "b"]
        first, wrong, rejected, last = [
            await outcome(task) for task in [call(batcher, value) for value in values]
        ]
        for error in (wrong, rejected):
            assert isinstance(error, InferenceError)
            assert isinstance(error, ValueError)
        assert bad in str(wrong)
        # What cannot be prepared takes no place in the batch.
        size = 3 if stage == "prepare" else 4
        assert (first, last) == (("a", size), ("b", size))
        assert await outcome(call(batcher, bad)) != (bad, 1)
        stats = assert_balance(batcher)
        assert (stats.failed, stats.completed) == (3, 2)


async def test_failing_batch_is_divided(gate: Gate) -> None:
    async with DynBatcher(InStages, 4, stage_threads=2, model_args=(gate.path,)) as batcher:
        tasks = [call(batcher, value) for value in ("a", "infer raises", "b", "c")]
        outcomes = [await outcome(task) for task in tasks]
        assert isinstance(outcomes.pop(1), ValueError)
        assert [value for value, _ in outcomes] == ["a", "b", "c"]


async def test_death_loses_only_begun_batches(gate: Gate) -> None:
    async with DynBatcher(
        InStages, 1, stage_threads=2, model_args=(gate.path,), idempotent=False
    ) as batcher:
        tasks, pids = [], []
        for value in IN_STAGES:
            tasks.append(call(batcher, value))
            pids.append((await gate.visit()).pid)
        os.kill(pids[-1], signal.SIGKILL)
        for task in tasks[:2]:
            assert isinstance(await outcome(task), WorkerLostError)
        # Not begun, so it is tried again.
        (await gate.visit()).let_on()
        assert await outcome(tasks[2]) == ("prepare waits", 1)
        assert_balance(batcher)


async def test_death_in_prepare_is_traced_to_one_request(gate: Gate) -> None:
    async with DynBatcher(
        InStages, 4, stage_threads=2, model_args=(gate.path,), max_restarts=None
    ) as batcher:
        values = ("a", "prepare dies", "b", "c")
        tasks = [call(batcher, value) for value in values]
        outcomes = [await outcome(task) for task in tasks]
        assert isinstance(outcomes.pop(1), PoisonRequestError)
        assert outcomes == [("a", 1), ("b", 1), ("c", 1)]
        assert_balance(batcher)


async def test_fatal_error_of_infer_replaces_worker(gate: Gate) -> None:
    async with DynBatcher(InStages, 1, stage_threads=2, model_args=(gate.path,)) as batcher:
        first = call(batcher, "finish waits")
        visit = await gate.visit()
        broken, behind = call(batcher, "infer breaks"), call(batcher, "behind")
        await until(lambda: last_begun(batcher) == 1)
        visit.let_on()
        assert await outcome(first) == ("finish waits", 1)
        assert isinstance(await outcome(broken), InferenceError)
        assert await outcome(behind) == ("behind", 1)
        assert assert_balance(batcher).restarts == 1


@pytest.mark.parametrize("stage", ["prepare", "finish"])
async def test_fatal_error_of_prepare_or_finish_replaces_worker(gate: Gate, stage: str) -> None:
    async with DynBatcher(InStages, 1, stage_threads=2, model_args=(gate.path,)) as batcher:
        assert isinstance(await outcome(call(batcher, f"{stage} breaks")), InferenceError)
        assert await outcome(call(batcher, "next")) == ("next", 1)
        assert assert_balance(batcher).restarts == 1


async def test_deadlines_and_cancellation_hold_in_every_stage(gate: Gate) -> None:
    async with DynBatcher(InStages, 2, stage_threads=2, model_args=(gate.path,)) as batcher:
        for value in IN_STAGES:
            gone = call(batcher, value)
            mate = call(batcher, f"beside {value}")
            visit = await gate.visit()
            gone.cancel()
            assert isinstance(await outcome(gone), asyncio.CancelledError)
            visit.let_on()
            assert await outcome(mate) == (f"beside {value}", 2)
            late = call(batcher, value, timeout=SOON_IN_WORKER)
            visit = await gate.visit()
            assert isinstance(await outcome(late), DeadlineExceededError)
            visit.let_on()
            assert await batcher.process_batched("next") == ("next", 1)
        stats = assert_balance(batcher)
        assert (stats.cancelled, stats.expired) == (3, 3)


async def test_closing_finishes_every_stage(gate: Gate) -> None:
    async with DynBatcher(InStages, 1, stage_threads=2, model_args=(gate.path,)) as batcher:
        tasks, visits = [], []
        for value in IN_STAGES:
            tasks.append(call(batcher, value))
            visits.append(await gate.visit())
        closing = asyncio.create_task(batcher.aclose())
        await turns()
        for visit in visits:
            visit.let_on()
        assert [await outcome(task) for task in tasks] == [(value, 1) for value in IN_STAGES]
        await closing


async def test_methods_other_than_infer_have_no_stages(gate: Gate) -> None:
    async with DynBatcher(
        InStagesWithMethod, 4, stage_threads=2, model_args=(gate.path,)
    ) as batcher:
        lengths = batcher.methods.measure.process_many(["a", "prepare raises"])
        assert await asyncio.gather(lengths, batcher.process_batched("b")) == [[1, 14], ("b", 1)]


async def test_batch_runs_in_its_own_context_during_prepare(gate: Gate) -> None:
    async with DynBatcher(SeesContexts, 1, model_args=(gate.path,), stage_threads=2) as batcher:
        batcher.add_observer(Follower())
        tasks, visits = [], []
        for value in ("infer waits", "prepare waits", "prepare waits"):
            tasks.append(call(batcher, value))
            visits.append(await gate.visit())
        for visit in visits:
            visit.let_on()
        assert [seen for _, seen in [await outcome(task) for task in tasks]] == [[0], [1], [2]]


@pytest.mark.parametrize("threads", [1, 3])
async def test_the_stages_have_their_own_threads(threads: int) -> None:
    async with DynBatcher(Threads, 8, stage_threads=threads) as batcher:
        names = await batcher.process_many(range(64))
        assert {infer for _, infer, _ in names} == {"MainThread"}
        seen = {name for first, _, last in names for name in (first, last)}
        assert seen <= {f"fast_batcher-stage_{number}" for number in range(threads)}


async def test_reused_output_array_is_copied_for_finish(gate: Gate) -> None:
    async with DynBatcher(Reuses, 1, model_args=(gate.path,)) as batcher:
        first = call(batcher, 7)
        visit = await gate.visit()
        second = call(batcher, -1)
        third = call(batcher, -2)
        # Then the second one has been computed.
        await until(lambda: last_begun(batcher) == 2)
        visit.let_on()
        assert [await outcome(task) for task in (first, second, third)] == [7.0, -1.0, -2.0]


async def test_prepare_frees_shared_memory_of_large_inputs() -> None:
    async with DynBatcher(Halves, 4) as batcher:
        rows = [np.full(2**17, number, np.float64) for number in range(24)]
        assert await batcher.process_many(rows) == [number * 2**16 for number in range(24)]
        slabs = opening_of(batcher).memory.slabs
        assert isinstance(slabs, Slabs)
        await until(lambda: not slabs.taken_bytes)


async def test_the_warm_up_runs_all_stages() -> None:
    async with DynBatcher(WarmsUp, 2) as batcher:
        # A batch of one twice, and of two twice; then this request.
        assert await batcher.process_batched("3") == (7, 7)


async def test_failing_warm_up_names_error_of_prepare() -> None:
    batcher = DynBatcher(WarmsUp, 2, model_args=("one",))
    with pytest.raises(WorkerStartupError, match=r"warm-up .* invalid literal for int"):
        await batcher.open()
    await batcher.aclose()
