"""The private directory of sockets, and its lock. Server and host processes, any thread.

The directory's permissions keep other users out.
"""

import contextlib
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from io import FileIO
from operator import methodcaller
from pathlib import Path

from fast_batcher._process import at_fork, monotonic
from fast_batcher.errors import ConfigurationError

# Longest path of a socket in bytes: 104 with the final zero on macOS and the BSDs, 108 on Linux.
MAX_PATH_BYTES = 103

# Seconds between two tries to take the lock, which a process holds for as long as the start of an
# interpreter takes.
LOCK_INTERVAL = 0.01

_REMEDY = "set XDG_RUNTIME_DIR to another directory of this user"


def open_directory() -> Path:
    """Return the directory of this user's sockets; make it if it does not exist.

    It is `$XDG_RUNTIME_DIR/fast_batcher` if that variable names a directory of this user, else
    `fast_batcher-<uid>` in the temporary directory.
    """
    try:
        path = _choose_path()
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # Not followed: a link may be another user's.
        fault = _find_fault(path.lstat())
    except OSError as error:
        raise ConfigurationError(
            f"shared: no directory for the host's socket can be made ({error}); {_REMEDY}"
        ) from error
    if fault is not None:
        raise ConfigurationError(
            f"shared: {path}, the directory of the host's socket, {fault}; remove it, or {_REMEDY}"
        )
    return path


def check_length(path: Path) -> None:
    """Check that a socket can have this path."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"shared: {path}, the path of the host's socket, takes {length} bytes, more than the "
            f"{MAX_PATH_BYTES} that systems allow; set XDG_RUNTIME_DIR to a directory of this user "
            "with a shorter path"
        )


@contextlib.contextmanager
def locked(directory: Path, seconds: float, cancelled: threading.Event) -> Iterator[None]:
    """Hold the directory's lock during the block.

    It protects all sockets of the directory: their files, and the starts and ends of hosts.
    """
    lock = take_lock(directory, seconds, cancelled)
    try:
        yield
    finally:
        # Also if a child of another thread's `fork` still has the descriptor.
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()


def take_lock(directory: Path, seconds: float, cancelled: threading.Event) -> FileIO:
    """Take the directory's lock; it is held until the file is closed or the process is dead.

    The arguments and the error are those of `locked`.
    """
    until = monotonic() + seconds
    # The file is never deleted: of two processes, each could lock a file of its own otherwise.
    # Closed at `exec`, as all files of Python.
    lock = FileIO(directory / "lock", "ab")
    at_fork(lock, in_child=methodcaller("close"))
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(lock.close)
        # Polled, because a wait of the system has no limit and cannot be cancelled.
        while not _try_to_lock(lock):
            if monotonic() >= until or cancelled.wait(LOCK_INTERVAL):
                raise TimeoutError(
                    f"another process holds the lock {lock.name}, which is held for moments only; "
                    f"it may be stopped or stuck: `fuser {lock.name}` names it, continue or end it"
                )
        on_failure.pop_all()
    return lock


def identify_socket(path: Path) -> str | None:
    """Identify the socket that has this path now; None without one. Call it under the lock."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        # File systems use the numbers of deleted files again.
        return f"{status.st_ino}-{status.st_mtime_ns}"
    return None


def _try_to_lock(lock: FileIO) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _choose_path() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # The directory is another user's after "su", and does not exist after a logout.
    with contextlib.suppress(OSError):
        if os.path.isabs(runtime) and os.stat(runtime).st_uid == os.geteuid():
            return Path(runtime, "fast_batcher")
    return Path(tempfile.gettempdir(), f"fast_batcher-{os.geteuid()}")


def _find_fault(status: os.stat_result) -> str | None:
    if not stat.S_ISDIR(status.st_mode):
        return "is a link or a file, not a directory"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to this user, {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}, so other users have access"
    return None
