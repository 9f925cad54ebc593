"""Cancellation of endpoints whose client has disconnected. API process, on its event loop.

A task per request that waits for the disconnect would cost 75 us, and most requests are answered
before any client disconnects. So all requests share one timer, and a request gets such a task only
after `UNWATCHED` seconds.
"""

import asyncio
import contextvars
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from fastapi import Depends
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from fast_batcher.fastapi.bodies import BODY_IS_READ, WHEN_BODY_IS_READ, client_has_gone

# Seconds after which a request is watched. The task then costs 0.1 % of the request's time so far,
# and a disconnect is noticed at most this much later.
UNWATCHED = 0.05


class EndedByDisconnect:
    """Context manager that cancels its task when the client of the request disconnects.

    Args:
        receive: The request's `receive`; all messages but the disconnect are dropped.
        is_whole: Whether the whole body was read; otherwise the request is not watched before
            `begin`, for a message that two wait for goes to one of them.

    Raises:
        HTTPException: 499 in place of the cancellation; or the error of a limit on the body.
    """

    __slots__ = (
        "_context", "_is_whole", "_reason", "_receive", "_sweeper", "_task", "_watcher", "since",
    )  # fmt: skip

    def __init__(self, receive: Receive, *, is_whole: bool = True) -> None:
        self._receive = receive
        self._is_whole = is_whole
        # The context of the request, in which its middlewares expect `receive` to be awaited.
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        # The error to raise instead of the cancellation; None while the task was not cancelled.
        self._reason: HTTPException | None = None
        self._sweeper = _find_sweeper()
        self.since: float = 0.0

    async def __aenter__(self) -> Self:
        """Begin, unless a part of the body is left."""
        self._task = asyncio.current_task()
        if self._is_whole:
            self.begin()
        return self

    def begin(self) -> None:
        """Register the request; it is watched after `UNWATCHED` seconds."""
        self.since = asyncio.get_running_loop().time()
        self._sweeper.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop watching; replace a cancellation made by this object with its HTTP error."""
        self._sweeper.discard(self)
        if self._watcher is None:
            return
        self._watcher.cancel()
        if self._reason is None:
            return
        if not isinstance(error, asyncio.CancelledError):
            try:
                # If the cancellation has not been raised yet, it is raised here, and not in the
                # middle of the response.
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                pass
            else:
                return
        assert self._task is not None, "it was entered"
        self._task.uncancel()
        self._task.add_done_callback(partial(_clear, _find_exits()))
        raise self._take_reason() from None

    def _take_reason(self) -> HTTPException:
        """Return the error and drop the reference to it, which would make a reference cycle."""
        reason, self._reason = self._reason, None
        assert reason is not None, "it was cancelled here"
        return reason

    def watch(self) -> None:
        """Start to wait for the disconnect."""
        self._watcher = asyncio.create_task(self._wait(), context=self._context)

    async def _wait(self) -> None:
        try:
            # `request.is_disconnected()` would never return True behind a BaseHTTPMiddleware.
            while (await self._receive())["type"] != "http.disconnect":
                pass  # the empty body of a request without one
            self._reason = client_has_gone()
        except HTTPException as error:  # from a limit on the body, of FastAPI or of a middleware
            self._reason = error
        assert self._task is not None, "it was entered"
        self._task.cancel()


class _Sweeper:
    """Timer of one event loop that starts to watch requests after `UNWATCHED` seconds."""

    def __init__(self) -> None:
        # Running requests that are not watched yet, oldest first.
        self._entries: OrderedDict[EndedByDisconnect, None] = OrderedDict()
        self._has_timer = False

    def add(self, entry: EndedByDisconnect) -> None:
        """Watch a request once it has taken `UNWATCHED` seconds."""
        self._entries[entry] = None
        if not self._has_timer:
            self._start_timer(entry.since)

    def discard(self, entry: EndedByDisconnect) -> None:
        """Remove a request that has ended."""
        self._entries.pop(entry, None)

    def _start_timer(self, since: float) -> None:
        self._has_timer = True
        # The context is empty: otherwise the timer would keep a request's context alive.
        context = contextvars.Context()
        loop = asyncio.get_running_loop()
        loop.call_at(since + UNWATCHED, self._sweep, context=context)

    def _sweep(self) -> None:
        self._has_timer = False
        limit = asyncio.get_running_loop().time() - UNWATCHED
        while self._entries:
            entry = next(iter(self._entries))
            if entry.since > limit:
                self._start_timer(entry.since)
                return
            del self._entries[entry]
            entry.watch()


def _find_sweeper() -> _Sweeper:
    loop = asyncio.get_running_loop()
    sweeper = _sweepers.get(loop)
    if sweeper is None:
        sweeper = _sweepers[loop] = _Sweeper()
    return sweeper


def _find_exits() -> list[FrameType]:
    """Return the frames of the context managers of `contextlib` that the running task leaves."""
    frame, found = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code.co_filename == AsyncExitStack.__aexit__.__code__.co_filename:
            found.append(frame)
        frame = frame.f_back
    return found


def _clear(frames: list[FrameType], _: object) -> None:
    """Clear the frames of `contextlib` to break their reference cycles with an error.

    FastAPI runs dependencies in exit stacks. The frame of such a stack keeps the new error and its
    traceback, whose frames hold the body of the request; on Python 3.13 the frame of an
    `asynccontextmanager` keeps the cancellation, too. Without this, a server would keep the bodies
    of disconnected clients until the next garbage collection.
    Source: `AsyncExitStack.__aexit__` of CPython 3.11 to 3.14.
    """
    for frame in frames:
        with suppress(RuntimeError):  # the frame still runs: it is the program's own
            frame.clear()


_sweepers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Sweeper] = WeakKeyDictionary()


async def end_by_disconnect(connection: HTTPConnection) -> AsyncIterator[None]:
    """Cancel an endpoint when its client disconnects; the function of `cancel_on_disconnect`."""
    if not isinstance(connection, Request):
        yield  # the endpoint of a WebSocket learns of the disconnect itself, where it receives
        return
    is_whole = _is_whole(connection)
    async with EndedByDisconnect(connection.receive, is_whole=is_whole) as watched:
        if not is_whole:
            connection.scope[WHEN_BODY_IS_READ] = watched.begin
        try:
            yield
        finally:  # the scope would keep the task
            connection.scope.pop(WHEN_BODY_IS_READ, None)


def _is_whole(request: Request) -> bool:
    """Return whether no piece of the body is left that the endpoint could read.

    FastAPI reads what its parameters need before any dependency. Nothing public tells how much of a
    body an app has read itself, but by `read_body` or `read_array`.
    """
    scope, headers = request.scope, request.headers
    if scope.get(BODY_IS_READ) or getattr(scope.get("route"), "body_field", None) is not None:
        return True
    if "content-length" in headers:
        return headers["content-length"] == "0"
    # Before HTTP/2 a body without a length is announced, too.
    is_announced = scope["http_version"].startswith("1") or request.method in ("GET", "HEAD")
    return is_announced and "transfer-encoding" not in headers


cancel_on_disconnect: Any = Depends(end_by_disconnect, scope="function")
"""Dependency that cancels an `async def` endpoint when its client disconnects.

FastAPI does not do that by itself. Use it as `@app.post(..., dependencies=[cancel_on_disconnect])`,
or in the `dependencies` of an app or router.

A queued request of the endpoint is then removed from the batcher's queue; the output of a running
one is dropped. Other requests of the batch are not affected. Logs and metrics see status 499.

A request with a body is cancelled only after the body was read: by FastAPI for a parameter of the
endpoint, by `read_body` or by `read_array`. If the app reads it in another way, for example by
`request.body()`, the request is not cancelled. It has no effect on WebSockets, whose endpoints get
`WebSocketDisconnect` when they receive.
"""
