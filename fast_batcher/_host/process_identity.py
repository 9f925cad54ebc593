"""Identities of processes, so that no other process is killed. Any process and thread.

A pid alone does not identify a process: it is used again, and means another process in another PID
namespace, that of another container for example.
"""

import os
import select
import signal
from typing import NamedTuple

from fast_batcher._host.identity import find_namespace, read_start_time


class ProcessIdentity(NamedTuple):
    """A process of this machine, for good where `/proc` exists."""

    # Inode of the PID namespace; None where there are none.
    namespace: int | None
    pid: int
    # In ticks since the boot; None if the process is not visible, or there is no `/proc`.
    started: str | None


def identify_process(pid: int) -> ProcessIdentity:
    """Identify the process that has this pid in this PID namespace."""
    return ProcessIdentity(find_namespace(), pid, read_start_time(pid))


def kill_process(process: ProcessIdentity, seconds: float = 0.0) -> bool:
    """Kill a process, unless it is not visible here, and never another one.

    Args:
        process: The process.
        seconds: Longest time to wait for its death.

    Returns:
        Whether it was killed. If not, it is dead, or in another PID namespace.
    """
    if not hasattr(os, "pidfd_open"):
        return identify_process(process.pid) == process and _kill(process.pid)
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:  # it is not there, or there is no descriptor for it
        return False
    try:
        # After the descriptor was opened, which stays with this process.
        if identify_process(process.pid) != process:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        dead = select.poll()
        dead.register(fd, select.POLLIN)
        dead.poll(1000 * seconds)
    except OSError:  # it is dead, or has become another user's
        return False
    finally:
        os.close(fd)
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True
