"""Worker processes: start, pipes, signals and death.

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
import multiprocessing
import os
import signal
import subprocess
import sys
from asyncio import AbstractEventLoop
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context
from io import FileIO
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from fast_batcher._devices import thread_share, worker_environment
from fast_batcher._parent.sending import FrameWorker
from fast_batcher._parent.worker_handle import Exit, WorkerState, describe_exit
from fast_batcher._process import (
    SIGKILL,
    PassedDescriptor,
    opened_descendants,
    read_rss,
    send_signal,
)
from fast_batcher._shared_memory.outbox import OutboxReader
from fast_batcher._transport.channels import Frames, Kind, LoopChannel, Reservation, open_pipes
from fast_batcher._transport.logs import LogReceiver, LogSettings, open_log_sockets
from fast_batcher._transport.progress import GPU_BYTES, WorkerProgress
from fast_batcher._worker.main import worker_main
from fast_batcher.settings import Settings

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


class WorkerProcess(FrameWorker):
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
        if placement.mps is not None:
            environment |= placement.mps.start()
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

    # Frames to the worker.

    def send(self, kind: int, batch_id: int, body: bytes) -> None:
        if self._live is not None:
            self._live.channel.send(kind, batch_id, body)

    def skip(self, batch_id: int) -> None:
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

    @property
    def gpu_bytes(self) -> int:
        """Bytes that PyTorch has reserved on the GPU, at most a second ago or at the last ping."""
        return 0 if self._live is None else self._live.progress.numbers[GPU_BYTES]

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
        may_be_out_of_memory = exit_code == -SIGKILL and not is_ours
        exit = Exit(
            text=describe_exit(exit_code, may_be_out_of_memory=may_be_out_of_memory),
            by_signal=exit_code is not None and exit_code < 0,
            is_clean=exit_code == 0 and self.was_asked_to_end,
            is_ours=is_ours,
            taken=progress.taken,
            begun=progress.begun,
            may_be_out_of_memory=may_be_out_of_memory,
        )
        self._end_leases(progress.inherited)
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


def _make_outbox(settings: Settings) -> OutboxReader | OSError | None:
    """Make the memory for large answers; return None if the settings turn it off, or the error."""
    if not settings.max_shared_bytes:
        return None
    try:
        return OutboxReader(settings.max_shared_bytes, settings.shared_memory_threshold)
    except OSError as error:
        # Its frames would hold the pipes.
        return error.with_traceback(None)
