"""Workers, as their parent sees them: the record of a worker, its state, and its frames.

    pool, sender, session  -->  WorkerHandle   start, pings, frames of batches, end
    WorkerHandle  --WorkerEvents-->  pool      placed, ready, dead

`WorkerProcess` is a process of this machine, `RayWorker` an actor of a Ray cluster. The pool
decides when workers are started, replaced and ended; a `WorkerHandle` does it. `spawn` runs on the
spawner thread; everything else runs on the thread of the event loop, or on the thread that ends the
pool once the loop is closed.
"""

import logging
import signal
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fast_batcher._devices import Placement
from fast_batcher._shared_memory.inputs import Slab, Slabs
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import KIND_NAMES, Frame, Frames, Kind, Reservation
from fast_batcher._transport.pickling import SerializedError
from fast_batcher.errors import RemoteTraceback, TransportError, WorkerStartupError
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from fast_batcher._file_state import FileState
    from fast_batcher._shared_memory.outbox import OutboxReader

logger = logging.getLogger("fast_batcher")


class WorkerState(Enum):
    """State of a worker from its start to its death.

    state    ends with                            frames from the worker           its death is
    -------  -----------------------------------  -------------------------------  --------------
    LOADING  READY or STARTUP_FAILED              only these two are expected      a failed start
    READY    a kill by the parent                 answers, passed to the listener  a loss
    ENDING   the worker's death                   dropped                          as before

    A worker that was asked to end stays READY: its remaining answers count.
    """

    LOADING = "loading"
    READY = "ready"
    ENDING = "ending"


class Exit(NamedTuple):
    """Exit status of a worker, and the batches it had."""

    # "exit code 3", "signal 9 (SIGKILL)".
    text: str
    # A signal ended it.
    by_signal: bool
    # It was asked to end, and did so with exit code 0.
    is_clean: bool
    # The parent has ended it, and has logged the reason.
    is_ours: bool
    # Ids of the batches that it read last and began to compute last, None without any.
    taken: int | None
    begun: int | None
    # SIGKILL came from outside, for example from the OOM killer of Linux.
    may_be_out_of_memory: bool
    # Its machine has died, or cannot be reached: that says nothing about the model.
    is_node_lost: bool = False


class WorkerEvents(Protocol):
    """Events that workers report to their pool, on the event loop's thread."""

    def worker_placed(self, worker: "WorkerHandle") -> None:
        """Handle that a worker has a process, if it had none when its `spawn` returned."""

    def worker_loaded(self, worker: "WorkerHandle", times: list[tuple[int, float]]) -> None:
        """Handle readiness; `times` are sizes and seconds of the warm-up batches."""

    def start_failed(self, worker: "WorkerHandle", error: WorkerStartupError) -> None:
        """Handle a worker that could not be started, or could not load its model in time."""

    def worker_exited(self, worker: "WorkerHandle", exit: Exit) -> None:
        """Handle a death; called once, after all frames of the worker were dispatched."""


# Read for each frame: on Python 3.11 a member of an enumeration costs as much as a call.
_READY = WorkerState.READY


