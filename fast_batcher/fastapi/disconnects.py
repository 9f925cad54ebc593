"""Endpoints that end when their client goes away. Runs in the API process, on its event loop.

A task for each request, which waits for the disconnect, would cost it 75 us, and most requests are
answered long before anybody loses patience. So all requests share one timer, and only the requests
that have taken a while get such a task.
"""

import asyncio
import contextvars
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Depends
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from fast_batcher.fastapi.bodies import client_has_gone

# Seconds after which a request is watched. Its task is then 0.1 % of what the request has taken,
# and the work that a disconnect saves is late by no more than this.
UNWATCHED = 0.05


class EndedByDisconnect:
    """Cancels the task that has entered it when the client of its request goes away.

    Args:
        receive: Of the request; what else it gives is dropped.

    Raises:
        HTTPException: 499 in place of the cancellation; or what a limit on the body raises.
    """

    __slots__ = ("_context", "_reason", "_receive", "_sweeper", "_task", "_watcher", "since")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        # Of the request; its middlewares see it when `receive` is awaited.
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        # Why the task was cancelled here.
        self._reason: HTTPException | None = None
        self._sweeper = _find_sweeper()
        self.since = 0.0

    async def __aenter__(self) -> None:
        """Begin; the event loop's sweeper starts to watch after `UNWATCHED` seconds."""
        self._task = asyncio.current_task()
        self.since = asyncio.get_running_loop().time()
        self._sweeper.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; a cancellation of this object's becomes its reason."""
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
        self._task.add_done_callback(partial(_clear, _find_exit_stacks()))
        raise self._take_reason() from None

    def _take_reason(self) -> HTTPException:
        """Return the reason, which must not be reachable from its own traceback."""
        reason, self._reason = self._reason, None
        assert reason is not None, "it was cancelled here"
        return reason

    def watch(self) -> None:
        """Wait for the disconnect from now on."""
        self._watcher = asyncio.create_task(self._wait(), context=self._context)

    async def _wait(self) -> None:
        try:
            # `request.is_disconnected()` would never say so behind a BaseHTTPMiddleware.
            while (await self._receive())["type"] != "http.disconnect":
                pass  # the rest of a body that the endpoint has not read
            self._reason = client_has_gone()
        except HTTPException as error:  # from a limit on the body, of FastAPI or of a middleware
            self._reason = error
        assert self._task is not None, "it was entered"
        self._task.cancel()


class _Sweeper:
    """Starts to watch the requests of one event loop that have taken a while."""

    def __init__(self) -> None:
        # Requests that run and are not watched, oldest first.
        self._entries: OrderedDict[EndedByDisconnect, None] = OrderedDict()
        self._has_timer = False

    def add(self, entry: EndedByDisconnect) -> None:
        """Watch a request once it has taken `UNWATCHED` seconds."""
        self._entries[entry] = None
        if not self._has_timer:
            self._start_timer(entry.since)

    def discard(self, entry: EndedByDisconnect) -> None:
        """Forget a request that is over."""
        self._entries.pop(entry, None)

    def _start_timer(self, since: float) -> None:
        self._has_timer = True
        # In a context of its own: otherwise the timer would keep that of a request alive.
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
    """Return the sweeper of the running event loop."""
    loop = asyncio.get_running_loop()
    sweeper = _sweepers.get(loop)
    if sweeper is None:
        sweeper = _sweepers[loop] = _Sweeper()
    return sweeper


def _find_exit_stacks() -> list[FrameType]:
    """Return the frames of all exit stacks that the running task is leaving."""
    frame, found = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code is AsyncExitStack.__aexit__.__code__:
            found.append(frame)
        frame = frame.f_back
    return found


def _clear(frames: list[FrameType], _: object) -> None:
    """Break the reference cycles of exit stacks that a new error has left.

    Such a stack, in which FastAPI runs dependencies, keeps the error and its traceback in its own
    frame, and the frames below hold the body of the request. A collection finds them, and until
    then a server would keep the body of each client that has gone.
    Source: `AsyncExitStack.__aexit__` of CPython 3.11 to 3.14.
    """
    for frame in frames:
        with suppress(RuntimeError):  # of the program that runs the event loop
            frame.clear()


_sweepers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Sweeper] = WeakKeyDictionary()


async def end_by_disconnect(connection: HTTPConnection) -> AsyncIterator[None]:
    """End an endpoint when its client goes away; what `cancel_on_disconnect` depends on."""
    if not isinstance(connection, Request):
        yield  # the endpoint of a WebSocket learns of the disconnect itself, where it receives
        return
    async with EndedByDisconnect(connection.receive):
        yield


cancel_on_disconnect = Depends(end_by_disconnect, scope="function")
"""For `@app.post(..., dependencies=[cancel_on_disconnect])`, or those of an app or router: an
`async def` endpoint is cancelled when its client goes away, which FastAPI does not do by itself.

The endpoint's request to a batcher is then forgotten if it is queued, and its output is dropped if
it runs; other requests of the batch are not affected. Logs and metrics see status 499. Not for
endpoints that read `request.stream()` themselves; where a dependency reads the body, it comes
first: `dependencies=[Depends(read), cancel_on_disconnect]`. A WebSocket is left alone: its endpoint
learns of the disconnect by `WebSocketDisconnect`, where it receives.
"""
