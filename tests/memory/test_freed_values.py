"""Inputs and outputs after every ending of their calls, while the garbage collector is off.

A reference cycle would keep them until it runs, which may be after gigabytes of images.
"""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest
from models.obeying import Obeys, Order
from waits import SOON, SOON_IN_WORKER, Gate, call, turns, until

from fast_batcher import (
    BatcherClosedError,
    ConfigurationError,
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    OutputMismatchError,
    QueueFullError,
    RequestTooLargeError,
    UnsendableValueError,
    WorkerLostError,
)
from fast_batcher.caching import LRUCache

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# Calls of each ending.
COUNT = 50


@pytest.fixture
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


Start = Callable[[str], "list[asyncio.Future[Any]]"]


class Scene(NamedTuple):
    """A batcher, and the calls that are to end."""

    batcher: DynBatcher[Any, Any]
    gate: Gate
    # Starts calls whose inputs give this order to the model.
    start: Start


class LockedCache:
    """A cache without outputs, whose look-ups never end."""

    async def get(self, key: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    def set(self, key: Any, value: Any) -> None:
        raise AssertionError("nothing is computed")


def fails(value: Any) -> Any:
    if isinstance(value, Order):
        raise KeyError("no such feature")
    return 1


def puts_in_list(value: Any) -> Any:
    return [value] if isinstance(value, Order) else 1


async def ended(calls: "list[asyncio.Future[Any]]") -> "list[asyncio.Future[Any]]":
    await asyncio.wait(calls)
    return calls


def end_with(what: str) -> Callable[[Scene], Awaitable[Any]]:
    async def run(scene: Scene) -> Any:
        return await ended(scene.start(what))

    return run


async def hit(scene: Scene) -> Any:
    await ended(scene.start("echo"))
    return await ended(scene.start("echo"))


async def behind_a_batch(scene: Scene, *, cancels: bool = False, waiting: int = 0) -> Any:
    """Let the calls end while another batch runs."""
    blockers = [call(scene.batcher, "hold", timeout=float("inf"))]
    visit = await scene.gate.visit()
    blockers += [call(scene.batcher, number, timeout=float("inf")) for number in range(waiting)]
    await until(lambda: scene.batcher.stats.waiting == waiting)
    calls = scene.start("echo")
    await turns()
    for one in calls if cancels else ():
        one.cancel()
    await ended(calls)
    visit.let_on()
    await ended([*blockers])
    return calls


async def while_running(scene: Scene, *, cancels: bool = False) -> Any:
    """Let the calls end while the worker computes them."""
    calls = scene.start("hold")
    visit = await scene.gate.visit()
    for one in calls if cancels else ():
        one.cancel()
    await ended(calls)
    visit.let_on()
    return calls


async def cancelled_while_waiting(scene: Scene) -> Any:
    return await behind_a_batch(scene, cancels=True)


async def cancelled_while_running(scene: Scene) -> Any:
    return await while_running(scene, cancels=True)


async def rejected(scene: Scene) -> Any:
    return await behind_a_batch(scene, waiting=1)


async def cancelled_while_looked_up(scene: Scene) -> Any:
    calls = scene.start("echo")
    await turns()
    for one in calls:
        one.cancel()
    return await ended(calls)


async def closed(scene: Scene) -> Any:
    calls = scene.start("hold")
    await turns()
    await scene.batcher.aclose()
    return await ended(calls)


class Ending(NamedTuple):
    """A way in which calls end."""

    name: str
    # None if each call has an output.
    error: type[BaseException] | None
    run: Callable[[Scene], Awaitable[Any]]
    options: dict[str, Any] = {}  # noqa: RUF012  nothing writes to it


ENDINGS = [
    Ending("completed", None, end_with("echo")),
    Ending("infer raised", InferenceError, end_with("raise"), {"isolate_errors": False}),
    Ending("wrong count", OutputMismatchError, end_with("drop"), {"isolate_errors": False}),
    Ending("expired while waiting", DeadlineExceededError, behind_a_batch, {"timeout": SOON}),
    Ending(
        "expired while running", DeadlineExceededError, while_running, {"timeout": SOON_IN_WORKER}
    ),
    Ending("cancelled while waiting", asyncio.CancelledError, cancelled_while_waiting),
    Ending("cancelled while running", asyncio.CancelledError, cancelled_while_running),
    Ending("queue full", QueueFullError, rejected, {"max_queue_size": 1}),
    Ending(
        "costs too much",
        RequestTooLargeError,
        end_with("echo"),
        {"cost": lambda value: 2 if isinstance(value, Order) else 1, "max_request_cost": 1},
    ),
    Ending("cost raised", ConfigurationError, end_with("echo"), {"cost": fails}),
    Ending("cost invalid", ConfigurationError, end_with("echo"), {"cost": puts_in_list}),
    Ending("group_by raised", ConfigurationError, end_with("echo"), {"group_by": fails}),
    Ending("group_by invalid", ConfigurationError, end_with("echo"), {"group_by": puts_in_list}),
    Ending("not picklable", UnsendableValueError, end_with("unpicklable")),
    Ending("closed", BatcherClosedError, closed, {"drain_timeout": 0.01}),
    Ending("worker lost", WorkerLostError, end_with("die"), {"idempotent": False}),
]
CACHED_ENDINGS = [
    Ending("hit", None, hit),
    Ending("coalesced", None, end_with("echo"), {"key": type}),
    Ending(
        "joined, infer raised",
        InferenceError,
        end_with("raise"),
        {"key": type, "isolate_errors": False},
    ),
    Ending("key raised", ConfigurationError, end_with("echo"), {"key": fails}),
    Ending("key invalid", ConfigurationError, end_with("echo"), {"key": puts_in_list}),
    Ending(
        "expired while looked up",
        DeadlineExceededError,
        end_with("echo"),
        {"timeout": SOON, "cache": LockedCache()},
    ),
    Ending(
        "cancelled while looked up",
        asyncio.CancelledError,
        cancelled_while_looked_up,
        {"cache": LockedCache()},
    ),
    Ending(
        "closed while looked up",
        BatcherClosedError,
        closed,
        {"cache": LockedCache(), "drain_timeout": 0.01},
    ),
]


def start_singly(batcher: DynBatcher[Any, Any], values: list[Any]) -> Any:
    return [call(batcher, value) for value in values]


def start_together(batcher: DynBatcher[Any, Any], values: list[Any]) -> Any:
    parts = values[:1], values[1:]
    return [asyncio.create_task(batcher.process_many(part)) for part in parts]


def submit(batcher: DynBatcher[Any, Any], values: list[Any]) -> Any:
    return [asyncio.wrap_future(batcher.submit(value)) for value in values]


async def ends_of(
    calls: "list[asyncio.Future[Any]]", seen: list["weakref.ref[Any]"]
) -> list[type[BaseException] | None]:
    """Return the types of the errors; note the outputs."""
    ends: list[type[BaseException] | None] = []
    for one in calls:
        if one.cancelled():
            ends.append(asyncio.CancelledError)
        elif (error := one.exception()) is not None:
            ends.append(type(error))
        else:
            ends.append(None)
            outputs = one.result() if isinstance(one.result(), list) else [one.result()]
            seen += map(weakref.ref, outputs)
    return ends


@pytest.mark.usefixtures("_collector_off")
@pytest.mark.parametrize(
    ("begin", "ending", "is_cached"),
    [
        pytest.param(begin, ending, is_cached, id=f"{begin.__name__}-{cached}{ending.name}")
        for cached, is_cached, begins, endings in (
            ("", False, (start_singly, start_together, submit), ENDINGS),
            ("cached ", True, (start_singly,), ENDINGS),
            ("cached ", True, (start_singly, start_together), CACHED_ENDINGS),
        )
        for begin in begins
        for ending in endings
    ],
)
async def test_no_ending_keeps_an_input_or_output(
    ending: Ending, begin: Any, gate: Gate, *, is_cached: bool
) -> None:
    seen: list[weakref.ref[Any]] = []
    options: dict[str, Any] = {"cache": LRUCache(2 * COUNT)} if is_cached else {}
    options |= ending.options
    batcher: DynBatcher[Any, Any]
    async with DynBatcher(Obeys, 64, model_args=(gate.path,), **options) as batcher:

        def start(what: str) -> Any:
            values = [Order(what, number) for number in range(COUNT)]
            seen.extend(map(weakref.ref, values))
            return begin(batcher, values)

        ends = await ends_of(await ending.run(Scene(batcher, gate, start)), seen)
        for end in ends:
            assert end is ending.error or (end and ending.error and issubclass(end, ending.error))
        if batcher.state == "open" and "cache" not in ending.options:
            # The last batch may be kept until there is another one.
            assert await batcher.process_batched("after", timeout=float("inf")) == "after"
        await turns()
        assert sum(one() is not None for one in seen) == 0
