"""A cache of the user's in front of a function. Runs on the event loop of the calls.

It can make calls faster, and never make one fail: what it raises is logged once, and the function
is asked instead.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any

from fast_batcher.types import AsyncCache

logger = logging.getLogger("fast_batcher")


class CachedNone(Enum):
    """What is stored for an output that is None, which means "not there" to a cache.

    An enumeration, because its members are themselves again after pickling.
    """

    NONE = "None"


class Cache:
    """Looks up and remembers outputs.

    Args:
        cache: The user's.
        name: Of the function, for the log.
    """

    def __init__(self, cache: AsyncCache[Any, Any], name: str) -> None:
        self._cache = cache
        self._name = name
        self._has_warned = False
        # What is being stored: the loop itself keeps no hold of its tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    async def process(
        self, items: Sequence[Any], compute: Callable[[list[Any]], Awaitable[list[Any]]]
    ) -> list[Any]:
        """The outputs of so many items, computing those together that are not there.

        Storing them goes on behind the caller's back: see `settle`.
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
        """Wait until all that this loop stores is stored."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks)

    def stats(self) -> Any:
        """What the user's cache says of itself, None if it does not."""
        try:
            return self._cache.stats()
        except Exception as error:  # noqa: BLE001  it is the user's code
            self._warn("stats", error)
            return None

    async def _get(self, item: Any) -> Any:
        try:
            return await self._cache.get(item)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._warn("get", error)  # nobody has cancelled the call
            return None
        except Exception as error:  # noqa: BLE001  it is the user's code
            self._warn("get", error)
            return None

    async def _set(self, item: Any, output: Any) -> None:
        try:
            await self._cache.set(item, CachedNone.NONE if output is None else output)
        except Exception as error:  # noqa: BLE001  it is the user's code
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
