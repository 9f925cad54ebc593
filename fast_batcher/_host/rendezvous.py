"""The way of server processes to the host of a key, which exists once. Any thread.

    under the directory's lock:
        connect to the key's socket     -> the host lives, or another process starts it just now
        if no process listens there:
            unlink, bind, listen, connect
            launch the host, which inherits the listener

A starter that is killed leaves a socket without a listener, and the next process replaces it. A
host writes a *record* beside its socket: its identity, by which a client kills it if it is silent.
"""

import contextlib
import errno
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from io import FileIO
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from fast_batcher._host.directory import (
    check_length,
    identify_socket,
    locked,
    open_directory,
    take_lock,
)
from fast_batcher._host.identity import (
    COMMAND_LINE,
    MODULE_FILE,
    VARIABLE,
    HostKey,
    ProcessIdentity,
    identify_process,
    kill_process,
    list_differences,
)
from fast_batcher._host.launch import HostProcess
from fast_batcher._process import at_fork, occupy_stdio
from fast_batcher.errors import NotReadyError

logger = logging.getLogger("fast_batcher")

# Connections that the host has not accepted yet: more than the processes of any server. Systems
# may allow less, Linux 4096.
BACKLOG = 1024

# Seconds for which a host waits for the lock: it begins or ends without the lock afterwards.
LOCK_LIMIT = 5.0
# Seconds to wait for the death of a killed host; a stopped one is dead within milliseconds.
KILL_LIMIT = 1.0

# Remedies for differences whose names begin so, besides making them equal.
_REMEDIES = {
    (COMMAND_LINE,): 'with shared="a name of your choice" command lines may differ',
    (VARIABLE,): "os.environ.pop(...) removes a variable that the model does not read",
    ("the model", "model_"): "batchers of different models need different names (name=)",
}

_NEVER = threading.Event()
_locks_of_retired: list[FileIO] = []


class Joined(NamedTuple):
    """A connection to a host, which may not have accepted it yet."""

    connection: socket.socket
    # The host if this process has started it.
    process: HostProcess | None
    # The identity of the socket, by `identify_socket`.
    socket_id: str | None
    # Whether the host has begun to accept: it answers at once, unless it is stopped or stuck.
    has_begun: bool


def connect(
    key: HostKey,
    launch: Callable[[socket.socket], HostProcess] | None,
    seconds: float = LOCK_LIMIT,
    cancelled: threading.Event = _NEVER,
) -> Joined:
    """Connect to the host of a key; start a missing host with `launch`. Blocks for the lock alone.

    The connection reads an end of file or a reset before its first byte if the host dies, or ends,
    before it accepts. Then call this again, unless this process has started the host: that failed.
    """
    occupy_stdio()
    directory = open_directory()
    path = directory / key.file_name
    check_length(path)
    with locked(directory, seconds, cancelled):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return Joined(_dial(path), None, identify_socket(path), _read_record(path) is not None)
        if launch is None:
            raise NotReadyError(f"{key.name}: there is no host process")
        _sweep(directory, key)
        return _start(path, key, launch)


def replace_silent(
    key: HostKey, joined: Joined, seconds: float, cancelled: threading.Event
) -> None:
    """Make room for another host, unless this one has answered or been replaced meanwhile.

    The silent host is killed. If that is not possible from here, it loses its socket.
    """
    directory = open_directory()
    path = directory / key.file_name
    with locked(directory, seconds, cancelled):
        answers = select.poll()
        answers.register(joined.connection, select.POLLIN)
        if answers.poll(0) or identify_socket(path) != joined.socket_id:
            return
        process = _read_record(path)
        is_killed = process is not None and kill_process(process, KILL_LIMIT)
        logger.error(
            "%s: the host process%s does not answer and is replaced%s",
            key.name,
            "" if process is None else f" (pid {process.pid})",
            "" if is_killed else "; it cannot be killed by this process",
        )
        _remove(path)


def check_peer(connection: socket.socket) -> None:
    """Check that the process at the other end is this user's. Both sides.

    Systems other than Linux do not tell; there the directory's permissions alone keep others out.
    """
    if sys.platform == "linux":
        # The kernel's `struct ucred`. For a client the pid is that of the starter, who listened.
        size = struct.calcsize("iII")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, uid, _ = struct.unpack("iII", credentials)
        if uid != os.geteuid():
            raise PermissionError(
                errno.EPERM,
                f"the process at the other end belongs to user {uid}, not to this user, "
                f"{os.geteuid()}",
            )


def announce(listener: socket.socket, socket_id: str) -> bool:
    """Record that the host accepts from now on. Host process."""
    path = Path(listener.getsockname())
    with contextlib.suppress(TimeoutError), locked(path.parent, LOCK_LIMIT, _NEVER):
        if identify_socket(path) != socket_id:
            return False
        _record_of(path).write_text(json.dumps(identify_process(os.getpid())))
    return True


