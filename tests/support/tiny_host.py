"""A host process that answers each line with its pid, and programs that open it.

    host    `main`; notes in its directory when it starts, and whether another lives
    opener  `run_opener`: opens the host as often as it is told

The first argument of a host says what it does: "serve"; "sleep", which never accepts; "retire",
which retires with its first client and does not end; or an exit code, with which it ends at once.
"""

import fcntl
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fast_batcher._host.identity import HostKey, make_key
from fast_batcher._host.launch import HostProcess, launch_host
from fast_batcher._host.main import Inherited
from fast_batcher._host.rendezvous import check_peer, connect, retire

# What a host writes before its first welcome, and after it.
EARLY, LATE = "written before the welcome", "written after the welcome"


# --- the host -------------------------------------------------------------------------------------


def main() -> None:
    inherited = Inherited(sys.argv[1:])
    mode = sys.argv[1 + Inherited.COUNT]
    os.write(2, f"{EARLY}\n".encode())
    if mode == "sleep":
        signal.pause()
    if mode == "retire":
        connection, _ = inherited.listener.accept()
        retire(inherited.listener, inherited.socket_id)
        connection.sendall(b"r")
        signal.pause()
    if mode != "serve":
        sys.exit(int(mode))
    _serve(inherited, _claim(inherited.listener))


def _note(listener: socket.socket, name: str) -> None:
    path = Path(listener.getsockname())
    (path.parent / name).touch()


def _claim(listener: socket.socket) -> int:
    """Lock a file while this host lives; note if another one does.

    A host that was killed may take a moment to be dead.
    """
    _note(listener, f"host-{os.getpid()}")
    path = Path(listener.getsockname()).with_suffix(".claim")
    claim = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(claim, 20, 0).decode().strip()
        if not (path.parent / f"killed-{other}").exists():
            _note(listener, f"two-{other}-{os.getpid()}")
        fcntl.flock(claim, fcntl.LOCK_EX)
    os.pwrite(claim, f"{os.getpid():20}".encode(), 0)
    return claim


def _serve(inherited: Inherited, claim: int) -> None:
    """Answer lines: "ask" with the pid, "end" with the end of the host."""
    is_released = False
    with selectors.DefaultSelector() as selector:
        selector.register(inherited.listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is inherited.listener:
                    client, _ = connection.accept()
                    check_peer(client)
                    selector.register(client, selectors.EVENT_READ)
                    continue
                line = _receive(connection)
                if line == b"end":
                    retire(inherited.listener, inherited.socket_id)
                    os.close(claim)
                    os._exit(0)
                if not line:
                    selector.unregister(connection)
                    connection.close()
                    continue
                if not is_released:
                    is_released = True
                    inherited.release_output()
                    os.write(1, f"{LATE}\n".encode())
                with suppress(BrokenPipeError):
                    connection.sendall(f"{os.getpid()}".encode())


# --- who opens it ---------------------------------------------------------------------------------


def _receive(connection: socket.socket) -> bytes:
    with suppress(ConnectionResetError):
        return connection.recv(100)
    return b""


def launch(mode: str, listener: socket.socket) -> HostProcess:
    return launch_host(listener, [mode], module="tiny_host")


def ask(connection: socket.socket) -> int | None:
    """The pid of the host; None if it is dead."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(b"ask")
        return int(connection.recv(100) or 0) or None
    return None


def open_host(key: HostKey, mode: str = "serve") -> tuple[socket.socket, HostProcess | None, int]:
    """Connect until a host answers; its pid. A host that this process has started may be killed."""
    while True:
        connection, process, *_ = connect(key, partial(launch, mode))
        pid = ask(connection)
        if pid is not None:
            return connection, process, pid
        connection.close()
        if process is not None:
            process.reap()
            process.close()


def tell(thing: Any) -> None:
    # One write, so that what two processes tell does not mix.
    os.write(1, (json.dumps(thing) + "\n").encode())


def run_opener() -> None:
    """Open the host at each line of stdin, and tell its pid; the line says how to close it."""
    key = make_key(True, {}, None, "Tiny")
    tell("started")
    for line in sys.stdin:
        connection, process, pid = open_host(key)
        if line.strip() == "end":
            with suppress(BrokenPipeError):
                connection.sendall(b"end")
            # Its end: of a host or of the connection.
            _receive(connection)
        connection.close()
        if process is not None:
            process.close()
        tell(pid)
