"""Keys of hosts: processes with equal keys share one host. Server process, any thread.

A key has two parts. The *scope* says whose processes may share: by default those with one parent,
which are the siblings of one server. The *fingerprint* says whether they want the same of a host.
"""

import contextlib
import hashlib
import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import accumulate
from multiprocessing import spawn
from pathlib import Path

from fast_batcher._version import __version__

# Hexadecimal digits of each part: socket paths are short, and macOS leaves 37 bytes behind its
# temporary directory.
SCOPE_DIGITS = 12
FINGERPRINT_DIGITS = 16


@dataclass(frozen=True)
class HostKey:
    """The key of one host."""

    # The batcher's name, for messages.
    name: str
    scope: str
    fingerprint: str
    # Pid of the parent of all processes of the scope; None if they have various parents, or if the
    # parent is outside of the PID namespace.
    supervisor: int | None

    @property
    def file_name(self) -> str:
        """The name of the host's socket; one listing shows all hosts of a scope."""
        return f"{self.scope}-{self.fingerprint}.sock"


def make_key(shared: bool | str, payload: bytes, module_file: str | None, name: str) -> HostKey:
    """Make the key of the host that a batcher of this process wants.

    Args:
        shared: True for processes with the parent of this one; a name for all processes of this
            user that give it, if they find the same directory of sockets.
        payload: The settings and the model, pickled.
        module_file: The file of the model's module, if it has one.
        name: The batcher's name. Processes of one scope that give a batcher of one name different
            payloads are warned.
    """
    supervisor = None
    if isinstance(shared, str):
        scope = _digest("name", shared, name)
    else:
        pid, started = _find_parent()
        scope = _digest("siblings", find_namespace(), pid, started, name)
        supervisor = pid or None
    fingerprint = _digest(
        __version__,
        sys.version,
        # Of the host and the workers.
        os.fsdecode(spawn.get_executable()),
        payload,
        sys.path,
        _find_working_directory(),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        _find_file_state(module_file),
    )
    return HostKey(name, scope[:SCOPE_DIGITS], fingerprint[:FINGERPRINT_DIGITS], supervisor)


def find_module_file(module: str) -> str | None:
    """Return the file of a module without importing it; None if it has none.

    Another process may have imported the module, and must find the same file.
    """
    found, path = None, None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = PathFinder.find_spec(name, path)
        path = None if found is None else found.submodule_search_locations
        if path is None:  # not a package
            break
    if found is not None and found.name == module and found.origin is not None:
        return found.origin
    # Import hooks may find modules elsewhere.
    return getattr(sys.modules.get(module), "__file__", None)


def read_start_time(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if it is not visible here.

    A pid and its start time name one process, for good. Systems without `/proc` tell none.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program comes before this, in parentheses, and may contain anything.
    return text.rpartition(")")[2].split()[19]


def _digest(*parts: object) -> str:
    # The text of builtins is unambiguous, and escapes surrogates of file names.
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _find_parent() -> tuple[int, str | None]:
    # A process whose parent dies gets another, and a dead one's start time cannot be read. The pid
    # is 0 if the parent is outside of the PID namespace.
    while True:
        pid = os.getppid()
        started = read_start_time(pid)
        if os.getppid() == pid:
            return pid, started


def find_namespace() -> int | None:
    """Return the inode of the PID namespace of this process; None where there are none."""
    # Containers may share the directory of sockets, and have the same pids.
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def _find_working_directory() -> str | None:
    with contextlib.suppress(OSError):  # it has been deleted
        return os.getcwd()
    return None


def _find_file_state(path: str | None) -> tuple[int, int] | None:
    if path is not None:
        with contextlib.suppress(OSError):  # it is in an archive, for example
            status = os.stat(path)
            return status.st_mtime_ns, status.st_size
    return None
