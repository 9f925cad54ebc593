"""Outputs whose every attribute raises reach their callers, and harm no other call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from models.hostile import Answers, Chunks, Hostile, Remembers, Staged
from openings import every_place, own_directory
from waits import LIMIT, ONE_LOOP

from fast_batcher import DynBatcher, aio
from fast_batcher.caching import LRUCache
from fast_batcher.testing import BatcherKit

__all__ = ["own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("own_directory")]

Ask = Callable[[DynBatcher[Any, Any], Any], Awaitable[Any]]


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return ONE_LOOP


async def one(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    return await batcher.process_batched(value)


async def many(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    first, other, last = await batcher.process_many([1, value, 2])
    assert (first, last) == (1, 2)
    return other


async def submit(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    return await asyncio.wrap_future(await asyncio.to_thread(batcher.submit, value))


async def method(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    return await batcher.methods.other.process_batched(value)


async def session(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    async with batcher.session() as opened:
        return await opened.process_batched(value)


async def stream(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    *_, last = [chunk async for chunk in await batcher.stream(value)]
    return last


async def whole(batcher: DynBatcher[Any, Any], value: Any) -> Any:
    return (await batcher.process_batched(value))[-1]


FACES: dict[str, tuple[type[Any], Ask, dict[str, Any]]] = {
    "process_batched": (Answers, one, {}),
    "process_many": (Answers, many, {}),
    "submit": (Answers, submit, {}),
    "a method": (Answers, method, {}),
    "stages": (Staged, one, {}),
    "a cache": (Answers, one, {"cache": LRUCache(10)}),
    "a session": (Remembers, session, {}),
    "a stream": (Chunks, stream, {}),
    "all chunks": (Chunks, whole, {}),
}
every_face = pytest.mark.parametrize(("model", "ask", "options"), FACES.values(), ids=FACES)


async def check(batcher: DynBatcher[Any, Any], ask: Ask) -> None:
    async with asyncio.timeout(LIMIT), batcher:
        calls = [ask(batcher, value) for value in ("hostile", 1, "hostile", 2)]
        kinds = [type(answer) for answer in await asyncio.gather(*calls)]
        assert kinds == [Hostile, int, Hostile, int]
        assert batcher.stats.restarts == batcher.stats.cancelled == 0


@every_place
@every_face
async def test_hostile_output_reaches_its_caller(
    model: type[Any], ask: Ask, options: dict[str, Any], place: dict[str, Any]
) -> None:
    await check(DynBatcher(model, 4, **options, **place), ask)


@every_face
async def test_hostile_output_reaches_its_caller_in_the_kit(
    model: type[Any], ask: Ask, options: dict[str, Any]
) -> None:
    with BatcherKit():
        await check(DynBatcher(model, 4, **options), ask)


async def test_hostile_output_of_a_decorated_function_reaches_its_caller() -> None:
    @aio.dynamically
    def answer(values: list[Any]) -> list[Any]:
        return [Hostile() if value == "hostile" else value for value in values]

    kinds = [type(one) for one in await asyncio.gather(*map(answer, ["hostile", 1]))]
    assert kinds == [Hostile, int]
