"""Workers, as their parent sees them; worker processes: start, pipes, signals and death.

    pool, sender, session  -->  WorkerHandle   start, pings, frames of batches, end
    WorkerHandle  --WorkerEvents-->  pool      placed, ready, dead

A `WorkerHandle` is the record of one worker: a `WorkerProcess` of this machine, or a `RayWorker`
(`_ray/handle.py`). The pool decides when workers are started, replaced and ended; a handle does it.
`spawn` runs on the spawner thread; everything else runs on the thread of the event loop, or on the
thread that ends the pool once the loop is closed.

The child is a `multiprocessing` spawn child: a new interpreter that reads its target from a pipe.
`Process.start()` is not used, because it

- refuses to start a child of a daemonic process, as Hypercorn's workers are; our workers end with
  their parent, however it dies;
- gives the child the environment of the parent, which belongs to the whole program;
- leaves the descriptors 0 to 2 free in the child if they are free in the parent;
- reaps all children, from any thread, whenever the program starts another.
"""

import contextlib
import io
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from enum import Enum
from io import FileIO
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fast_batcher._devices import Placement, thread_share, worker_environment
from fast_batcher._process import (
    SIGKILL,
    PassedDescriptor,
    monotonic,
    opened_descendants,
    read_rss,
    send_signal,
)
from fast_batcher._shared_memory.inputs import Slab, Slabs
from fast_batcher._shared_memory.outbox import OutboxReader
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import (
    KIND_NAMES,
    Frame,
    Frames,
    Kind,
    LoopChannel,
    Reservation,
    open_pipes,
)
from fast_batcher._transport.logs import LogReceiver, LogSettings, open_log_sockets
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.main import Start, WorkerSettings, worker_main
from fast_batcher.errors import RemoteTraceback, TransportError, WorkerStartupError
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from fast_batcher._file_state import FileState

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

    def worker_exited(self, worker: "WorkerHandle", exit: Exit) -> None:
        """Handle a death; called once, after all frames of the worker were dispatched."""


# Read for each frame: on Python 3.11 a member of an enumeration costs as much as a call.
_READY = WorkerState.READY


