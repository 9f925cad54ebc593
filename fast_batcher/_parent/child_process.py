"""Starts the process of a worker, and takes its exit code. Parent process.

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
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess

from fast_batcher._transport.descriptors import PassedDescriptor

# Signals that go to the whole process group, and would end a child that is still importing. The
# child inherits them as blocked, and unblocks them when it has handlers.
_BLOCKED = {signal.SIGINT, signal.SIGTERM}


class ChildProcess:
    """A running child process, made from a `multiprocessing` process that was not started.

    Make it on a thread that outlives the process: on Linux a worker asks the kernel to end it with
    the thread that started it.

    Args:
        process: Target and arguments of the child; not used afterwards.
        environment: All environment variables of the child.
        cores: Cores to which the child is pinned, None for those of the calling thread. Linux.

    Raises:
        OSError: The system has no room for another process or for its pipes.
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
        """Reap the dead process and return its exit code.

        Returns:
            Negative for a signal; None if another part of the program has reaped the process.
        """
        try:
            if sys.platform == "linux" and self._pidfd is not None:
                info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if info is None:
                    return None
                return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            # The sentinel is closed a moment before the process is dead.
            os.kill(self.pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ChildProcessError, ProcessLookupError):
            return None

    def close(self) -> None:
        """Close the descriptors of the dead process."""
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
                popen = subprocess.Popen(
                    spawn.get_command_line(tracker_fd=tracker, pipe_handle=source),
                    env=environment,
                    pass_fds=(*self._passed, tracker),
                    stdin=_stream(0),
                    stdout=_stream(1),
                    stderr=_stream(2),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
