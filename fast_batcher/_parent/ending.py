"""End of workers: on their event loop, without one for `stop`, and at the end of the interpreter.

Parent process. `end_pools` blocks the thread that calls it. At the end of the interpreter that is
the main thread; pools whose event loop runs on another thread are ended by that thread.
"""

import asyncio
import atexit
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextvars import Context
from typing import Protocol

from fast_batcher._parent.worker_process import WorkerHandle, WorkerState
from fast_batcher._process import monotonic

# Seconds between SIGTERM and SIGKILL: enough for a handler of the model to run. With the default
# stop_timeout of 2 s a program that forgot to stop exits within 3 s.
TERMINATE_GRACE = 0.5
# Seconds after SIGKILL. A killed process is gone within milliseconds; a process in an
# uninterruptible system call (a driver, a network file system) may stay for ever.
KILL_GRACE = 5.0
# Signals to workers that have not ended by themselves, and the seconds to wait after each.
LAST_STEPS = ((signal.SIGTERM, TERMINATE_GRACE), (signal.SIGKILL, KILL_GRACE))
# Seconds, at the end of the interpreter: a loop that has not ended its pools by then is blocked.
# Together with the steps before, a program that forgot to stop still exits within 3 s.
LOOP_GRACE = 0.5


class LiveWorkers:
    """Live workers of a pool, including workers that are being spawned. Event loop's thread."""

    def __init__(self) -> None:
        self._workers: set[WorkerHandle] = set()
        # Done when no worker is left; None while nothing waits for it.
        self._all_dead: asyncio.Future[None] | None = None

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter([*self._workers])

    def add(self, worker: WorkerHandle) -> None:
        """Add a worker that is going to be started."""
        self._workers.add(worker)

    def discard(self, *workers: WorkerHandle) -> None:
        """Remove workers that are dead, or could not be started."""
        self._workers.difference_update(workers)
        waiter = self._all_dead
        if self._workers or waiter is None or waiter.done() or waiter.get_loop().is_closed():
            return
        waiter.set_result(None)

    def remaining(self) -> list[WorkerHandle]:
        """Return the workers that have a process."""
        return [worker for worker in self if worker.is_alive]

    async def end(self, seconds: float) -> None:
        """Ask the workers to end, and terminate those left after `seconds`; wait for their deaths."""
        for worker in self:
            if worker.state is WorkerState.LOADING:
                worker.kill()  # it has no batch to finish
            else:
                worker.ask_to_end()
        await self._wait_until_dead(seconds)
        for number, grace in LAST_STEPS:
            for worker in self:
                worker.ignore()
                worker.signal(number)
            await self._wait_until_dead(grace)

    async def _wait_until_dead(self, seconds: float) -> None:
        if self._workers:
            if self._all_dead is None or self._all_dead.done():
                self._all_dead = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_dead], timeout=seconds)


class EndablePool(Protocol):
    """Interface of a pool for `end_pools` and for the end of the interpreter."""

    live: LiveWorkers
    stop_timeout: float
    loop: asyncio.AbstractEventLoop
    # True once no further worker is started.
    is_closing: bool

    def begin_end(self) -> None:
        """Start no more workers, send no more frames, and close the pipes of the workers."""

    def finish_end(self) -> None:
        """Remove the workers, which are dead, and end the threads."""


# Pools that have not been ended. The references keep a pool whose batcher was dropped: it still has
# workers.
_open_pools: set[EndablePool] = set()
# In a forked copy of the process the workers are children of another.
os.register_at_fork(after_in_child=_open_pools.clear)


def note_open(pool: EndablePool) -> None:
    """Register this pool to be ended at the end of the interpreter, unless `end_pools` is first."""
    _open_pools.add(pool)


def end_pools(pools: list[EndablePool], grace: float) -> None:
    """End these pools together: close the pipes, SIGTERM, SIGKILL. Blocks."""
    for pool in pools:
        pool.begin_end()
    if grace:
        _reap_dead(pools, grace)
    for number, seconds in LAST_STEPS if grace else LAST_STEPS[-1:]:
        for pool in pools:
            for worker in pool.live.remaining():
                worker.signal(number)
        _reap_dead(pools, seconds)
    for pool in pools:
        pool.finish_end()
        _open_pools.discard(pool)


def _reap_dead(pools: list[EndablePool], seconds: float) -> None:
    """Reap the workers that die within `seconds`; return at once when all are dead."""
    deadline = monotonic() + seconds
    poller = select.poll()
    waiting = {worker.death_fd: worker for pool in pools for worker in pool.live.remaining()}
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    while waiting:
        ready = poller.poll(max(0.0, deadline - monotonic()) * 1000)
        if not ready:
            return
        for fd, _ in ready:
            poller.unregister(fd)
            worker = waiting.pop(fd)
            worker.reap()
            if worker.outbox is not None:
                worker.outbox.close()


@atexit.register
def end_forgotten_pools() -> None:
    """End every pool that this process has opened and not ended."""
    pools = list(_open_pools)
    grace = max((pool.stop_timeout for pool in pools), default=0.0)
    # Loops that still run here do so on daemon threads.
    running = {pool.loop for pool in pools if pool.loop.is_running()}
    endings = [
        _end_on_loop(loop, [pool for pool in pools if pool.loop is loop], grace) for loop in running
    ]
    end_pools([pool for pool in pools if pool.loop not in running], grace)
    deadline = monotonic() + grace + TERMINATE_GRACE + LOOP_GRACE
    for has_ended in endings:
        has_ended.wait(max(0.0, deadline - monotonic()))
    for pool in list(_open_pools):  # its loop is blocked, or has just stopped
        pool.is_closing = True
        for worker in pool.live.remaining():
            worker.signal(signal.SIGKILL)


def _end_on_loop(
    loop: asyncio.AbstractEventLoop, pools: list[EndablePool], grace: float
) -> threading.Event:
    """Schedule the end of pools on the thread of their event loop.

    If this thread ended them, both threads would release a worker that has just died.
    """
    has_ended = threading.Event()

    def end() -> None:
        try:
            end_pools(pools, grace)
        finally:
            has_ended.set()

    try:
        loop.call_soon_threadsafe(end, context=Context())
    except RuntimeError:  # the loop has just been closed
        has_ended.set()
    return has_ended
