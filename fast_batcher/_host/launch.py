"""Start and end of a host process. Parent process, any thread.

The host is a new interpreter that loads this package from its directory and nothing else of the
app. It outlives its starter, in a session of its own: a signal to the server's process group does
not reach it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from io import FileIO
from multiprocessing import spawn
from pathlib import Path

from fast_batcher._host.directory import identify_socket
from fast_batcher._parent.worker_handle import describe_exit
from fast_batcher._parent.worker_process import launch
from fast_batcher._process import monotonic, occupy_stdio
from fast_batcher._transport.progress import make_memory_file
from fast_batcher.errors import WorkerStartupError

# The host's program. It finds this very package, even if the app has found it by changes of
# `sys.path`, and puts no directory before the standard library's.
_PROGRAM = """\
import importlib, importlib.util, sys
path, module = sys.argv[1:3]
del sys.argv[1:3]
spec = importlib.util.spec_from_file_location("fast_batcher", path)
sys.modules["fast_batcher"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["fast_batcher"])
importlib.import_module(module).main()
"""
_PACKAGE_FILE = Path(__file__).parents[1] / "__init__.py"

# Options of the interpreter that the host has, too, by their names in `sys.flags`.
_OPTIONS = {
    "dont_write_bytecode": "B",
    "ignore_environment": "E",
    "no_site": "S",
    "no_user_site": "s",
    "optimize": "O",
}

# Characters of output in an error: the end of a traceback and what was logged before it.
MAX_OUTPUT = 4000
# Seconds between two looks at a host that is about to end.
POLL_INTERVAL = 0.002


class HostProcess:
    """The host process, in the process that has started it."""

    def __init__(self, pid: int, output: FileIO) -> None:
        self.pid = pid
        self._output = output
        # How it ended; "" until it is reaped.
        self._exit_text = ""

    def reap(self) -> str:
        """Wait until the host is dead, and return how it ended: "exit code 3", for example.

        Blocks: call it when the host has hung up or was killed.
        """
        self._wait(0)
        return self._exit_text

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the host; return whether it has ended."""
        until = monotonic() + seconds
        self._wait(os.WNOHANG)
        while not self._exit_text and monotonic() < until:
            threading.Event().wait(POLL_INTERVAL)
            self._wait(os.WNOHANG)
        return self._exit_text != ""

    def _wait(self, options: int) -> None:
        if self._exit_text:
            return
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # another part of the program has reaped it
            self._exit_text = describe_exit(None)
        else:
            if pid:
                self._exit_text = describe_exit(os.waitstatus_to_exitcode(status))

    @property
    def has_ended_itself(self) -> bool:
        """Whether it has ended as a host does that no client needs."""
        return self._exit_text == describe_exit(0)

    def kill(self) -> None:
        """Kill the host; it is reaped on a thread."""
        if not self._exit_text:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.reap_soon()

    def reap_soon(self) -> None:
        """Reap the host on a thread, when it ends."""
        threading.Thread(target=self.reap, name="fast_batcher-reaper", daemon=True).start()

    def read_output(self) -> str:
        """Return the end of what the host has written until its first welcome."""
        # A character takes at most four bytes.
        fd = self._output.fileno()
        size = os.fstat(fd).st_size
        start = max(0, size - 4 * MAX_OUTPUT)
        return os.pread(fd, size - start, start).decode(errors="replace")[-MAX_OUTPUT:]

    def make_startup_error(self) -> WorkerStartupError:
        """Wait until the host is dead; return the error of a host that sent no welcome."""
        end, output = self.reap(), self.read_output().strip()
        return WorkerStartupError(
            f"the host process {self.pid} ended before it was ready: {end}; "
            + (f"its output:\n{output}" if output else "it wrote nothing")
        )

    def close(self) -> None:
        """Forget the output. The process goes on, and can still be reaped."""
        self._output.close()


def launch_host(
    listener: socket.socket,
    arguments: Sequence[str] = (),
    *,
    module: str = "fast_batcher._host.main",
) -> HostProcess:
    socket_id = identify_socket(Path(listener.getsockname())) or ""
    # As for workers: what is not inheritable is not stderr, but the socket of a server that was
    # started without standard streams, or the /dev/null in its place.
    occupy_stdio()
    stderr = os.dup(2) if os.get_inheritable(2) else os.open(os.devnull, os.O_WRONLY)
    with FileIO(stderr, "w"), contextlib.ExitStack() as on_failure:
        output = on_failure.enter_context(FileIO(make_memory_file(0)))
        pid = launch(
            [
                *_interpreter(),
                *("-c", _PROGRAM, os.fspath(_PACKAGE_FILE), module),
                *(str(listener.fileno()), str(stderr), socket_id, *arguments),
            ],
            passed=(listener.fileno(), stderr),
            streams=(subprocess.DEVNULL, output, output),
            in_own_session=True,
        )
        on_failure.pop_all()
    return HostProcess(pid, output)


def _interpreter() -> list[str]:
    """Return the interpreter of the workers, with options of this one.

    "P": a file of the working directory cannot hide one of the standard library.
    """
    options = "".join(option * getattr(sys.flags, name) for name, option in _OPTIONS.items())
    return [
        os.fsdecode(spawn.get_executable()),
        f"-P{options}",
        *(f"-W{option}" for option in sys.warnoptions),
    ]