class WorkerHandle(ABC):
    """A worker, from its start to its death. A replacement is another object."""

    # Whether the inputs of its batches are sent as they are, to a thread of this process.
    takes_values = False

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
        # Another worker has its place, or there are to be fewer workers: it finishes its batches,
        # and then ends. Set by the pool.
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
        return WorkerStartupError(
            f"worker {self.index} did not load its model within start_timeout="
            f"{self._settings.start_timeout} seconds and was ended; raise start_timeout if the "
            "model needs longer"
        )

    def make_worker_settings(self, threads: int) -> WorkerSettings:
        """Make the settings of the worker; `threads` are those of `prepare` and `finish`."""
        settings = self._settings
        return WorkerSettings(
            settings.max_frame_bytes,
            settings.batch_limit,
            settings.freeze_gc,
            self._placement.device,
            self.index,
            settings.stage_threads or threads,
            is_stepped=self.model_spec.is_stepped,
        )

    # Frames to the worker, as in `LoopChannel`; frames to a dead worker are dropped.

    @abstractmethod
    def send(self, kind: int, batch_id: int, body: Any) -> None:
        """Send a frame without waiting."""

    @abstractmethod
    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""

    def reserve(self) -> Reservation:
        """Reserve a position for frames that are not ready yet; later frames wait behind it."""
        raise NotImplementedError  # without shared memory all frames are ready at once

    def fill(self, reservation: Reservation, frames: Frames) -> None:
        """Send zero or more frames at the position that was reserved for them."""
        raise NotImplementedError

    def is_sending(self) -> bool:
        """Return whether delayed frames were sent since the last call, or are not ready yet."""
        return False

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
            times, self.stages, self.module_files, start = pickling.loads(frame.body)
            self.state = WorkerState.READY
            devices = self._settings.devices
            if devices is not None:  # the worker's own name of each GPU is cuda:0
                start = start._replace(device=devices[self.index % len(devices)])
            seconds = monotonic() - self._began
            logger.info("%s ready in %s", self.title, describe_start(seconds, times, start))
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
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read."""
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
        # The frames of a dead worker can still be read.
        self.read_all()
        exit = self.reap()
        if exit is not None:
            self._events.worker_exited(self, exit)


# Signals that go to the whole process group, and would end a child that is still importing. The
# child inherits them as blocked, and unblocks them when it has handlers.
_BLOCKED = {signal.SIGINT, signal.SIGTERM}


class ChildProcess:
    """A running child process, made from a `multiprocessing` process that was not started.

    Make it on a thread that outlives the process: on Linux a worker asks the kernel to end it with
    the thread that started it.
    """

    # `multiprocessing` uses this and `duplicate_for_child` while it pickles a descriptor.
    DupFd = PassedDescriptor

    def __init__(
        self,
        process: BaseProcess,
        environment: Mapping[str, str],
        cores: frozenset[int] | None = None,
    ) -> None:
        # Descriptors that the child gets, with the numbers that they have here.
        self._passed: list[int] = []
        instructions = self._pickle(process)
        fds: list[int] = []
        try:
            # At the death of one side, the other side reads an end of file.
            fds += os.pipe()
            fds += os.pipe()
            self._sentinel, their_sentinel, source, self._sink = fds
            self._passed += (their_sentinel, source)
            self.pid = self._launch(source, environment, cores)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        os.close(their_sentinel)
        os.close(source)
        # If the child has died already, `death_fd` tells.
        with contextlib.suppress(BrokenPipeError), open(self._sink, "wb", closefd=False) as file:
            file.write(instructions)
        self._pidfd = _open_pidfd(self.pid)

    def duplicate_for_child(self, fd: int) -> int:
        """Pass a descriptor to the child; returns its number there."""
        self._passed.append(fd)
        return fd

    @property
    def death_fd(self) -> int:
        """Descriptor that becomes readable when the process dies.

        On systems without pidfds it becomes readable only when grandchildren that inherited the
        sentinel have ended, too.
        """
        return self._sentinel if self._pidfd is None else self._pidfd

    def take_exit_code(self) -> int | None:
        """Reap the dead process, and return its exit code, negative for a signal.

        None if another part of the program has reaped it.
        """
        try:
            if sys.platform == "linux" and self._pidfd is not None:
                info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if info is None:
                    return None
                return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            # The sentinel is closed a moment before the process is dead.
            os.kill(self.pid, SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ChildProcessError, ProcessLookupError):
            return None

    def close(self) -> None:
        os.close(self._sentinel)
        os.close(self._sink)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _pickle(self, process: BaseProcess) -> bytes:
        """Return the child's preparation data and target, pickled."""
        preparation = spawn.get_preparation_data(process.name)
        # "<stdin>" for a program that was read from there.
        if not os.path.isfile(preparation.get("init_main_from_path", "")):
            preparation.pop("init_main_from_path", None)
        file = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]  # it uses only what this class has
        try:
            reduction.dump(preparation, file)
            reduction.dump(process, file)
        finally:
            set_spawning_popen(None)
        return file.getvalue()

    def _launch(
        self, source: int, environment: Mapping[str, str], cores: frozenset[int] | None
    ) -> int:
        tracker = resource_tracker.getfd()
        assert tracker is not None, "it runs by now"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            with _pinned(cores):
                return launch(
                    spawn.get_command_line(tracker_fd=tracker, pipe_handle=source),
                    passed=(*self._passed, tracker),
                    streams=(_stream(0), _stream(1), _stream(2)),
                    environment=environment,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(
    command: list[str],
    *,
    passed: Sequence[int],
    streams: tuple[int | FileIO | None, ...],
    environment: Mapping[str, str] | None = None,
    in_own_session: bool = False,
) -> int:
    """Start a program, which the caller must reap, and return its process id.

    The program has the descriptors `passed` and, as stdin, stdout and stderr, `streams`: None
    stands for the parent's stream.
    """
    stdin, stdout, stderr = streams
    popen = subprocess.Popen(
        command,
        env=environment,
        pass_fds=passed,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=in_own_session,
    )
    # `subprocess` must neither reap the child nor warn that it still runs.
    popen.returncode = 0
    return popen.pid


@contextlib.contextmanager
def _pinned(cores: frozenset[int] | None) -> Iterator[None]:
    """Pin the calling thread for a moment: a child that it starts is pinned from its first step.

    A child that pinned itself would be late: numeric libraries start their threads when the main
    module imports them.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _stream(number: int) -> int | None:
    """Return the child's standard stream 0, 1 or 2 for `Popen`: None to inherit it.

    The child gets /dev/null if this process has no such stream, or if the descriptor is not
    inheritable, as the socket of a server that was started without standard streams.
    """
    with contextlib.suppress(OSError):
        if os.get_inheritable(number):
            return None
    return subprocess.DEVNULL


def _open_pidfd(pid: int) -> int | None:
    if sys.platform == "linux":
        # The child has not been reaped, so no other process can have its pid.
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


# A separate context, because `multiprocessing.set_start_method` would change the whole program.
# Spawn, because a forked child inherits the parent's pipe ends, and CUDA state that it cannot use.
_context = multiprocessing.get_context("spawn")


class _LiveProcess(NamedTuple):
    """Resources of a live process."""

    child: ChildProcess
    channel: LoopChannel
    progress: WorkerProgress
    logs: LogReceiver


class WorkerProcess(WorkerHandle):
    """A worker that is a process of this machine."""

    # The worker has closed its end of a pipe, which a dying process does first.
    _has_hung_up = False
    # None before `spawn` and after `reap`. Setting it to None breaks the reference cycle with the
    # channel, whose buffer would otherwise live until the next garbage collection.
    _live: _LiveProcess | None = None

    # Start.

    def spawn(self) -> None:
        """Start the process. Spawner thread."""
        settings = self._settings
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
            logs_there = LogSettings.of_this_process(sender)
            child = self._start_child(theirs, progress, logs_there, self._slabs, outbox)
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

    def _start_child(self, *passed: Any) -> ChildProcess:
        """Start the process with copies of these. Spawner thread."""
        settings, placement = self._settings, self._placement
        threads = placement.threads or thread_share(settings.most_workers)
        process = _context.Process(
            target=worker_main,
            args=(*passed, self.make_worker_settings(threads)),
            name=f"fast_batcher-{self.model_spec.name}-{self.index}",
            # Not daemonic: a model may have children, for example those of a data loader.
            daemon=False,
        )
        environment = worker_environment(os.environ, threads, placement.visible_devices)
        return ChildProcess(process, environment, placement.cores)

    def attach(self, loop: AbstractEventLoop) -> None:
        """Watch the worker from this event loop, and send it its model."""
        assert self._live is not None, "attached while it is alive"
        self._loop = loop
        self._live.channel.attach(loop)
        self._live.logs.attach(loop)
        self.is_attached = True
        self.send(Kind.LOAD, 0, self.model_spec.pickled)
        Context().run(loop.add_reader, self._live.child.death_fd, self._died)

    @property
    def is_alive(self) -> bool:
        """Whether the process was started and has not been reaped."""
        return self._live is not None

    # Frames to the worker, as in `LoopChannel`; frames to a dead worker are dropped.

    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        if self._live is not None:
            self._live.channel.send(kind, batch_id, body)

    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""
        if self._live is not None:
            self._live.progress.skip(batch_id)

    def reserve(self) -> Reservation:
        return Reservation() if self._live is None else self._live.channel.reserve()

    def fill(self, reservation: Reservation, frames: Frames) -> None:
        if self._live is not None:
            self._live.channel.fill(reservation, frames)

    def is_sending(self) -> bool:
        return self._live is not None and self._live.channel.is_sending()

    # Frames from the worker.

    def read_all(self) -> bool:
        """Dispatch the frames that have arrived; return as `LoopChannel.drain`."""
        return self._live is not None and self._live.channel.drain()

    # Progress and memory.

    def read_begun(self) -> int | None:
        """Return the id of the batch that the worker began last, None without any."""
        return None if self._live is None else self._live.progress.begun

    @property
    def rss_bytes(self) -> int:
        """Resident memory, 0 if it cannot be read. Linux."""
        return 0 if self.pid is None else read_rss(self.pid)

    # End.

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
        is_ours = self.state is WorkerState.ENDING and not self._has_hung_up
        exit = Exit(
            text=describe_exit(exit_code),
            by_signal=exit_code is not None and exit_code < 0,
            is_clean=exit_code == 0 and self.was_asked_to_end,
            is_ours=is_ours,
            taken=progress.taken,
            begun=progress.begun,
            may_be_out_of_memory=exit_code == -SIGKILL and not is_ours,
        )
        end_leases(self.leases, progress.inherited)
        child.close()
        channel.close()
        logs.close()
        progress.close()
        if self.outbox is not None and not self.outbox.is_used:
            self.outbox.close()
        return exit

    def _hung_up(self, error: Exception | None) -> None:
        """Kill a worker that has closed its end of a pipe or broken the protocol."""
        self._has_hung_up = error is None and self.state is not WorkerState.ENDING
        if error is None:
            self.kill()
        else:
            self.kill_on_protocol_error(error)


def end_leases(leases: dict[int, list[Slab]], inherited: int | None) -> None:
    """End the leases of a dead worker; its children may still view batches up to `inherited`."""
    for batch_id, leased in leases.items():
        if inherited is not None and batch_id <= inherited:
            for slab in leased:
                slab.leak()
    leases.clear()


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
    hint = ", possibly out of memory" if -code == SIGKILL else ""
    return f"signal {-code} ({name}{hint})"
