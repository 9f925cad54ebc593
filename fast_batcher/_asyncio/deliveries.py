"""Gives each caller of an output a copy of its own, without blocking the event loop.

API process, on the event loop's thread. A turn of the loop makes copies for a few milliseconds, and
the next turn continues. Copies that would take longer are made in a thread, one after the other.
"""

import asyncio
import copy
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, NamedTuple

from fast_batcher._arrays.joining import is_much
from fast_batcher._asyncio.offload import offload
from fast_batcher._asyncio.output_cache import EXITS
from fast_batcher._core.values import Request
from fast_batcher._process import monotonic

# Seconds of one turn of the event loop in which copies are made. With the last copy, which may take
# as long, and the callers that go on with their copies, a turn stays below 5 ms.
SLICE: Final = 0.001
# Parts of an output above which a thread copies it. `deepcopy` takes 0.1 us for a number, and 1 us
# for a list or dict.
MOST_PARTS: Final = 2000
# Bytes of its arrays above which a thread copies it. The system takes up to 4 ms for a MiB of fresh
# memory on virtual machines.
MOST_BYTES: Final = 2**18


class _Delivery(NamedTuple):
    # The callers that still wait. The owner of this list removes those that leave.
    callers: list[Request]
    output: Any


class Deliveries:
    """Outputs of which some callers have no copy yet.

    Args:
        settle: Called with a caller and its copy.
    """

    def __init__(self, settle: Callable[[Request, Any], None]) -> None:
        self._settle = settle
        # A task works on each of them as long as it is not empty; the first entry is under way.
        self._small: deque[_Delivery] = deque()
        self._large: deque[_Delivery] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, callers: list[Request], output: Any, loop: AbstractEventLoop) -> None:
        """Give each caller a copy, from the next turn of the event loop on."""
        self._small.append(_Delivery(callers, output))
        if len(self._small) == 1:
            self._start(self._copy_here(), loop)

    def _add_large(self, delivery: _Delivery) -> None:
        self._large.append(delivery)
        if len(self._large) == 1:
            self._start(self._copy_in_thread(), asyncio.get_running_loop())

    def _start(self, work: Coroutine[Any, Any, None], loop: AbstractEventLoop) -> None:
        task = loop.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy_here(self) -> None:
        """Make copies for `SLICE` seconds in each turn of the event loop."""
        until = monotonic() + SLICE
        while self._small:
            delivery = self._small[0]
            is_large = _is_large(delivery.output)
            while delivery.callers and not is_large:
                began_at = monotonic()
                self._settle(delivery.callers.pop(0), copy_output(delivery.output))
                now = monotonic()
                # The size of an object of the user's class is unknown.
                is_large = now - began_at > SLICE
                if now > until:
                    await asyncio.sleep(0)
                    until = monotonic() + SLICE
            self._small.popleft()
            if delivery.callers:
                self._add_large(delivery)

    async def _copy_in_thread(self) -> None:
        """Make one copy after the other: Python code in several threads would slow the loop."""
        while self._large:
            delivery = self._large[0]
            while delivery.callers:
                copied = await offload(True, copy_output, delivery.output)
                if delivery.callers:
                    self._settle(delivery.callers.pop(0), copied)
                del copied
            self._large.popleft()

    async def wait(self, seconds: float) -> None:
        """Wait until every caller has its copy, at most `seconds`."""
        until = monotonic() + seconds
        # The copies of a large output are the work of another task, which starts meanwhile.
        while self._tasks and (left := until - monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left)

    def rebind(self, loop: AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed, and its tasks with it."""
        self._tasks.clear()
        if self._small:
            self._start(self._copy_here(), loop)
        if self._large:
            self._start(self._copy_in_thread(), loop)

    def finish(self) -> None:
        """Give every caller its copy now; blocks."""
        for delivery in (*self._small, *self._large):
            while delivery.callers:
                self._settle(delivery.callers.pop(0), copy_output(delivery.output))


def _is_large(output: Any) -> bool:
    try:
        return is_much(output, most_parts=MOST_PARTS, most_bytes=MOST_BYTES)
    except Exception:  # noqa: BLE001  the user's classes may raise anything
        return False


def copy_output(output: Any) -> Any:
    """Copy an output for one caller; immutable ones are not copied."""
    try:
        return copy.deepcopy(output)
    except EXITS:
        raise
    except BaseException:  # noqa: BLE001  the user's code may raise anything
        return output
