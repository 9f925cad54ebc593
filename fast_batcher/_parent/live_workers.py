"""The workers of a pool that have been started and not been seen to end. Parent process.

Everything runs on the event loop's thread, but for `kill_from_any_thread`.
"""

import asyncio
import signal
from collections.abc import Iterator

from fast_batcher._parent.worker import WorkerHandle, WorkerState

# Seconds between SIGTERM and SIGKILL: enough for a handler of the model to run. With the default
# stop_timeout of 2 s a program that forgot to stop exits within 3 s.
TERMINATE_GRACE = 0.5
# Seconds after SIGKILL. A killed process is gone within milliseconds; one in an uninterruptible
# system call (a driver, a network file system) may never be, and is not worth waiting for.
KILL_GRACE = 5.0
# What is sent to workers that have not ended by themselves, and the seconds after it.
LAST_STEPS = ((signal.SIGTERM, TERMINATE_GRACE), (signal.SIGKILL, KILL_GRACE))


class LiveWorkers:
    """Every worker whose death the pool still has to see; it ends all of them."""

    def __init__(self) -> None:
        # Those that are being spawned included.
        self._workers: set[WorkerHandle] = set()
        # Done when there is no worker left; None while nothing waits for that.
        self._all_dead: asyncio.Future[None] | None = None

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter([*self._workers])

    def add(self, worker: WorkerHandle) -> None:
        """Note a worker that is going to be started."""
        self._workers.add(worker)

    def discard(self, worker: WorkerHandle) -> None:
        """Forget a worker that is dead, or could not be started."""
        self._workers.discard(worker)
        if not self._workers:
            self._wake()

    def clear(self) -> None:
        """Forget all workers; they are dead."""
        self._workers.clear()
        self._wake()

    def remaining(self) -> list[WorkerHandle]:
        """Return the workers that have a process."""
        return [worker for worker in self if worker.is_alive]

    def kill(self) -> None:
        """Kill every worker, without waiting."""
        for worker in self:
            worker.kill()

    def kill_from_any_thread(self) -> None:
        """Kill every worker, and change nothing that the event loop uses."""
        for worker in self.remaining():
            worker.signal(signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Ask the workers to end, and after some seconds make them; returns when they are dead."""
        for worker in self:
            if worker.state is WorkerState.LOADING:
                worker.kill()  # it has nothing to finish
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

    def _wake(self) -> None:
        waiter = self._all_dead
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)
