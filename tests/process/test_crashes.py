"""Every way a worker can end in the middle of a batch, with real processes.

The callers of the batch are told how it ended, those that wait are served by its replacement.
"""

import asyncio
import os
import signal

import pytest
from packing import pack
from sample_models import CRASHES, Crashes, Holds, TalksNonsense
from waits import LIMIT, Gate, Watch, assert_balance, call, outcome, turns, within

from fast_batcher import DynBatcher, WorkerLostError
from fast_batcher._transport.codec import dumps
from fast_batcher._transport.frames import Kind

pytestmark = pytest.mark.anyio

ENDS = {
    "exit 0": "exit code 0",
    "exit 3": "exit code 3",
    "killed": "signal 9 (SIGKILL, possibly out of memory)",
    "segfault": "signal 11 (SIGSEGV)",
    "abort": "signal 6 (SIGABRT)",
    "terminated": "signal 15 (SIGTERM)",
}


def test_every_crash_of_the_sample_has_its_row() -> None:
    assert set(ENDS) == set(CRASHES)


@pytest.mark.parametrize("way", ENDS)
async def test_the_callers_are_told_how_their_worker_ended_and_the_others_are_served(
    way: str,
) -> None:
    async with DynBatcher(Crashes, 4) as batcher:
        # One turn, so they share a batch; those behind do not fill one, so they wait.
        lost = [call(batcher, text) for text in ("a", way, "b", "c")]
        waiting = [call(batcher, text) for text in ("d", "e")]
        for task in lost:
            error = await outcome(task)
            assert isinstance(error, WorkerLostError)
            assert str(error) == f"worker 0 ended with {ENDS[way]} while it had this request"
        assert [await outcome(task) for task in waiting] == ["d", "e"]
        stats = assert_balance(batcher)
        assert (stats.failed, stats.completed, stats.restarts) == (4, 2, 1)


async def test_the_batch_behind_a_fatal_one_is_lost_with_the_worker_and_the_queue_is_kept(
    gate: Gate,
) -> None:
    async with DynBatcher(Holds, 2, model_args=(gate.path,)) as batcher:
        running = [call(batcher, "hold"), call(batcher, 0)]
        visit = await gate.visit()
        # A full batch is sent to the busy worker; one more request waits.
        behind = [call(batcher, number) for number in (1, 2)]
        waiting = call(batcher, "waiting")
        await turns()
        assert assert_balance(batcher).running == 4
        os.kill(visit.pid, signal.SIGKILL)
        for task in (*running, *behind):
            assert isinstance(await outcome(task), WorkerLostError)
        assert await outcome(waiting) == "waiting"


async def test_a_cancelled_caller_of_a_fatal_batch_is_counted_once(gate: Gate) -> None:
    async with DynBatcher(Holds, model_args=(gate.path,)) as batcher:
        stays, leaves = call(batcher, "hold"), call(batcher, 0)
        visit = await gate.visit()
        leaves.cancel()
        os.kill(visit.pid, signal.SIGKILL)
        assert isinstance(await outcome(leaves), asyncio.CancelledError)
        assert isinstance(await outcome(stays), WorkerLostError)
        stats = assert_balance(batcher)
        assert (stats.failed, stats.cancelled, stats.running) == (1, 1, 0)


async def test_an_answer_that_was_sent_before_death_is_delivered() -> None:
    """The worker has answered and is dead before the loop looks for either."""
    answer = pack(Kind.OUTPUTS, 0, dumps(["one", "two"]))
    async with DynBatcher(TalksNonsense) as batcher:
        (pid,) = [handle.pid for handle in batcher._pool.remaining()]
        assert pid is not None
        calls = [call(batcher, answer), call(batcher, b"die")]
        with Watch([pid]) as worker:
            await turns()
            assert worker.survivors(LIMIT) == []
        assert [await outcome(task) for task in calls] == ["one", "two"]
        assert assert_balance(batcher).failed == 0


@pytest.mark.slow
async def test_workers_that_are_killed_all_the_time_lose_no_request_silently() -> None:
    """Each call ends once, with its own answer or the loss of its worker."""
    async with DynBatcher(Crashes, 4, num_workers=2, max_queue_size=2000) as batcher:
        calls = [
            call(batcher, "killed" if number % 100 == 50 else str(number), timeout=LIMIT)
            for number in range(500)
        ]
        with within(5.0, "500 calls end although 5 of them kill their workers"):
            results = [await outcome(task) for task in calls]
        for number, result in enumerate(results):
            assert result == str(number) or isinstance(result, WorkerLostError)
        assert sum(isinstance(result, WorkerLostError) for result in results) <= 5 * 2 * 4
        stats = assert_balance(batcher)
        assert (stats.waiting, stats.running) == (0, 0)
