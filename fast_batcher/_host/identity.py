"""Keys of hosts: processes with equal keys share one host. Server process, any thread.

A key has two parts. The *scope* says whose processes may share: by default those with one parent,
which are the siblings of one server. The *fingerprint* says whether they want the same of a host:
it is the digest of everything that the answers of the host's workers may depend on.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import accumulate
from multiprocessing import spawn
from pathlib import Path

from fast_batcher._file_state import read_state
from fast_batcher._host.digests import digest
from fast_batcher._version import __version__

# Hexadecimal digits of each part: socket paths are short, and macOS leaves 37 bytes behind its
# temporary directory.
SCOPE_DIGITS = 12
FINGERPRINT_DIGITS = 16
# Of the digest of one facet, which is compared with one other and must not tell a short secret.
FACET_DIGITS = 8

# Environment variables that supervisors, shells and terminals set for each process, and no model
# reads. Every other variable is a facet. Listed in docs/server_processes.md.
PER_PROCESS_VARIABLES = frozenset(
    {
        # Shells and terminals.
        *("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID", "XDG_SESSION_ID"),
        *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"),
        # honcho and foreman; supervisord; PM2.
        *("HONCHO_PROCESS_NAME", "PORT", "PS"),
        *("SUPERVISOR_GROUP_NAME", "SUPERVISOR_PROCESS_NAME"),
        *("NODE_APP_INSTANCE", "pm_id", "unique_id"),
        # systemd.
        *("INVOCATION_ID", "JOURNAL_STREAM", "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID"),
        *("MAINPID", "NOTIFY_SOCKET", "SYSTEMD_EXEC_PID", "WATCHDOG_PID", "WATCHDOG_USEC"),
        # The test that runs, which changes within a process.
        "PYTEST_CURRENT_TEST",
    }
)


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
    # Digests of the facets of the fingerprint, by their names in messages.
    facets: Mapping[str, str]

    @property
    def file_name(self) -> str:
        """The name of the host's socket; one listing shows all hosts of a scope."""
        return f"{self.scope}-{self.fingerprint}.sock"


def make_key(
    shared: bool | str, own: Mapping[str, str], module_file: str | None, name: str
) -> HostKey:
    """Make the key of the host that a batcher of this process wants.

    Args:
        shared: True for processes with the parent of this one; a name for all processes of this
            user that give it, if they find the same directory of sockets.
        own: Digests of the batcher's settings and of the model's arguments, by their names.
        module_file: The file of the model's module, if it has one.
        name: The batcher's name. Processes of one scope that give a batcher of one name different
            facets are warned.
    """
    supervisor = None
    facets = {**own, **_digest_process(module_file)}
    if isinstance(shared, str):
        scope = digest("name", shared, name)
    else:
        pid, started = _find_parent()
        scope = digest("siblings", find_namespace(), pid, started, name)
        supervisor = pid or None
        # Processes that share a name are often different programs.
        facets["the command line"] = digest(sys.argv)
    return HostKey(
        name,
        scope[:SCOPE_DIGITS],
        digest(facets)[:FINGERPRINT_DIGITS],
        supervisor,
        {facet: found[:FACET_DIGITS] for facet, found in facets.items()},
    )


def list_differences(facets: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of the facets in which two keys differ, sorted."""
    names = facets.keys() | others.keys()
    return sorted(name for name in names if facets.get(name) != others.get(name))


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


def _digest_process(module_file: str | None) -> dict[str, str]:
    """Digest what the answers of workers depend on besides the batcher and the model."""
    facets = {
        "the version of fast_batcher": __version__,
        "the version of Python": sys.version,
        # Of the host and the workers.
        "the interpreter": os.fsdecode(spawn.get_executable()),
        "sys.path": sys.path,
        "the working directory": _find_working_directory(),
        "the CPU affinity": _find_affinity(),
        "the file of the model's module": None if module_file is None else read_state(module_file),
    }
    # Other threads may remove variables during the copy.
    present = ((name, os.environ.get(name)) for name in list(os.environ))
    facets |= {
        f"the environment variable {name}": value
        for name, value in present
        if name not in PER_PROCESS_VARIABLES and value is not None
    }
    return {name: digest(value) for name, value in facets.items()}


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


def _find_affinity() -> list[int]:
    """Return the cores of this process, which its workers inherit; none where these are unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
