"""The way of server processes to the host of a key, which exists once. Any thread.

    under the directory's lock:
        connect to the key's socket     -> the host lives, or another process starts it just now
        if no process listens there:
            unlink, bind, listen, connect
            launch the host, which inherits the listener

A starter that is killed leaves a socket without a listener, and the next process replaces it.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable
from io import FileIO
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from fast_batcher._fork import at_fork
from fast_batcher._host.directory import check_length, locked, open_directory, take_lock
from fast_batcher._host.identity import HostKey, list_differences
from fast_batcher._host.launch import HostProcess
from fast_batcher._transport.descriptors import occupy_stdio
from fast_batcher.errors import NotReadyError

logger = logging.getLogger("fast_batcher")

# Connections that the host has not accepted yet: more than the processes of any server. Systems
# may allow less, Linux 4096.
BACKLOG = 1024

_locks_of_retired: list[FileIO] = []


class Joined(NamedTuple):
    """A connection to a host, which may not have accepted it yet."""

    connection: socket.socket
    # The host if this process has started it.
    process: HostProcess | None


def connect(key: HostKey, launch: Callable[[socket.socket], HostProcess]) -> Joined:
    """Connect to the host of a key; start a missing host. Blocks for the lock alone.

    The connection reads an end of file or a reset before its first byte if the host dies, or ends,
    before it accepts. Then call this again, unless this process has started the host: that failed.

    Args:
        key: The key of the host.
        launch: Starts the host with the listening socket.

    Raises:
        ConfigurationError: No private directory for the socket can be had.
        NotReadyError: The host does not accept, and `BACKLOG` others wait for it.
        OSError: The host cannot be started, or the system has no room for a socket.
    """
    occupy_stdio()
    directory = open_directory()
    path = directory / key.file_name
    check_length(path)
    with locked(directory):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return Joined(_dial(path), None)
        _sweep(directory, key)
        return _start(path, key, launch)


def check_peer(connection: socket.socket) -> None:
    """Check that the process at the other end is this user's. Both sides.

    Systems other than Linux do not tell; there the directory's permissions alone keep others out.

    Raises:
        PermissionError: It belongs to another user.
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


def retire(listener: socket.socket) -> None:
    """Remove the host's socket. Host process, its last act: end the process at once.

    The process holds the lock until it is dead, so that no other host starts before. Do not close
    the listener: whoever waits in its backlog then finds no host, and starts the next one.
    """
    path = Path(listener.getsockname())
    _locks_of_retired.append(take_lock(path.parent))
    _remove(path)


def withdraw(listener: socket.socket) -> None:
    """Remove the host's socket and close the listener. Host process, which goes on.

    Whoever waits in the backlog reads an end of file, and finds no host, or the next one.
    """
    path = Path(listener.getsockname())
    with locked(path.parent):
        _remove(path)
    listener.close()


def _start(path: Path, key: HostKey, launch: Callable[[socket.socket], HostProcess]) -> Joined:
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(_remove, path)
        # For processes with other keys.
        _facets_of(path).write_text(json.dumps(dict(key.facets)))
        with _open_socket() as listener:
            listener.bind(os.fspath(path))
            listener.listen(BACKLOG)
            # Before the launch: a host that dies at once resets the connection.
            connection = on_failure.enter_context(_dial(path))
            process = launch(listener)
        on_failure.pop_all()
    return Joined(connection, process)


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
    if differences:
        logger.warning(
            "%s: these server processes have another host process already, which this process "
            "cannot share: they differ in %s. One more host process is started, with workers of "
            "its own. To share one, make these equal",
            key.name,
            ", ".join(sorted(differences)),
        )


def _read_facets(path: Path) -> dict[str, str]:
    """Return the facets of a host's key; none if its starter was killed before it wrote them."""
    with contextlib.suppress(OSError, ValueError):
        facets: dict[str, str] = json.loads(_facets_of(path).read_text())
        return facets
    return {}


def _remove(path: Path) -> None:
    """Remove a host's socket and the facets of its key."""
    path.unlink(missing_ok=True)
    _facets_of(path).unlink(missing_ok=True)


def _facets_of(path: Path) -> Path:
    return path.with_suffix(".json")
