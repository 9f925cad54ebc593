"""The floor: what awaiting a future costs that another callback settles, and nothing else.

Fixed for good, so that ratios to it can be compared over the years: each call creates a future and
appends it; one `call_soon` per loop iteration swaps the list and settles.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.scenarios import Load, Process

DISTRIBUTIONS: list[str] = []


class Floor:
    """Settles everything that arrived in one loop iteration, with no model behind it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    async def process(self, value: str) -> str:
        """Wait to be settled."""
        future = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._pump)
        self._waiting.append(future)
        await future
        return value

    def _pump(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Nothing to start."""
    yield Floor(asyncio.get_running_loop()).process
