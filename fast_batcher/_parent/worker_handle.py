"""The seam between an opening and its workers: batches to a worker, and outcomes from it.

    opening  --compute, skip, order-->  WorkerHandle  --BatchEvents-->   opening
    pool     --spawn, signal, reap-->   WorkerHandle  --WorkerEvents-->  pool

A `WorkerHandle` is the record of one worker. How batches reach a worker is the handle's own affair:
a process (`worker_process.py`) and an actor (`_ray/handle.py`) get frames, a thread
(`worker_thread.py`) gets the values. The pool decides when workers are started, replaced and ended;
a handle does it. `spawn` runs on the spawner thread; everything else runs on the thread of the
event loop, or on the thread that ends the pool once the loop is closed.
"""

import logging
import select
import signal
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fast_batcher._core.values import Batch, Order, Report, Request
from fast_batcher._devices import Placement
from fast_batcher._process import SIGKILL, monotonic
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._worker.main import Start, WorkerSettings
from fast_batcher.errors import BatcherError, RemoteTraceback, WorkerStartupError
from fast_batcher.model import ModelKind, ModelSpec
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from fast_batcher._file_state import FileState
    from fast_batcher._shared_memory.outbox import OutboxReader

logger = logging.getLogger("fast_batcher")


# Further causes of a slow start. The warm-up of a model with streams computes whole answers.
_START_HINTS = {
    ModelKind.STEPS: ". A stream of warmup_inputs() without an end is another cause: return `Done`",
}


class WorkerState(Enum):
    """State of a worker from its start to its death.

    state    ends with                            events of the worker             its death is
    -------  -----------------------------------  -------------------------------  --------------
    LOADING  readiness or a failed start          only these two are expected      a failed start
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


# Seconds of a start whose steps are logged: to import PyTorch and to load a small model takes less
# on a usual machine, and Kubernetes gives up a container that has not started in 30 by default.
SLOW_START = 10.0


def describe_start(seconds: float, times: list[tuple[int, float]], start: Start) -> str:
    """Write the seconds of a start, the device, the memory, and the times of the warm-up."""
    parts = [f"{seconds:.1f} s" + (f" on {start.device}" if start.device else "")]
    if start.rss_bytes:
        parts.append(f"{start.rss_bytes / 2**20:.0f} MiB")
    if start.gpu_bytes:
        parts.append(f"{start.gpu_bytes / 2**20:.0f} MiB of the GPU")
    if times:
        batches = [f"t({size})={_show_milliseconds(1e3 * each)} ms" for size, each in times]
        parts.append(f"warm-up {' '.join(batches)}")
    text = ", ".join(parts)
    if seconds <= SLOW_START:
        return text
    imported, constructed, warmed_up = start[:3]
    process = max(0.0, seconds - imported - constructed - warmed_up)
    return (
        f"{text}; process start {process:.1f} s, import {imported:.1f} s, "
        f"constructor {constructed:.1f} s, warm-up {warmed_up:.1f} s"
    )


def _show_milliseconds(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


class WorkerEvents(Protocol):
    """Events that workers report to their pool, on the event loop's thread."""

    def worker_placed(self, worker: "WorkerHandle") -> None:
        """Handle that a worker has a process, if it had none when its `spawn` returned."""

    def worker_loaded(self, worker: "WorkerHandle", times: list[tuple[int, float]]) -> None:
        """Handle readiness; `times` are sizes and seconds of the warm-up batches."""

    def start_failed(self, worker: "WorkerHandle", error: WorkerStartupError) -> None:
        """Handle a worker that could not be started, or could not load its model in time."""

    def worker_answers(self, worker: "WorkerHandle") -> None:
        """Handle the answer to a ping."""

    def worker_exited(self, worker: "WorkerHandle", exit: Exit) -> None:
        """Handle a death; called once, after all other events of the worker."""


# Returns the outcomes of the requests of a batch: outputs, and a `Failure` in place of an output.
# It is called when the worker has its next batch; once, or for each request of a batch that has
# failed as a whole, whose one outcome is the error. A large one is a `SharedOutcomes`.
Outcomes = Callable[[], list[Any]]


# Requests whose input cannot be sent, with the reasons.
Unsendable = list[tuple[Request, BatcherError]]


