"""Identities: keys of hosts, and processes that must not be confused.

A key has two parts. The *scope* says whose processes may share: by default those with one parent,
which are the siblings of one server. The *fingerprint* says whether they want the same of a host:
it is the digest of everything that the answers of the host's workers may depend on. API process,
any thread.

`ProcessIdentity` keeps other processes from being killed. A pid alone does not identify a process:
it is used again, and means another process in another PID namespace, that of another container for
example. Any process and thread.
"""

import contextlib
import itertools
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import NamedTuple

from fast_batcher._file_state import read_state
from fast_batcher._identity import digest
from fast_batcher._version import __version__

# Hexadecimal digits of each part: socket paths are short, and macOS leaves 37 bytes behind its
# temporary directory.
SCOPE_DIGITS = 12
FINGERPRINT_DIGITS = 16
# A facet's digest is compared with one other, and must not tell a short secret.
FACET_DIGITS = 8

# Names of environment variables by which processes of one app are told apart. Answers of a model do
# not depend on them. Every other variable counts, because the model may read it: a second host
# costs memory, and a host with other values may give wrong answers.
_PER_PROCESS = re.compile(
    "|".join(
        (
            # Shells, terminals and containers.
            r"_|COLUMNS|LINES|OLDPWD|PWD|SHLVL|TERM|WINDOWID|STY|TMUX|TMUX_PANE|\w+_SESSION_ID",
            r"SSH_CLIENT|SSH_CONNECTION|SSH_TTY|HOSTNAME",
            # honcho, foreman and platforms; gunicorn; supervisord; uWSGI.
            r"PORT|PS|(HONCHO|GUNICORN|SUPERVISOR|UWSGI)_\w+",
            r"INVOCATION_ID|JOURNAL_STREAM|MAINPID|NOTIFY_SOCKET|(LISTEN|SYSTEMD|WATCHDOG)_\w+",
            # The test that runs, which changes within a process.
            "PYTEST_CURRENT_TEST",
        )
    )
)


# Names of facets of which messages say more.
MODULE_FILE = "the file of the model's module"
COMMAND_LINE = "the command line"
# A name follows.
VARIABLE = "the environment variable"

# Numbers of the keys that no other session has.
_keys_alone = itertools.count()


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
    """Make the key of the host that a batcher of this process wants; unique if not `shared`."""
    supervisor = None
    facets = {**own, **_digest_process(module_file)}
    if isinstance(shared, str):
        scope = digest("name", shared, name)
    elif not shared:
        supervisor = os.getpid()
        started = read_start_time(supervisor)
        scope = digest("own", find_namespace(), supervisor, started, next(_keys_alone), name)
    else:
        pid, started = _find_parent()
        scope = digest("siblings", find_namespace(), pid, started, name)
        supervisor = pid or None
        # Processes that share a name are often different programs.
        facets[COMMAND_LINE] = digest(sys.argv)
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


def read_start_time(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if it is not visible here.

    A pid and its start time name one process, for good. Systems without `/proc` tell none.
    """
    status = _read_status(pid)
    return None if status is None else status[_STARTED]


def find_youngest_child(pid: int) -> tuple["ProcessIdentity | None", float]:
    """Find the youngest living child of a process that can be a server process, and its age.

    A server process runs the same interpreter as this process, in the session of its parent.

    Returns:
        The child, and its age in seconds; None and infinity without one.
    """
    parent = _read_status(pid)
    if parent is None:
        return None, math.inf
    found = []
    for path in Path("/proc").iterdir():
        status = _read_status(int(path.name)) if path.name.isdecimal() else None
        if (
            status is not None
            and status[_PARENT] == str(pid)
            and status[_SESSION] == parent[_SESSION]
            and status[_STATE] not in _DEAD
            and _read_program(path) == _read_program(Path("/proc/self"))
        ):
            found.append((int(status[_STARTED]), int(path.name)))
    if not found:
        return None, math.inf
    started, child = max(found)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return identify_process(child), age


def _read_program(process: Path) -> str | None:
    """Return the file that a process runs; None if it is dead, or of another user."""
    try:
        return os.readlink(process / "exe")
    except OSError:
        return None


# Positions of fields in `_read_status`, and the states of processes that have ended.
_STATE, _PARENT, _SESSION, _STARTED = 0, 1, 3, 19
_DEAD = frozenset("ZX")


def _read_status(pid: int) -> list[str] | None:
    """Return the fields of `/proc/<pid>/stat` from the state on; None if it is not visible here."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program comes before the state, in parentheses, and may contain anything.
    return text.rpartition(")")[2].split()


def _digest_process(module_file: str | None) -> dict[str, str]:
    """Digest what the answers of workers depend on besides the batcher and the model."""
    # The host and the workers run it.
    program = os.fsdecode(spawn.get_executable())
    facets = {
        "the version of fast_batcher": __version__,
        "the version of Python": sys.version,
        # Its file may be a link: a virtual environment's is, and says which environment is meant.
        "the interpreter": (_resolve_path(os.path.dirname(program)), os.path.basename(program)),
        "sys.path": [*map(_resolve_path, sys.path)],
        "the working directory": _find_working_directory(),
        "the CPU affinity": _find_affinity(),
        MODULE_FILE: None if module_file is None else read_state(module_file),
    }
    # Other threads may remove variables during the copy.
    present = {name: os.environ.get(name) for name in list(os.environ)}
    facets |= {f"{VARIABLE} {name}": present[name] for name in _list_variables(present)}
    return {name: digest(value) for name, value in facets.items()}


def _list_variables(present: Mapping[str, str | None]) -> list[str]:
    """Return the names of the environment variables that count."""
    counting = [
        name
        for name, value in present.items()
        if value is not None and not _PER_PROCESS.fullmatch(name)
    ]
    if "pm_id" not in present:
        return counting
    # PM2 describes a process in names in lower case. Its instances have one `name` and one
    # configuration, except for the variables that these two name.
    own = {present.get("instance_var") or "NODE_APP_INSTANCE", present.get("increment_var")}
    return [name for name in counting if name == "name" or not (name.islower() or name in own)]


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


def _resolve_path(path: str) -> str:
    """Resolve links and `..` of an absolute path; the working directory is a facet by itself."""
    return os.path.realpath(path) if os.path.isabs(path) else path


def _find_working_directory() -> str | None:
    with contextlib.suppress(OSError):  # it has been deleted
        return os.getcwd()
    return None


def _find_affinity() -> list[int]:
    """Return the cores of this process, which its workers inherit; none where these are unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class ProcessIdentity(NamedTuple):
    """A process of this machine, for good where `/proc` exists."""

    # Inode of the PID namespace; None where there are none.
    namespace: int | None
    pid: int
    # Start in ticks since the boot; None if the process is not visible, or there is no `/proc`.
    started: str | None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as is visible here."""
        status = _read_status(self.pid)
        return (
            status is not None and status[_STARTED] == self.started and status[_STATE] not in _DEAD
        )


def identify_process(pid: int) -> ProcessIdentity:
    """Identify the process that has this pid in this PID namespace."""
    return ProcessIdentity(find_namespace(), pid, read_start_time(pid))


def kill_process(process: ProcessIdentity, seconds: float = 0.0) -> bool:
    """Kill a process, unless it is not visible here, and never another one."""
    if not hasattr(os, "pidfd_open"):
        return identify_process(process.pid) == process and _kill(process.pid)
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:  # it is not there, or there is no descriptor for it
        return False
    try:
        # The descriptor, which stays with this process, is open: so the process is compared now.
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
