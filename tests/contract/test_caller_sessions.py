"""Sessions of a `SessionModel`, with real workers: order, states, ends, faults."""

import asyncio
import os
import random
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from models.crashing import Bomb
from models.ordinary import Slow
from models.remembering import Counted, Diary, Framed, Held, Line, Mixed, Unwilling
from openings import PLACES, every_place, host_of, opening_of, pids_of
from waits import LIMIT, Gate, assert_balance, both_loops, call, one_loop, outcome, turns, until

from fast_batcher import (
    BatcherClosedError,
    BatcherError,
    BatchSession,
    ConfigurationError,
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    QueueFullError,
    SessionLostError,
    SessionModel,
    SteppedModel,
    UnsendableValueError,
)
from fast_batcher.caching import LRUCache
from fast_batcher.testing import BatcherKit

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("hosts")]


# Tests that wait for a call to run: the statistics of a shared batcher are up to a second old.
own = pytest.mark.parametrize("place", [PLACES["threads"], {}], ids=["threads", "processes"])


async def speak(batcher: DynBatcher[Any, Any], name: str, count: int) -> int:
    """Have a session of some calls; return the size of its largest batch."""
    sizes = []
    async with batcher.session() as session:
        for number in range(1, count + 1):
            answer = await session.process_batched(Line(name, number))
            assert answer[:2] == (name, number)
            sizes.append(int(answer[2]))
    return max(sizes)


async def live(batcher: DynBatcher[Any, Any]) -> int:
    """Return how many states the worker has, besides that of the call that asks."""
    _, begun, left = await batcher.process_batched(Line("states", 0, "states"))
    return int(begun - left - 1)


@both_loops
@every_place
async def test_sessions_keep_their_states_and_share_batches(place: Any) -> None:
    async with DynBatcher(Diary, **place, model_args=(0.005,)) as batcher:
        sizes = await asyncio.gather(*[speak(batcher, f"s{number}", 9) for number in range(20)])
        assert max(sizes) > 1
        assert await live(batcher) == 0
        await until(lambda: batcher.stats.completed == 20 * 9 + 1)
        assert batcher.stats.sessions == 0
        assert_balance(batcher)


@one_loop
@every_place
async def test_calls_of_one_session_are_computed_in_order(place: Any) -> None:
    async with DynBatcher(Diary, **place, num_workers=2) as batcher, batcher.session() as session:
        calls = [session.process_batched(Line("s", number)) for number in range(1, 9)]
        answers = await asyncio.gather(*calls)
        assert answers == [("s", number, 1) for number in range(1, 9)]
        await until(lambda: batcher.stats.sessions == 1)


@one_loop
@every_place
async def test_an_exception_instance_fails_its_call_and_not_the_session(place: Any) -> None:
    async with DynBatcher(Diary, **place) as batcher, batcher.session() as session:
        with pytest.raises(InferenceError, match="not this one"):
            await session.process_batched(Line("s", 1, "fail"))
        if place != PLACES["threads"]:  # a thread can pass it on
            with pytest.raises(InferenceError):
                await session.process_batched(Line("s", 2, "lambda"))
            await session.process_batched(Line("s", 3))
        assert (await session.process_batched(Line("s", 4)))[1] in (2, 4)


@one_loop
@every_place
async def test_an_error_of_the_batch_ends_its_sessions_and_no_others(place: Any) -> None:
    async with DynBatcher(Diary, **place) as batcher:
        async with batcher.session() as other, batcher.session() as session:
            assert await other.process_batched(Line("o", 1)) == ("o", 1, 1)
            assert await session.process_batched(Line("s", 1)) == ("s", 1, 1)
            with pytest.raises(InferenceError, match="all of them"):
                await session.process_batched(Line("s", 2, "raise"))
            with pytest.raises(SessionLostError, match="has failed"):
                await session.process_batched(Line("s", 3))
            assert await other.process_batched(Line("o", 2)) == ("o", 2, 1)
            assert await live(batcher) == 1
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_a_call_that_cannot_be_sent_leaves_the_others_their_sessions(place: Any) -> None:
    async with (
        DynBatcher(Diary, **place) as batcher,
        batcher.session() as first,
        batcher.session() as second,
    ):
        assert await first.process_batched(Line("f", 1)) == ("f", 1, 1)
        assert await second.process_batched(Line("s", 1)) == ("s", 1, 1)
        unsendable: Any = Bomb("dump task", "raise")
        if place == PLACES["threads"]:  # it is not pickled
            unsendable = Line("f", 2)
        calls = first.process_batched(unsendable), second.process_batched(Line("s", 2))
        _, answer = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answer, tuple), answer
        assert answer[:2] == ("s", 2)


