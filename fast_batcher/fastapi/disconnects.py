"""Endpoints that end when their client goes away. Runs in the API process, on its event loop.

A task for each request, which waits for the disconnect, would cost it 75 us, and most requests are
answered long before anybody loses patience. So all requests share one timer, and only the requests
that have taken a while get such a task.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Depends
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from fast_batcher.fastapi.bodies import client_has_gone

# Seconds after which a request is watched. Its task is then a part of a thousand of what the
# request has taken, and the work that a disconnect saves is late by no more than this.
UNWATCHED = 0.05


class EndedByDisconnect:
    """Cancels the task that has entered it when the client of its request goes away.

    Args:
        receive: Of the request; what else it gives is dropped.

    Raises:
        HTTPException: 499 in place of the cancellation; or what a limit on the body raises.
    """

    __slots__ = ("_reason", "_receive", "_task", "_watcher", "is_over", "since")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        # Why the task was cancelled here.
        self._reason: HTTPException | None = None
        self.since = 0.0
        self.is_over = False

    async def __aenter__(self) -> None:
        """Begin; the event loop's sweeper starts to watch after `UNWATCHED` seconds."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        sweeper = _sweepers.get(loop)
        if sweeper is None:
            sweeper = _sweepers[loop] = _Sweeper()
        sweeper.add(self, loop)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; a cancellation of this object's becomes its reason."""
        self.is_over = True
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
        raise self._reason from None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the disconnect from now on."""
        self._watcher = loop.create_task(self._wait())

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
        # Oldest first; some are over.
        self._entries: deque[EndedByDisconnect] = deque()

    def add(self, entry: EndedByDisconnect, loop: asyncio.AbstractEventLoop) -> None:
        """Look at a request in `UNWATCHED` seconds."""
        if not self._entries:
            loop.call_later(UNWATCHED, self._sweep, loop)
        self._entries.append(entry)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        entries, limit = self._entries, loop.time() - UNWATCHED
        while entries and (entries[0].is_over or entries[0].since <= limit):
            entry = entries.popleft()
            if not entry.is_over:
                entry.watch(loop)
        if entries:
            loop.call_at(entries[0].since + UNWATCHED, self._sweep, loop)


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
