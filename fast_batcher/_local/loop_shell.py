"""The calls that come from one event loop. Runs on that loop.

Those of one turn of the loop reach the engine together: what a hand-over costs is paid once per
turn and not once per call.
"""

import asyncio
from asyncio import Future
from collections.abc import Sequence
from typing import Any

from fast_batcher._core.messages import Request
from fast_batcher._local.callers import Call, requests_of
from fast_batcher._local.engine import Engine
from fast_batcher._local.settings import LocalSettings


class LoopShell:
    """One event loop's way to an engine.

    Args:
        engine: Where the calls go.
        loop: Where they come from.
        settings: Of the function.
    """

    __slots__ = ("_settings", "arrivals", "engine", "has_pump", "is_plain", "loop")

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, settings: LocalSettings
    ) -> None:
        self.engine = engine
        self.loop = loop
        self._settings = settings
        # Whether a single item has nothing that the queue looks at.
        self.is_plain = settings.max_batch_length is None
        # Requests of this turn, and whether a `pump` is scheduled that takes them. Public for
        # `LocalBatcher.aprocess` alone, which every call goes through.
        self.arrivals: list[Request] = []
        self.has_pump = False

    async def process_many(self, items: Sequence[Any]) -> list[Any]:
        """Wait for the outputs of at least one item; the first error ends the wait for all."""
        self.engine.require_room(len(items), behind=len(self.arrivals))
        future: Future[list[Any]] = Future(loop=self.loop)
        call = Call(len(items), future)
        requests = requests_of(call, items, self._settings, self.engine.rank_requests)
        self.arrivals += requests
        if not self.has_pump:
            self.has_pump = True
            self.loop.call_soon(self.pump)
        try:
            return await future
        except BaseException:
            self.abandon(requests)
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, call, requests

    def pump(self) -> None:
        """Hand over what has come in this turn."""
        self.has_pump = False
        if self.arrivals:
            arrivals, self.arrivals = self.arrivals, []
            self.engine.submit(arrivals)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Forget requests whose caller has gone."""
        if self.arrivals:
            gone = set(requests)
            self.arrivals = [request for request in self.arrivals if request not in gone]
        # One that has not been submitted has no id yet.
        self.engine.cancel([request for request in requests if request.id >= 0])
