"""Several lifespans, or `async with`, on one batcher: the last to leave closes it."""

import asyncio
import contextlib
import copy
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from models.base import Echo
from models.ordinary import Gated
from openings import opening_of
from waits import Gate, Watch, call, outcome, until

from fast_batcher import BatcherClosedError, DynBatcher

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def make_app(batcher: DynBatcher[Any, Any], lifespan: Any = None) -> FastAPI:
    app = FastAPI(lifespan=lifespan or batcher.lifespan)

    @app.get("/")
    async def echo(value: str) -> Any:
        return await batcher.process_batched(value)

    return app


@contextlib.asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an app whose lifespan has begun, on this loop."""
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


async def answer(client: httpx2.AsyncClient, value: str) -> Any:
    return (await client.get("/", params={"value": value})).json()


@pytest.mark.parametrize("first", [0, 1], ids=["first in, first out", "first in, last out"])
async def test_last_of_two_apps_closes_the_batcher(first: int) -> None:
    batcher = DynBatcher(Echo)
    apps = [running(make_app(batcher)) for _ in range(2)]
    clients = [await app.__aenter__() for app in apps]
    (worker,) = opening_of(batcher).pool.alive()
    assert worker.pid is not None
    await apps[first].__aexit__(None, None, None)
    assert batcher.state == "open"
    assert await answer(clients[1 - first], "still served") == "still served"
    with Watch([worker.pid]) as watch:
        await apps[1 - first].__aexit__(None, None, None)
        assert watch.survivors(0.0) == []
    assert batcher.state == "closed"


async def test_first_lifespan_decides_about_the_loop() -> None:
    """And not the loop under which the batcher was constructed, as in a notebook."""
    batcher = DynBatcher(Echo)
    await asyncio.sleep(0)

    def serve() -> Any:
        with TestClient(make_app(batcher)) as client:
            return client.get("/", params={"value": "served"}).json()

    assert await asyncio.to_thread(serve) == "served"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_batcher_names_the_remedy(duplicate: Callable[[object], object]) -> None:
    batcher = DynBatcher(Echo)
    with pytest.raises(TypeError, match=r"Echo: a batcher owns processes .* in a function"):
        duplicate(batcher)
    assert vars(copy.copy(batcher.methods)) == vars(batcher.methods)


@pytest.mark.parametrize("end", ["aclose", "stop"])
async def test_explicit_close_ends_all_owners(end: str) -> None:
    batcher = DynBatcher(Echo, stop_timeout=0.0)
    before = contextlib.AsyncExitStack()
    async with batcher:
        await before.enter_async_context(batcher)
        await before.enter_async_context(batcher.lifespan()(None))
        if end == "aclose":
            await batcher.aclose()
        else:
            batcher.stop()
        with pytest.raises(BatcherClosedError):
            await batcher.process_batched("after the end")
    assert batcher.state == "closed"
    # Two of the last opening have not left yet, and they close nothing that is not theirs.
    async with batcher:
        await before.aclose()
        assert await batcher.process_batched("of the next opening") == "of the next opening"
    assert batcher.state == "closed"
    async with batcher:
        assert await batcher.process_batched("and again") == "and again"
        # Who entered before an end closes nothing that was opened after it.
        await batcher.aclose()
        await batcher.open()
    assert batcher.state == "open"
    await batcher.aclose()


async def test_owner_during_close_is_rejected(gate: Gate) -> None:
    batcher = DynBatcher(Gated, model_args=(gate.path,))
    await batcher.__aenter__()
    accepted = call(batcher, "accepted")
    visit = await gate.visit()
    closing = asyncio.create_task(batcher.__aexit__(None, None, None))
    await until(lambda: batcher.state == "draining")
    with pytest.raises(BatcherClosedError):
        await batcher.__aenter__()
    visit.let_on()
    assert await outcome(accepted) == "accepted"
    await closing
    assert batcher.state == "closed"


async def test_owner_on_another_loop_is_rejected() -> None:
    batcher = DynBatcher(Echo)
    await batcher.open()

    async def elsewhere() -> None:
        async with batcher:
            raise AssertionError("it belongs to a loop that lives")

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    assert await batcher.process_batched("still served") == "still served"
    await batcher.aclose()
