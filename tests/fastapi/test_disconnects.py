"""Requests whose clients go away leave nothing behind, whatever serves them."""

import asyncio
import contextvars
import gc
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi_versions import needs_included_routers
from pydantic import BaseModel
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route

from fast_batcher.fastapi import JsonEndpoint, cancel_on_disconnect, install_exception_handlers

CLIENTS = 50
# Much more than the small cycles that the middleware of a task group leaves.
TEXT_BYTES = 1_000_000


class Query(BaseModel):
    text: str


class Bodies:
    """The endpoint, and what it has been called with."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Query]] = []
        self.arrived = asyncio.Semaphore(0)

    async def wait(self, body: Query) -> str:
        self.seen.append(weakref.ref(body))
        self.arrived.release()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("no result is set")


def add_plain(app: FastAPI, wait: Any) -> None:
    app.post("/", dependencies=[cancel_on_disconnect])(wait)


def add_json(app: FastAPI, wait: Any) -> None:
    endpoint = JsonEndpoint(wait, cancel_on_disconnect=True)
    app.router.routes.append(Route("/", endpoint, methods=["POST"]))


async def pass_on(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
    return await call_next(request)


async def leave(app: FastAPI, bodies: Bodies) -> int:
    """Send a body over ASGI and go away once the endpoint has it; return the status."""
    status = 0
    content = b'{"text": "%s"}' % (b"a" * TEXT_BYTES)
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await bodies.arrived.acquire()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    await app(scope | {"query_string": b"", "http_version": "1.1"}, receive, send)
    return status


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("has_handlers", [False, True])
@pytest.mark.parametrize("has_middleware", [False, True])
@pytest.mark.parametrize("add", [add_plain, pytest.param(add_json, marks=needs_included_routers)])
def test_no_body_outlives_a_client_that_has_gone(
    add: Callable[[FastAPI, Any], None], has_middleware: bool, has_handlers: bool
) -> None:
    async def serve() -> None:
        app, bodies = FastAPI(), Bodies()
        add(app, bodies.wait)
        if has_middleware:
            app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
        if has_handlers:
            install_exception_handlers(app)
        await asyncio.create_task(leave(app, bodies))
        with no_collections():
            clients = [asyncio.create_task(leave(app, bodies)) for _ in range(CLIENTS)]
            assert await asyncio.gather(*clients) == [499] * CLIENTS
            del clients
            await asyncio.sleep(0)  # what is called when a task has ended
            assert len(bodies.seen) == CLIENTS + 1
            assert [body for body in bodies.seen if body() is not None] == []
            # As bytes, as a request has read it.
            assert tracemalloc.get_traced_memory()[0] < 5 * TEXT_BYTES

    asyncio.run(serve())


def test_shared_timer_keeps_no_context_alive() -> None:
    class Value:
        pass

    variable: contextvars.ContextVar[Value] = contextvars.ContextVar("variable")

    async def serve() -> None:
        app, bodies = FastAPI(), Bodies()

        @app.post("/", dependencies=[cancel_on_disconnect])
        async def answer() -> int:
            return 0

        async def request() -> weakref.ref[Value]:
            value = Value()
            variable.set(value)
            await leave(app, bodies)
            return weakref.ref(value)

        value = await asyncio.create_task(request(), context=contextvars.Context())
        await asyncio.sleep(0)
        assert value() is None

    asyncio.run(serve())
