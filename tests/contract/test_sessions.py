"""The contract of sessions: the same for a batcher of its own and for one in a host process."""

import asyncio
import gc
import itertools
import logging
import math
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException, UploadFile
from models.base import Echo
from models.crashing import Stuck
from models.large import Digests, MakesLarge, digest, fingerprint, make_large
from models.loading import NeedsFile
from models.ordinary import Gated, GatedOnLoad, Grows, Holds, Slow
from models.raising import (
    BadText,
    CodedError,
    FailsAtGate,
    FailsPositions,
    Numbers,
    Raises,
    Refuses,
)
from models.returning import UNPICKLABLE, RefusesPickling, Returns
from models.scribbling import ScribblesAndDies
from models.shared import Batches, DiesInBatch, NeedsFileAndDies, Web
from models.stages import InStages
from openings import Make, frames_of, needs_pickling, own_directory, pids_of
from openings import make as make_in_processes
from openings import make_any as make
from recorder import Recorder
from waits import (
    LIMIT,
    SOON,
    SOON_IN_WORKER,
    Gate,
    Watch,
    assert_balance,
    call,
    outcome,
    turns,
    until,
)

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InferenceError,
    NotReadyError,
    OutputMismatchError,
    PoisonRequestError,
    QueueFullError,
    RequestTooLargeError,
    UnsendableValueError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher._core import host
from fast_batcher._host.client import RemoteOpening
from fast_batcher.caching import LRUCache
from fast_batcher.observing import WorkerChanged

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

__all__ = ["make", "make_in_processes", "own_directory"]


# --- answers --------------------------------------------------------------------------------------

ATOMS: list[Any] = [None, 0, -1, 2**70, 0.5, math.inf, "", "text", "\ud800", b"", b"bytes", True]
OTHERS: list[Any] = [[], {}, (), {"a": [None]}, np.arange(3), "x" * 2**21, b"x" * 2**21]


async def test_inputs_come_back_as_they_went(make: Make) -> None:
    """Fault F70: falsy values are values."""
    async with make(Echo, 7) as batcher:
        for values in (ATOMS, OTHERS, [*ATOMS, *OTHERS], range(1000)):
            calls = [call(batcher, value) for value in values]
            outputs = await asyncio.gather(*calls)
            assert [fingerprint(one) for one in outputs] == [fingerprint(one) for one in values]
        assert await batcher.process_many(range(3000)) == [*range(3000)]
        features = {"x": np.arange(300), "y": np.ones((300, 5))}
        rows = await batcher.process_rows(features)
        assert fingerprint(rows) == fingerprint(features)
    assert_balance(batcher)


async def test_arrays_of_every_size_arrive(make: Make) -> None:
    """The first large one goes another way than those after it."""
    sizes = [10, 50_000, 60_000, 600_000, 1_500_000, 5_000_000]
    async with make(Digests, 8) as batcher:
        for _ in range(3):
            arrays = [np.random.default_rng(size).bytes(size) for size in sizes * 2]
            inputs: list[Any] = [np.frombuffer(one, np.uint8) for one in arrays]
            for size in sizes[1:]:
                inputs.append(batcher.allocate_input(size))
                inputs[-1][:] = size % 256
                await turns(1)
            inputs += [b"small", {"not": "staged"}][:1]
            outputs = await asyncio.gather(*map(batcher.process_batched, inputs))
            assert outputs == [digest(one) for one in inputs]
    assert_balance(batcher)