@one_loop
@every_place
@pytest.mark.parametrize("has_state", [False, True])
async def test_a_failed_call_loses_the_session_for_the_calls_behind_it(
    place: Any, gate: Gate, has_state: bool
) -> None:
    """Its caller has left, and its worker has the next call when it fails."""
    options = {**place, "max_batch_size": 1, "model_args": (gate.path,)}
    async with DynBatcher(Held, **options) as batcher, batcher.session() as session:
        if has_state:
            assert await session.process_batched(Line("s", 1)) == ("s", 1, 1)
        failing = asyncio.create_task(session.process_batched(Line("s", 2, "raise")))
        visit = await gate.visit()
        failing.cancel()
        behind = asyncio.create_task(session.process_batched(Line("s", 3)))
        await until(lambda: batcher.stats.batches == 2 + has_state)
        visit.let_on()
        with pytest.raises(SessionLostError, match="has failed"):
            await behind
        with pytest.raises(SessionLostError, match="has failed"):
            await session.process_batched(Line("s", 4))
        assert await live(batcher) == 0


@one_loop
@pytest.mark.parametrize("place", [{}, {"shared": True}], ids=["own", "shared"])
async def test_a_session_begins_behind_an_unreadable_first_call(place: Any) -> None:
    async with DynBatcher(Diary, **place) as batcher, batcher.session() as session:
        unreadable: Any = Bomb("load task", "raise")
        with pytest.raises(InferenceError, match="boom"):
            await session.process_batched(unreadable)
        assert await session.process_batched(Line("s", 1)) == ("s", 1, 1)


@one_loop
@every_place
async def test_a_session_without_a_state_begins_with_its_next_call(place: Any) -> None:
    async with DynBatcher(Unwilling, **place) as batcher, batcher.session() as session:
        with pytest.raises(InferenceError, match="not the first"):
            await session.process_batched(Line("s", 1))
        assert await session.process_batched(Line("s", 2)) == ("s", 1, 1)


@one_loop
@pytest.mark.parametrize("place", [{}, {"shared": True}], ids=["own", "shared"])
async def test_with_their_worker_sessions_are_lost(place: Any) -> None:
    async with DynBatcher(Diary, **place, restart_backoff=0.01) as batcher:
        async with batcher.session() as idle, batcher.session() as session:
            await idle.process_batched(Line("i", 1))
            with pytest.raises(SessionLostError, match="SIGKILL"):
                await session.process_batched(Line("s", 1, "kill"))
            for one in (idle, session):
                with pytest.raises(SessionLostError, match=r"ended: .*worker"):
                    await one.process_batched(Line("s", 2))
        assert await speak(batcher, "next", 3) == 1
        await until(lambda: batcher.stats.sessions == 0)


@one_loop
@every_place
async def test_a_reload_ends_sessions(place: Any) -> None:
    async with DynBatcher(Diary, **place) as batcher, batcher.session() as session:
        await session.process_batched(Line("s", 1))
        await batcher.reload()
        with pytest.raises(SessionLostError, match="replaced"):
            await session.process_batched(Line("s", 2))
        assert await speak(batcher, "next", 2) == 1


@one_loop
@every_place
async def test_a_worker_that_a_person_removes_finishes_its_sessions(place: Any) -> None:
    """The worker with the fewest sessions gets no new one, and ends with its last one."""
    async with DynBatcher(Diary, **place, num_workers=2) as batcher, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(batcher.session()) for _ in range(4)]
        for session in sessions:
            await session.process_batched(Line("s", 1))
        await sessions[0].aclose()
        batcher.reconfigure(num_workers=1)
        await until(lambda: batcher.stats.num_workers == batcher.stats.workers_ready == 1)
        later = await stack.enter_async_context(batcher.session())
        for session in [*sessions[1:], later]:
            await session.process_batched(Line("s", 2))
        await sessions[2].aclose()
        for session in (sessions[1], sessions[3], later):
            await session.process_batched(Line("s", 3))


