"""Starts worker processes on a thread, and limits how long they may take. Parent process.

Everything but `WorkerHandle.spawn` runs on the event loop's thread.
"""

import asyncio
import functools
from collections.abc import Callable

from fast_batcher._parent.background import JobThread
from fast_batcher._parent.shutdown import LiveWorkers
from fast_batcher._parent.worker import WorkerHandle, WorkerState
from fast_batcher.errors import WorkerStartupError


class Starter:
    """Starts the workers of one pool.

    Its thread lives as long as the workers, because on Linux the kernel ends them when the *thread*
    that forked them ends.

    Args:
        loop: The event loop.
        timeout: Seconds that a worker may take to load its model.
        live: Where the workers are noted.
        start_failed: Told of a worker that could not be started, or did not load in time.
        model_name: For errors.
        name: The batcher's name, for the thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        live: LiveWorkers,
        start_failed: Callable[[WorkerHandle, WorkerStartupError], None],
        model_name: str,
        name: str,
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._live = live
        self._start_failed = start_failed
        self._model_name = model_name
        self._thread = JobThread(loop, f"fast_batcher-starter-{name}")

    def start(self, worker: WorkerHandle) -> None:
        """Start a worker; it tells the pool itself when it is ready."""
        self.limit(worker)
        self._thread.run(worker.spawn, functools.partial(self._finish_spawn, worker))
        self._live.add(worker)

    def limit(self, worker: WorkerHandle) -> None:
        """Give a worker that loads its model `timeout` seconds from now on."""
        worker.set_timer(self._loop.call_later(self._timeout, self._time_out, worker))

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with another event loop; the one before is closed, and its timers with it."""
        self._loop = loop
        self._thread.rebind(loop)

    def hold(self) -> None:
        """Start nothing more; returns when the current start is over."""
        self._thread.hold()

    def stop(self) -> None:
        """End the thread; the workers are dead."""
        self._thread.stop()

    def _finish_spawn(self, worker: WorkerHandle, error: BaseException | None) -> None:
        if error is not None:
            startup_error = WorkerStartupError(
                f"worker {worker.index} could not be started: {error!r}"
            )
            startup_error.__cause__ = error
            self._start_failed(worker, startup_error)
            self._live.discard(worker)
        elif worker.is_alive:  # otherwise the pool was stopped meanwhile
            worker.attach(self._loop)
            if worker.state is WorkerState.ENDING:
                worker.kill()  # it was given up before there was a process to kill
            else:
                self.limit(worker)

    def _time_out(self, worker: WorkerHandle) -> None:
        was_attached = worker.is_attached
        self._thread.take_outcomes()
        if worker.is_attached and not was_attached:
            # The loop was blocked since it was spawned, and has just sent it the model.
            return
        if worker.is_attached:
            worker.read_all()  # it may have been ready in time, and the loop was blocked
        if worker.state is not WorkerState.LOADING:
            return
        error = WorkerStartupError(
            f"worker {worker.index} did not load {self._model_name} within start_timeout="
            f"{self._timeout} seconds and was ended; raise start_timeout if the model needs longer"
        )
        self._start_failed(worker, error)
