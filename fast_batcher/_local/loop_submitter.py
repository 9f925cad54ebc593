"""Collects the calls of one event loop. Runs on that loop.

Calls of one turn of the loop reach the engine together: the cost of handing them over is paid once
per turn, and not once per call.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from fast_batcher._core.messages import Request
from fast_batcher._local.callers import make_requests
from fast_batcher._local.engine import Engine
from fast_batcher._local.settings import DecoratorSettings


class LoopSubmitter:
    """Submits the calls of one event loop to an engine.

    Args:
        engine: Where the calls go.
        loop: Where they come from.
        settings: The options of the function.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, settings: DecoratorSettings
    ) -> None:
        self.engine = engine
        self._loop = loop
        self._settings = settings
        # The requests of each call of this turn. While there are any, a `flush` is scheduled.
        self._pending: list[list[Request]] = []

    def process(self, items: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Await the outputs of at least one item; the first error ends the wait for all.

        Cancellation: safe at any time. Items that wait are forgotten; a batch that is being
        computed is computed, and its outputs for this caller are dropped.
        """
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        return self._wait(future, make_requests(items, future, self._settings))

    def process_one(self, item: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of one item that has neither a cost nor a priority.

        A short cut past `Call`, which most calls would pay for with a quarter of their CPU: an
        async function misses the bar of `benchmarks/decorators.py` without it.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        return self._wait(future, [Request(item, future)])

    async def _wait(self, future: "asyncio.Future[Any]", requests: list[Request]) -> Any:
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending.append(requests)
        try:
            return await future
        except BaseException:
            self._abandon(requests)
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, requests

    def flush(self) -> None:
        """Submit the calls of this turn."""
        pending, self._pending = self._pending, []
        if pending:
            self.engine.submit(pending)

    def _abandon(self, requests: list[Request]) -> None:
        if requests in self._pending:
            self._pending.remove(requests)
        else:
            self.engine.cancel(requests)
