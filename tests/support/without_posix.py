"""A program that pretends to run on Windows: it removes what Windows lacks, and then imports us."""
# ruff: noqa: E402, T201

import asyncio
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import sysconfig
import time

for known in (  # what on Windows is another module of Python
    "concurrent.futures.process",
    "ctypes",
    "multiprocessing.resource_tracker",
    "multiprocessing.spawn",
    "subprocess",
    "tempfile",
):
    importlib.import_module(known)
pair, unix = socket.socketpair, socket.AF_UNIX
socket.socketpair = lambda *_: pair(unix)  # for asyncio itself
sysconfig.get_paths()
for module, names in {
    os: "register_at_fork fork sysconf memfd_create pidfd_open waitid sched_getaffinity getsid "
    "sched_setaffinity O_TMPFILE killpg getuid geteuid WNOHANG WEXITED P_PIDFD uname",
    signal: "SIGKILL SIGCHLD SIGPIPE SIGHUP SIGUSR1 pthread_sigmask siginterrupt pidfd_send_signal",
    select: "poll epoll",
    socket: "AF_UNIX sendmsg",
    mmap: "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
    time: "clock_gettime CLOCK_MONOTONIC",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for missing in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[missing] = None  # type: ignore[assignment]
sys.platform = "win32"

from fast_batcher import DynBatcher, InferenceModel, aio, dynamically
from fast_batcher.errors import ConfigurationError


class Double(InferenceModel[int, int]):
    """Doubles numbers."""

    def infer(self, inputs: list[int]) -> list[int]:
        """Double them."""
        return [2 * value for value in inputs]


@dynamically
def double(items: list[int]) -> list[int]:
    """Double them, in a thread."""
    return [2 * item for item in items]


@aio.dynamically
async def triple(items: list[int]) -> list[int]:
    """Triple them, on the loop."""
    return [3 * item for item in items]


async def main() -> None:
    """Use all that works on Windows."""
    try:
        await DynBatcher[int, int]("models:Unknown").process_batched(1)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
    print("fcntl" in sys.modules and sys.modules["fcntl"] is not None)
    async with DynBatcher(Double, workers="threads") as batcher:
        print(await batcher.process_many(range(3)))
    print(double(4), await triple([1, 2]))


if __name__ == "__main__":
    asyncio.run(main())
    double.shutdown()
