"""Logs the changes of workers, and tells observers. API process, the event loop's thread."""

import logging

from fast_batcher._observers import Observers
from fast_batcher._parent.worker import Exit, WorkerHandle
from fast_batcher.observing import WorkerChange, WorkerChanged

logger = logging.getLogger("fast_batcher")


class WorkerLog:
    """The changes of the workers of one pool.

    Args:
        name: The batcher's name.
        observers: Told about each change.
    """

    def __init__(self, name: str, observers: Observers) -> None:
        self._name = name
        self._observers = observers

    def started(self, worker: WorkerHandle) -> None:
        """Note that a worker has a process."""
        self._tell(worker, "started")

    def ready(self, worker: WorkerHandle) -> None:
        """Note that a worker has loaded its model."""
        logger.info("%s is ready", worker.title)
        self._tell(worker, "ready")

    def recycled(self, worker: WorkerHandle) -> None:
        """Note that another worker has taken the place of one that was due."""
        logger.info("%s is recycled", worker.title)
        self._tell(worker, "recycled")

    def lost(self, worker: WorkerHandle, exit: Exit, *, is_replaced: bool) -> None:
        """Note that a worker that was ready is dead."""
        if is_replaced:
            # The log already says why the parent has ended it.
            level = logging.INFO if exit.is_ours else logging.WARNING
            logger.log(level, "%s ended with %s; another takes its place", worker.title, exit.text)
        self._tell(worker, "lost", exit.text)

    def _tell(self, worker: WorkerHandle, change: WorkerChange, exit_text: str = "") -> None:
        if self._observers.active:
            event = WorkerChanged(self._name, worker.index, change, worker.pid, exit_text)
            self._observers.tell(event)