def has_rival(listener: socket.socket) -> bool:
    """Return whether the scope of a listening host has another living host. Host process."""
    if listener.fileno() < 0:
        return False
    path = Path(listener.getsockname())
    scope = path.name.partition("-")[0]
    return any(other != path and _is_bound(other) for other in path.parent.glob(f"{scope}-*.sock"))


def retire(listener: socket.socket, socket_id: str) -> None:
    """Remove the host's socket. Host process, its last act: end the process at once.

    The process holds the lock until it is dead, so that no other host starts before. Do not close
    the listener: whoever waits in its backlog then finds no host, and starts the next one.
    """
    path = Path(listener.getsockname())
    # While another process holds the lock, the socket is left to whoever starts the next host.
    with contextlib.suppress(TimeoutError):
        _locks_of_retired.append(take_lock(path.parent, LOCK_LIMIT, _NEVER))
        if identify_socket(path) == socket_id:
            _remove(path)


def _start(path: Path, key: HostKey, launch: Callable[[socket.socket], HostProcess]) -> Joined:
    with contextlib.ExitStack() as on_failure:
        _remove(path)  # a record without a socket
        on_failure.callback(_remove, path)
        # Processes with other keys read it.
        _facets_of(path).write_text(json.dumps(dict(key.facets)))
        with _open_socket() as listener:
            listener.bind(os.fspath(path))
            listener.listen(BACKLOG)
            # The connection is there before the launch: a host that dies at once resets it.
            connection = on_failure.enter_context(_dial(path))
            process = launch(listener)
            socket_id = identify_socket(path)
        on_failure.pop_all()
    return Joined(connection, process, socket_id, has_begun=False)


def _dial(path: Path) -> socket.socket:
    with contextlib.ExitStack() as on_failure:
        connection = on_failure.enter_context(_open_socket())
        # Not blocking: a stuck host whose backlog is full would block all openings of this user.
        connection.setblocking(False)
        try:
            connection.connect(os.fspath(path))
        except BlockingIOError:
            raise NotReadyError(
                f"the host process at {path} accepts no connection, and others wait for it already"
            ) from None
        connection.setblocking(True)
        check_peer(connection)
        on_failure.pop_all()
    return connection


def _open_socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # While a forked child of the app has a copy, the other side sees no end of file: a dead host
    # would seem to listen, and a dead client to be there.
    at_fork(opened, in_child=methodcaller("close"))
    return opened


def _is_bound(path: Path) -> bool:
    """Return whether a living process has the socket open. The process notices nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            # The wrong type of socket, and nothing else is wrong.
            if error.errno == errno.EPROTOTYPE:
                return True
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise
    return False


def _sweep(directory: Path, key: HostKey) -> None:
    """Remove the files of dead hosts, this key's too; warn if others of its scope live."""
    differences: set[str] = set()
    for path in directory.glob("*.sock"):
        if not _is_bound(path):
            _remove(path)
        elif path.name.startswith(f"{key.scope}-"):
            differences.update(list_differences(key.facets, _read_facets(path)))
    if differences == {MODULE_FILE}:
        logger.warning(
            "%s: %s has changed since the host process loaded it; server processes that open from "
            "now on share a new host process",
            *(key.name, MODULE_FILE),
        )
    elif differences:
        remedies = [
            text
            for starts, text in _REMEDIES.items()
            if any(name.startswith(starts) for name in differences)
        ]
        logger.warning(
            "%s: these server processes have another host process already, which this process "
            "cannot share: they differ in %s. One more host process is started, with workers of "
            "its own. To share one, %s",
            *(key.name, ", ".join(sorted(differences)), "; ".join(["make these equal", *remedies])),
        )


def _read_facets(path: Path) -> dict[str, str]:
    """Return the facets of a host's key; none if its starter was killed before it wrote them."""
    with contextlib.suppress(OSError, ValueError):
        facets: dict[str, str] = json.loads(_facets_of(path).read_text(encoding="utf-8"))
        return facets
    return {}


def _read_record(path: Path) -> ProcessIdentity | None:
    """Return the identity of the host; None if the host has not begun to accept."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return ProcessIdentity(*json.loads(_record_of(path).read_text(encoding="utf-8")))
    return None


def _remove(path: Path) -> None:
    for file in (path, _record_of(path), _facets_of(path)):
        file.unlink(missing_ok=True)


def _record_of(path: Path) -> Path:
    return path.with_suffix(".host")


def _facets_of(path: Path) -> Path:
    return path.with_suffix(".key")