@one_loop
@every_place
async def test_a_worker_that_a_person_removes_ends_its_sessions_in_time(place: Any) -> None:
    options = {**place, "num_workers": 2, "drain_timeout": 0.0}
    async with DynBatcher(Diary, **options) as batcher, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(batcher.session()) for _ in range(4)]
        for session in sessions:
            await session.process_batched(Line("s", 1))
        batcher.reconfigure(num_workers=1)
        await until(lambda: batcher.stats.sessions == 2)
        answers = [session.process_batched(Line("s", 2)) for session in sessions]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert sum(isinstance(one, SessionLostError) for one in found) == 2


@one_loop
async def test_a_worker_that_the_batcher_itself_does_not_need_keeps_its_sessions() -> None:
    """It gets no new session, and ends with its last one."""
    async with DynBatcher(Diary, num_workers=2) as batcher:
        batcher.reconfigure(num_workers=(1, 2))
        sessions = [batcher.session() for _ in range(4)]
        for session in sessions:
            await session.process_batched(Line("s", 1))
        opening_of(batcher)._leaving = 1  # as after two minutes of little load
        await until(lambda: batcher.stats.workers_ready == 1)
        for session in sessions:
            await session.process_batched(Line("s", 2))
        for session in sessions:
            await session.aclose()
        assert await speak(batcher, "next", 2) == 1


@one_loop
@every_place
@pytest.mark.parametrize("how", ["close", "stop", "reload", "recycle", "scale", "fail"])
async def test_each_state_that_begins_is_left_once(place: Any, how: str, tmp_path: Path) -> None:
    file = tmp_path / "states"
    options = {**place, "model_args": (str(file),), "drain_timeout": 0.0}
    if how == "recycle":
        options["max_batches_per_worker"] = 3
    batcher = DynBatcher(Counted, **options, num_workers=1 if how == "recycle" else 2)
    await batcher.open()
    sessions = [batcher.session() for _ in range(6)]
    await batcher.process_batched("alone")
    for session in sessions:
        with suppress(SessionLostError):
            await session.process_batched("")
    if how == "reload":
        await batcher.reload()
    elif how == "scale":
        batcher.reconfigure(num_workers=1)
    elif how == "fail":
        with pytest.raises(InferenceError):
            await sessions[0].process_batched("raise")
    if how == "stop":
        batcher.stop()
    else:
        await batcher.aclose()
    lines = [line.split() for line in file.read_text().splitlines()]
    left = [state for what, state in lines if what == "left"]
    assert sorted(left) == sorted(state for what, state in lines if what == "begun")
    assert len(left) >= len(sessions)


@one_loop
@every_place
async def test_an_idle_session_ends_and_its_state_is_released(place: Any) -> None:
    async with DynBatcher(Diary, **place) as batcher:
        session = batcher.session(timeout=0.05)
        await session.process_batched(Line("s", 1))
        if place == PLACES["shared"]:  # its statistics are a second old
            await until(lambda: batcher.stats.batches == 1)
        await until(lambda: batcher.stats.sessions == 0)
        with pytest.raises(SessionLostError, match=r"idle for its timeout of 0.05"):
            await session.process_batched(Line("s", 2))
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_no_more_sessions_than_places(place: Any) -> None:
    async with DynBatcher(Diary, **place, max_sessions=2) as batcher:
        first, second, third = [batcher.session() for _ in range(3)]
        for session in (first, second):
            await session.process_batched(Line("s", 1))
        with pytest.raises(QueueFullError, match=r"max_sessions=2") as info:
            await third.process_batched(Line("t", 1))
        assert info.value.retry_after is None  # no session has ended yet
        await first.aclose()
        with pytest.raises(SessionLostError, match="closed"):
            await first.process_batched(Line("s", 2))
        assert await third.process_batched(Line("t", 1)) == ("t", 1, 1)
        with pytest.raises(QueueFullError) as info:
            await batcher.session().process_batched(Line("u", 1))
        assert info.value.retry_after is not None
        await second.aclose()
        await third.aclose()


