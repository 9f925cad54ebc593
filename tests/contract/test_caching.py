"""Outputs that are cached, and equal inputs that are computed once, with real workers."""

import asyncio
import copy
import logging
import math
import re
import shutil
import subprocess
import tempfile
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.base import Echo
from models.ordinary import Holds, Slow
from models.raising import Raises
from models.versions import Versioned
from paths import ROOT
from programs import run_program
from waits import (
    LIMIT,
    ONE_LOOP,
    SOON,
    Gate,
    assert_balance,
    call,
    order_of_ends,
    outcome,
    turns,
    until,
)

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DeadlineExceededError,
    DynBatcher,
    QueueFullError,
    UnsendableValueError,
    WorkerStartupError,
)
from fast_batcher.caching import LRUCache, hash_input

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return ONE_LOOP


def counts(batcher: DynBatcher[Any, Any]) -> tuple[int, int, int, int]:
    """Hits, misses, coalesced calls, and requests that a worker has got."""
    stats = assert_balance(batcher)
    return stats.cache_hits, stats.cache_misses, stats.cache_coalesced, stats.submitted


class AsyncMemory:
    """A cache of coroutines, whose look-ups wait while it is locked."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        self.lock = asyncio.Lock()

    async def get(self, key: Any) -> Any:
        async with self.lock:
            return self.known.get(key)

    async def set(self, key: Any, value: Any) -> None:
        await turns()
        self.known[key] = value


# Keys.


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (["a" * 2, "a" * 2], [s := "aa", s], True),
        ("text", "".join(["tex", "t"]), True),
        (1, 1.0, False),
        (1, True, False),
        ("1", b"1", False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (np.arange(6), np.arange(6), True),
        (np.arange(6), np.arange(6).reshape(2, 3), False),
        (np.zeros(4, "int32"), np.zeros(4, "float32"), False),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T, True),
        ({"pixels": np.zeros(9)}, {"pixels": np.ones(9)}, False),
    ],
)
def test_different_inputs_have_different_keys(one: Any, other: Any, *, is_equal: bool) -> None:
    assert (hash_input(one) == hash_input(other)) is is_equal


async def test_crowd_of_one_turn_costs_one_look_up() -> None:
    """Look-ups and tasks of a thousand hits would block the event loop."""
    memory = LRUCache(10)
    async with DynBatcher(Echo, cache=memory, workers="threads") as batcher:
        await batcher.process_batched([1])
        before = memory.stats().hits
        outputs = await asyncio.gather(*[batcher.process_batched([1]) for _ in range(1000)])
        assert outputs == [[1]] * 1000
        assert len({*map(id, outputs)}) == 1000
        assert memory.stats().hits == before + 1
        assert batcher.stats.cache_hits == 1000


@pytest.mark.slow
def test_key_is_equal_in_every_process() -> None:
    torch = pytest.importorskip("torch")
    done = run_program(
        "from fast_batcher.caching import hash_input; print(hash_input({'a': ['text', 1.5, None]}))"
    )
    assert done.stdout.strip() == hash_input({"a": ["text", 1.5, None]})
    whole = torch.arange(6.0)
    assert hash_input(whole[:3]) == hash_input(torch.arange(3.0))
    assert hash_input(whole[:3]) != hash_input(torch.arange(3.0, dtype=torch.float64))


# The cache that comes with the library.


def test_cache_evicts_least_recently_used_and_expired_outputs() -> None:
    cache = LRUCache(2)
    cache.set(1, "one")
    cache.set(2, "two")
    assert cache.get(1) == "one"
    cache.set([3], "three")
    assert [cache.get(key) for key in (1, 2, [3])] == ["one", None, "three"]
    assert (cache.stats().gets, cache.stats().hits, len(cache)) == (4, 3, 2)
    cache.clear()
    assert cache.get(1) is None
    brief, endless = LRUCache(2, ttl=5e-324), LRUCache(2, ttl=math.inf)
    for one in (brief, endless):
        one.set(1, "one")
    assert (brief.get(1), len(brief), endless.get(1)) == (None, 0, "one")


# Pairs that are equal for Python, or of which one was the key of the other.
ALIKE: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ((1, 2), (True, 2.0)),
    (frozenset({1}), frozenset({True})),
    (np.float32(1), np.int64(1)),
    (Decimal("1.0"), Decimal("1.00")),
    (
        datetime(2020, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        datetime(2020, 1, 1, tzinfo=UTC),
    ),
    ({"a": 1}, hash_input({"a": 1})),
    ({"a": 1}, (hash_input({"a": 1}),)),
    ({"a": 1}, {"a": True}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=repr)
def test_keys_of_the_cache_have_types(one: Any, other: Any) -> None:
    cache = LRUCache(4)
    cache.set(one, "one")
    assert (cache.get(other), cache.get(copy.deepcopy(one))) == (None, "one")
    cache.set(other, "other")
    assert (cache.get(one), cache.get(other)) == ("one", "other")


@pytest.mark.parametrize("arguments", [(0,), (True,), (1.5,), (1, 0), (1, math.nan), (1, "1")])
def test_a_cache_of_no_size_is_refused(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(max_entries|ttl)=.*: give "):
        LRUCache(*arguments)


# Batchers with a cache.


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: LRUCache(100), AsyncMemory])
async def test_each_caller_gets_its_own_cached_output(make: Any) -> None:
    async with DynBatcher(Slow, model_args=(0.0,), cache=make()) as batcher:
        first, second = await asyncio.gather(*[call(batcher, [1, [2]]) for _ in range(2)])
        assert first == second == [1, [2]]
        first[1].append("changed")
        await until(lambda: batcher.stats.cache_misses == 1)
        for _ in range(3):
            await turns()
        third = await batcher.process_batched([1, [2]])
        assert third == second == [1, [2]]
        third[1].append("changed")
        assert await asyncio.wrap_future(batcher.submit([1, [2]])) == [1, [2]]
        assert counts(batcher) == (2, 1, 1, 1)
        assert await batcher.process_many([1, 2, 1, 2, None, None]) == [1, 2, 1, 2, None, None]
        for _ in range(3):
            await turns()
        assert await batcher.process_batched(None) is None
        assert counts(batcher) == (3, 4, 4, 4)
    assert batcher.stats.cache_hits == 3


@pytest.mark.slow
async def test_equal_inputs_survive_cancelled_callers(gate: Gate) -> None:
    cache = LRUCache(1)
    async with DynBatcher(Holds, model_args=(gate.path,), cache=cache) as batcher:
        calls = [call(batcher, "hold") for _ in range(100)]
        visit = await gate.visit()
        for one in calls[:99]:
            one.cancel()
        await turns()
        assert batcher.stats.running == 1
        visit.let_on()
        assert await calls[99] == "hold"
        assert [one.cancelled() for one in calls[:99]] == [True] * 99
        assert counts(batcher) == (0, 1, 99, 1)
        # The computation is cancelled with its last caller.
        cache.clear()
        calls = [call(batcher, "hold") for _ in range(2)]
        visit = await gate.visit()
        for one in calls:
            one.cancel()
        await until(lambda: batcher.stats.cancelled == 1)
        assert batcher.stats.completed == 1
        visit.let_on()


@pytest.mark.slow
async def test_joined_caller_has_its_own_deadline(gate: Gate) -> None:
    async with DynBatcher(Holds, model_args=(gate.path,), cache=LRUCache(1)) as batcher:
        brief = call(batcher, "hold", timeout=0.2)
        long = call(batcher, "hold")
        briefer = call(batcher, "hold", timeout=0.05)
        visit = await gate.visit()
        for one in (briefer, brief):
            assert isinstance(await outcome(one), DeadlineExceededError)
        assert not long.done()
        visit.let_on()
        (await gate.visit()).let_on()  # it is computed again, for the one that still waits
        assert await outcome(long) == "hold"
        assert counts(batcher)[:3] == (0, 1, 2)


class SlowLookUp:
    """A cache whose look-ups wait for an event, while there is one."""

    ends: asyncio.Event | None = None

    async def get(self, key: Any) -> Any:
        if self.ends is not None:
            await self.ends.wait()

    async def set(self, key: Any, value: Any) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("place", [{}, {"shared": True}], ids=["own", "shared"])
@pytest.mark.usefixtures("hosts")
async def test_the_default_timeout_counts_from_the_call_and_not_from_the_look_up(
    place: dict[str, Any], gate: Gate
) -> None:
    cache = SlowLookUp()
    options = {**place, "model_args": (gate.path,), "timeout": 0.5, "drain_timeout": 0.0}
    async with DynBatcher(Holds, cache=cache, **options) as batcher:
        running = call(batcher, "hold", timeout=LIMIT)
        visit = await gate.visit()
        ends = cache.ends = asyncio.Event()
        early = call(batcher, "early")
        await asyncio.sleep(0.1)  # the other call is that much later
        cache.ends = None
        late = call(batcher, "late")
        await turns()
        ends.set()
        assert await order_of_ends(early, late) == [0, 1]
        visit.let_on()
        assert await running == "hold"


@pytest.mark.slow
async def test_the_default_timeout_of_a_joined_call_is_not_prolonged(gate: Gate) -> None:
    options: dict[str, Any] = {"model_args": (gate.path,), "timeout": 0.6, "drain_timeout": 0.0}
    async with DynBatcher(Holds, cache=LRUCache(9), **options) as batcher:
        calls = [call(batcher, "hold", timeout=0.3), call(batcher, "hold")]
        visit = await gate.visit()
        await asyncio.sleep(0.1)
        calls.append(call(batcher, "hold again"))  # later than the joined call is made
        assert await order_of_ends(*calls) == [0, 1, 2]
        visit.let_on()


@pytest.mark.slow
async def test_error_is_not_cached() -> None:
    async with DynBatcher(Raises, cache=LRUCache(9)) as batcher:
        errors = await asyncio.gather(
            *[call(batcher, "os") for _ in range(3)], return_exceptions=True
        )
        assert [isinstance(error, FileNotFoundError) for error in errors] == [True] * 3
        assert len({id(error) for error in errors}) == 3
        assert {str(error) for error in errors} == {str(errors[0])}
        assert isinstance(await outcome(call(batcher, "os")), FileNotFoundError)
        assert counts(batcher)[:3] == (0, 2, 2)


class Panic(BaseException):
    """An error of an extension in Rust."""


@pytest.mark.slow
async def test_custom_keys_and_inputs_without_key() -> None:
    def key(value: Any) -> Any:
        if "panic" in value:
            raise Panic
        return value["id"]

    async with DynBatcher(Slow, model_args=(0.0,), cache=LRUCache(9), key=key) as batcher:
        assert await batcher.process_batched({"id": 1, "text": "one"}) == {"id": 1, "text": "one"}
        assert await batcher.process_batched({"id": 1, "text": "two"}) == {"id": 1, "text": "one"}
        wrongs: list[dict[str, Any]] = [{}, {"id": []}, {"panic": 1}]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError, match=r"key: .*for an input of type"):
                await batcher.process_batched(wrong)
            with pytest.raises(ConfigurationError, match=r"key: .*for an input of type"):
                await asyncio.wrap_future(batcher.submit(wrong))
    async with DynBatcher(Slow, model_args=(0.0,), cache=LRUCache(9)) as batcher:
        with pytest.raises(UnsendableValueError):
            await batcher.process_batched(lambda: None)
        assert counts(batcher)[:3] == (0, 0, 0)


@pytest.mark.slow
async def test_many_inputs_wait_for_room_in_the_queue() -> None:
    cache = LRUCache(9)
    async with DynBatcher(Slow, 64, model_args=(0.0,), cache=cache, max_queue_size=3) as batcher:
        assert await batcher.process_many(range(300)) == [*range(300)]
        assert counts(batcher) == (0, 300, 0, 300)


@pytest.mark.slow
async def test_input_of_cancelled_caller_may_change(gate: Gate) -> None:
    async with DynBatcher(Holds, 1, model_args=(gate.path,), cache=LRUCache(9)) as batcher:
        running = call(batcher, "hold")
        visit = await gate.visit()
        full = call(batcher, "full")  # the batch behind the one that runs
        await turns()
        theirs = ["text"]
        leaves = call(batcher, theirs)
        await until(lambda: batcher.stats.submitted == 3)
        stays = call(batcher, ["text"])
        await turns()
        leaves.cancel()
        await turns()
        theirs[0] = "changed"
        visit.let_on()
        assert await stays == ["text"]
        assert [await running, await full] == ["hold", "full"]


class Fatal(BaseException):
    """An error that `except Exception` does not catch."""


class Fails:
    """A cache that raises an error from a plain method or a coroutine."""

    def __init__(self, error: BaseException, *, is_async: bool) -> None:
        self._error = error
        self._is_async = is_async

    def get(self, key: Any) -> Any:
        return self._fail()

    def set(self, key: Any, value: Any) -> Any:
        return self._fail()

    def _fail(self) -> Any:
        if not self._is_async:
            raise self._error

        async def fail() -> None:
            raise self._error

        return fail()


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [Fatal(), asyncio.CancelledError(), ValueError()], ids=repr)
async def test_no_error_of_the_cache_harms_a_caller(
    error: BaseException, *, is_async: bool
) -> None:
    cache = Fails(error, is_async=is_async)
    async with DynBatcher(Slow, model_args=(0.0,), cache=cache) as batcher:
        for _ in range(2):
            calls = [call(batcher, value) for value in range(8)]
            assert await asyncio.gather(*calls) == [*range(8)]
        assert counts(batcher) == (0, 16, 0, 16)


@pytest.mark.slow
async def test_look_ups_are_limited_and_counted() -> None:
    memory = AsyncMemory()
    async with DynBatcher(Slow, model_args=(0.0,), cache=memory, max_queue_size=3) as batcher:
        async with memory.lock:
            accepted = [call(batcher, value) for value in range(3)]
            rejected = [call(batcher, value) for value in (3, 4)]
            for one in rejected:
                assert isinstance(await outcome(one), QueueFullError)
            joined = call(batcher, 2)
            await turns()
            assert (batcher.stats.cache_lookups, batcher.stats.rejected) == (3, 2)
        assert await asyncio.gather(*accepted, joined) == [0, 1, 2, 2]
        assert batcher.stats.cache_lookups == 0
        assert counts(batcher) == (0, 3, 1, 3)
        # Inputs of one call wait for each other.
        assert await batcher.process_many(range(10, 110)) == [*range(10, 110)]
        assert batcher.stats.rejected == 2


@pytest.mark.slow
async def test_caller_cancels_in_turn_of_rejection(gate: Gate) -> None:
    options: dict[str, Any] = {"cache": LRUCache(9), "max_queue_size": 1}
    async with DynBatcher(Holds, 1, model_args=(gate.path,), **options) as batcher:
        running = call(batcher, "hold")
        visit = await gate.visit()
        behind = call(batcher, 0)  # the batch behind the one that runs
        await until(lambda: batcher.stats.batches == 2)
        calls = [batcher.process_batched(value) for value in (1, 2, 3)]
        futures = [one.send(None) for one in calls]  # each waits now, before the queue is asked
        with pytest.raises(asyncio.CancelledError):
            calls[1].throw(asyncio.CancelledError())
        assert batcher.stats.rejected == 2
        # It has no room either, and is told.
        await until(futures[2].done)
        with pytest.raises(QueueFullError):
            calls[2].send(None)
        visit.let_on()
        await until(futures[0].done)
        with pytest.raises(StopIteration) as answer:
            calls[0].send(None)
        assert answer.value.value == 1
        assert [await running, await behind] == ["hold", 0]
        assert_balance(batcher)


@pytest.mark.slow
async def test_hits_are_answered_while_the_queue_is_full(gate: Gate) -> None:
    memory = AsyncMemory()
    options: dict[str, Any] = {"cache": memory, "max_queue_size": 1}
    async with DynBatcher(Holds, 1, model_args=(gate.path,), **options) as batcher:
        assert await batcher.process_batched("known") == "known"
        await until(lambda: bool(memory.known))
        running = call(batcher, "hold")
        visit = await gate.visit()
        waiting = []
        for value in (1, 2):
            waiting.append(call(batcher, value))
            await turns(9)
        assert batcher.stats.waiting == 1
        assert isinstance(await outcome(call(batcher, 3)), QueueFullError)
        assert await outcome(call(batcher, "known")) == "known"
        visit.let_on()
        assert await asyncio.gather(running, *waiting) == ["hold", 1, 2]


@pytest.mark.slow
async def test_calls_end_while_the_cache_looks(caplog: pytest.LogCaptureFixture) -> None:
    memory = AsyncMemory()
    async with DynBatcher(Slow, model_args=(0.0,), cache=memory, drain_timeout=SOON) as batcher:
        async with memory.lock:
            late, left = call(batcher, 1, timeout=0.05), call(batcher, 2)
            assert isinstance(await outcome(late), DeadlineExceededError)
            left.cancel()
            assert isinstance(await outcome(left), asyncio.CancelledError)
        drained = call(batcher, 3)
        await turns()
        async with memory.lock:
            caught = call(batcher, 4)
            await turns()
            async with asyncio.timeout(LIMIT):
                await batcher.aclose()
        assert await outcome(drained) == 3
        assert isinstance(await outcome(caught), BatcherClosedError)
        stats = assert_balance(batcher)
        ends = stats.expired, stats.cancelled, stats.completed, stats.failed
        assert (stats.submitted, ends) == (4, (1, 1, 1, 1))
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.slow
async def test_accepted_calls_are_finished_when_the_batcher_closes() -> None:
    memory = AsyncMemory()
    async with DynBatcher(Slow, model_args=(0.0,), cache=memory) as batcher:
        await memory.lock.acquire()
        calls = [call(batcher, value) for value in (1, 2)]
        await turns()
        closing = asyncio.create_task(batcher.aclose())
        await turns()
        memory.lock.release()
        assert await asyncio.gather(*calls) == [1, 2]
        await closing
        assert sorted(memory.known.values()) == [1, 2]


@pytest.mark.slow
async def test_outputs_of_other_weights_are_not_found(tmp_path: Path) -> None:
    """What is computed while a reload runs may be of the old or of the new weights."""
    weights = tmp_path / "weights"
    async with DynBatcher(Versioned, model_args=("one",), cache=LRUCache(9)) as batcher:

        async def ask(value: str) -> str:
            version, _ = await batcher.process_batched(value)
            return str(version)

        assert await ask("before") == "one"
        reload = asyncio.create_task(batcher.reload(model_args=(f"waits {weights}",)))
        await turns()
        assert {await ask(value) for value in ("before", "meanwhile", "meanwhile")} == {"one"}
        assert counts(batcher)[:2] == (1, 3)
        weights.touch()
        await reload
        for hits in (1, 2):
            assert await ask("before") == f"waits {weights}"
            assert counts(batcher)[:2] == (hits, 4)
        with pytest.raises(WorkerStartupError):
            await batcher.reload(model_args=("bad",))
        assert await ask("before") == f"waits {weights}"
        assert counts(batcher)[:2] == (3, 4)


def key_of_anything(_: Any) -> str:
    return "key"


@pytest.mark.parametrize("options", [{}, {"key": key_of_anything}], ids=["default key", "key"])
async def test_batchers_with_one_cache_answer_with_their_own_models(
    options: dict[str, Any],
) -> None:
    """Although their names are equal."""
    options |= {"name": "one", "workers": "threads", "cache": LRUCache(9)}
    made: list[tuple[Any, tuple[Any, ...]]] = [
        (Versioned, ("one",)),
        (Versioned, ("two",)),
        (Echo, ()),
    ]
    answers, hits = [], []
    for model, arguments in made * 2:
        async with DynBatcher(model, model_args=arguments, **options) as batcher:
            answers.append(await batcher.process_batched("same"))
            hits.append(batcher.stats.cache_hits)
    assert hits == [0, 0, 0, 1, 1, 1]
    assert [answer[0] for answer in answers[:2]] == ["one", "two"]
    assert answers[2] == "same"
    assert answers[:3] == answers[3:]


@pytest.mark.slow
@pytest.mark.parametrize("place", [{"workers": "threads"}, {"shared": True}], ids=str)
@pytest.mark.usefixtures("hosts")
async def test_a_lasting_cache_follows_reloads_and_restarts(
    place: dict[str, Any], tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_text("old")
    options: dict[str, Any] = {**place, "cache": LRUCache(9)}

    async def ask(batcher: DynBatcher[Any, Any], *, hits: int) -> str:
        before = batcher.stats.cache_hits
        version, _ = await batcher.process_batched("same")
        assert batcher.stats.cache_hits == before + hits
        return str(version)

    async with DynBatcher(Versioned, model_args=("one",), **options) as batcher:
        assert await ask(batcher, hits=0) == "one"
        await batcher.reload(model_args=("two",))
        assert await ask(batcher, hits=0) == "two"
    for version in ("one", "two"):
        async with DynBatcher(Versioned, model_args=(version,), **options) as batcher:
            assert await ask(batcher, hits=1) == version
    # Weights that change where they are.
    path = str(weights)
    for hits in (0, 1):
        async with DynBatcher(Versioned, model_args=(path,), **options) as batcher:
            await ask(batcher, hits=hits)
    weights.write_text("newer")
    async with DynBatcher(Versioned, model_args=(path,), **options) as batcher:
        await ask(batcher, hits=0)
        weights.write_text("newest")
        await batcher.reload()
        await ask(batcher, hits=0)
        # And weights without a file or a name.
        await batcher.reload()
        await ask(batcher, hits=0)
        await ask(batcher, hits=1)
    options["shared_version"] = "2"
    async with DynBatcher(Versioned, model_args=(path,), **options) as batcher:
        await ask(batcher, hits=0)


@pytest.mark.slow
async def test_reopening_drops_outputs_of_old_weights() -> None:
    batcher = DynBatcher(Versioned, model_args=("one",), cache=LRUCache(9))
    async with batcher:
        assert (await batcher.process_batched("same"))[0] == "one"
        await batcher.reload(model_args=("two",))
    async with batcher:
        assert (await batcher.process_batched("same"))[0] == "two"


@pytest.mark.slow
async def test_output_in_flight_at_reload_is_not_cached(gate: Gate) -> None:
    async with DynBatcher(Holds, model_args=(gate.path,), cache=LRUCache(9)) as batcher:
        running = call(batcher, "hold")
        visit = await gate.visit()
        with pytest.raises(WorkerStartupError):
            await batcher.reload(model_args=("too", "many"))
        visit.let_on()
        await running
        again = call(batcher, "hold")
        (await gate.visit()).let_on()
        assert await again == await running
        assert counts(batcher)[:2] == (0, 2)


@pytest.mark.slow
def test_each_process_has_its_own_cache() -> None:
    program = (
        "import asyncio\n"
        "from fast_batcher import DynBatcher\n"
        "from fast_batcher.caching import LRUCache\n"
        "batcher = DynBatcher('models.base:Echo', cache=LRUCache(9), auto_open=False)\n"
        "async def ask(): return await batcher.process_batched([1])\n"
        "async def first():\n"
        "    await batcher.open()\n"
        "    return await ask()\n"
        "print(asyncio.run(first()), asyncio.run(ask()), batcher.stats.cache_hits)\n"
        "batcher.stop()\n"
        "async def shared():\n"
        "    async with DynBatcher('models.base:Echo', cache=LRUCache(9), shared=True) as shared:\n"
        "        print(await asyncio.gather(*[shared.process_batched([1]) for _ in range(3)]))\n"
        "        print(await shared.process_batched([1]), shared.stats.cache_hits,\n"
        "              shared.stats.cache_coalesced)\n"
        "asyncio.run(shared())\n"
    )
    done = run_program(program)
    assert (done.stdout, done.stderr) == ("[1] [1] 1\n[[1], [1], [1]]\n[1] 1 2\n", "")


def assert_recipe_works(name: str, arguments: str) -> None:
    """Run the class of this name in the documentation twice: the second process finds the output.

    Args:
        name: The name.
        arguments: What the class is called with, as source code.
    """
    page = (ROOT / "docs" / "caching.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (recipe,) = [block for block in blocks if f"class {name}" in block]
    program = (
        f"import asyncio\n{recipe}\n"
        "from fast_batcher import DynBatcher\n"
        "async def main():\n"
        f"    async with DynBatcher('models.base:Echo', cache={name}({arguments})) as batcher:\n"
        "        print(await batcher.process_batched({'a': [1]}), batcher.stats.cache_hits)\n"
        "asyncio.run(main())\n"
    )
    done = [run_program(program) for _ in range(2)]
    assert [one.stdout for one in done] == ["{'a': [1]} 0\n", "{'a': [1]} 1\n"], done


@pytest.mark.slow
def test_the_recipe_for_diskcache_works(tmp_path: Path) -> None:
    assert_recipe_works("DiskCache", repr(str(tmp_path)))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="Redis is needed: apt-get install redis-server"
)
def test_the_recipe_for_redis_works() -> None:
    # Not below pytest's directory, whose path may be too long for a socket.
    directory = tempfile.mkdtemp(dir="/tmp")
    path = f"{directory}/socket"
    command = ["redis-server", "--port", "0", "--unixsocket", path]
    command += ["--save", "", "--dir", directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any("ready to accept connections" in line for line in server.stdout)
            assert_recipe_works("RedisCache", f"'unix://{path}', prefix='v1', ttl=60")
        finally:
            server.kill()
            shutil.rmtree(directory)
