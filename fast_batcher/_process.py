"""The process itself: forks, the clock, the garbage collector, descendants and descriptors.

Runs in every process, on any thread.

`monotonic` is the clock of deadlines, in seconds. Test tools that freeze time (freezegun, for
example) replace `time.monotonic` in every module that imports it, and restore it later. A request
that arrives in between would have a meaningless deadline, and the scheduler learns from arrivals on
a clock that must never go back. These tools do not replace `time.clock_gettime(CLOCK_MONOTONIC)`,
which takes 0.04 us more.
"""

import contextlib
import functools
import gc
import mmap
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

# Ends a process at once; on Windows, which has no such signal, the name of the end of a thread.
SIGKILL: Final = getattr(signal, "SIGKILL", signal.SIGTERM)
_OwnerT = TypeVar("_OwnerT")
# Hooks before a fork, after it in the parent, and after it in the child; by owner, weakly.
_hooks: "weakref.WeakKeyDictionary[Any, tuple[Callable[[Any], object] | None, ...]]"
_hooks = weakref.WeakKeyDictionary()


def at_fork(
    owner: _OwnerT,
    *,
    before: Callable[[_OwnerT], object] | None = None,
    in_parent: Callable[[_OwnerT], object] | None = None,
    in_child: Callable[[_OwnerT], object] | None = None,
) -> None:
    """Call these functions with `owner` at each fork of this process, as long as `owner` exists.

    A forked child inherits memory maps and descriptors. If it kept them, shared memory would not be
    freed, and a worker would never read the end of a pipe that the parent has closed.
    """
    _hooks[owner] = (before, in_parent, in_child)


def _run_hooks(index: int) -> None:
    # Another thread may register an owner meanwhile: a list of references is taken at once.
    for reference in _hooks.keyrefs():
        owner = reference()
        if owner is not None:
            hook = _hooks[owner][index]
            if hook is not None:
                hook(owner)


def after_fork_in_child(hook: Callable[[], object]) -> None:
    """Call a function in each forked copy of this process."""
    if hasattr(os, "fork"):
        os.register_at_fork(after_in_child=hook)


if hasattr(os, "fork"):  # Windows has no forks
    os.register_at_fork(
        before=functools.partial(_run_hooks, 0),
        after_in_parent=functools.partial(_run_hooks, 1),
        after_in_child=functools.partial(_run_hooks, 2),
    )


monotonic: Callable[[], float]
if sys.platform == "win32":  # has no `clock_gettime`
    monotonic = time.monotonic
else:
    monotonic = functools.partial(time.clock_gettime, time.CLOCK_MONOTONIC)

# Seconds for which the user's code may block the event loop before a warning is logged: users
# notice a tenth of a second.
SLOW: Final = 0.1


class _Freeze:
    """Whether this process has frozen its objects, and the number of blocks that need that.

    A full collection visits every object of the process: the modules, the app, the model. With
    torch imported that takes tens of milliseconds, during which no request is served. These objects
    live as long as the process serves, so visiting them frees nothing. `gc.freeze` excludes them
    from all later collections.

    The thresholds stay Python's own. A higher one saves some CPU time per request, and lets an app
    that leaves garbage in reference cycles hold it for longer. Source:
    `benchmarks/garbage_collection.py`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted_by = 0
        # False if the app had frozen objects before.
        self.is_ours = False


_freeze = _Freeze()


def freeze_for_good() -> None:
    """Collect once, and exclude all live objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude live objects from collections until the block ends.

    Blocks may overlap, also in several threads: each block freezes the objects that are alive at
    its start, and the last that ends unfreezes all. An app that has called `gc.freeze` itself keeps
    its frozen objects.
    """
    with _freeze.lock:
        if not _freeze.wanted_by:
            _freeze.is_ours = not gc.get_freeze_count()
        _freeze.wanted_by += 1
        if _freeze.is_ours:
            freeze_for_good()
    try:
        yield
    finally:
        with _freeze.lock:
            _freeze.wanted_by -= 1
            if not _freeze.wanted_by and _freeze.is_ours:
                gc.unfreeze()


# Seconds after SIGTERM and again after SIGKILL: enough for a handler to run, and in total less than
# the default stop_timeout, after which the parent would end the worker.
GRACE = 0.5


def end_descendants() -> None:
    """End the descendants of this process: SIGTERM, then SIGKILL. Main thread.

    A worker calls it at its end. Before the parent ends a worker that cannot do so itself, it opens
    the descendants with `opened_descendants`. A process in another session (`start_new_session`) is
    meant to outlive the worker: it and its descendants are not ended.

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
    """Send a signal to processes; skip ended ones and processes of other users."""
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
        return path.read_text(encoding="utf-8", errors="replace")
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


def read_rss(pid: int) -> int:
    """Return the resident memory of a process in bytes, 0 if it cannot be read. Linux."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):  # it has just ended
        return 0


def occupy_stdio() -> None:
    """Open /dev/null at each free descriptor from 0 to 2.

    Call it before a pipe is opened: in a program that was started without standard streams the pipe
    would get one of these numbers, and output of native code to 1 and 2 would become part of a
    request.

    The descriptors stay open, because a later pipe could get a closed number. They are
    close-on-exec, so that processes started by the program do not inherit them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is free, and the next file gets the lowest free number
            fd = os.open(os.devnull, os.O_RDWR)
            if fd > 2:  # another thread was faster
                os.close(fd)


class PassedDescriptor:
    """Descriptor that is passed to a worker, where it has the number it has in the parent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """Return the descriptor, which the worker owns from now on. Called in the worker.

        Programs that the model starts do not inherit it.
        """
        os.set_inheritable(self._fd, False)
        return self._fd
