"""`ReportingSession`: the session of a host. Host process, on the event loop's thread."""

from collections.abc import Callable

from fast_batcher._core.values import Request, settle
from fast_batcher._file_state import FileState, read_state
from fast_batcher._parent.worker_process import Exit, WorkerLink
from fast_batcher._session.life import Status
from fast_batcher._session.outcomes import Ledger, set_exception
from fast_batcher._session.session import LocalSession, ValueAccess
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Settings


class ReportingSession(LocalSession):
    """A session that reports each change of its workers, and rejects calls while it is broken.

    Args:
        on_change: Called after each change.
        model_spec: The model that the workers load.
        settings: The batcher's settings.
        status: The batcher's state.
        ledger: Settles and counts the requests.
        access: Access to inputs and outputs.
        named_paths: Texts and paths in the model's arguments, which may name files.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        model_spec: ModelSpec,
        settings: Settings,
        status: Status,
        ledger: Ledger,
        access: ValueAccess,
        named_paths: list[str],
    ) -> None:
        super().__init__(model_spec, settings, status, ledger, access)
        self._on_change = on_change
        self._named_paths = named_paths
        # States of the files that the first worker has loaded.
        self._loaded: dict[str, FileState] = {}
        self.accept = self._accept

    def _accept(self, request: Request) -> None:
        """Add a request to the queue, unless its process has not heard yet that this is broken."""
        error = self._status.broken_error()
        if error is None:
            self.pump.accept(request)
        else:
            settle(request)
            set_exception(request, error)

    def worker_ready(self, worker: WorkerLink, times: list[tuple[int, float]]) -> None:
        """Give a ready worker batches."""
        super().worker_ready(worker, times)
        named = {path: read_state(path) for path in self._named_paths}
        for path, state in {**worker.module_files, **named}.items():
            if state is not None:
                # A later worker may have loaded a file that has changed.
                self._loaded.setdefault(path, state)
        self._on_change()

    def find_changed_file(self) -> str | None:
        """Return a file or folder that has changed since a worker loaded it, None without any."""
        changed = (path for path, state in self._loaded.items() if read_state(path) != state)
        return next(changed, None)

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
