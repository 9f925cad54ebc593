"""Processes find or start one host; real processes, hosts of `tiny_host`."""

import errno
import fcntl
import json
import logging
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forks import fork, status_of
from marks import long
from paths import PYTHONPATH
from tiny_host import EARLY, LATE, ask, launch, open_host
from waits import LIMIT

from fast_batcher._host import directory as directories
from fast_batcher._host import rendezvous
from fast_batcher._host.directory import identify_socket, open_directory
from fast_batcher._host.identity import HostKey, make_key
from fast_batcher._host.launch import HostProcess, launch_host
from fast_batcher._host.rendezvous import (
    announce,
    check_peer,
    connect,
    has_rival,
    replace_silent,
    retire,
)
from fast_batcher.errors import ConfigurationError, NotReadyError, WorkerStartupError

SERVE = partial(launch, "serve")


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of sockets, with a path that is short enough; hosts are killed at the end."""
    runtime = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    yield Path(runtime, "fast_batcher")
    for pid in pids_of("host", runtime):
        with suppress(OSError):  # it is dead
            if b"tiny_host" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(runtime)


@pytest.fixture
def key() -> HostKey:
    return make_key(True, {}, None, "Tiny")


def pids_of(note: str, runtime: str | Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in Path(runtime).rglob(f"{note}-*")]


def start(
    key: HostKey, launch: Callable[[socket.socket], HostProcess] = SERVE
) -> tuple[socket.socket, HostProcess]:
    connection, process, *_ = connect(key, launch)
    assert process is not None
    return connection, process


def end(connection: socket.socket, process: HostProcess | None) -> None:
    """Forget the host; kill it if this process has started it."""
    connection.close()
    if process is not None:
        os.kill(process.pid, signal.SIGKILL)
        process.reap()
        process.close()


class Opener:
    """A child process that opens the host when it is told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import tiny_host; tiny_host.run_opener()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT)[0], "it does not answer"
        return json.loads(self.process.stdout.readline())

    def finish(self) -> None:
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def openers(directory: Path) -> Iterator[Callable[[int], list[Opener]]]:
    """Starts openers, and returns when all are ready."""
    started: list[Opener] = []

    def start(count: int) -> list[Opener]:
        started.extend(Opener() for _ in range(count))
        assert {one.hear() for one in started} == {"started"}
        return started

    yield start
    for one in started:
        one.finish()


# --- one host -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_open_at_once_get_one_host(
    openers: Callable[[int], list[Opener]], directory: Path
) -> None:
    started = openers(12)
    for one in started:
        one.tell("close")
    (pid,) = {one.hear() for one in started}
    assert pids_of("host", directory) == [pid]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *long(1)])
def test_clients_get_answers_while_hosts_are_killed(
    openers: Callable[[int], list[Opener]], directory: Path, key: HostKey, seed: int
) -> None:
    """40 openings by five processes; 8 hosts are killed, and some are ended by their clients."""
    chance = random.Random(seed)
    kills = set(chance.sample(range(2, 40), 8))
    started = openers(5)
    waiting: list[Opener] = []
    killed = 0
    for opening in range(40):
        if len(waiting) == len(started):
            one = waiting.pop(chance.randrange(len(waiting)))
            assert one.hear() > 0
        one = chance.choice([one for one in started if one not in waiting])
        one.tell("end" if chance.random() < 0.2 else "close")
        waiting.append(one)
        if opening in kills:
            # Opened here, too, so that there is a host to kill.
            connection, process, pid = open_host(key)
            (directory / f"killed-{pid}").touch()
            with suppress(ProcessLookupError):  # another client has ended it
                os.kill(pid, signal.SIGKILL)
                killed += 1
            end(connection, process)
    assert all(one.hear() > 0 for one in waiting)
    assert killed > 0
    assert list(directory.glob("two-*")) == []


@pytest.mark.slow
def test_clients_elect_again_if_host_dies_early(
    directory: Path, key: HostKey, openers: Callable[[int], list[Opener]]
) -> None:
    started = openers(3)
    asleep = start(key, partial(launch, "sleep"))
    for one in started:
        one.tell("close")
    waiting = connect(key, SERVE)
    assert waiting.process is None
    end(*asleep)
    assert ask(waiting.connection) is None
    waiting.connection.close()
    (pid,) = {one.hear() for one in started}
    assert pids_of("host", directory) == [pid]