async def test_outputs_of_every_kind_arrive(make: Make) -> None:
    needs_pickling(make)
    wanted = [(kind, size, 1) for kind in ("array", "nested", "text") for size in (100, 2_000_000)]
    async with make(MakesLarge, 8) as batcher:
        calls = [call(batcher, one) for one in [*wanted, "unpicklable"]]
        *outputs, unpicklable = [await outcome(one) for one in calls]
        expected = [make_large(*one) for one in wanted]
        assert [fingerprint(one) for one in outputs] == [fingerprint(one) for one in expected]
        assert isinstance(unpicklable, InferenceError)
    async with make(Grows, 64, max_frame_bytes=2**20) as batcher:
        sizes = [300_000] * 64
        assert [*map(len, await batcher.process_many(sizes))] == sizes
        with pytest.raises(InferenceError):
            await batcher.process_batched(2**20)
        assert len(await batcher.process_batched(100)) == 100


async def test_error_of_an_unpicklable_input_names_the_remedy(make: Make) -> None:
    """As an upload above the size that Starlette keeps in memory."""
    needs_pickling(make)
    with tempfile.SpooledTemporaryFile(max_size=1) as file:
        file.write(b"xx")
        upload = UploadFile(file)  # type: ignore[arg-type]  # as Starlette makes it
        async with make(Echo) as batcher:
            for value in (upload, file, {"image": upload}):
                error = await outcome(call(batcher, value))
                assert isinstance(error, UnsendableValueError)
                assert "read the file first, as await upload.read(), and send its bytes" in str(
                    error
                )
            reading = upload.read()
            forgotten = await outcome(call(batcher, [reading]))
            assert "await the coroutine, and send its result" in str(forgotten)
            reading.close()
            other = await outcome(call(batcher, threading.Lock()))
            assert "send plain data instead" in str(other)


async def test_threads_submit(make: Make) -> None:
    """Fault F48."""
    async with make(Echo, 7) as batcher:

        def submit(first: int) -> list[Any]:
            futures = [batcher.submit(first + number) for number in range(100)]
            return [future.result(LIMIT) for future in futures]

        outputs = await asyncio.gather(*[asyncio.to_thread(submit, 100 * one) for one in range(5)])
        assert [*itertools.chain(*outputs)] == [*range(500)]
        cancelled = batcher.submit(1)
        assert cancelled.cancel()
        assert await batcher.process_batched(2) == 2
    assert assert_balance(batcher).submitted == 501


async def test_stages_work_on_batches_at_the_same_time(make: Make, gate: Gate) -> None:
    async with make(InStages, 1, stage_threads=2, model_args=(gate.path,)) as batcher:
        values = ["finish waits", "infer waits", "prepare waits"]
        calls, visits = [], []
        for value in values:
            calls.append(call(batcher, value))
            visits.append(await gate.visit())
            assert visits[-1].note == value
        for visit in visits:
            visit.let_on()
        assert [await one for one in calls] == [(value, 1) for value in values]
        assert isinstance(await outcome(call(batcher, "prepare raises")), ValueError)
    assert_balance(batcher)


# --- cancellation and deadlines -------------------------------------------------------------------


async def test_cancelled_requests_harm_no_other(make: Make, gate: Gate) -> None:
    async with make(Batches, 3, model_args=(gate.path,)) as batcher:
        running = [call(batcher, value) for value in ("hold", 1, 2)]
        visit = await gate.visit()
        # The worker may have its next batch while it computes.
        behind = [call(batcher, value) for value in (3, 4, 5)]
        waiting = [call(batcher, value) for value in (6, 7, 8, 9)]
        await turns(1)
        at_once = call(batcher, 10)
        await turns(1)
        cancelled = [running[1], behind[1], waiting[1], at_once]
        for task in cancelled:
            task.cancel()
            assert isinstance(await outcome(task), asyncio.CancelledError)
        visit.let_on()
        assert await running[0] == await running[2] == ["hold", 1, 2]
        assert await behind[0] == await behind[2]
        outputs = await asyncio.gather(behind[0], waiting[0], *waiting[2:])
        assert {3, 6, 8, 9} < {*itertools.chain(*outputs)} <= {3, 4, 5, 6, 8, 9}
    assert assert_balance(batcher).cancelled == len(cancelled)