class WorkerHandle(ABC):
    """A worker, from its start to its death. A replacement is another object."""

    def __init__(
        self,
        id: int,
        index: int,
        model_spec: ModelSpec,
        settings: Settings,
        placement: Placement,
        slabs: Slabs | None,
        events: WorkerEvents,
        on_frame: Callable[[int, Frame], None],
        name: str,
    ) -> None:
        # Number of this worker among all that the pool has started.
        self.id = id
        # Index among the batcher's workers, from 0; its replacement has the same index.
        self.index = index
        self.model_spec = model_spec
        self._settings = settings
        self._placement = placement
        self._slabs = slabs
        self._events = events
        self._on_frame = on_frame
        self._name = name

        self.state = WorkerState.LOADING
        # From READY to the death; set by the pool.
        self.is_serving = False
        # Another worker has taken its place: it finishes its batches, and then ends. Set by the
        # pool.
        self.is_retired = False
        # Answered batches; the pool counts them if workers are recycled.
        self.batches = 0
        # The worker reads no further frames.
        self.was_asked_to_end = False
        # Slabs that it may still view, by batch id; set by the sender.
        self.leases: dict[int, list[Slab]] = {}
        self._timer: TimerHandle | None = None
        self._loop: AbstractEventLoop | None = None
        self.is_attached = False

        # Process id; None until it has a process.
        self.pid: int | None = None
        # Address of its node in a cluster; "" for this machine.
        self.node = ""
        # Memory in which the worker leaves large answers, None without shared memory.
        self.outbox: OutboxReader | None = None
        # Batches on which it works at the same time, 1 to 3; set when it is ready.
        self.stages = 1
        # Files of the app that the worker has imported; set when it is ready.
        self.module_files: dict[str, FileState] = {}

    @property
    def title(self) -> str:
        """Name in logs: the batcher, the worker's index and the process id."""
        return f"{self._name}: worker {self.index} (pid {self.pid})"

    # Start.

    @abstractmethod
    def spawn(self) -> None:
        """Start the worker. Spawner thread."""

    @abstractmethod
    def attach(self, loop: AbstractEventLoop) -> None:
        """Watch the worker from this event loop; the previous loop, if any, is closed."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the worker was started and has not been reaped."""

    @property
    def is_placed(self) -> bool:
        """Whether it has, or had, a process."""
        return self.pid is not None

    @property
    def start_limit(self) -> float:
        """Seconds until the present step of the start has failed."""
        return self._settings.start_timeout

    def make_timeout_error(self) -> WorkerStartupError:
        """Make the error of a worker whose start has taken longer than `start_limit`."""
        return WorkerStartupError(
            f"worker {self.index} did not load its model within start_timeout="
            f"{self._settings.start_timeout} seconds and was ended; raise start_timeout if the "
            "model needs longer"
        )

    # Frames to the worker, as in `LoopChannel`; frames to a dead worker are dropped.

    @abstractmethod
    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        """Send a frame without waiting."""

    @abstractmethod
    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""

    @abstractmethod
    def reserve(self) -> Reservation:
        """Reserve a position for frames that are not ready yet; later frames wait behind it."""

    @abstractmethod
    def fill(self, reservation: Reservation, frames: Frames) -> None:
        """Send zero or more frames at the position that was reserved for them."""

    @abstractmethod
    def is_sending(self) -> bool:
        """Return whether delayed frames were sent since the last call, or are not ready yet."""

    # Frames from the worker.

    @abstractmethod
    def read_all(self) -> bool:
        """Dispatch the arrived frames; return whether another is in the middle of its arrival."""

    def _dispatch(self, frame: Frame) -> None:
        """Handle a frame according to the state: see `WorkerState`."""
        if self.state is _READY:
            self._on_frame(self.id, frame)
        elif self.state is WorkerState.LOADING:
            self._finish_loading(frame)

    def _finish_loading(self, frame: Frame) -> None:
        if frame.kind == Kind.READY:
            times, self.stages, self.module_files = pickling.loads(frame.body)
            self.state = WorkerState.READY
            self._events.worker_loaded(self, times)
        elif frame.kind == Kind.STARTUP_FAILED:
            failure = SerializedError(*pickling.loads(frame.body))
            error = WorkerStartupError(
                f"worker {self.index} could not load {self.model_spec.name}: {failure.text}"
            )
            error.__cause__ = RemoteTraceback(failure.traceback)
            self._events.start_failed(self, error)
        else:
            raise TransportError(f"a worker that is not ready sent {KIND_NAMES[frame.kind]}")

    # Progress and memory.

    @abstractmethod
    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""

    @property
    @abstractmethod
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read."""

    # End.

    def set_timer(self, timer: TimerHandle | None) -> None:
        """Set the pool's timer for this worker, and cancel the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def ask_to_end(self) -> None:
        """Ask the worker to finish its batches, and then to end. Its answers still count."""
        self.was_asked_to_end = True
        self.send(Kind.STOP, 0, b"")

    def ignore(self) -> None:
        """Drop all further frames from this worker: the parent is ending it."""
        self.state = WorkerState.ENDING

    @abstractmethod
    def disconnect(self) -> None:
        """Send no more frames: the worker ends after its current batch."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, if alive, and to processes that its model has started."""

    def kill(self) -> None:
        """Kill the worker; `worker_exited` follows. During `spawn` it is killed afterwards."""
        self.ignore()
        self.signal(signal.SIGKILL)

    def kill_on_protocol_error(self, error: Exception) -> None:
        """Log that the worker broke the protocol, and kill it."""
        if self.state is not WorkerState.ENDING:
            logger.error(
                "%s broke the protocol and is replaced: %s", self.title, error, exc_info=error
            )
        self.kill()

    @property
    @abstractmethod
    def death_fd(self) -> int:
        """Descriptor that is readable once the worker is dead; -1 after `reap`."""

    @abstractmethod
    def reap(self) -> Exit | None:
        """Release the resources of the dead worker; None if that was done before."""

    def _died(self) -> None:
        # The frames of a dead worker can still be read.
        self.read_all()
        exit = self.reap()
        if exit is not None:
            self._events.worker_exited(self, exit)


def end_leases(leases: dict[int, list[Slab]], inherited: int | None) -> None:
    """End the leases of a dead worker; its children may still view batches up to `inherited`."""
    for batch_id, leased in leases.items():
        if inherited is not None and batch_id <= inherited:
            for slab in leased:
                slab.leak()
    leases.clear()
