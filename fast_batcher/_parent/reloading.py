"""Replaces the workers of a pool by workers with another model. API process, loop's thread.

`Reload` decides about the order; this module starts the workers, as recycling does: a replacement
loads its model while its predecessor still serves.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from fast_batcher._core.supervision import Reload
from fast_batcher._parent.replica import Replica
from fast_batcher._parent.worker import WorkerHandle, WorkerState
from fast_batcher.model_spec import ModelSpec

logger = logging.getLogger("fast_batcher")


class Reloading:
    """A reload that runs; `done` has its outcome.

    Args:
        replicas: The pool's workers, by index.
        after: The model to load.
        start: Starts the successor of a replica's worker.
        name: The batcher's name, for the log.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        after: ModelSpec,
        start: Callable[[Replica], None],
        name: str,
    ) -> None:
        self._replicas = replicas
        self._before, self._after = replicas[0].model_spec, after
        self._start = start
        self._name = name
        self._reload = Reload(len(replicas))
        self._error: BaseException | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._advance()

    def is_awaited(self, worker_id: int) -> bool:
        """Whether a worker that has become ready is the replacement that comes next."""
        index = self._reload.current
        worker = None if index is None else self._replicas[index].worker
        return worker is not None and worker.id == worker_id and self._is_next(worker)

    def _is_next(self, worker: WorkerHandle) -> bool:
        return worker.index == self._reload.current and worker.model_spec is self._target

    def worker_ready(self, worker: WorkerHandle) -> None:
        """Note that a worker is ready; its replica has it as its worker."""
        if worker.index == self._reload.current:
            if self._is_next(worker):
                self._reload.replaced()
            self._advance()

    def start_failed(self, worker: WorkerHandle, error: BaseException) -> None:
        """Go back if a worker with the new model could not load it."""
        if not self._is_next(worker):
            return
        if not self._reload.goes_back:
            logger.error("%s: the reload has failed, and is undone: %s", self._name, error)
            self._error = error
        self._reload.failed()
        for replica in self._replicas:
            replica.model_spec = self._before
        self._advance()

    def fail(self, error: BaseException) -> None:
        """End with an error, because the pool ends."""
        if not self.done.done():
            self.done.set_exception(error)

    @property
    def _target(self) -> ModelSpec:
        return self._before if self._reload.goes_back else self._after

    def _advance(self) -> None:
        """Start the next replacement, or end."""
        index = self._reload.current
        if index is None:
            self._finish()
            return
        replica = self._replicas[index]
        replica.model_spec = self._target
        worker = replica.worker
        # A worker that loads, or will be restarted, comes first: `worker_ready` goes on.
        is_serving = worker is not None and worker.state is WorkerState.READY
        if is_serving and replica.successor is None:
            self._start(replica)

    def _finish(self) -> None:
        if self.done.done():
            return
        if self._error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self._error)
