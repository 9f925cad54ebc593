"""Looks outputs up in the user's cache before the function computes them. Runs on event loops.

An error of the cache fails no call: it is logged once, and the function computes the output.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any

from fast_batcher._local.callers import is_cancelled
from fast_batcher.types import AsyncCache

logger = logging.getLogger("fast_batcher")


class CachedNone(Enum):
    """Stored value for an output that is None, because `get` returns None for a miss.

    An enumeration, because pickling preserves the identity of its members.
    """

    NONE = "None"


class OutputCache:
    """Looks up and stores outputs of one function.

    Args:
        cache: The user's cache.
        name: The function's name, for the log.
    """

    def __init__(self, cache: AsyncCache[Any, Any], name: str) -> None:
        self._cache = cache
        self._name = name
        self._has_warned = False
        # The tasks that store outputs; an event loop holds only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    async def process(
        self, items: Sequence[Any], compute: Callable[[list[Any]], Awaitable[list[Any]]]
    ) -> list[Any]:
        """Return the outputs of the items; those not in the cache are computed together.

        Computed outputs are stored by tasks. The caller does not wait for these; `settle` does.
        """
        outputs = list(await asyncio.gather(*map(self._get, items)))
        missing = [at for at, output in enumerate(outputs) if output is None]
        if missing:
            computed = await compute([items[at] for at in missing])
            for at, output in zip(missing, computed, strict=True):
                outputs[at] = output
                task = asyncio.create_task(self._set(items[at], output))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return [None if output is CachedNone.NONE else output for output in outputs]

    async def settle(self) -> None:
        """Wait until the tasks of this event loop have stored their outputs."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks)

    def stats(self) -> Any:
        """Return the statistics of the user's cache, None if it raises."""
        try:
            return self._cache.stats()
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            self._warn("stats", error)
            return None

    async def _get(self, item: Any) -> Any:
        try:
            return await self._cache.get(item)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self._warn("get", error)
            return None

    async def _set(self, item: Any, output: Any) -> None:
        try:
            await self._cache.set(item, CachedNone.NONE if output is None else output)
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            self._warn("set", error)

    def _warn(self, what: str, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the cache's %s() raised; calls go on without it, and this is said once",
                self._name,
                what,
                exc_info=error,
            )
