"""How workers, their pool and its listener talk to each other. Parent process.

    listener  --WorkerLink-->   worker      frames of batches
    pool      --WorkerHandle--> worker      its start, its pings, its end
    worker    --WorkerEvents--> pool        it is ready, it is dead
    pool      --PoolEvents-->   listener    workers come and go; frames, at once from the worker

The pool decides when workers are started, replaced and ended; a worker knows how. There is one kind
of worker: `WorkerProcess`, a child process.
"""

from asyncio import AbstractEventLoop, TimerHandle
from enum import Enum
from signal import Signals
from typing import NamedTuple, Protocol

from fast_batcher._shared_memory.outbox_reader import OutboxReader
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher._transport.loop_channel import Frames, Reservation
from fast_batcher.errors import WorkerStartupError


class WorkerState(Enum):
    """Where a worker is between its start and its death.

    state    until                                what its frames mean             its death is
    -------  -----------------------------------  -------------------------------  --------------
    LOADING  it says READY or STARTUP_FAILED      only these two are expected      a failed start
    READY    the parent ends it                   answers, for the batcher         a loss
    ENDING   its death                            nothing, they are dropped        as it was before

    A worker that was asked to end stays READY: what it still answers counts.
    """

    LOADING = "loading"
    READY = "ready"
    ENDING = "ending"


class Exit(NamedTuple):
    """How a worker died, and which batches it had."""

    # "exit code 3", "signal 9 (SIGKILL)".
    text: str
    # A signal ended it.
    by_signal: bool
    # It was asked to end, and has.
    is_clean: bool
    # The parent has ended it, and has logged why.
    is_ours: bool
    # Ids of the batches that it had read last and begun last, None without any.
    taken: int | None
    begun: int | None
    # Id of the last batch of whose inputs its children may have views, None without any.
    inherited: int | None
    # Something other than the parent has killed it: on Linux the kernel does so when memory ends.
    may_be_out_of_memory: bool


class WorkerLink(Protocol):
    """What senders and answers use of a ready worker."""

    @property
    def id(self) -> int:
        """Number of this worker among all that the pool has started."""

    @property
    def outbox(self) -> OutboxReader | None:
        """Where the worker leaves large answers, None if it sends them all."""

    def send(self, kind: Kind, batch_id: int, body: bytes, /) -> None:
        """Send a frame without waiting; a frame to a dead worker is dropped."""

    def reserve(self) -> Reservation:
        """Keep a place among the frames that are sent, for frames that are not ready yet."""

    def fill(self, reservation: Reservation, frames: Frames, /) -> None:
        """Send frames in the place that was reserved for them."""


class WorkerHandle(WorkerLink, Protocol):
    """What the pool uses of a worker.

    `spawn` runs on the starter thread, everything else on the event loop's thread, or on the thread
    that ends the pool once the loop is closed.
    """

    # Which of the batcher's workers this is, from 0; its replacement has the same index.
    index: int
    # The process id; None before `spawn`.
    pid: int | None
    state: WorkerState
    # Batches that it has answered; the pool counts them if workers are recycled.
    batches: int
    # Whether an event loop watches it, or did until it was closed.
    is_attached: bool
    # Whether `ask_to_end` was called: it reads nothing more.
    was_asked_to_end: bool

    @property
    def title(self) -> str:
        """What logs call it: the batcher, the worker and the process."""

    def spawn(self) -> None:
        """Start it. Starter thread.

        Raises:
            OSError: The system has no room for another process.
        """

    def attach(self, loop: AbstractEventLoop) -> None:
        """Let this event loop watch it; a loop that did so before is closed."""

    @property
    def is_alive(self) -> bool:
        """Whether it has been started and not been seen to end."""

    @property
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read."""

    def set_timer(self, timer: TimerHandle | None) -> None:
        """Replace what the pool does about it later; the timer before is cancelled."""

    def read_all(self) -> bool:
        """Dispatch the frames that have arrived; whether the rest of a frame is arriving."""

    def is_sending(self) -> bool:
        """Whether frames that had to wait have been sent lately, or wait now."""

    def read_begun(self) -> int | None:
        """The id of the batch that it has begun last, None without any."""

    def ask_to_end(self) -> None:
        """Let it finish what it has, and end by itself."""

    def ignore(self) -> None:
        """Drop what it says from now on: the parent is ending it."""

    def disconnect(self) -> None:
        """Close the pipes: it ends after the batch that it computes."""

    def signal(self, number: Signals) -> None:
        """Send it a signal, and then the processes that its model has started."""

    def kill(self) -> None:
        """End it at once."""

    def kill_on_protocol_error(self, error: Exception) -> None:
        """End it at once because it broke the protocol; logs the error."""

    @property
    def death_fd(self) -> int:
        """Readable once it is dead; -1 after `reap`."""

    def reap(self) -> Exit | None:
        """Release what belonged to it, now that it is dead; None if that has been done."""


class WorkerEvents(Protocol):
    """What workers tell their pool, on the event loop's thread."""

    def worker_loaded(self, worker: WorkerHandle, times: list[tuple[int, float]]) -> None:
        """A worker is ready; sizes and seconds of the batches of its warm-up."""

    def start_failed(self, worker: WorkerHandle, error: WorkerStartupError) -> None:
        """A worker could not be started, or could not load its model in time."""

    def worker_exited(self, worker: WorkerHandle, exit: Exit) -> None:
        """A worker is dead, and every frame that it had sent has been dispatched. Told once."""


class PoolEvents(Protocol):
    """What a pool tells its listener, and asks it, on the loop's thread."""

    def worker_ready(self, worker: WorkerLink, times: list[tuple[int, float]], /) -> None:
        """A worker has loaded its model; sizes and seconds of the batches of its warm-up."""

    def worker_retired(self, worker_id: int, /) -> None:
        """A worker gets no more batches: another has taken its place."""

    def worker_lost(self, worker_id: int, exit: Exit, /) -> None:
        """A worker that was ready is dead."""

    def worker_failed_to_start(self, worker_id: int, error: WorkerStartupError, /) -> None:
        """A worker died or was ended before it was ready."""

    def workers_given_up(self, reason: str, seconds: float, /) -> None:
        """No worker is left, and the next one is started in some seconds."""

    def frame_arrived(self, worker_id: int, frame: Frame, /) -> None:
        """A ready worker has sent a frame; raises if that breaks the protocol."""

    def idle_workers(self) -> list[int]:
        """Return the ids of the ready workers that have no batch."""