@pytest.fixture
def _patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of a host leaves each deadline to it, however late it is."""
    monkeypatch.setattr(host, "GRACE", LIMIT)


@pytest.mark.usefixtures("_patient_client")
async def test_deadlines_end_waiting_and_running_requests(make: Make, gate: Gate) -> None:
    async with make(Batches, 2, model_args=(gate.path,), timeout=SOON_IN_WORKER) as batcher:
        running = [call(batcher, "hold"), call(batcher, 1, timeout=LIMIT)]
        visit = await gate.visit()
        waiting = [
            call(batcher, 2),
            call(batcher, 3, timeout=SOON),
            call(batcher, 4, timeout=LIMIT),
        ]
        errors = [await outcome(one) for one in (running[0], *waiting[:2])]
        assert {type(one) for one in errors} == {DeadlineExceededError}
        assert f"{SOON} seconds" in str(errors[2])
        assert f"{SOON_IN_WORKER} seconds" in str(errors[0])
        visit.let_on()
        assert await running[1] == ["hold", 1]
        assert await waiting[2] == [4]
    assert assert_balance(batcher).expired == 3


@pytest.mark.usefixtures("_patient_client")
async def test_a_deadline_passes_while_the_model_loads(make: Make, gate: Gate) -> None:
    batcher = make(GatedOnLoad, model_args=(gate.path,), timeout=SOON_IN_WORKER)
    await batcher.open(wait_ready=False)
    calls = [call(batcher, 1), call(batcher, 2, timeout=LIMIT)]
    visit = await gate.visit()
    error = await outcome(calls[0])
    assert isinstance(error, NotReadyError)
    visit.let_on()
    assert await calls[1] == 2
    await batcher.aclose()
    assert assert_balance(batcher).expired == 1


# --- the queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_queue_size": 8}, {"max_queue_bytes": 8 * 900}])
async def test_full_queue_rejects_calls_and_slows_process_many(
    make: Make, gate: Gate, limit: dict[str, Any]
) -> None:
    values = [bytes([number]) * 900 for number in range(60)]
    async with make(Holds, 2, model_args=(gate.path,), **limit) as batcher:
        assert await batcher.process_many(values) == values
        calls = [call(batcher, "hold")]
        visit = await gate.visit()
        calls += [call(batcher, value) for value in values]
        rejected = [await outcome(one) for one in calls[20:]]
        assert {type(one) for one in rejected} == {QueueFullError}
        visit.let_on()
        outcomes = [await outcome(one) for one in calls]
        answered = [one for one in outcomes if not isinstance(one, Exception)]
        # One batch runs, and one is with the worker.
        assert answered == ["hold", *values[: len(answered) - 1]]
        assert 8 < len(answered) <= 8 + 4
    assert assert_balance(batcher).rejected == len(calls) - len(answered)


async def test_call_with_impossible_deadline_is_rejected(make: Make) -> None:
    async with make(Slow, 1, model_args=(0.1,), max_latency=0.15) as batcher:
        assert await batcher.process_batched(0) == 0
        calls = [call(batcher, number) for number in range(20)]
        errors = [await outcome(one) for one in calls]
        late = [one for one in errors if isinstance(one, DeadlineExceededError)]
        assert len(late) > 10
        assert all(one.retry_after is not None for one in late)
        # A timeout of the call is no less a target.
        calls = [call(batcher, 1), call(batcher, 2, timeout=0.001)]
        assert isinstance(await outcome(calls[1]), DeadlineExceededError)
        await outcome(calls[0])
    assert assert_balance(batcher).rejected > 0


async def test_priorities_groups_and_costs_shape_batches(make: Make, gate: Gate) -> None:
    options: dict[str, Any] = {"group_by": key_of, "cost": cost_of, "max_batch_cost": 4.0}
    async with make(Batches, 8, model_args=(gate.path,), **options) as batcher:
        first = [call(batcher, "hold")]
        visit = await gate.visit()
        # The worker may get its next batch while it computes.
        first.append(call(batcher, ("behind", 1), priority=9))
        low = [call(batcher, ("a", 1)) for _ in range(4)]
        other = [call(batcher, ("b", 2)) for _ in range(2)]
        high = call(batcher, ("c", 1), priority=5, timeout=np.float64(LIMIT))
        wrong: Any
        for wrong in (("no cost", -1), ("no hash", 1, [])):
            assert isinstance(await outcome(call(batcher, wrong)), ConfigurationError)
        ended: list[Any] = []
        for task in (*low, *other, high):
            task.add_done_callback(ended.append)
        visit.let_on()
        assert await high == [("c", 1)]
        assert [await one for one in low] == [[("a", 1)] * 4] * 4
        assert [await one for one in other] == [[("b", 2)] * 2] * 2
        await turns()
        assert ended == [high, *low, *other]
        await asyncio.gather(*first)
    assert_balance(batcher)


async def test_share_that_floods_the_queue_delays_and_rejects_no_other(
    make: Make, gate: Gate
) -> None:
    async with make(Batches, 4, model_args=(gate.path,), max_queue_size=16) as batcher:
        first = call(batcher, "hold")
        visit = await gate.visit()
        flood = [call(batcher, number, share="flood") for number in range(60)]
        errors = [await outcome(one) for one in flood[20:]]
        assert {type(one) for one in errors} == {QueueFullError}
        assert all("share 'flood'" in str(one) for one in errors)
        others = [call(batcher, f"share {number}", share=number) for number in range(3)]
        others.append(call(batcher, "no share"))
        many = asyncio.create_task(batcher.process_many(["x"] * 64, share="many"))
        # Of the flood eight are accepted, as the worker is busy.
        await until(lambda: batcher.stats.submitted > 1 + 8 + len(others))
        visit.let_on()
        for one in others:
            assert [type(value) for value in await one].count(int) <= 1
        assert len(await many) == 64
        answered = [one for one in [await outcome(one) for one in flood] if isinstance(one, list)]
        assert 8 <= len(answered) <= 16
        assert await first == ["hold"]
        wrong: Any
        for wrong in (True, 1.5, "x" * 201, 2**63, [], b"bytes"):
            assert isinstance(await outcome(call(batcher, 1, share=wrong)), ConfigurationError)
        assert await batcher.process_batched(1, share="x" * 200, timeout=LIMIT) == [1]
    assert_balance(batcher)


async def test_call_waits_for_no_equal_one_of_lower_priority(make: Make, gate: Gate) -> None:
    async with make(Holds, 1, model_args=(gate.path,), cache=LRUCache(99)) as batcher:
        first = [call(batcher, "hold")]
        visit = await gate.visit()
        # The worker may get its next batch while it computes.
        first.append(call(batcher, "behind", priority=9))
        waiting = [call(batcher, number) for number in range(8)]
        await turns()
        urgent = call(batcher, 7, priority=5)
        await turns()
        joined = call(batcher, 7)
        await until(lambda: batcher.stats.submitted == 11)
        ended: list[Any] = []
        for task in (*waiting, urgent, joined):
            task.add_done_callback(ended.append)
        visit.let_on()
        await asyncio.gather(*first, *waiting, urgent, joined)
        await turns()
        assert ended == [urgent, joined, *waiting]
        stats = batcher.stats
        assert (stats.cache_misses, stats.cache_coalesced) == (11, 1)


def key_of(value: Any) -> Any:
    if isinstance(value, str):
        return value
    # Equal parts, which are one object or two.
    return (value[0], "".join([*value[0]])), value[2:] and value[2]


def cost_of(value: Any) -> float:
    return 1.0 if isinstance(value, str) else value[1]


async def test_settings_change_while_it_runs(make: Make, gate: Gate) -> None:
    batcher = make(Batches, 2, model_args=(gate.path,))
    opening = asyncio.create_task(batcher.open())
    await turns(2)
    batcher.reconfigure(max_batch_size=4)
    await opening
    running = call(batcher, "hold")
    visit = await gate.visit()
    calls = [call(batcher, number) for number in range(8)]
    await turns(2)
    batcher.reconfigure(max_batch_size=8, max_queue_size=1)
    error = await outcome(call(batcher, "too many"))
    assert isinstance(error, QueueFullError)
    assert "max_queue_size=1" in str(error)
    with pytest.raises(ConfigurationError):
        batcher.reconfigure(max_batch_size=0)
    with pytest.raises(RuntimeError, match="must be called on the event loop"):
        await asyncio.to_thread(batcher.reconfigure, max_batch_size=1)
    batcher.reconfigure(max_queue_size=None)
    calls += [call(batcher, number) for number in range(8, 12)]
    await turns(2)
    visit.let_on()
    outcomes = [await outcome(one) for one in (running, *calls)]
    await batcher.aclose()
    # The worker may have had its next batch before the change.
    assert outcomes[:2] in ([["hold"], [0, 1, 2, 3]], [["hold"], [*range(8)]])
    assert outcomes[9] == [*range(len(outcomes[1]), 12)]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [False, True])
async def test_exceptions_of_the_model_reach_the_caller(make: Make, retries: bool) -> None:
    kinds = {"coded": CodedError, "lock": InferenceError, "huge": InferenceError}
    async with make(Raises, 4, isolate_errors=retries) as batcher:
        for name, kind in kinds.items():
            error, fine = [await outcome(call(batcher, text)) for text in (name, "fine")]
            assert isinstance(error, InferenceError)
            assert isinstance(error, kind)
            assert getattr(error, "code", 42) == 42
            calls = [call(batcher, text) for text in (name, "fine")]
            error, fine = [await outcome(one) for one in calls]
            assert isinstance(error, kind)
            assert (fine == "fine") == retries
    stats = assert_balance(batcher)
    assert (stats.failed, stats.completed) == ((6, 6) if retries else (9, 3))


async def test_errors_of_every_kind_reach_the_caller(make: Make) -> None:
    """Fault F28: an exception among the outputs fails its request alone."""
    async with make(Web) as batcher:
        with pytest.raises(HTTPException) as raised:
            await batcher.process_batched("404")
        assert (raised.value.status_code, raised.value.detail) == (404, "no such thing")
        assert raised.value.headers == {"X-Reason": "test"}
    async with make(Returns) as batcher:
        for name in ("fewer", "more", "None"):
            assert isinstance(await outcome(call(batcher, name)), OutputMismatchError)
    async with make(FailsPositions) as batcher:
        calls = [call(batcher, text) for text in ("one", "bad", "two")]
        one, bad, two = [await outcome(task) for task in calls]
        assert (one, two) == ("one", "two")
        assert isinstance(bad, ValueError)
    # Each text takes 128 KiB, and all are too much for one frame.
    limits = frames_of(make, 2**20)
    async with make(Numbers, 64, isolate_errors=False, **limits) as batcher:
        calls = [call(batcher, "x" * 60_000) for _ in range(40)]
        errors = [await outcome(one) for one in calls]
        assert all(isinstance(one, ValueError) for one in errors)
    assert_balance(batcher)


async def test_inputs_that_the_model_refuses_have_not_failed(make: Make) -> None:
    async with make(Refuses) as batcher:
        texts = ["one", "bad", "two", "worse", "three"]
        outcomes = [await outcome(task) for task in [call(batcher, text) for text in texts]]
        assert [type(one) for one in outcomes] == [str, BadText, str, BadText, str]
        assert isinstance(outcomes[1], InferenceError)
        await until(lambda: batcher.stats.completed == 3)  # a host tells it later
        stats = assert_balance(batcher)
        assert (stats.refused, stats.failed, stats.late_errors) == (2, 0, 0)


class ReprRaisesError(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")


async def test_inputs_that_cannot_be_sent_fail_alone(make: Make) -> None:
    """Fault F27."""
    needs_pickling(make)
    async with make(Echo, 8, max_frame_bytes=2**20) as batcher:
        wrong = [make_one() for make_one in UNPICKLABLE.values()]
        wrong += [RefusesPickling(ReprRaisesError()), RefusesPickling(KeyboardInterrupt())]
        values = ["fine", *wrong, b"x" * 2**20, np.zeros(2**20, np.uint8), 1]
        calls = [call(batcher, value) for value in values]
        outcomes = [await outcome(one) for one in calls]
        assert (outcomes[0], outcomes[-1]) == ("fine", 1)
        assert {type(one) for one in outcomes[1:-3]} == {UnsendableValueError}
        assert all(one.__cause__ is not None for one in outcomes[1:-3])
        assert {type(one) for one in outcomes[-3:-1]} == {RequestTooLargeError}
        # Many that fit alone do not fit into one frame.
        values = [bytes([number]) * 1_000_000 for number in range(30)]
        assert await asyncio.gather(*map(batcher.process_batched, values)) == values
    stats = assert_balance(batcher)
    assert (stats.failed, stats.completed) == (len(wrong) + 2, 32)


# --- dying workers --------------------------------------------------------------------------------

RESTARTS: dict[str, Any] = {"max_restarts": None, "restart_backoff": 0.01}


async def test_poisonous_request_fails_alone(make_in_processes: Make) -> None:
    async with make_in_processes(DiesInBatch, 8, **RESTARTS) as batcher:
        calls = [call(batcher, value) for value in (1, "poison", "two", b"3")]
        outcomes = [await outcome(one) for one in calls]
        assert isinstance(outcomes.pop(1), PoisonRequestError)
        assert outcomes == [1, "two", b"3"]
    assert_balance(batcher)
    async with make_in_processes(DiesInBatch, 8, idempotent=False, **RESTARTS) as batcher:
        calls = [call(batcher, value) for value in (1, "poison")]
        assert {type(await outcome(one)) for one in calls} == {WorkerLostError}
        assert await batcher.process_batched(2) == 2
    assert_balance(batcher)


@pytest.mark.parametrize("size", [100, 100_000, 2_000_000])
async def test_retry_sees_original_inputs(
    make_in_processes: Make, tmp_path: Path, size: int
) -> None:
    """The model works in place, and its worker dies."""
    mark = tmp_path / "mark"
    async with make_in_processes(ScribblesAndDies, 8, model_args=(mark,), **RESTARTS) as batcher:
        for _ in range(2):
            arrays = [np.full(size, number, np.uint8) for number in range(6)]
            for number in range(6, 8):
                await turns(1)
                arrays.append(batcher.allocate_input(size))
                arrays[-1][:] = number
            mark.touch()
            outputs = await asyncio.gather(*map(batcher.process_batched, arrays))
            assert outputs == [*range(1, 9)]
            assert not mark.exists()
            outputs = await asyncio.gather(*map(batcher.process_batched, arrays))
            assert outputs == [*range(1, 9)]
            assert [int(one[0]) for one in arrays] == [*range(8)]
    assert_balance(batcher)


async def test_spent_restarts_reject_calls(make_in_processes: Make, tmp_path: Path) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    options: dict[str, Any] = {"max_restarts": 0, "restart_window": 0.2}
    arguments = (str(needed),)
    async with make_in_processes(NeedsFileAndDies, model_args=arguments, **options) as batcher:
        needed.unlink()
        assert isinstance(await outcome(call(batcher, "poison")), NotReadyError)
        await until(lambda: batcher.state == "broken")
        error = await outcome(call(batcher, "x"))
        assert isinstance(error, NotReadyError)
        assert error.retry_after is not None
        needed.touch()
        await until(lambda: batcher.is_ready)
        assert await batcher.process_batched("fine") == "fine"


# --- life -----------------------------------------------------------------------------------------


async def test_aclose_answers_accepted_requests(make: Make, gate: Gate) -> None:
    batcher = make(Gated, 2, model_args=(gate.path,))
    await batcher.open()
    calls = [call(batcher, number) for number in range(5)]
    visit = await gate.visit()
    large = call(batcher, np.zeros(3_000_000, np.uint8).tobytes())
    await turns(1)
    closing = asyncio.create_task(batcher.aclose())
    await turns(2)
    assert batcher.state == "draining"
    assert isinstance(await outcome(call(batcher, 9)), BatcherClosedError)
    large.cancel()
    gate.close()
    assert await asyncio.gather(*calls) == [*range(5)]
    await closing
    assert visit.note == [0, 1]
    assert batcher.state == "closed"
    assert_balance(batcher)
    # It can be opened again.
    async with batcher:
        assert await batcher.process_batched(1) == 1


@pytest.mark.parametrize("how", ["aclose", "stop", "stop in a thread", "cancelled aclose"])
async def test_closing_fails_unanswered_requests(
    make_in_processes: Make, gate: Gate, how: str
) -> None:
    batcher = make_in_processes(
        Stuck, 2, model_args=(gate.path, "plainly"), drain_timeout=0.1, stop_timeout=0.2
    )
    await batcher.open()
    calls = [call(batcher, number) for number in range(5)]
    await gate.visit()
    at_once = call(batcher, 6)
    await turns(1)
    if how == "stop":
        batcher.stop()
    elif how == "stop in a thread":
        await asyncio.to_thread(batcher.stop)
    else:
        closing = asyncio.create_task(batcher.aclose())
        if how == "cancelled aclose":
            await turns(2)
            closing.cancel()
        await outcome(closing)
    errors = [await outcome(one) for one in [*calls, at_once]]
    assert {type(one) for one in errors} == {BatcherClosedError}
    assert batcher.state == "closed"
    assert isinstance(await outcome(call(batcher, 9)), BatcherClosedError)
    assert_balance(batcher)


def drop(batchers: list[Any]) -> None:
    batchers.clear()
    gc.collect()


async def test_dropped_batcher_warns_and_ends(make_in_processes: Make) -> None:
    """As in a notebook, whose cell makes a batcher each time that it runs."""
    cell = [make_in_processes(Echo)]
    await cell[0].open()
    with Watch(pids_of(cell[0])) as workers:
        with pytest.warns(ResourceWarning, match="Echo: an open batcher was dropped"):
            drop(cell)
        await workers.until_dead()


async def test_session_reopens_after_failed_start(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    batcher = make(NeedsFile, model_args=(str(weights),))
    for _ in range(2):
        with pytest.raises(WorkerStartupError, match="weights") as raised:
            await batcher.open()
        assert "FileNotFoundError" in str(raised.value.__cause__)
        assert batcher.state == "broken"
        assert isinstance(await outcome(call(batcher, 1)), WorkerStartupError)
    # Nobody waits for this one.
    await batcher.open(wait_ready=False)
    assert isinstance(await outcome(call(batcher, 1)), WorkerStartupError)
    await until(lambda: batcher.state == "broken")
    if isinstance(batcher._opening, RemoteOpening):
        link = batcher._opening._link
        await until(lambda: not link.is_connected)
    await turns(50)
    assert batcher.state == "broken"
    assert isinstance(batcher.start_error, WorkerStartupError)
    weights.touch()
    async with batcher:
        assert await batcher.process_batched(1) == 1
    assert_balance(batcher)


def test_batcher_opens_again_on_another_event_loop(make: Make, gate: Gate) -> None:
    """Fault F47."""
    batcher = make(Holds, 4, model_args=(gate.path,), stop_timeout=0.0)
    abandoned: list[threading.Thread] = []

    async def first() -> None:
        await batcher.open()
        assert await batcher.process_batched(np.zeros(100_000)) is not None
        left = call(batcher, "hold")
        await gate.visit()
        await turns(2)
        left.cancel()
        abandoned.extend(one for one in threading.enumerate() if "Holds" in one.name)

    async def second() -> None:
        arrays = [np.full(100_000, number) for number in range(4)]
        outputs = await asyncio.gather(*map(batcher.process_batched, arrays))
        assert [fingerprint(one) for one in outputs] == [fingerprint(one) for one in arrays]
        if not batcher.stats.completed:
            await until(lambda: batcher.stats.completed > 0)

    asyncio.run(first())
    gate.close()
    asyncio.run(second())
    asyncio.run(second())
    batcher.stop()
    for thread in abandoned:  # it ends with the call of the model
        thread.join(LIMIT)
    assert batcher.state == "closed"
    assert_balance(batcher)


# --- observers and logs ---------------------------------------------------------------------------


async def test_observers_see_each_request_once(make: Make, gate: Gate) -> None:
    early, late = Recorder(), Recorder()
    options: dict[str, Any] = {"max_queue_size": 4, "observers": [early]}
    async with make(Holds, 2, model_args=(gate.path,), **options) as batcher:
        assert await batcher.process_batched(0) == 0
        batcher.add_observer(late)
        running = call(batcher, "hold")
        visit = await gate.visit()
        calls = [call(batcher, number) for number in range(9)]
        calls.append(call(batcher, UNPICKLABLE["lock"]()))
        calls.append(call(batcher, 1, timeout=1e-6))
        cancelled = call(batcher, 10)
        await turns(1)
        cancelled.cancel()
        visit.let_on()
        outcomes = [await outcome(one) for one in (running, *calls, cancelled)]
    stats = assert_balance(batcher)
    counted = Counter(
        completed=stats.completed,
        failed=stats.failed,
        expired=stats.expired,
        cancelled=stats.cancelled,
        rejected=stats.rejected,
    )
    assert +early.outcomes() == +counted
    assert early.outcomes().total() == len(outcomes) + 1
    assert late.outcomes().total() == len(outcomes)
    assert [one.change for one in early.of(WorkerChanged)] == ["started", "ready", "lost"]


async def test_late_errors_are_counted_and_one_is_logged(
    make_in_processes: Make, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of batches whose callers have all left."""
    async with make_in_processes(
        FailsAtGate, 2, model_args=(gate.path,), restart_backoff=0.01
    ) as batcher:
        cancelled = 0
        for count, how in enumerate(["raise", "item", "large", "count", "unpicklable", "exit"], 1):
            callers = [call(batcher, how) for _ in range(2)]
            visit = await gate.visit()
            assert visit.note == [how] * 2
            for one in callers:
                one.cancel()
            cancelled += len(callers)
            await until(lambda: batcher.stats.cancelled == cancelled)  # noqa: B023
            visit.let_on()
            await until(lambda: batcher.stats.late_errors == count)  # noqa: B023
        answered = call(batcher, "raise")
        (await gate.visit()).let_on()
        assert isinstance(await outcome(answered), ValueError)
    assert assert_balance(batcher).late_errors == count
    (record,) = [one for one in caplog.records if "no caller got" in one.getMessage()]
    assert (record.name, record.levelname) == ("fast_batcher", "WARNING")
    assert "ValueError: the disk is full" in record.getMessage()
    shown = logging.Formatter().format(record)
    assert "in infer" in shown
    assert "raising.py" in shown


async def test_records_of_workers_arrive_once(
    make_in_processes: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_in_processes(Web) as batcher:
        await outcome(call(batcher, "404"))
    records = [one for one in caplog.records if one.name == "models.web"]
    assert [one.getMessage() for one in records] == ["status 404"]
    assert records[0].process != os.getpid()
