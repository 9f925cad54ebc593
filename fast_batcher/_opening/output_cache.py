"""The user's cache of outputs: look-ups and stores. Runs on event loops.

An error of the cache fails no call: it is logged once, and the output is computed. The methods of
the cache may be coroutine functions or plain ones.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fast_batcher._identity import digest_input
from fast_batcher.types import Cache, CachedNone

logger = logging.getLogger("fast_batcher")

# Exceptions that end the program.
EXITS = (KeyboardInterrupt, SystemExit)


def ends_task(error: BaseException) -> bool:
    """Return whether an error is for the running task or the program, and not the user code's own.

    User code may raise `CancelledError` although nobody has cancelled the task.
    """
    if issubclass(type(error), asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    # An event loop that is closed ends its coroutines with `GeneratorExit`.
    return issubclass(type(error), (*EXITS, GeneratorExit))


def is_awaitable(found: Any) -> bool:
    """Return whether the cache has returned an awaitable; asks the type alone.

    A stored output may be an object whose attributes raise.
    """
    return issubclass(type(found), Awaitable)


class OutputCache:
    """The user's cache, as one batcher or one function uses it."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._has_warned = False
        # The tasks that store outputs; an event loop holds only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    async def process(
        self,
        items: Sequence[Any],
        identity: str,
        compute: Callable[[list[Any]], Awaitable[list[Any]]],
    ) -> list[Any]:
        """Return the outputs of the items; those not in the cache are computed together.

        Computed outputs are stored by tasks. The caller does not wait for these; `settle` does.

        Args:
            items: The items.
            identity: The identity of the function, which is part of each key.
            compute: Returns the outputs of several items.
        """
        keys = [_make_key(identity, item) for item in items]
        outputs = list(await asyncio.gather(*map(self.get, keys)))
        missing = [at for at, output in enumerate(outputs) if output is None]
        if missing:
            computed = await compute([items[at] for at in missing])
            for at, output in zip(missing, computed, strict=True):
                outputs[at] = output
                self.store(keys[at], output)
        return [None if output is CachedNone.NONE else output for output in outputs]

    async def get(self, key: Any) -> Any:
        """Return an output, `CachedNone.NONE` for the output None, and None for a miss.

        An item that cannot be pickled has the key None, and is computed.
        """
        if key is None:
            return None
        found = self.look_up(key)
        return await found if is_awaitable(found) else found

    def look_up(self, key: Any) -> Any:
        """Return what `get` returns, or an awaitable of it if `get` of the cache returns one."""
        try:
            found = self._cache.get(key)
        except EXITS:
            raise
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything
            self._warn("get", error)
            return None
        return self._wait_for("get", found) if is_awaitable(found) else found

    def store(self, key: Any, output: Any) -> None:
        """Store an output, in a task if `set` of the cache is asynchronous."""
        if key is None:
            return
        try:
            stored = self._cache.set(key, CachedNone.NONE if output is None else output)
        except EXITS:
            raise
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything
            self._warn("set", error)
            return
        if is_awaitable(stored):
            task = asyncio.create_task(self._wait_for("set", stored))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settle(self, timeout: float | None = None) -> None:
        """Wait until the tasks of this event loop have stored their outputs, or `timeout` ends."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    def stats(self) -> Any:
        """Return the statistics of the user's cache, None if it has none or raises."""
        read = getattr(self._cache, "stats", None)
        if read is None:
            return None
        try:
            return read()
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            self._warn("stats", error)
            return None

    async def _wait_for(self, method: str, done: Awaitable[Any]) -> Any:
        """Return what a method of the cache returns, None if it raises."""
        try:
            return await done
        except BaseException as error:
            if ends_task(error):
                raise
            self._warn(method, error)
            return None

    def _warn(self, method: str, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the cache's %s() raised; calls go on without it, and this is said once",
                self._name,
                method,
                exc_info=error,
            )


def _make_key(identity: str, item: Any) -> str | None:
    """Return the key of a function's output for an item, None if the item cannot be pickled."""
    try:
        return f"{identity}:{digest_input(item)}"
    except EXITS:
        raise
    except BaseException:  # noqa: BLE001  the user's code may raise anything
        return None
