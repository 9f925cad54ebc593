"""Deadlines under a blocked event loop, and during the copy of an answer."""

import asyncio
import select
import time
from time import monotonic
from typing import Any

import pytest
from models.base import Echo
from models.large import Digests, digest
from models.ordinary import Gated, GatedOnLoad, Grows
from openings import opening_of
from prometheus_client import CollectorRegistry
from sender_harness import MEBI, copier_held, until_copying
from shared_hosts import hosts
from waits import LIMIT, Gate, assert_balance, call, one_loop, outcome, turns, until

from fast_batcher import DeadlineExceededError, DynBatcher, NotReadyError
from fast_batcher._core.loop_lag import SERIOUS, TICK
from fast_batcher._opening import opening
from fast_batcher._parent.staging import LARGEST_COPY_ON_LOOP
from fast_batcher._parent.worker_handle import WorkerHandle
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher.fastapi.status.page import _of_loop
from fast_batcher.prometheus import instrument

__all__ = ["hosts"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Long enough for a worker to answer at once, on a busy machine too, in seconds; and to start.
IN_TIME = 2.0
STARTS_IN_TIME = 8.0
# Turns of the loop until a call has been dispatched; its answer is read in a later one at best.
DISPATCH = 2


def block_the_loop(handle: WorkerHandle, seconds: float) -> None:
    """Until the worker has answered, and so many seconds have passed: an endpoint's mistake."""
    deadline = monotonic() + seconds
    assert isinstance(handle, WorkerProcess)
    assert handle._live is not None
    source = handle._live.channel._source
    assert select.select([source], [], [], LIMIT)[0], "the worker said nothing"
    time.sleep(max(0.0, deadline - monotonic()))


def worker_of(batcher: DynBatcher[Any, Any]) -> WorkerHandle:
    (worker,) = workers_of(batcher)
    return worker


def workers_of(batcher: DynBatcher[Any, Any]) -> list[WorkerHandle]:
    return opening_of(batcher).pool.alive()


@pytest.fixture(params=["timer", "pump"])
def next_thing(request: pytest.FixtureRequest) -> Any:
    """Order of timers and reads after a blocked loop; it depends on the loop."""
    return request.param


# Bytes of an answer, and settings that say which way it goes.
ANSWERS: dict[str, tuple[int, dict[str, Any]]] = {
    "small": (10, {}),
    "in shared memory": (24 * MEBI, {}),
    # Only a part of it can have come: the worker waits for a reader.
    "through the pipe": (24 * MEBI, {"max_shared_bytes": 0}),
}


@pytest.mark.parametrize("settings", [{"timeout": IN_TIME}, {"infer_timeout": IN_TIME}])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_answer_during_blocked_loop_is_delivered(
    settings: Any, answer: str, next_thing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that does not run for a moment is still sending.
    monkeypatch.setattr(opening, "REST_OF_ANSWER", LIMIT)
    size, shared = ANSWERS[answer]
    async with DynBatcher(Grows, **settings, **shared) as batcher:
        handle = worker_of(batcher)
        answered = call(batcher, size)
        await turns(DISPATCH)
        assert batcher.stats.running == 1
        block_the_loop(handle, 1.1 * IN_TIME)
        if next_thing == "pump":
            batcher.reconfigure(max_queue_size=None)
        assert len(await outcome(answered)) == size
        assert (batcher.stats.restarts, worker_of(batcher)) == (0, handle)
        assert batcher.is_ready
        assert_balance(batcher)


async def test_unanswered_request_expires_after_blocked_loop(next_thing: str, gate: Gate) -> None:
    settings: dict[str, Any] = {"num_workers": 2, "timeout": IN_TIME}
    async with DynBatcher(Gated, 1, model_args=(gate.path,), **settings) as batcher:
        answered, late = call(batcher, "in time"), call(batcher, "late")
        visits = {visit.note[0]: visit for visit in [await gate.visit(), await gate.visit()]}
        handles = workers_of(batcher)
        (handle,) = [one for one in handles if one.pid == visits["in time"].pid]
        waiting = call(batcher, "waiting")
        await turns()
        visits["in time"].let_on()
        block_the_loop(handle, 1.1 * IN_TIME)
        if next_thing == "pump":
            batcher.reconfigure(max_queue_size=None)
        assert await outcome(answered) == "in time"
        error = await outcome(late)
        assert isinstance(error, DeadlineExceededError)
        assert "the model had not answered" in str(error)
        assert isinstance(await outcome(waiting), DeadlineExceededError)
        gate.close()
        assert_balance(batcher)


@pytest.mark.parametrize("place", [{}, {"workers": "threads"}, {"shared": True}])
async def test_blocked_loop_is_named_in_log_error_and_statistics(
    place: Any, caplog: pytest.LogCaptureFixture, hosts: object
) -> None:
    """The loop, and not the model, which would have answered at once."""
    batcher, registry = DynBatcher(Echo, **place), CollectorRegistry()
    instrument(batcher, registry)
    async with batcher:
        assert await batcher.process_batched("first") == "first"
        if place.get("shared"):  # its statistics are a second old
            await until(lambda: batcher.stats.submitted > 0)
        before = batcher.stats.loop_blocked
        late = call(batcher, "late", timeout=0.5)
        await asyncio.sleep(0)
        time.sleep(SERIOUS + TICK)
        error = await outcome(late)
        assert isinstance(error, DeadlineExceededError | NotReadyError)
        assert "; the event loop was blocked for " in str(error)
        await until(lambda: batcher.stats.loop_blocked >= before + SERIOUS)
        time.sleep(SERIOUS + TICK)
        blocked = batcher.stats.loop_blocked
        await until(lambda: batcher.stats.loop_blocked > blocked)
        metric, labels = "fast_batcher_event_loop_blocked_seconds_total", {"model": "Echo"}
        await until(lambda: (registry.get_sample_value(metric, labels) or 0.0) > blocked)
        (problem,) = [problem for problem in _of_loop(monotonic()) if "event loop" in problem.text]
        assert problem.level == "warning"
    (warning,) = [text for text in caplog.messages if "event loop" in text]  # one in a minute
    assert warning.startswith("the event loop was blocked for ")
    assert "import it with the app" in warning
    assert "large bodies arrive faster than it reads them" in warning
    assert "Echo" not in warning


async def test_blocked_loop_of_an_app_that_starts_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with DynBatcher(Echo, workers="threads") as batcher:
        time.sleep(SERIOUS + TICK)
        await until(lambda: batcher.stats.loop_blocked >= SERIOUS)
    assert not [text for text in caplog.messages if "event loop" in text]


async def test_two_batchers_of_a_loop_have_one_watch(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (DynBatcher(Echo, workers="threads", name=name) for name in "ab")
    async with first:
        async with second:
            assert await second.process_batched("a") == "a"
            time.sleep(SERIOUS + TICK)
            await until(lambda: second.stats.loop_blocked >= SERIOUS)
        closed = second.stats.loop_blocked
        assert first.stats.loop_blocked >= closed
        time.sleep(2 * TICK)
        await until(lambda: first.stats.loop_blocked > closed)
        assert second.stats.loop_blocked == closed
    assert len([text for text in caplog.messages if "event loop" in text]) == 1


async def test_answer_does_not_expire_during_copy() -> None:
    async with DynBatcher(Grows, timeout=IN_TIME) as batcher:
        with copier_held(batcher):
            copied = call(batcher, 2 * LARGEST_COPY_ON_LOOP)
            await until_copying(batcher)
            # Its deadline is later than that of the call before.
            loop = asyncio.get_running_loop()
            passed = loop.create_future()
            loop.call_later(1.1 * IN_TIME, passed.set_result, None)
            await passed
            assert batcher.stats.running == 1
            assert not copied.done()
        assert len(await outcome(copied)) == 2 * LARGEST_COPY_ON_LOOP
        stats = assert_balance(batcher)
        assert (stats.completed, stats.expired) == (1, 0)


@one_loop
async def test_worker_ready_during_blocked_loop_is_kept(gate: Gate) -> None:
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,), start_timeout=STARTS_IN_TIME)
    await batcher.open(wait_ready=False)
    visit = await gate.visit()
    visit.let_on()
    block_the_loop(worker_of(batcher), 1.1 * STARTS_IN_TIME)
    assert await batcher.process_batched("served") == "served"
    await batcher.aclose()


@pytest.mark.parametrize("max_shared_bytes", [0, 100 * MEBI])
async def test_unsent_large_input_replaces_no_worker(max_shared_bytes: int) -> None:
    large = b"x" * (30 * MEBI)
    async with DynBatcher(
        Digests, infer_timeout=IN_TIME, max_shared_bytes=max_shared_bytes
    ) as batcher:
        handle = worker_of(batcher)
        answered = call(batcher, large)
        await turns(DISPATCH)
        assert batcher.stats.running == 1
        time.sleep(1.1 * IN_TIME)
        assert await outcome(answered) == digest(large)
        assert (batcher.stats.restarts, worker_of(batcher)) == (0, handle)


@one_loop
async def test_load_time_starts_after_blocked_loop() -> None:
    batcher = DynBatcher(Echo, start_timeout=STARTS_IN_TIME)
    await batcher.open(wait_ready=False)
    time.sleep(1.1 * STARTS_IN_TIME)
    assert await batcher.process_batched("served") == "served"
    await batcher.aclose()
