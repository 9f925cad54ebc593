"""Requests whose clients go away leave nothing behind, whatever serves them."""

import asyncio
import contextvars
import gc
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi_versions import needs_included_routers
from pydantic import BaseModel
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route
from waits import LIMIT, until

from fast_batcher.fastapi import (
    JsonEndpoint,
    cancel_on_disconnect,
    install_exception_handlers,
    read_array,
    read_body,
)
from fast_batcher.fastapi.disconnects import UNWATCHED

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


# --- bodies that the app reads itself -------------------------------------------------------------

PIECES = 3


async def read_pieces(request: Request) -> bytes:
    return b"".join([piece async for piece in request.stream()])


async def read_at_once(request: Request) -> bytes:
    return await request.body()


async def read_pixels(request: Request) -> bytes:
    return bytes(await read_array(request, PIECES, "uint8"))


def make_reading_app(read: Any, ended: "asyncio.Future[int]", *, is_in_router: bool) -> FastAPI:
    """An app that reads bodies behind the dependency, and answers when it is let."""
    app = FastAPI(dependencies=[cancel_on_disconnect])
    router = APIRouter()

    @(router if is_in_router else app).post("/")
    async def count(body: Annotated[bytes, Depends(read)]) -> int:
        return len(body) + await ended

    app.include_router(router)
    return app


def is_over(moment: float) -> bool:
    return asyncio.get_running_loop().time() > moment


async def send_slowly(app: FastAPI, *, then_leaves: bool) -> tuple[int, bytes]:
    """Send a body in pieces, of which each takes until the request is watched, or longer.

    As with some servers, one message goes to one who waits for it.
    """
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    status, content = 0, b""

    async def send(message: Any) -> None:
        nonlocal status, content
        status = message.get("status", status)
        content += message.get("body", b"")

    scope: Any = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/"}
    scope |= {"query_string": b"", "headers": [(b"content-length", b"%d" % PIECES)]}
    request = asyncio.create_task(app(scope, messages.get, send))
    for number in range(PIECES):
        moment = loop.time() + 2 * UNWATCHED
        await until(partial(is_over, moment))
        is_last = number == PIECES - 1
        messages.put_nowait({"type": "http.request", "body": b"a", "more_body": not is_last})
    if then_leaves:
        messages.put_nowait({"type": "http.disconnect"})
    async with asyncio.timeout(LIMIT):
        await request
    return status, content


@pytest.mark.parametrize("is_in_router", [False, True])
@pytest.mark.parametrize("read", [read_pixels, read_body, read_pieces, read_at_once])
@pytest.mark.anyio
async def test_no_piece_of_a_slow_body_is_lost(read: Any, is_in_router: bool) -> None:
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(0)
    app = make_reading_app(read, ended, is_in_router=is_in_router)
    assert await send_slowly(app, then_leaves=False) == (200, b"%d" % PIECES)


@pytest.mark.parametrize("read", [read_pixels, read_body])
@pytest.mark.anyio
async def test_client_may_go_once_the_slow_body_is_read(read: Any) -> None:
    ended = asyncio.get_running_loop().create_future()
    app = make_reading_app(read, ended, is_in_router=False)
    assert (await send_slowly(app, then_leaves=True))[0] == 499
    assert ended.cancelled()
