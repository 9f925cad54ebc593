"""A private NVIDIA MPS daemon for the workers that share a GPU. Parent process, spawner thread.

    Pool --start--> MpsDaemon --Popen--> sh --> nvidia-cuda-mps-control --> nvidia-cuda-mps-server
                        |                 ^
                        +--- lifeline ----+ a pipe; at its end all of these are killed

With MPS the kernels of several processes run on a GPU at the same time. The daemon is in a session
of its own, which ends with this process however it dies: the shell reads the lifeline, whose other
end no other process has.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fast_batcher._devices import VISIBLE_DEVICES, Placement, share_cores
from fast_batcher._process import at_fork, monotonic
from fast_batcher.errors import ConfigurationError, WorkerStartupError

_CONTROL = "nvidia-cuda-mps-control"
# Arguments: the control program, and the directory of the daemon. The daemon runs in the foreground
# (-f), so that it stays in the process group that is killed. The shell ends with the daemon. The
# reader of the lifeline stays: the server of a daemon that has died serves its workers on.
_GUARD = """\
exec 3<&0
"$1" -f 3<&- &
daemon=$!
{ read -r _ <&3; rm -rf "$2"; kill -s KILL 0; } &
exec 3<&-
wait "$daemon"
"""
# Seconds for the start of a daemon, which takes a fraction of one.
_START_TIMEOUT = 10.0


def check_control() -> None:
    """Check that the control program of MPS is installed, which is a part of NVIDIA's driver."""
    if shutil.which(_CONTROL) is None:
        raise ConfigurationError(
            f"mps=True: there is no {_CONTROL} in PATH; install NVIDIA's driver with it (in a "
            "container: with the driver capability 'compute'), or omit mps"
        )


class _Guarded(NamedTuple):
    """A daemon that was started, and its guard."""

    guard: subprocess.Popen[bytes]
    # The private directory of the daemon, and the environment of its clients.
    directory: str
    variables: dict[str, str]

    @property
    def is_alive(self) -> bool:
        # The guard stays a zombie, so that no other process gets the id of its group.
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.guard.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def close_lifeline(self) -> None:
        assert self.guard.stdin is not None, "it is a pipe"
        self.guard.stdin.close()

    def kill(self) -> None:
        self.close_lifeline()
        # The reader of the lifeline does the same, unless it was killed.
        with suppress(ProcessLookupError):
            os.killpg(self.guard.pid, signal.SIGKILL)
        self.guard.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class MpsDaemon:
    """The MPS daemon of one GPU, which is an entry of CUDA_VISIBLE_DEVICES."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        # Every daemon that was started; the last one may run.
        self._started: list[_Guarded] = []
        at_fork(self, in_child=MpsDaemon._close_lifelines)

    def start(self) -> dict[str, str]:
        """Start the daemon unless it runs; return the variables that its workers need. Blocks."""
        if not (self._started and self._started[-1].is_alive):
            self._started.append(_launch(self._gpu))
            try:
                _wait_until_ready(self._started[-1])
            except BaseException:
                self._started.pop().kill()
                raise
        # The clients of a daemon count the GPUs that it sees.
        gpu = "0" if self._gpu.isdecimal() else self._gpu
        return self._started[-1].variables | {VISIBLE_DEVICES: gpu}

    def close(self) -> None:
        """Kill the daemon and its server; the workers are dead."""
        while self._started:
            self._started.pop().kill()

    def _close_lifelines(self) -> None:
        """Close what a forked copy of this process has inherited."""
        while self._started:
            one = self._started.pop()
            one.close_lifeline()
            one.guard.returncode = 0  # else `subprocess` warns that it still runs


def share_gpus(placements: list[Placement]) -> list[Placement]:
    """Give the workers of each GPU a daemon, and each of them cores of its own.

    The thread of a worker that launches kernels would lose time if it shared a core with another's.
    """
    gpus = [one.visible_devices for one in placements]
    daemons = {gpu: MpsDaemon(gpu) for gpu in gpus if gpu}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return [
        replace(one, mps=daemons[gpu], cores=share_cores(cores, index, len(gpus))) if gpu else one
        for index, (one, gpu) in enumerate(zip(placements, gpus, strict=True))
    ]


def _launch(gpu: str) -> _Guarded:
    directory = tempfile.mkdtemp(prefix="fast_batcher-mps-")
    variables = {
        f"CUDA_MPS_{name}_DIRECTORY": tempfile.mkdtemp(prefix=name, dir=directory)
        for name in ("PIPE", "LOG")
    }
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "fast_batcher-mps", _CONTROL, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables, VISIBLE_DEVICES: gpu},
        start_new_session=True,
    )
    return _Guarded(guard, directory, variables)


def _wait_until_ready(daemon: _Guarded) -> None:
    """Ask the daemon until it answers; raise its log if it does not.

    A worker that finds no daemon would use the GPU without MPS. NVIDIA documents no event for a
    daemon in the foreground; a file in the directory does not show that the daemon listens.
    """
    deadline = monotonic() + _START_TIMEOUT
    while daemon.is_alive and monotonic() < deadline:
        with suppress(subprocess.SubprocessError):
            subprocess.run(
                [_CONTROL],  # it exits with 0 if it has reached the daemon
                input=b"get_default_active_thread_percentage\n",
                env={**os.environ, **daemon.variables},
                capture_output=True,
                timeout=_START_TIMEOUT,
                check=True,
            )
            return
    logs = Path(daemon.directory).glob("LOG*/*")
    log = "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    raise WorkerStartupError(
        f"mps=True: {_CONTROL} has ended, or does not answer; its log ends with "
        f"{log[-1000:]!r}; omit mps if the GPU does not support it"
    )