@one_loop
@every_place
async def test_a_session_that_ends_after_a_full_queue_frees_its_place(
    place: Any, gate: Gate
) -> None:
    """Its first call runs on without its caller, and its second one is rejected."""
    limits: dict[str, Any] = {
        "max_sessions": 1,
        "max_batch_size": 2,
        "max_queue_size": 1,
        "timeout": None,
    }
    async with DynBatcher(Held, **place, **limits, model_args=(gate.path,)) as batcher:
        session = batcher.session()
        running = asyncio.create_task(session.process_batched(Line("s", 1, "gate")))
        visit = await gate.visit()
        running.cancel()
        waiting = call(batcher, Line("w", 1))  # a busy worker gets full batches alone
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="max_queue_size"):
            await session.process_batched(Line("s", 2))
        await session.aclose()
        visit.let_on()
        await waiting
        assert await speak(batcher, "next", 2) == 1


@one_loop
@every_place
@pytest.mark.parametrize("how", ["idle", "reload", "failed", "rejected"])
async def test_close_does_not_wait_for_a_session_without_a_place(place: Any, how: str) -> None:
    """Its user still has it: only the scheduler knows that it has ended."""
    batcher = DynBatcher(Diary, **place, max_sessions=1, drain_timeout=10 * LIMIT)
    await batcher.open()
    session = batcher.session(timeout=0.05 if how == "idle" else LIMIT)
    other = batcher.session()
    await session.process_batched(Line("s", 1))
    if how == "reload":
        await batcher.reload()
    elif how == "failed":
        with pytest.raises(InferenceError):
            await session.process_batched(Line("s", 2, "raise"))
    elif how == "rejected":
        with pytest.raises(QueueFullError):
            await other.process_batched(Line("o", 1))
        await session.aclose()
    assert await outcome(asyncio.create_task(batcher.aclose())) is None
    for one in (session, other):
        await one.aclose()


@one_loop
async def test_a_host_keeps_nothing_of_rejected_sessions() -> None:
    async with (
        DynBatcher(Diary, shared=True, max_sessions=1) as batcher,
        batcher.session(timeout=10 * LIMIT) as only,  # it is idle until the end
    ):

        async def be_rejected(*, closes: bool) -> None:
            session = batcher.session()
            with pytest.raises(QueueFullError, match="max_sessions"):
                await session.process_batched(Line("s", 1))
            if closes:
                await session.aclose()

        await only.process_batched(Line("o", 1))
        host = psutil.Process(host_of(batcher))
        before = 0
        for part in range(40):
            if part == 16:  # its memory has grown to what it needs
                before = host.memory_info().rss
            calls = [be_rejected(closes=number % 2 == 0) for number in range(500)]
            await asyncio.gather(*calls)
        # 12,000 sessions: less than 170 bytes each.
        assert host.memory_info().rss - before < 2 * 2**20


@one_loop
@own
async def test_a_cancelled_call_does_not_end_the_session(place: Any) -> None:
    options = {**place, "model_args": (0.05,)}
    async with DynBatcher(Diary, **options) as batcher, batcher.session() as session:
        await session.process_batched(Line("s", 1))
        call = asyncio.create_task(session.process_batched(Line("s", 2)))
        await until(lambda: batcher.stats.running == 1)
        call.cancel()
        _, count, _ = await session.process_batched(Line("s", 3))
        assert count in (2, 3)  # the cancelled one was computed, or had not begun
        waiting = [
            asyncio.create_task(session.process_batched(Line("s", number))) for number in (4, 5, 6)
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        assert (await waiting[0])[1] == count + 1
        assert (await waiting[2])[1] == count + 2


@one_loop
@every_place
async def test_a_call_after_a_cancelled_one_is_in_another_batch(place: Any) -> None:
    """The first call is cancelled at any moment of the batch before it, its last one included."""
    seconds, rounds = 0.004, 80
    options = {**place, "model_args": (seconds,)}
    async with (
        DynBatcher(Diary, **options) as batcher,
        batcher.session() as before,
        batcher.session() as session,
    ):
        for number in range(rounds):
            running = asyncio.create_task(before.process_batched(Line("before", number)))
            await asyncio.sleep(seconds / 4)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds * number / rounds):
                    await session.process_batched(Line("s", 2 * number))
            await session.process_batched(Line("s", 2 * number + 1))
            await running