@pytest.mark.slow
def test_starter_killed_before_launch_is_replaced(directory: Path, key: HostKey) -> None:
    """The child has neither the lock nor the socket, which would seem to be a host's."""
    program = (
        "import os, signal\n"
        "from fast_batcher._host.identity import HostKey\n"
        "from fast_batcher._host.rendezvous import connect\n"
        "def die(listener):\n"
        "    if os.fork() == 0:\n"
        "        os.write(1, b'x')\n"
        "        os._exit(len(os.read(0, 1)))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"connect({key!r}, die)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    assert starter.stdout.read(1) == b"x"
    assert starter.wait(LIMIT) == -signal.SIGKILL
    assert (directory / key.file_name).is_socket()
    connection, process = start(key)
    assert ask(connection) == process.pid
    end(connection, process)
    starter.communicate(timeout=LIMIT)


@pytest.mark.slow
def test_retiring_host_holds_the_lock_until_exit(directory: Path, key: HostKey) -> None:
    connection, process = start(key, partial(launch, "retire"))
    assert connection.recv(1) == b"r"
    assert [path.name for path in directory.glob("*.sock")] == []
    with open(directory / "lock") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end(connection, process)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_last_client_ends_host_and_removes_socket(directory: Path, key: HostKey) -> None:
    connection, process = start(key)
    connection.sendall(b"end")
    assert process.reap() == "exit code 0"
    assert [path.name for path in directory.glob("*.sock")] == []
    connection.close()
    process.close()


@pytest.mark.slow
def test_rendezvous_leaves_nothing_open(directory: Path, key: HostKey) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    connection, process = start(key)
    second, no_process, *_ = connect(key, SERVE)
    assert not connection.get_inheritable()
    assert not second.get_inheritable()
    assert ask(connection) == process.pid
    for path in Path(f"/proc/{process.pid}/fdinfo").iterdir():
        flags = int(path.read_text().split("flags:")[1].split()[0], 8)
        assert bool(flags & os.O_CLOEXEC) is (int(path.name) > 2), path
    end(second, no_process)
    end(connection, process)
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- a host that cannot be had --------------------------------------------------------------------


def test_a_failed_launch_leaves_no_socket(directory: Path, key: HostKey) -> None:
    def fail(listener: socket.socket) -> HostProcess:
        raise OSError(errno.EAGAIN, "no more processes")

    for _ in range(2):
        with pytest.raises(OSError, match="no more processes"):
            connect(key, fail)
        assert [path.name for path in directory.iterdir()] == ["lock"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "module", "text"),
    [
        (["3"], "tiny_host", f"exit code 3; its output:\n{EARLY}"),
        (["-9"], "tiny_host", "exit code 247"),
        ([], "no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_early_host_death_reports_its_reason(
    directory: Path, key: HostKey, arguments: list[str], module: str, text: str
) -> None:
    connection, process = start(key, partial(launch_host, arguments=arguments, module=module))
    assert ask(connection) is None
    error = process.make_startup_error()
    assert isinstance(error, WorkerStartupError)
    assert text in str(error)
    connection.close()
    process.close()


@pytest.mark.slow
def test_exit_of_host_is_described_by_signal(directory: Path, key: HostKey) -> None:
    for is_reaped, text in [(False, "signal 9 (SIGKILL"), (True, "unknown exit status")]:
        connection, process = start(key, partial(launch, "sleep"))
        os.kill(process.pid, signal.SIGKILL)
        if is_reaped:
            os.waitpid(process.pid, 0)
        assert text in str(process.make_startup_error())
        connection.close()
        process.close()


@pytest.mark.slow
def test_host_writes_to_file_until_welcome(
    directory: Path, key: HostKey, capfd: pytest.CaptureFixture[str]
) -> None:
    connection, process = start(key)
    assert ask(connection) == process.pid
    connection.sendall(b"end")
    assert process.reap() == "exit code 0"
    assert process.read_output() == f"{EARLY}\n"
    connection.close()
    process.close()
    assert capfd.readouterr() == ("", f"{LATE}\n")


@pytest.mark.slow
def test_a_starter_without_standard_streams_has_a_host(directory: Path, key: HostKey) -> None:
    program = (
        "import os, signal\n"
        "os.closerange(0, 3)\n"
        "from tiny_host import open_host\n"
        "from fast_batcher._host.identity import make_key\n"
        "connection, process, pid = open_host(make_key('name', {}, None, 'Tiny'))\n"
        "os.kill(pid, signal.SIGKILL)\n"
        "assert 'SIGKILL' in process.reap()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=LIMIT)
    assert done.returncode == 0


@pytest.mark.slow
def test_host_uses_library_of_its_starter(
    directory: Path, key: HostKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although PYTHONPATH does not name it, and files there have names of Python's modules."""
    (tmp_path / "logging.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    connection, process = start(key)
    assert ask(connection) == process.pid
    end(connection, process)


def test_full_backlog_of_hanging_host_is_an_error(
    directory: Path, key: HostKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "BACKLOG", 0)
    kept: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        kept.append(listener.dup())

    kept.append(connect(key, keep).connection)
    with pytest.raises(NotReadyError, match="accepts no connection"):
        connect(key, keep)
    for one in kept:
        one.close()


# --- locks and sockets of others ------------------------------------------------------------------


def test_the_wait_for_the_lock_has_a_limit(directory: Path, key: HostKey) -> None:
    with open(open_directory() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"holds the lock {lock.name}.*fuser"):
            connect(key, SERVE, 0.0)


def test_the_wait_for_the_lock_can_be_cancelled(directory: Path, key: HostKey) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with open(open_directory() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            connect(key, SERVE, LIMIT, cancelled)


def test_replaced_host_keeps_socket_of_next_host(directory: Path, key: HostKey) -> None:
    path = directory / key.file_name
    listeners: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        listeners.append(listener.dup())

    first = connect(key, keep)
    assert first.socket_id is not None
    assert announce(listeners[0], first.socket_id)
    (directory / key.file_name).with_suffix(".host").unlink()  # it names this process
    replace_silent(key, first, LIMIT, threading.Event())
    assert not path.exists()
    second = connect(key, keep)
    assert not second.has_begun
    assert not announce(listeners[0], first.socket_id)
    retire(listeners[0], first.socket_id)
    rendezvous._locks_of_retired.pop().close()
    replace_silent(key, first, LIMIT, threading.Event())
    assert identify_socket(path) == second.socket_id
    for one in [first.connection, second.connection, *listeners]:
        one.close()


def test_answering_host_is_not_replaced(directory: Path, key: HostKey) -> None:
    listeners: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        listeners.append(listener.dup())

    joined = connect(key, keep)
    accepted, _ = listeners[0].accept()
    accepted.sendall(b"x")
    replace_silent(key, joined, LIMIT, threading.Event())
    assert (directory / key.file_name).exists()
    for one in (joined.connection, accepted, listeners[0]):
        one.close()


# --- siblings that differ -------------------------------------------------------------------------


def test_differing_siblings_cause_one_warning(
    directory: Path, key: HostKey, caplog: pytest.LogCaptureFixture
) -> None:
    """And none for a host that is dead, or of another scope; a dead one's socket is removed."""
    listeners: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        listeners.append(listener.dup())

    others = [
        make_key(True, {}, None, "Other model"),
        make_key("name", {}, None, "Tiny"),
        make_key(True, {"max_delay": "dead"}, None, "Tiny"),
    ]
    connections = [connect(one, keep).connection for one in others]
    listeners.pop().close()
    with caplog.at_level(logging.WARNING):
        connections += [connect(key, keep).connection for _ in range(2)]
        assert caplog.messages == []
        assert not (directory / others[2].file_name).exists()
        changed = make_key(True, {"max_delay": "changed"}, None, "Tiny")
        connections += [connect(changed, keep).connection for _ in range(2)]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("Tiny: ")
    assert "they differ in max_delay." in caplog.messages[0]
    assert caplog.messages[0].endswith("make these equal")
    for one in [*listeners, *connections]:
        one.close()


@pytest.mark.usefixtures("directory")
def test_a_variable_that_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        listeners.append(listener.dup())

    connections = []
    for value in ("1", "2"):
        monkeypatch.setenv("OF_AN_UNKNOWN_MANAGER", value)
        connections.append(connect(make_key(True, {}, None, "Tiny"), keep).connection)
    assert "differ in the environment variable OF_AN_UNKNOWN_MANAGER." in caplog.messages[0]
    # What it advises helps.
    assert "os.environ.pop(...) removes a variable" in caplog.messages[0]
    monkeypatch.delenv("OF_AN_UNKNOWN_MANAGER")
    connections += [connect(make_key(True, {}, None, "Tiny"), keep).connection for _ in range(2)]
    assert len(listeners) == 3
    for one in [*listeners, *connections]:
        one.close()


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("facet", ["the model", "model_args[0]", "model_kwargs['path']"])
def test_names_are_advised_for_batchers_of_different_models(
    facet: str, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        listeners.append(listener.dup())

    keys = [make_key(True, {facet: value}, None, "Tiny") for value in ("1", "2")]
    connections = [connect(one, keep).connection for one in keys]
    assert f"they differ in {facet}." in caplog.messages[0]
    assert caplog.messages[0].endswith("need different names (name=)")
    for one in [*listeners, *connections]:
        one.close()


@pytest.mark.usefixtures("directory")
def test_a_name_is_advised_for_other_command_lines(
    key: HostKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[socket.socket] = []

    def keep(listener: socket.socket) -> Any:
        listeners.append(listener.dup())

    connections = [connect(key, keep).connection]
    monkeypatch.setattr(sys, "argv", ["app", "--port", "8001"])
    connections.append(connect(make_key(True, {}, None, "Tiny"), keep).connection)
    assert "they differ in the command line." in caplog.messages[0]
    assert 'shared="a name of your choice"' in caplog.messages[0]
    for one in [*listeners, *connections]:
        one.close()


# --- the directory --------------------------------------------------------------------------------


def make_link(path: Path) -> None:
    path.parent.joinpath("real").mkdir(mode=0o700)
    path.symlink_to("real")


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def make_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make it")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (make_link, "is a link or a file"),
        (Path.touch, "is a link or a file"),
        (make_open, "has mode 0750"),
        (make_foreign, "belongs to user 12345"),
    ],
)
def test_directory_of_other_users_is_rejected(
    directory: Path, key: HostKey, make: Callable[[Path], None], fault: str
) -> None:
    make(directory)
    with pytest.raises(ConfigurationError, match=fault) as caught:
        connect(key, SERVE)
    assert str(directory) in str(caught.value)
    assert "set XDG_RUNTIME_DIR" in str(caught.value)


def test_the_directory_is_private_whatever_the_umask(directory: Path) -> None:
    before = os.umask(0)
    try:
        assert open_directory() == directory
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("runtime", ["", "relative", "/no/such/directory"])
def test_temporary_directory_replaces_missing_runtime_directory(
    directory: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(tempfile, "tempdir", str(directory.parent))
    assert open_directory() == directory.parent / f"fast_batcher-{os.geteuid()}"


def test_invalid_socket_paths_are_reported(
    directory: Path, key: HostKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = directory.parent / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ConfigurationError, match=f"more than the {directories.MAX_PATH_BYTES}"):
        connect(key, SERVE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/directory")
    with pytest.raises(ConfigurationError, match="can be made"):
        connect(key, SERVE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.slow
def test_each_side_refuses_a_peer_of_another_user(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listening, tell_listening = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind(path)

        def refuse() -> int:
            os.setuid(12345)
            listener.listen()
            os.write(tell_listening, b"x")
            try:
                check_peer(listener.accept()[0])
            except PermissionError:
                return 7
            return 0

        child = fork(refuse)
        os.close(tell_listening)
        assert os.read(listening, 1) == b"x"
        connection.connect(path)
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            check_peer(connection)
        assert status_of(child) == 7
    os.close(listening)


def test_only_a_living_host_of_the_same_scope_is_a_rival(tmp_path: Path) -> None:
    with ExitStack() as at_end:
        first, second, other = (
            at_end.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
        )
        first.bind(str(tmp_path / "a-1.sock"))
        other.bind(str(tmp_path / "b-1.sock"))
        assert not has_rival(first)
        second.bind(str(tmp_path / "a-2.sock"))
        assert has_rival(first)
        second.close()
        assert not has_rival(first)
        first.close()
        assert not has_rival(first)