class BatchEvents(Protocol):
    """Events that ready workers report about their batches, on the event loop's thread.

    A method raises if the worker does not have the batch, or has broken the protocol otherwise; the
    worker is replaced.
    """

    def reported(
        self,
        worker_id: int,
        batch_id: int,
        seconds: float,
        answer: Outcomes,
        note: Report | None = None,
        /,
    ) -> None:
        """Handle the outcomes of a batch or a step, which the model has computed in `seconds`."""

    def inputs_unsendable(self, batch: Batch, unsendable: Unsendable, /) -> None:
        """Handle inputs of a batch that cannot be sent; the worker gets the others."""


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
        listener: BatchEvents,
        name: str,
    ) -> None:
        # Number of this worker among all that the pool has started.
        self.id = id
        # Index among the batcher's workers, from 0; its replacement has the same index.
        self.index = index
        self.model_spec = model_spec
        self._settings = settings
        self._placement = placement
        # The MPS daemon of its GPU, None without one.
        self.shared_device = placement.mps
        # Another worker of its GPU had an error that ends every process that uses the GPU.
        self.has_lost_device = False
        self._slabs = slabs
        self._events = events
        self.listener = listener
        self._name = name

        self.state = WorkerState.LOADING
        # Whether it takes batches: from READY to the death. The pool sets it.
        self.is_serving = False
        # Answered batches; the pool counts them if workers are recycled.
        self.batches = 0
        # The worker takes no further batches.
        self.was_asked_to_end = False
        self._timer: TimerHandle | None = None
        self._loop: AbstractEventLoop | None = None
        self.is_attached = False

        # Beginning of its start.
        self._began = monotonic()
        # Process id; None until it has a process.
        self.pid: int | None = None
        # Address of its node in a cluster; "" for this machine.
        self.node = ""
        # Memory in which the worker leaves large answers, None without shared memory.
        self.outbox: OutboxReader | None = None
        # Batches on which it works at the same time, 1 to 3; set when it is ready.
        self.stages = 1
        # The allowed batch sizes of the model's methods, by name; set when it is ready.
        self.allowed_sizes: dict[str, tuple[int, ...]] = {}
        # Files of the app that the worker has imported; set when it is ready.
        self.module_files: dict[str, FileState] = {}

    @property
    def title(self) -> str:
        """Name in logs: the batcher, the worker's index and the process id."""
        return f"{self._name}: worker {self.index} (pid {self.pid})"

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded its model, and is not being ended."""
        return self.state is WorkerState.READY

    # Start.

    @abstractmethod
    def spawn(self) -> None:
        """Start the worker. Spawner thread."""

    @abstractmethod
    def attach(self, loop: AbstractEventLoop) -> None:
        """Watch the worker from this event loop."""

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
        hint = _START_HINTS.get(self.model_spec.kind, "")
        return WorkerStartupError(
            f"worker {self.index} did not load its model within start_timeout="
            f"{self._settings.start_timeout} seconds and was ended; raise start_timeout if the "
            f"model needs longer{hint}"
        )

    def make_worker_settings(self, threads: int) -> WorkerSettings:
        """Make the settings of the worker; `threads` are those of `prepare` and `finish`."""
        settings = self._settings
        return WorkerSettings(**settings.select(WorkerSettings._fields))._replace(
            max_batch_size=settings.batch_limit,
            device=self._placement.device,
            worker_index=self.index,
            stage_threads=settings.stage_threads or threads,
            kind=self.model_spec.kind,
            name=self._name,
        )

    # Batches and orders; those to a dead worker are dropped.

    @abstractmethod
    def compute(self, batch: Batch) -> None:
        """Let the worker compute a batch."""

    @abstractmethod
    def order(self, order: Order, batch_id: int = 0) -> None:
        """Give the worker an order, behind the batches that it has."""

    @abstractmethod
    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""

    def is_sending(self) -> bool:
        """Return whether delayed batches were sent since the last call, or are not ready yet."""
        return False

    # Events of the worker.

    @abstractmethod
    def read_all(self) -> bool:
        """Report what has arrived; return whether more is in the middle of its arrival."""

    def _loaded(self, times: Any, stages: int, files: dict[str, Any], start: Start) -> None:
        self.stages, self.module_files = stages, files
        self.allowed_sizes = start.allowed_sizes
        self.state = WorkerState.READY
        devices = self._settings.devices
        if devices is not None:  # the worker's own name of each GPU is cuda:0
            start = start._replace(device=devices[self.index % len(devices)])
        seconds = monotonic() - self._began
        logger.info("%s ready in %s", self.title, describe_start(seconds, times, start))
        self._events.worker_loaded(self, times)

    def _start_failed(self, failure: SerializedError) -> None:
        error = WorkerStartupError(
            f"worker {self.index} could not load {self.model_spec.name}: {failure.text}"
        )
        error.__cause__ = RemoteTraceback(failure.traceback)
        self._events.start_failed(self, error)

    # Progress and memory.

    @abstractmethod
    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""

    @property
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read."""
        return 0

    @property
    def gpu_bytes(self) -> int:
        """Bytes that PyTorch has reserved on the GPU, 0 if that is not known."""
        return 0

    # End.

    def set_timer(self, timer: TimerHandle | None) -> None:
        """Set the pool's timer for this worker, and cancel the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def ask_to_end(self) -> None:
        """Ask the worker to finish its batches, and then to end. Its answers still count."""
        self.was_asked_to_end = True
        self.order(Order.STOP)

    def ignore(self) -> None:
        """Drop all further events of this worker: the parent is ending it."""
        self.state = WorkerState.ENDING

    @abstractmethod
    def disconnect(self) -> None:
        """Send nothing more: the worker ends after its current batch."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, if alive, and to processes that its model has started."""

    def kill(self) -> None:
        """Kill the worker; `worker_exited` follows. During `spawn` it is killed afterwards."""
        self.ignore()
        self.signal(SIGKILL)

    def kill_on_protocol_error(self, error: Exception) -> None:
        """Log that the worker broke the protocol, and kill it."""
        if self.state is not WorkerState.ENDING:
            logger.error(
                "%s broke the protocol and is replaced: %s", self.title, error, exc_info=error
            )
        self.kill()

    @property
    def death_fd(self) -> int:
        """Descriptor that is readable once the worker is dead; -1 after `reap`."""
        return -1

    def wait_until_dead(self, seconds: float) -> bool:
        """Wait for the death of the worker; return whether it is dead."""
        poller = select.poll()
        poller.register(self.death_fd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    @abstractmethod
    def reap(self) -> Exit | None:
        """Release the resources of the dead worker; None if that was done before."""

    def _died(self) -> None:
        # The answers of a dead worker can still be read.
        self.read_all()
        exit = self.reap()
        if exit is not None:
            self._events.worker_exited(self, exit)


def describe_exit(code: int | None, *, may_be_out_of_memory: bool = False) -> str:
    """Describe how a process ended."""
    if code is None:
        return "unknown exit status"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", possibly out of memory" if may_be_out_of_memory else ""
    return f"signal {-code} ({name}{hint})"