@one_loop
async def test_the_wait_for_earlier_calls_counts() -> None:
    async with DynBatcher(Diary, model_args=(0.3,)) as batcher, batcher.session() as session:
        first = asyncio.create_task(session.process_batched(Line("s", 1)))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError, match=r"earlier calls .* timeout=0\.01 seconds"):
            await session.process_batched(Line("s", 2), timeout=0.01)
        assert await first == ("s", 1, 1)
        with pytest.raises(ConfigurationError, match="timeout"):
            await session.process_batched(Line("s", 2), timeout=-1)


@one_loop
async def test_the_default_timeout_is_no_target_behind_an_earlier_call() -> None:
    seconds = 0.2
    options: dict[str, Any] = {"model_args": (seconds,), "timeout": 2.5 * seconds}
    async with (
        DynBatcher(Diary, workers="threads", max_batch_size=1, **options) as batcher,
        batcher.session() as other,
        batcher.session() as session,
    ):
        for number in range(1, 4):  # the batcher learns how long a call takes
            await session.process_batched(Line("s", number), timeout=LIMIT)
        calls = [
            asyncio.create_task(one.process_batched(Line(name, number)))
            for one, name, number in ((session, "s", 4), (other, "o", 1), (session, "s", 5))
        ]
        await asyncio.wait(calls)
        error = calls[-1].exception()
        assert error is None or getattr(error, "retry_after", None) is None, error


@one_loop
@every_place
async def test_sessions_end_while_the_batcher_drains(place: Any) -> None:
    async with DynBatcher(Diary, **place, drain_timeout=LIMIT) as batcher:
        session = batcher.session()
        await session.process_batched(Line("s", 1))
        batcher.begin_drain()
        assert await session.process_batched(Line("s", 2)) == ("s", 2, 1)
        with pytest.raises(BatcherClosedError):
            await batcher.session().process_batched(Line("t", 1))
        closing = asyncio.create_task(batcher.aclose())
        for number in range(3, 9):
            assert await session.process_batched(Line("s", number)) == ("s", number, 1)
            assert not closing.done()
        await session.aclose()
        await closing
        with pytest.raises(SessionLostError):
            await session.process_batched(Line("s", 9))


@one_loop
async def test_closing_names_the_sessions_that_no_block_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batcher = DynBatcher(Diary, workers="threads", drain_timeout=0.0)
    await batcher.open()
    left, ended, unused = [batcher.session() for _ in range(3)]
    async with batcher.session() as within:
        for session in (left, ended, within):
            await session.process_batched(Line("s", 1))
        await ended.aclose()
        await batcher.aclose()
    (message,) = [text for text in caplog.messages if "sessions" in text]
    assert message.startswith("Diary: aclose() waits up to drain_timeout=0.0 seconds for sessions")
    assert "(1)" in message
    del left, unused


@one_loop
@every_place
async def test_a_dropped_session_ends(place: Any) -> None:
    async with DynBatcher(Diary, **place, drain_timeout=LIMIT) as batcher:
        await batcher.session().process_batched(Line("s", 1))
        await until(lambda: batcher.stats.batches == 1 and not batcher.stats.sessions)
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_no_session_begins_while_the_batcher_drains(place: Any) -> None:
    """Also none that had called before, and found no place."""
    async with DynBatcher(Diary, **place, max_sessions=1, drain_timeout=LIMIT) as batcher:
        only, other = batcher.session(), batcher.session()
        await only.process_batched(Line("s", 1))
        with pytest.raises(QueueFullError):
            await other.process_batched(Line("o", 1))
        batcher.begin_drain()
        assert await only.process_batched(Line("s", 2)) == ("s", 2, 1)
        await only.aclose()
        with pytest.raises(BatcherClosedError, match="takes no new session"):
            await other.process_batched(Line("o", 2))
        await other.aclose()


@one_loop
async def test_no_call_of_a_session_goes_behind_the_goodbye_to_its_host() -> None:
    """It would be computed on a new state."""
    batcher = DynBatcher(Diary, shared=True, drain_timeout=0.0)
    await batcher.open()
    session, other = batcher.session(), batcher.session()
    await session.process_batched(Line("s", 1))
    unsendable: Any = lambda: 0  # noqa: E731
    with pytest.raises(UnsendableValueError):
        await other.process_batched(unsendable)
    host = psutil.Process(host_of(batcher))
    host.suspend()
    try:
        closing = asyncio.create_task(batcher.aclose())
        await until(batcher._opening._link._leaving.is_set)  # type: ignore[union-attr]
        calls = [asyncio.create_task(one.process_batched(Line("s", 2))) for one in (session, other)]
        await turns()
    finally:
        host.resume()
    await closing
    errors = [await outcome(one) for one in calls]
    assert [type(error) for error in errors] == [SessionLostError, BatcherClosedError]


