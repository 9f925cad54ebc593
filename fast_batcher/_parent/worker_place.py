"""One of a pool's `num_workers` workers, whichever process it is. Event loop's thread, parent."""

from typing import TYPE_CHECKING

from fast_batcher._core.restarts import Restarts
from fast_batcher._parent.worker import WorkerHandle
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    import asyncio


class WorkerPlace:
    """The processes that serve under one index, one after the other.

    Args:
        index: Which of the batcher's workers this is, from 0.
        settings: The batcher's settings.
    """

    def __init__(self, index: int, settings: Settings) -> None:
        self.index = index
        # None while it waits for its replacement.
        self.worker: WorkerHandle | None = None
        # One that loads its model to take the place of a worker that still serves.
        self.successor: WorkerHandle | None = None
        self.restart_timer: asyncio.TimerHandle | None = None
        self.restarts = Restarts(
            settings.max_restarts, settings.restart_window, settings.restart_backoff
        )
        # The restart budget is spent, and no worker has been ready since.
        self.is_given_up = False
        # Ids are `index`, `index + num_workers`, and so on.
        self._next_id = index
        self._num_workers = settings.num_workers

    def take_id(self) -> int:
        """Return the id of the next process here."""
        worker_id = self._next_id
        self._next_id += self._num_workers
        return worker_id

    def has(self, worker: WorkerHandle) -> bool:
        """Whether this worker serves here, or is going to."""
        return worker in (self.worker, self.successor)
