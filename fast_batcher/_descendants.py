"""Ends processes that a model has started and not ended. Linux; no effect on other systems.

A worker calls `end_descendants` at its end. Before the parent ends a worker that cannot do so
itself, it opens the descendants with `opened_descendants`.

A process in another session (`start_new_session=True`) is meant to outlive the worker: it and its
descendants are not ended.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

# Seconds after SIGTERM and again after SIGKILL: enough for a handler to run, and in total less than
# the default stop_timeout, after which the parent would end the worker.
GRACE = 0.5


def end_descendants() -> None:
    """End the descendants of this process: SIGTERM, then SIGKILL. Main thread.

    Returns when they are dead, at the latest after twice `GRACE` seconds.
    """
    # The handler of a library may raise when a child dies; that of PyTorch's data loader does.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with opened_descendants(os.getpid()) as pidfds:
            send_signal(pidfds, number)
            _wait_until_dead(pidfds, GRACE)


@contextmanager
def opened_descendants(pid: int) -> Iterator[list[int]]:
    """Yield pidfds of a process's descendants in its session; they are closed after the block."""
    with contextlib.ExitStack() as stack:
        pidfds: list[int] = []
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # the process has ended
                for child in _open_children(pid, os.getsid(pid)):
                    stack.callback(os.close, child)
                    pidfds.append(child)
        yield pidfds


def send_signal(pidfds: list[int], number: signal.Signals) -> None:
    """Send a signal to processes, except those that have ended or belong to another user."""
    for pidfd in pidfds:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)


def _open_children(parent: int, session: int) -> Iterator[int]:
    # The kernel lists children by the thread that started them.
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, _read_text(path).split()):
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:  # it has ended, or there is no descriptor left for it
                continue
            # Checked after it was opened: the pid may have been reused by another process.
            if _is_child(pid, parent, session):
                yield pidfd
                yield from _open_children(pid, session)
            else:
                os.close(pidfd)


def _is_child(pid: int, parent: int, session: int) -> bool:
    # The name of the program comes before this, in parentheses, and may contain anything.
    fields = _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    is_ours = len(fields) > 3 and (int(fields[1]), int(fields[3])) == (parent, session)
    # A resource tracker, of `multiprocessing` or joblib, ends by itself after all its users.
    return is_ours and "resource_tracker" not in _read_text(Path(f"/proc/{pid}/cmdline"))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def _wait_until_dead(pidfds: list[int], seconds: float) -> None:
    deadline = monotonic() + seconds
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    alive = len(pidfds)
    while alive:
        dead = poller.poll(max(0.0, deadline - monotonic()) * 1000)
        if not dead:
            return
        for pidfd, _ in dead:
            poller.unregister(pidfd)
        alive -= len(dead)
