"""The session of a host. Host process, on the event loop's thread."""

from typing import Any

from fast_batcher._asyncio.ledger import set_exception
from fast_batcher._asyncio.local_session import LocalSession
from fast_batcher._core.messages import Request, settle
from fast_batcher._parent.worker import Exit, WorkerLink
from fast_batcher.errors import WorkerStartupError


class ReportingSession(LocalSession):
    """A session that reports each change of its workers, and rejects calls while it is broken.

    Args:
        on_change: Called after each change.
        arguments: Of `LocalSession`.
    """

    def __init__(self, on_change: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._on_change = on_change

    def accept(self, request: Request) -> None:
        """Add a request to the queue, unless its process has not heard yet that this is broken."""
        error = self._status.broken_error()
        if error is None:
            super().accept(request)
        else:
            settle(request)
            set_exception(request, error)

    def worker_ready(self, worker: WorkerLink, times: list[tuple[int, float]]) -> None:
        """Give a ready worker batches."""
        super().worker_ready(worker, times)
        self._on_change()

    def worker_lost(self, worker: int, exit: Exit) -> None:
        """Retry the requests of a dead worker, or fail them."""
        super().worker_lost(worker, exit)
        self._on_change()

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """Break while opening."""
        super().worker_failed_to_start(worker, error)
        self._on_change()

    def workers_given_up(self, reason: str, seconds: float) -> None:
        """Break."""
        super().workers_given_up(reason, seconds)
        self._on_change()
