"""Servers in processes of their own, models that wait at a gate, and clients that go away."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from paths import SUPPORT
from waits import LIMIT


class Gate:
    """A gate at which a model waits for the test; the input or argument is the gate's port."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT)
        self._visitors: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def wait_for_visitor(self) -> None:
        visitor, _ = self._listener.accept()
        self._visitors.append(visitor)

    def let_on(self) -> None:
        self._visitors[-1].sendall(b".")

    def close(self) -> None:
        for end in (self._listener, *self._visitors):
            end.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


def get(url: str, **options: Any) -> httpx2.Response:
    """Get a page of a server of this machine, as `httpx2.get`."""
    return _ask("GET", url, **options)


def post(url: str, **options: Any) -> httpx2.Response:
    """Post to a server of this machine, as `httpx2.post`."""
    return _ask("POST", url, **options)


def _ask(method: str, url: str, **options: Any) -> httpx2.Response:
    # For each call httpx2 would read the certificates of all authorities, which takes 25 ms.
    return httpx2.request(method, url, timeout=LIMIT, verify=False, **options)


class Server:
    """A uvicorn in a process of its own; both its streams can be read line by line.

    Args:
        app: What it serves, as "module:name" below `tests/support`.
        options: More of its command line.
        folder: Where the module is, if not here.
        command: Another server, with its whole command line: a module, or the path of a script.
        python: The interpreter; another one than that of these tests sees no path of theirs.
        settings: More of its environment.
    """

    def __init__(
        self,
        app: str,
        *options: str,
        folder: Path | None = None,
        command: Sequence[str] = (),
        python: str = sys.executable,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT), **(settings or {})}
        if python != sys.executable:
            environment = {}
        if folder is not None:
            options = (*options, "--app-dir", str(folder))
        command = command or uvicorn_command(app, *options)[2:]
        self.process = subprocess.Popen(
            [python, *([] if os.path.isabs(command[0]) else ["-m"]), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            # A group of its own, that a signal can be sent to.
            start_new_session=True,
        )
        self.output = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        with self._killed_after_limit():
            for line in self.process.stdout:
                self.output += line
                if match := re.search(pattern, line):
                    return match
        raise AssertionError(f"the server ended without a line like {pattern!r}:\n{self.output}")

    def wait_for_exit(self) -> int:
        assert self.process.stdout is not None
        with self._killed_after_limit():
            self.output += self.process.stdout.read()
            return self.process.wait()

    def url(self) -> str:
        """Address of the server, once it listens."""
        return str(self.wait_for(r"running on (http://[\d.:]+)")[1])

    def close(self) -> None:
        self._kill()
        self.process.communicate()

    def _kill(self) -> None:
        """Kill it with the processes that it has started, which write to the same pipe."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @contextmanager
    def _killed_after_limit(self) -> Iterator[None]:
        """Guard one wait: a server may live as long as the tests that share it."""
        was_late = threading.Event()

        def kill() -> None:
            was_late.set()
            self._kill()

        watchdog = threading.Timer(LIMIT, kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()
            assert not was_late.is_set(), f"killed after {LIMIT:g} seconds:\n{self.output}"


@contextmanager
def run_server(app: str, folder: Path, **options: Any) -> Iterator[str]:
    """Run an app as its reader would; on the way out it must end by itself, with its workers."""
    server = Server(app, "--no-access-log", folder=folder, **options)
    try:
        yield server.url()
        server.process.send_signal(signal.SIGTERM)
        # Its output ends when no worker holds the pipe any more. uvicorn ends with the signal
        # that it was sent, once it has shut down.
        assert server.wait_for_exit() in (0, -signal.SIGTERM), server.output
        assert "Application shutdown complete" in server.output
    finally:
        server.close()


def wait_until_listening(url: str) -> None:
    """Wait for a process of uvicorn that shares a socket: it listens after the start of its app."""
    address = urlsplit(url)
    assert address.hostname is not None
    deadline = monotonic() + LIMIT
    while monotonic() < deadline:
        with suppress(ConnectionRefusedError):
            socket.create_connection((address.hostname, address.port or 80), LIMIT).close()
            return
        os.sched_yield()
    raise AssertionError(f"nobody listens at {url}")


def find_free_port() -> int:
    """A port for a server that does not tell which one it has chosen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def uvicorn_command(app: str, *options: str) -> list[str]:
    where = ["--app-dir", str(SUPPORT), "--host", "127.0.0.1", "--port", "0", "--no-use-colors"]
    return [sys.executable, "-m", "uvicorn", app, *where, *options]


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(app: str, *options: str, **more: Any) -> Server:
        servers.append(Server(app, *options, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def post_and_stay(url: str, path: str, gate: int) -> socket.socket:
    """A client that has asked and does not read the answer."""
    address = urlsplit(url)
    assert address.port is not None
    client = socket.create_connection(("127.0.0.1", address.port), timeout=LIMIT)
    body = json.dumps({"gate": gate}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return client


def ask_until(url: str, **wanted: int) -> dict[str, int]:
    """Ask for the app's counts until they are as wanted; nothing tells when they are."""
    deadline = monotonic() + LIMIT
    while True:
        stats: dict[str, int] = get(f"{url}/stats").json()
        if {name: stats[name] for name in wanted} == wanted:
            return stats
        assert monotonic() < deadline, stats
