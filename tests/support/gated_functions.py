"""Functions whose batches wait until they are let on, and the ways in which tests batch them."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest
from waits import LIMIT

from fast_batcher import aio, dynamically
from fast_batcher.types import BatchProcessorStats


class GatedFunction:
    """Doubles each item, once its batch has been let on. Blocks its thread until then."""

    def __init__(self) -> None:
        # The batches that have begun, in their order.
        self.batches: list[list[Any]] = []
        self._begun: SimpleQueue[list[Any]] = SimpleQueue()
        self.renew_gate(0)

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        self._begun.put(list(items))
        assert self._gate.acquire(timeout=LIMIT), "the test has not let it on"
        return [2 * item for item in items]

    def next_batch(self) -> list[Any]:
        """Wait for the next batch to begin."""
        return self._begun.get(timeout=LIMIT)

    def let_on(self, batches: int = 1) -> None:
        """Let this number of batches end."""
        self._gate.release(batches)

    def renew_gate(self, batches: int) -> None:
        """Make another gate, which lets on this number of batches."""
        self._gate = threading.Semaphore(batches)


class GatedCoroutine:
    """Doubles each item, once its batch has been let on. Awaits that on the loop it is made on."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._gate = asyncio.Semaphore(0)

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        async with asyncio.timeout(LIMIT):
            await self._gate.acquire()
        return [2 * item for item in items]

    def let_on(self, batches: int = 1) -> None:
        """Let this number of batches end."""
        for _ in range(batches):
            self._gate.release()


class Awaited:
    """A function of a thread decorator behind the interface that those of `aio` have."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.start = function.start
        self.clear_stats = function.clear_stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function.acall(*args, **kwargs)

    @property
    def stats(self) -> BatchProcessorStats:
        return self._function.stats  # type: ignore[no-any-return]  # see the decorator

    async def shutdown(self, *, cancel: bool = False) -> None:
        await asyncio.to_thread(self._function.shutdown, cancel=cancel)


@dataclass(frozen=True)
class Variant:
    """A way to batch awaited calls; all ways have the same contract."""

    runs_on_loop: bool = False
    is_aio: bool = True

    def gated(self) -> Any:
        """A function whose batches wait, for this variant."""
        return GatedCoroutine() if self.runs_on_loop else GatedFunction()

    def decorate(self, func: Any, **options: Any) -> Any:
        """A function, async where it runs on the loop, with a batcher in front of it."""
        is_async = iscoroutinefunction(func) or iscoroutinefunction(type(func).__call__)
        if self.runs_on_loop and not is_async:
            plain = func

            async def func(items: list[Any]) -> Any:
                return plain(items)

        if self.is_aio:
            return aio.dynamically(**options)(func)
        return Awaited(dynamically(**options)(func))

    @asynccontextmanager
    async def batched(self, func: Any, **options: Any) -> AsyncIterator[Any]:
        """The decorated function, shut down at the end."""
        function = self.decorate(func, **options)
        try:
            yield function
        finally:
            await function.shutdown()


VARIANTS = {
    "thread": Variant(is_aio=False),
    "aio thread": Variant(),
    "aio task": Variant(runs_on_loop=True),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def in_one_batch(function: Any, *items: Any) -> list[Any]:
    """The outputs of calls of one turn, each of a caller of its own, which share a batch."""

    async def main() -> list[Any]:
        return await asyncio.gather(*map(function.acall, items))

    return asyncio.run(main())


def spin_until(is_so: Callable[[], bool]) -> None:
    """Give way to other threads until this is true of a batcher, which does not tell when."""
    deadline = monotonic() + LIMIT
    while not is_so():
        assert monotonic() < deadline, "it has not come about"
        os.sched_yield()


class InThread:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                self._outcome.put((function(*args), None))
            except BaseException as error:  # noqa: BLE001  `result` raises it
                self._outcome.put((None, error))

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> Any:
        """Wait for what it returned or raised."""
        value, error = self._outcome.get(timeout=LIMIT)
        self._thread.join()
        if error is not None:
            raise error
        return value
