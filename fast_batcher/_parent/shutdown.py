"""Ends pools without an event loop: for `stop`, and at the end of the interpreter. Parent process.

`end_pools` blocks the thread that calls it. At the end of the interpreter that is the main thread;
pools whose event loop runs on another thread are ended by that thread.
"""

import asyncio
import atexit
import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING, Protocol

from fast_batcher._clock import monotonic
from fast_batcher._parent.live_workers import LAST_STEPS, TERMINATE_GRACE, LiveWorkers
from fast_batcher._parent.worker import WorkerHandle

if TYPE_CHECKING:
    from signal import Signals

# Seconds, at the end of the interpreter: a loop that has not ended its pools by then is blocked.
# Together with the steps before, a program that forgot to stop still exits within 3 s.
LOOP_GRACE = 0.5
# Seconds between two looks whether a loop still runs: one that stops tells no other thread.
LOOK_INTERVAL = 0.01


class EndablePool(Protocol):
    """What this module uses of a pool."""

    live: LiveWorkers
    stop_timeout: float
    # The process whose children the workers are.
    owner_pid: int
    loop: asyncio.AbstractEventLoop
    # The thread of that loop.
    thread_id: int
    # Nothing is started any more.
    is_closing: bool

    def begin_end(self) -> None:
        """Start nothing more, send nothing more, and close the pipes of the workers."""

    def finish_end(self) -> None:
        """Forget the workers, which are dead, and end the threads."""


# Pools that have not been ended. They are held here, because a pool whose batcher was dropped has
# workers all the same.
_open_pools: set[EndablePool] = set()


def note_open(pool: EndablePool) -> None:
    """End this pool at the end of the interpreter, unless `end_pools` comes first."""
    _open_pools.add(pool)


def end_pools(pools: list[EndablePool], grace: float) -> None:
    """End these pools together: close the pipes, SIGTERM, SIGKILL. Blocks.

    Args:
        pools: The pools; this thread is that of their loop, or the loop does not run.
        grace: Seconds in which the workers may end by themselves; with 0 they are killed at once.
    """
    for pool in pools:
        pool.begin_end()
    steps: list[tuple[Signals | None, float]] = [LAST_STEPS[-1]]
    if grace:
        steps = [(None, grace), *LAST_STEPS]
    for number, seconds in steps:
        workers = [worker for pool in pools for worker in pool.live.remaining()]
        if number is not None:
            for worker in workers:
                worker.signal(number)
        _reap_dead(workers, seconds)
    for pool in pools:
        pool.finish_end()
        _open_pools.discard(pool)


def _reap_dead(workers: list[WorkerHandle], seconds: float) -> None:
    """Reap the workers that die within some seconds; returns when it is all of them."""
    deadline = monotonic() + seconds
    poller = select.poll()
    waiting = {worker.death_fd: worker for worker in workers}
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
    # In a forked copy of the process the workers are children of another.
    pools = [pool for pool in list(_open_pools) if pool.owner_pid == os.getpid()]
    if not pools:
        return
    grace = max(pool.stop_timeout for pool in pools)
    here: list[EndablePool] = []
    elsewhere: dict[asyncio.AbstractEventLoop, list[EndablePool]] = {}
    for pool in pools:
        runs_elsewhere = pool.thread_id != threading.get_ident() and pool.loop.is_running()
        (elsewhere.setdefault(pool.loop, []) if runs_elsewhere else here).append(pool)
    endings = [(loop, some, _begin_end_on(loop, some, grace)) for loop, some in elsewhere.items()]
    if here:
        end_pools(here, grace)
    deadline = monotonic() + grace + TERMINATE_GRACE + LOOP_GRACE
    for loop, some, has_ended in endings:
        _finish_end_on(loop, some, has_ended, deadline, grace)


def _begin_end_on(
    loop: asyncio.AbstractEventLoop, pools: list[EndablePool], grace: float
) -> threading.Event:
    """Let the thread of their loop end pools: a daemon thread, which runs on at the end.

    If this thread ended them, both would release a worker that has just died.

    Returns:
        Set once they have been ended.
    """
    has_ended = threading.Event()

    def end() -> None:
        try:
            end_pools(pools, grace)
        finally:
            has_ended.set()

    with contextlib.suppress(RuntimeError):  # the loop has just been closed
        loop.call_soon_threadsafe(end)
    return has_ended


def _finish_end_on(
    loop: asyncio.AbstractEventLoop,
    pools: list[EndablePool],
    has_ended: threading.Event,
    deadline: float,
    grace: float,
) -> None:
    """Wait until the thread of a loop has ended its pools; end them here if it does not."""
    while not has_ended.wait(LOOK_INTERVAL):
        if not loop.is_running():
            end_pools(pools, grace)
            return
        if monotonic() >= deadline:
            for pool in pools:
                pool.is_closing = True
                pool.live.kill_from_any_thread()
            return
