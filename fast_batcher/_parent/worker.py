"""Interfaces between workers, their pool and its listener. Parent process.

    listener  --WorkerLink-->   worker      frames of batches
    pool      --WorkerHandle--> worker      start, pings, end
    worker    --WorkerEvents--> pool        ready, dead
    pool      --PoolEvents-->   listener    arrivals and losses of workers, and their frames

The pool decides when workers are started, replaced and ended; a `WorkerHandle` does it. The only
implementation is `WorkerProcess`, a child process.
"""

from asyncio import AbstractEventLoop, TimerHandle
from enum import Enum
from signal import Signals
from typing import NamedTuple, Protocol

from fast_batcher._file_state import FileState
from fast_batcher._shared_memory.outbox_reader import OutboxReader
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher._transport.loop_channel import Frames, Reservation
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model_spec import ModelSpec


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
    # Id of the last batch whose inputs its children may still view, None without any.
    inherited: int | None
    # SIGKILL came from outside, for example from the OOM killer of Linux.
    may_be_out_of_memory: bool


class WorkerLink(Protocol):
    """Interface of a ready worker for `BatchSender` and `Answers`."""

    @property
    def id(self) -> int:
        """Number of this process among all processes that the pool has started."""

    @property
    def pid(self) -> int | None:
        """Process id, None before the start and for a worker without a process."""

    @property
    def outbox(self) -> OutboxReader | None:
        """Memory in which the worker leaves large answers, None without shared memory."""

    @property
    def stages(self) -> int:
        """Number of batches on which the worker works at the same time, 1 to 3."""

    @property
    def module_files(self) -> dict[str, FileState]:
        """States of the app's files that the worker has imported, when it was ready."""

    def send(self, kind: Kind, batch_id: int, body: bytes, /) -> None:
        """Send a frame without waiting; a frame to a dead worker is dropped."""

    def skip(self, batch_id: int, /) -> None:
        """Let the worker not compute a batch, unless it has begun."""

    def reserve(self) -> Reservation:
        """Reserve a position in the order of frames, for frames that are not ready yet."""

    def fill(self, reservation: Reservation, frames: Frames, /) -> None:
        """Send frames at the position that was reserved for them."""


class WorkerHandle(WorkerLink, Protocol):
    """Interface of a worker for the pool.

    `spawn` runs on the starter thread, everything else on the event loop's thread, or on the thread
    that ends the pool once the loop is closed.
    """

    # Index among the batcher's workers, from 0; its replacement has the same index.
    index: int
    # The model that it loads.
    model_spec: ModelSpec
    # The process id; None before `spawn`.
    pid: int | None
    state: WorkerState
    # Answered batches; the pool counts them if workers are recycled.
    batches: int
    # Whether `attach` was called.
    is_attached: bool
    # Whether `ask_to_end` was called: the worker reads no further frames.
    was_asked_to_end: bool

    @property
    def title(self) -> str:
        """Name in logs: the batcher, the worker's index and the process id."""

    def spawn(self) -> None:
        """Start the process. Starter thread.

        Raises:
            OSError: The system has no room for another process.
        """

    def attach(self, loop: AbstractEventLoop) -> None:
        """Watch the worker from this event loop; the previous loop, if any, is closed."""

    @property
    def is_alive(self) -> bool:
        """Whether the process was started and has not been reaped."""

    @property
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read."""

    def set_timer(self, timer: TimerHandle | None) -> None:
        """Set the pool's timer for this worker, and cancel the previous one."""

    def read_all(self) -> bool:
        """Dispatch the frames that have arrived; return whether a frame has arrived in part."""

    def is_sending(self) -> bool:
        """Return whether delayed frames were sent since the last call, or are not ready yet."""

    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""

    def ask_to_end(self) -> None:
        """Ask the worker to finish its batches, and then to end."""

    def ignore(self) -> None:
        """Drop all further frames from this worker: the parent is ending it."""

    def disconnect(self) -> None:
        """Close the pipes: the worker ends after its current batch."""

    def signal(self, number: Signals) -> None:
        """Send a signal to the worker and to the processes that its model has started."""

    def kill(self) -> None:
        """Send SIGKILL to the worker and to the processes that its model has started."""

    def kill_on_protocol_error(self, error: Exception) -> None:
        """Log that the worker broke the protocol, and kill it."""

    @property
    def death_fd(self) -> int:
        """Descriptor that is readable once the worker is dead; -1 after `reap`."""

    def reap(self) -> Exit | None:
        """Release the resources of the dead worker; None if that was done before."""


class WorkerEvents(Protocol):
    """Events that workers report to their pool, on the event loop's thread."""

    def worker_loaded(self, worker: WorkerHandle, times: list[tuple[int, float]]) -> None:
        """Handle readiness; `times` are sizes and seconds of the warm-up batches."""

    def start_failed(self, worker: WorkerHandle, error: WorkerStartupError) -> None:
        """Handle a worker that could not be started, or could not load its model in time."""

    def worker_exited(self, worker: WorkerHandle, exit: Exit) -> None:
        """Handle a death; called once, after all frames of the worker were dispatched."""


class PoolEvents(Protocol):
    """Events that a pool reports to its listener, and a question to it, on the loop's thread."""

    def worker_ready(self, worker: WorkerLink, times: list[tuple[int, float]], /) -> None:
        """Handle readiness; `times` are sizes and seconds of the warm-up batches."""

    def worker_retired(self, worker_id: int, /) -> None:
        """Give a worker no more batches: another has taken its place."""

    def worker_lost(self, worker_id: int, exit: Exit, /) -> None:
        """Handle the death of a worker that was ready."""

    def worker_failed_to_start(self, worker_id: int, error: WorkerStartupError, /) -> None:
        """Handle a worker that died or was ended before it was ready."""

    def workers_given_up(self, reason: str, seconds: float, /) -> None:
        """Handle that no worker is left, and that the next is started after `seconds`."""

    def frame_arrived(self, worker_id: int, frame: Frame, /) -> None:
        """Handle a frame of a ready worker; raises if the frame breaks the protocol."""

    def idle_workers(self) -> list[int]:
        """Return the ids of the ready workers that have no batch."""
