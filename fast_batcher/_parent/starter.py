"""Starts worker processes on a thread, and enforces `start_timeout`. Parent process.

Everything but `WorkerHandle.spawn` runs on the event loop's thread.
"""

import asyncio
import functools
from collections.abc import Callable
from contextvars import Context

from fast_batcher._parent.background import JobThread
from fast_batcher._parent.shutdown import LiveWorkers
from fast_batcher._parent.worker import Exit, WorkerHandle, WorkerState
from fast_batcher._parent.worker_log import WorkerLog
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model_spec import is_main_importable

# Remedy in the error of a worker that may have ended because it imported the program.
MAIN_GUARD = (
    ". A script that is run needs `if __name__ == '__main__':` around what it does, because the "
    "worker imports it"
)


class Starter:
    """Starts the workers of one pool.

    Args:
        thread: Starts the processes. It lives as long as the workers, because on Linux the kernel
            ends them when the *thread* that forked them ends.
        timeout: Seconds that a worker may take to load its model.
        live: The live workers of the pool; started workers are added.
        start_failed: Called with a worker that could not be started, or did not load in time.
        log: Notes the workers that were started.
    """

    def __init__(
        self,
        thread: JobThread,
        timeout: float,
        live: LiveWorkers,
        start_failed: Callable[[WorkerHandle, WorkerStartupError], None],
        log: WorkerLog,
    ) -> None:
        self._thread = thread
        self._timeout = timeout
        self._live = live
        self._start_failed = start_failed
        self._log = log

    def start(self, worker: WorkerHandle) -> None:
        """Start a worker, which reports its readiness to the pool."""
        self.limit(worker)
        self._thread.run(worker.spawn, functools.partial(self._finish_spawn, worker))
        self._live.add(worker)

    def limit(self, worker: WorkerHandle) -> None:
        """Give a worker that loads its model `timeout` seconds from now on."""
        loop = asyncio.get_running_loop()
        worker.set_timer(loop.call_later(self._timeout, self._time_out, worker, context=Context()))

    def _finish_spawn(self, worker: WorkerHandle, error: BaseException | None) -> None:
        if error is not None:
            startup_error = WorkerStartupError(
                f"worker {worker.index} could not be started: {error!r}"
            )
            startup_error.__cause__ = error
            self._start_failed(worker, startup_error)
            self._live.discard(worker)
        elif worker.is_alive:  # otherwise the pool was stopped meanwhile
            worker.attach(asyncio.get_running_loop())
            self._log.started(worker)
            if worker.state is WorkerState.ENDING:
                worker.kill()  # `kill` was called before the process existed
            else:
                self.limit(worker)

    def _time_out(self, worker: WorkerHandle) -> None:
        was_attached = worker.is_attached
        self._thread.take_outcomes()
        if worker.is_attached and not was_attached:
            # The loop was blocked since the spawn, and has sent the model only now.
            return
        if worker.is_attached:
            worker.read_all()  # READY may have arrived in time, while the loop was blocked
        if worker.state is not WorkerState.LOADING:
            return
        error = WorkerStartupError(
            f"worker {worker.index} did not load its model within start_timeout="
            f"{self._timeout} seconds and was ended; raise start_timeout if the model needs longer"
        )
        self._start_failed(worker, error)


def make_early_exit_error(worker: WorkerHandle, exit: Exit) -> WorkerStartupError:
    """Make the error of a worker that has died before it was ready."""
    hint = "" if exit.by_signal or not is_main_importable() else MAIN_GUARD
    return WorkerStartupError(
        f"worker {worker.index} ended with {exit.text} before it had loaded "
        f"{worker.model_spec.name}; its output on stderr may tell why{hint}"
    )
