"""Handle of one worker process in the parent: start, pipes, frames, signals, death.

`spawn` runs on the starter thread; everything else runs on the thread of the event loop, or on the
thread that ends the pool once the loop is closed.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple

from fast_batcher._descendants import opened_descendants, send_signal
from fast_batcher._devices import Placement
from fast_batcher._parent.child_process import ChildProcess
from fast_batcher._parent.log_receiver import LogReceiver
from fast_batcher._parent.thread_limits import thread_share, worker_environment
from fast_batcher._parent.worker import Exit, WorkerEvents, WorkerState
from fast_batcher._shared_memory.inputs import Slabs
from fast_batcher._shared_memory.outbox import OutboxReader
from fast_batcher._transport import pickling
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher._transport.log_records import open_log_sockets
from fast_batcher._transport.loop_channel import Frames, LoopChannel, Reservation
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.pipes import open_pipes
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.log_sending import LogSettings
from fast_batcher._worker.main import WorkerSettings, worker_main
from fast_batcher.errors import RemoteTraceback, TransportError, WorkerStartupError
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from fast_batcher._file_state import FileState

logger = logging.getLogger("fast_batcher")

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

# A separate context, because `set_start_method` would change the whole program. Spawn, because a
# forked child inherits CUDA state that it cannot use, and the parent's pipe ends.
_context = multiprocessing.get_context("spawn")

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_LOADING, _READY, _ENDING = WorkerState.LOADING, WorkerState.READY, WorkerState.ENDING


class _LiveProcess(NamedTuple):
    """Resources of a live process."""

    child: ChildProcess
    channel: LoopChannel
    progress: WorkerProgress
    logs: LogReceiver


class WorkerProcess:
    """Handle of a worker process, the pool's `WorkerHandle`. A replacement is another object.

    Args:
        id: Number of this process among all processes that the pool starts.
        model_spec: The model that it loads.
        settings: The batcher's settings.
        placement: Its device.
        slabs: Shared memory for large inputs, or None.
        events: Receives its start and its death: the pool.
        on_frame: Called with its id and each frame once it is ready.
        name: The batcher's name, for logs.
    """

    def __init__(
        self,
        id: int,
        model_spec: ModelSpec,
        settings: Settings,
        placement: Placement,
        slabs: Slabs | None,
        events: WorkerEvents,
        on_frame: Callable[[int, Frame], None],
        name: str,
    ) -> None:
        self.id = id
        self.index = id % settings.num_workers
        self.model_spec = model_spec
        self._settings = settings
        self._placement = placement
        self._slabs = slabs
        self._events = events
        self._on_frame = on_frame
        self._name = name

        self.state = WorkerState.LOADING
        self.batches = 0
        self.was_asked_to_end = False
        # The worker has closed its end of a pipe, which a dying process does first.
        self._has_hung_up = False
        self._timer: TimerHandle | None = None
        self._loop: AbstractEventLoop | None = None
        self.is_attached = False

        # Set by `spawn`.
        self.pid: int | None = None
        # Memory in which the worker leaves large answers, None without shared memory.
        self.outbox: OutboxReader | None = None
        # Batches on which it works at the same time; set when it is ready.
        self.stages = 1
        # Files of the app that the worker has imported; set when it is ready.
        self.module_files: dict[str, FileState] = {}
        # None before `spawn` and after `reap`. Setting it to None breaks the reference cycle with
        # the channel, whose buffer would otherwise live until the next garbage collection.
        self._live: _LiveProcess | None = None

    @property
    def title(self) -> str:
        """Name in logs: the batcher, the worker's index and the process id."""
        return f"{self._name}: worker {self.index} (pid {self.pid})"

    # Start.

    def spawn(self) -> None:
        """Start the process. Starter thread.

        Raises:
            OSError: The system has no room for another process.
        """
        settings, placement = self._settings, self._placement
        ours, theirs = open_pipes(_context)
        receiver, sender = open_log_sockets()
        with contextlib.ExitStack() as undo:
            for end in (*ours, *theirs, receiver, sender):
                undo.callback(end.close)
            progress = WorkerProgress()
            undo.callback(progress.close)
            channel = LoopChannel(ours, settings.max_frame_bytes, self._dispatch, self._hung_up)
            outbox = _make_outbox(settings)
            if isinstance(outbox, OutboxReader):
                undo.callback(outbox.close)
            threads = placement.threads or thread_share(settings.num_workers)
            process = _context.Process(
                target=worker_main,
                args=(
                    theirs,
                    progress,
                    LogSettings.of_this_process(sender),
                    self._slabs,
                    outbox,
                    _select_settings(settings, placement, threads, self.index),
                ),
                name=f"fast_batcher-{self.model_spec.name}-{self.index}",
                # Not daemonic: a model may have children, for example those of a data loader.
                daemon=False,
            )
            environment = worker_environment(os.environ, threads, placement.visible_devices)
            child = ChildProcess(process, environment, placement.cores)
            undo.pop_all()
        # The child has its own copies of these.
        sender.close()
        for end in theirs:  # while they are open here, no read returns an end of file
            end.close()
        progress.close_fd()
        if isinstance(outbox, OutboxReader):
            outbox.close_fd()
            self.outbox = outbox
        self.pid = child.pid
        # Last: from now on `is_alive` is True for the loop's thread.
        attributes = {"worker": self.index, "worker_pid": self.pid, "model": self._name}
        logs = LogReceiver(receiver, progress, attributes)
        self._live = _LiveProcess(child, channel, progress, logs)

    def attach(self, loop: AbstractEventLoop) -> None:
        """Watch the worker from this event loop; the previous loop, if any, is closed."""
        assert self._live is not None, "attached while it is alive"
        self._loop = loop
        self._live.channel.attach(loop)
        self._live.logs.attach(loop)
        if not self.is_attached:
            self.is_attached = True
            self.send(Kind.LOAD, 0, self.model_spec.pickled)
        Context().run(loop.add_reader, self._live.child.death_fd, self._died)

    @property
    def is_alive(self) -> bool:
        """Whether the process was started and has not been reaped."""
        return self._live is not None

    # Frames to the worker.

    def send(self, kind: Kind, batch_id: int, body: bytes) -> None:
        """Send a frame without waiting; a frame to a dead worker is dropped."""
        if self._live is not None:
            self._live.channel.send(kind, batch_id, body)

    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""
        if self._live is not None:
            self._live.progress.skip(batch_id)

    def reserve(self) -> Reservation:
        """Reserve a position in the order of frames, for frames that are not ready yet."""
        return Reservation() if self._live is None else self._live.channel.reserve()

    def fill(self, reservation: Reservation, frames: Frames) -> None:
        """Send frames at the position that was reserved for them."""
        if self._live is not None:
            self._live.channel.fill(reservation, frames)

    def is_sending(self) -> bool:
        """Return whether delayed frames were sent since the last call, or are not ready yet."""
        return self._live is not None and self._live.channel.is_sending()

    # Frames from the worker.

    def read_all(self) -> bool:
        """Dispatch the frames that have arrived; return whether a frame has arrived in part."""
        return self._live is not None and self._live.channel.drain()

    def _dispatch(self, frame: Frame) -> None:
        """Handle a frame according to the state: see `WorkerState`."""
        if self.state is _READY:
            self._on_frame(self.id, frame)
        elif self.state is _LOADING:
            self._finish_loading(frame)

    def _finish_loading(self, frame: Frame) -> None:
        if frame.kind is Kind.READY:
            times, self.stages, self.module_files = pickling.loads(frame.body)
            self.state = _READY
            self._events.worker_loaded(self, times)
        elif frame.kind is Kind.STARTUP_FAILED:
            failure = SerializedError(*pickling.loads(frame.body))
            error = WorkerStartupError(
                f"worker {self.index} could not load {self.model_spec.name}: {failure.text}"
            )
            error.__cause__ = RemoteTraceback(failure.traceback)
            self._events.start_failed(self, error)
        else:
            raise TransportError(f"a worker that is not ready sent {frame.kind.name}")

    # Progress and memory.

    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""
        return None if self._live is None else self._live.progress.begun

    @property
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read. Linux."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * PAGE_SIZE
        except (OSError, IndexError):  # the process has just died
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
        self.send(Kind.STOP, 0, b"")

    def ignore(self) -> None:
        """Drop all further frames from this worker: the parent is ending it."""
        self.state = _ENDING

    def disconnect(self) -> None:
        """Close the pipes: the worker ends after its current batch."""
        self.ignore()
        if self._live is not None:
            self._live.channel.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, if alive, and to the processes that its model has started.

        These are found first: once the worker is dead, its descendants cannot be identified. A
        worker ignores every SIGTERM except one sent by this method.
        """
        live = self._live
        if live is not None:
            if number == signal.SIGTERM:
                live.progress.let_sigterm_end()
            with opened_descendants(live.child.pid) as pidfds:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(live.child.pid, number)
                send_signal(pidfds, number)

    def kill(self) -> None:
        """Kill the worker; `worker_exited` follows. During `spawn` it is killed afterwards."""
        self.ignore()
        self.signal(signal.SIGKILL)

    def kill_on_protocol_error(self, error: Exception) -> None:
        """Log that the worker broke the protocol, and kill it."""
        if self.state is not _ENDING:
            logger.error(
                "%s broke the protocol and is replaced: %s", self.title, error, exc_info=error
            )
        self.kill()

    @property
    def death_fd(self) -> int:
        """Descriptor that is readable once the worker is dead; -1 after `reap`."""
        return -1 if self._live is None else self._live.child.death_fd

    def reap(self) -> Exit | None:
        """Release the resources of the dead worker; None if that was done before."""
        if self._live is None:
            return None
        child, channel, progress, logs = self._live
        self._live = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(child.death_fd)
        exit_code = child.take_exit_code()
        is_ours = self.state is _ENDING and not self._has_hung_up
        exit = Exit(
            text=describe_exit(exit_code),
            by_signal=exit_code is not None and exit_code < 0,
            is_clean=exit_code == 0 and self.was_asked_to_end,
            is_ours=is_ours,
            taken=progress.taken,
            begun=progress.begun,
            inherited=progress.inherited,
            may_be_out_of_memory=exit_code == -signal.SIGKILL and not is_ours,
        )
        child.close()
        channel.close()
        logs.close()
        progress.close()
        if self.outbox is not None and not self.outbox.is_used:
            self.outbox.close()
        return exit

    def _hung_up(self, error: Exception | None) -> None:
        """Kill a worker that has closed its end of a pipe or broken the protocol."""
        self._has_hung_up = error is None and self.state is not _ENDING
        if error is None:
            self.kill()
        else:
            self.kill_on_protocol_error(error)

    def _died(self) -> None:
        # The frames of a dead worker can still be read from the pipe.
        self.read_all()
        exit = self.reap()
        if exit is not None:
            self._events.worker_exited(self, exit)


def _select_settings(
    settings: Settings, placement: Placement, threads: int, index: int
) -> WorkerSettings:
    return WorkerSettings(
        settings.max_frame_bytes,
        settings.batch_limit,
        settings.freeze_gc,
        placement.device,
        index,
        settings.stage_threads or threads,
    )


def _make_outbox(settings: Settings) -> OutboxReader | OSError | None:
    """Make the memory for large answers; return None if the settings turn it off, or the error."""
    if not settings.max_shared_bytes:
        return None
    try:
        return OutboxReader(settings.max_shared_bytes, settings.shared_memory_threshold)
    except OSError as error:
        # Without its frames, which hold the pipes.
        return error.with_traceback(None)


def describe_exit(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None:
        return "unknown exit status"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", possibly out of memory" if -code == signal.SIGKILL else ""
    return f"signal {-code} ({name}{hint})"