@one_loop
@every_place
async def test_a_closed_batcher_that_opens_again_has_none_of_the_sessions(place: Any) -> None:
    batcher = DynBatcher(Diary, **place, drain_timeout=0.01)
    async with batcher:
        session = batcher.session()
        await session.process_batched(Line("s", 1))
    async with batcher:
        with pytest.raises(SessionLostError, match="batcher was closed"):
            await session.process_batched(Line("s", 2))
        await session.aclose()
        assert await speak(batcher, "t", 2) == 1


@one_loop
@own
async def test_closing_fails_a_call_that_waits_and_not_one_that_runs(place: Any) -> None:
    async with DynBatcher(Diary, **place, model_args=(0.05,), max_batch_size=1) as batcher:
        session = batcher.session()
        await session.process_batched(Line("s", 1))
        running = asyncio.create_task(session.process_batched(Line("s", 2)))
        await until(lambda: batcher.stats.running == 1)
        behind = asyncio.create_task(session.process_batched(Line("s", 3)))
        await asyncio.sleep(0)
        await session.aclose()
        assert await running == ("s", 2, 1)
        with pytest.raises(SessionLostError):
            await behind
        assert await live(batcher) == 0


@one_loop
@every_place
async def test_calls_without_a_session_have_a_state_of_their_own(place: Any) -> None:
    async with DynBatcher(Diary, **place) as batcher:
        lines = [Line(f"s{number}", number) for number in range(9)]
        answers = await batcher.process_many(lines)
        assert [answer[:2] for answer in answers] == [(line.name, 1) for line in lines]
        assert await live(batcher) == 0


@one_loop
async def test_a_session_that_another_thread_uses_names_the_way_that_works() -> None:
    loop = asyncio.get_running_loop()
    async with DynBatcher(Diary, workers="threads") as batcher, batcher.session() as session:
        await session.process_batched(Line("s", 1))

        def use(number: int) -> Any:
            later = session.process_batched(Line("s", number))
            return asyncio.run_coroutine_threadsafe(later, loop).result()

        for one in (session, batcher.session()):
            coroutine = one.process_batched(Line("s", 2))
            with pytest.raises(RuntimeError, match=r"asyncio\.run_coroutine_threadsafe"):
                await asyncio.to_thread(asyncio.run, coroutine)
        assert await asyncio.to_thread(use, 3) == ("s", 2, 1)


@one_loop
@every_place
async def test_large_inputs_of_sessions(place: Any) -> None:
    """They lie in shared memory where there is some; the model may keep views in its states."""
    async with DynBatcher(Framed, **place) as batcher, batcher.session() as session:
        for number in range(1, 6):
            frame = np.full(50_000, number, np.float32)
            assert await session.process_batched(frame) == [
                float(one) for one in range(1, number + 1)
            ]


@one_loop
async def test_a_model_named_by_a_text() -> None:
    name: Any = "models.remembering:Diary"
    async with DynBatcher(name) as batcher:
        assert await speak(batcher, "s", 3) == 1
    other: Any = "models.ordinary:Slow"
    options: dict[str, Any] = {"model_args": (0.0,), "name": "mine"}
    async with DynBatcher(other, **options) as batcher, batcher.session() as session:
        with pytest.raises(ConfigurationError, match=r"mine: .* SessionModel; derive"):
            await session.process_batched(0)


def test_sessions_of_other_models_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="SessionModel"):
        DynBatcher(Slow).session()
    with pytest.raises(ConfigurationError, match=r"cache=.* no effect with a SessionModel"):
        DynBatcher(Diary, cache=LRUCache(9))
    named: Any = "models.remembering:Diary"
    with pytest.raises(ConfigurationError, match="no cache"):
        DynBatcher(named, cache=LRUCache(9)).session()
    with pytest.raises(ConfigurationError, match="timeout"):
        DynBatcher(Diary).session(timeout=0)


