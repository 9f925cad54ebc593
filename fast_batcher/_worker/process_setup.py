"""Set-up of a worker process before the model is loaded: signals, and the parent's death."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

from fast_batcher._transport.progress import WorkerProgress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def set_signals(progress: WorkerProgress, parent_pid: int) -> None:
    """Ignore signals that go to the whole process group; the parent decides when to end.

    Ctrl-C in a terminal and the SIGTERM of a supervisor (systemd, for example) reach this process
    as well as the parent, which still waits for the answers of the batches that it has sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ignore_sigterm(progress, parent_pid)
    # Set, because a child inherits ignored signals through exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's own default: EPIPE as an exception
    signal.set_wakeup_fd(-1)
    # The parent blocked these when it started this process, until the handlers are set.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _ignore_sigterm(progress: WorkerProgress, parent_pid: int) -> None:
    """Let SIGTERM end this process only if the parent has sent it, or is dead.

    A model may put another handler in place of this one. It is a handler and not `SIG_IGN`, which
    the processes that the model starts would inherit: they could not be terminated.
    """

    def end_if_wanted(number: int, _: object) -> None:
        if progress.is_to_end or os.getppid() != parent_pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    # The signals that each thread had blocked before it forked.
    blocked = threading.local()

    def before_fork() -> None:
        # A SIGTERM for the child waits until the child has the default action.
        blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.before)

    def after_fork_in_child() -> None:
        # A handler of the model stays.
        if signal.getsignal(signal.SIGTERM) is end_if_wanted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after_fork()

    signal.signal(signal.SIGTERM, end_if_wanted)
    # A signal that is ignored must not interrupt native code of the model, either.
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child
    )


def end_with_parent(parent_pid: int) -> None:
    """End this process when its parent dies, even inside a long call into C."""
    if sys.platform == "linux":
        # The kernel sends the signal, so this works while C code holds the GIL.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)
    # For other systems, and after a change of credentials, which clears PR_SET_PDEATHSIG.
    threading.Thread(target=_watch_parent, name="fast_batcher-watcher", daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