def test_a_model_with_states_has_one_infer_with_two_arguments() -> None:
    class Forgetful(SessionModel[int, int, int]):
        def begin(self) -> int:
            return 0

        def infer(self, inputs: Any) -> Any:  # type: ignore[override]
            return inputs

    class Prepares(Diary):
        def prepare(self, value: Any) -> Any:
            return value

    class Awaits(Diary):
        async def begin(self) -> Any:  # type: ignore[override]
            return []

    class Both(Diary, SteppedModel[Any, Any]):  # type: ignore[misc]
        def join(self, inputs: list[Any]) -> list[Any]:
            return inputs

        def step(self, states: list[Any]) -> list[Any]:
            return states

    with pytest.raises(ConfigurationError, match=r"Both.*SteppedModel and a SessionModel; derive"):
        DynBatcher(Both)
    with pytest.raises(ConfigurationError, match="exactly two arguments"):
        DynBatcher(Forgetful)
    with pytest.raises(ConfigurationError, match="begin is async"):
        DynBatcher(Awaits)
    with pytest.raises(ConfigurationError, match="SessionModel cannot have prepare"):
        DynBatcher(Prepares)


async def go_on(session: BatchSession[Line, Any]) -> None:
    for number in range(2, 10**9):
        await session.process_batched(Line("s", number))


@one_loop
async def test_sessions_of_a_dead_host() -> None:
    async with DynBatcher(Diary, shared=True) as batcher, batcher.session() as session:
        await session.process_batched(Line("s", 1))
        os.kill(host_of(batcher), signal.SIGKILL)
        with pytest.raises(SessionLostError, match="host process died"):
            await go_on(session)
        assert await speak(batcher, "t", 3) == 1


async def act(batcher: DynBatcher[Any, Any], rng: random.Random, name: str) -> None:
    """Do what one caller may do, and check what it gets: its own state, or a typed error."""
    count = 0
    session: BatchSession[Line, Any] = batcher.session(timeout=LIMIT)
    try:
        for number in range(1, rng.randint(1, 12)):
            what = rng.choices(["", "fail", "raise"], [30, 2, 1])[0]
            call = asyncio.create_task(session.process_batched(Line(name, number, what)))
            if rng.random() < 0.1:
                for _ in range(rng.randint(0, 30)):
                    await asyncio.sleep(0)
                call.cancel()
            await asyncio.wait([call])
            if call.cancelled():
                continue
            error = call.exception()
            if isinstance(error, SessionLostError):
                return
            assert not isinstance(error, Mixed), error
            if error is not None:
                assert isinstance(error, InferenceError), error
                assert str(error) in ("not this one", "all of them")
                continue
            found, seen, _ = call.result()
            assert found == name
            assert count < seen <= number
            count = seen
    finally:
        await session.aclose()


async def disturb(batcher: DynBatcher[Any, Any], rng: random.Random, place: Any) -> None:
    """Kill, reload and scale, once in a schedule."""
    for _ in range(rng.randint(0, 40)):
        await asyncio.sleep(0)
    what = rng.choice(["kill", "reload", "scale", "none"])
    if what == "kill" and place != PLACES["threads"]:
        for pid in pids_of(batcher)[:1]:
            os.kill(pid, signal.SIGKILL)
    elif what == "reload":
        try:
            await batcher.reload()
        except BatcherError:
            assert place != PLACES["threads"], "a worker was killed meanwhile"
    elif what == "scale":
        batcher.reconfigure(num_workers=rng.randint(1, 2))


@one_loop
@every_place
async def test_random_schedules(place: Any) -> None:
    """No call on the state of another session, none twice, none out of order; every call ends."""
    rounds = int(os.environ.get("SESSION_ROUNDS", "100")) // 20
    options: dict[str, Any] = {"max_restarts": 10**6, "restart_backoff": 0.001, "timeout": LIMIT}
    async with DynBatcher(Diary, **place, num_workers=2, max_batch_size=6, **options) as batcher:
        for seed in range(rounds):
            rng = random.Random(seed)
            callers = [
                act(batcher, rng, f"s{seed}.{number}") for number in range(rng.randint(1, 25))
            ]
            await asyncio.gather(*callers, disturb(batcher, rng, place))
        await until(lambda: batcher.stats.sessions == batcher.stats.running == 0)
        assert_balance(batcher)


@one_loop
async def test_in_the_test_kit() -> None:
    with BatcherKit():
        async with DynBatcher(Diary) as batcher:
            assert await speak(batcher, "s", 3) == 1
