"""Processes die, stop and leave while a host serves them; real hosts, clients and models."""

import asyncio
import fcntl
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from models.sharing import Shared
from programs import PREAMBLE, Program, program
from shared_hosts import Hosts, hosts, join_reapers
from waits import LIMIT, SOON, Gate, Watch, call, measured, outcome, turns, until

from fast_batcher import (
    BatcherClosedError,
    DeadlineExceededError,
    DynBatcher,
    NotReadyError,
    PoisonRequestError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher._core.host import LINGER
from fast_batcher._host.client import RemoteOpening
from fast_batcher._host.directory import open_directory
from fast_batcher._host.launch import launch_host
from fast_batcher._host.rendezvous import connect

__all__ = ["hosts", "program"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
Batcher = DynBatcher[Any, Any]
Start = Callable[..., Program]


@pytest.fixture(autouse=True)
def _reapers_end() -> Iterator[None]:
    """A host that was killed, or left to others, is reaped when it is dead."""
    yield
    join_reapers()


@pytest.fixture
def make(hosts: Hosts, gate: Gate) -> Callable[..., Batcher]:
    """Makes batchers of one key, unless they have different settings."""

    def make(*, holds_load: bool = False, **settings: Any) -> Batcher:
        # Opened by the test alone, also if it is made while a loop runs.
        settings = {"restart_backoff": 0.01, "shared": "test", "auto_open": False, **settings}
        more = {"holds_load": holds_load}
        arguments = (str(hosts.notes), gate.path)
        return DynBatcher(Shared, model_args=arguments, model_kwargs=more, **settings)

    return make


def client(hosts: Hosts, gate: Gate, code: str) -> str:
    """A program with a batcher of the key of `make`, or of other siblings of this process."""
    return f"""
import warnings
sys.path[:] = {sys.path!r}
from models.sharing import Shared
def make(shared="test", **settings):
    settings = dict(restart_backoff=0.01, shared=shared, **settings)
    arguments = ({str(hosts.notes)!r}, {gate.path!r})
    more = dict(holds_load=False)
    return DynBatcher(Shared, model_args=arguments, model_kwargs=more, **settings)
async def main():
{code}
asyncio.run(main())
"""


WAITS = """
    async with make() as batcher:
        tell(await batcher.process_batched("host"))
        await asyncio.Event().wait()
"""


FORGETS = """
    global batcher
    batcher, wait = make(), False
    tell(await batcher.process_batched("host"))
    is_open.set()
    if wait:
        await asyncio.Event().wait()
"""


def link_of(batcher: Batcher) -> Any:
    assert isinstance(batcher._opening, RemoteOpening)
    return batcher._opening._link


async def host_of(batcher: Batcher) -> int:
    pid: int = await batcher.process_batched("host")
    return pid


def kill(program: Program) -> None:
    """Kill it, and wait until it is dead; its output may go on, because the host has it, too."""
    with Watch([program.pid]) as watch:
        program.kill()
        assert watch.survivors(LIMIT) == []


# --- the host is killed ---------------------------------------------------------------------------


async def test_a_host_killed_while_idle_is_replaced(
    make: Callable[..., Batcher], hosts: Hosts
) -> None:
    async with make() as batcher:
        host = await host_of(batcher)
        hosts.kill(host)
        with measured(0.5, "a call after the death of a host, with the load of its model"):
            assert await batcher.process_batched(4) == 8
        assert await host_of(batcher) != host


async def test_requests_of_killed_host_are_retried(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    """And two clients of one host never get each other's answers."""
    async with make(max_batch_size=1) as batcher, make(max_batch_size=1) as other:
        held = call(batcher, "hold")
        first = await gate.visit()
        behind = [call(one, number) for number in range(20) for one in (batcher, other)]
        hosts.kill(hosts.hosts()[0])
        second = await gate.visit()
        assert first.pid != second.pid
        second.let_on()
        assert await outcome(held) == "hold"
        answers = [await outcome(one) for one in behind]
        assert answers == [2 * number for number in range(20) for _ in "ab"]
        assert hosts.loads() == 2


async def test_request_is_poison_after_two_host_deaths(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    async with make() as batcher:
        poison = call(batcher, "hold")
        await gate.visit()
        hosts.kill(link_of(batcher).pid)
        await gate.visit()
        # The batcher counts the death of a host that, as far as it knows, has workers.
        await until(lambda: batcher.is_ready)
        late = call(batcher, 7)
        await turns()
        hosts.kill(link_of(batcher).pid)
        assert isinstance(await outcome(poison), PoisonRequestError)
        assert await outcome(late) == 14


async def test_non_idempotent_requests_die_with_host(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    async with make(idempotent=False) as batcher:
        lost = call(batcher, "hold")
        await gate.visit()
        with measured(0.01, "the death of a host is known"):
            hosts.kill(link_of(batcher).pid)
            assert isinstance(await outcome(lost), WorkerLostError)
        assert await batcher.process_batched(1) == 2


async def test_host_killed_during_load_is_replaced(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    batcher = make(holds_load=True)
    opening = asyncio.create_task(batcher.open())
    await gate.visit()
    waiting = call(batcher, 3)
    hosts.kill(hosts.hosts()[0])
    (await gate.visit()).let_on()
    await opening
    assert await outcome(waiting) == 6
    await batcher.aclose()


async def test_cancelled_close_does_not_wait_for_the_host(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fast_batcher._host.client.END_GRACE", LIMIT)
    batcher = make(stop_timeout=LIMIT)
    await batcher.open()
    held = call(batcher, "hold")
    visit = await gate.visit()
    closing = asyncio.create_task(batcher.aclose())
    await turns()
    closing.cancel()
    assert isinstance(await outcome(held), BatcherClosedError)
    with Watch([*hosts.hosts(), visit.pid]) as watch:
        assert len(watch.survivors(0.0)) == 2, "the worker computes"
        visit.let_on()
        assert watch.survivors(LINGER / 2) == []


@pytest.mark.parametrize("place", ["main thread", "daemon thread"])
def test_a_program_that_forgets_to_close_ends_its_host(
    hosts: Hosts, gate: Gate, program: Start, place: str
) -> None:
    code = FORGETS.replace("wait = False", f"wait = {place == 'daemon thread'}")
    if place == "daemon thread":
        run = "threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()"
        code = client(hosts, gate, code).replace("asyncio.run(main())", f"{run}; is_open.wait()")
    else:
        code = client(hosts, gate, code)
    running = program(f"is_open = threading.Event()\n{code}")
    with Watch([running.tells()]) as watch:
        assert watch.survivors(LINGER / 2) == []
    assert running.finish()[0] == 0


async def test_closing_client_returns_if_host_is_killed(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    batcher = make(drain_timeout=0.0, stop_timeout=LIMIT)
    await batcher.open()
    held = call(batcher, "hold")
    await gate.visit()
    closing = asyncio.create_task(batcher.aclose())
    assert isinstance(await outcome(held), BatcherClosedError)
    hosts.kill(hosts.hosts()[0])
    await closing
    # Its socket is there until the next start of a host.
    async with make():
        pass


async def test_given_up_host_fails_calls_and_recovers(
    make: Callable[..., Batcher], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make(max_restarts=0, restart_window=SOON) as batcher:
        assert await batcher.process_batched(1) == 2
        # No interpreter starts with it.
        monkeypatch.setenv("PYTHONHASHSEED", "none")
        hosts.kill(link_of(batcher).pid)
        error = await outcome(call(batcher, 1))
        assert isinstance(error, NotReadyError)
        assert error.retry_after is not None
        assert error.retry_after > 0
        with pytest.raises(NotReadyError, match="max_restarts=0"):
            await batcher.process_batched(1)
        assert not batcher.is_ready
        monkeypatch.delenv("PYTHONHASHSEED")
        await until(lambda: batcher.is_ready)
        assert await batcher.process_batched(1) == 2


# --- the host does not start ----------------------------------------------------------------------


async def test_start_error_of_host_reaches_each_client(
    make: Callable[..., Batcher], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "none")
    batchers = [make() for _ in range(3)]
    for error in [await outcome(asyncio.create_task(one.open())) for one in batchers]:
        assert isinstance(error, WorkerStartupError)
        assert "ended before it was ready: exit code 1" in str(error)
        assert "PYTHONHASHSEED must be" in str(error)
    monkeypatch.delenv("PYTHONHASHSEED")
    async with batchers[0]:
        assert await batchers[0].process_batched(1) == 2


@pytest.fixture
def held_hosts(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Hosts) -> None:
    """Hosts wait at the gate before they accept."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'fast_batcher._host.main' in sys.orig_argv:\n"
        "    from models.base import pass_gate\n"
        f"    pass_gate({gate.path!r})\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.usefixtures("held_hosts")
async def test_host_killed_before_accepting_fails_its_starter(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    starter, other = make(), make()
    starting = asyncio.create_task(starter.open())
    visit = await gate.visit()
    opening = asyncio.create_task(other.open())
    # One that vanishes before it is accepted.
    connect(link_of(starter)._key, launch_host).connection.close()
    os.kill(visit.pid, signal.SIGKILL)
    assert "signal 9 (SIGKILL" in str(await outcome(starting))
    (await gate.visit()).let_on()
    await opening
    assert await other.process_batched(1) == 2
    await other.aclose()


@pytest.mark.usefixtures("held_hosts")
async def test_client_lost_before_accept_affects_no_other(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate
) -> None:
    async with asyncio.TaskGroup() as tasks:
        batcher = make()
        opening = tasks.create_task(batcher.open())
        visit = await gate.visit()
        connect(link_of(batcher)._key, launch_host).connection.close()
        visit.let_on()
        await opening
        assert await batcher.process_batched(1) == 2
        await batcher.aclose()


@pytest.mark.usefixtures("held_hosts")
@pytest.mark.parametrize("way", ["aclose", "cancelled aclose", "stop"])
async def test_closing_before_host_accepts_ends_host(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, way: str
) -> None:
    batcher = make()
    opening = asyncio.create_task(batcher.open())
    visit = await gate.visit()
    with Watch([visit.pid]) as watch:
        if way == "aclose":
            closing = asyncio.create_task(batcher.aclose())
            assert isinstance(await outcome(opening), BatcherClosedError)
            visit.let_on()
            await closing
        elif way == "cancelled aclose":
            closing = asyncio.create_task(batcher.aclose())
            await turns()
            closing.cancel()
            assert isinstance(await outcome(opening), BatcherClosedError)
            visit.let_on()
        else:
            visit.let_on()
            batcher.stop()
            assert isinstance(await outcome(opening), BatcherClosedError)
        # It has been told, and does not wait for another process.
        assert watch.survivors(LINGER / 2 if way == "cancelled aclose" else 0.0) == []


@pytest.mark.usefixtures("held_hosts")
async def test_starter_kills_host_that_does_not_accept(
    make: Callable[..., Batcher], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = await outcome(asyncio.create_task(make(start_timeout=SOON).open()))
    assert isinstance(error, WorkerStartupError)
    assert f"start_timeout={SOON:g}" in str(error)
    with Watch(hosts.living()) as watch:
        assert watch.survivors(LIMIT) == []
    monkeypatch.delenv("PYTHONPATH")
    async with make():  # it removes the socket of the dead one
        pass


async def test_failed_load_reaches_every_client(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a waiting caller, too: nothing starts another host until it is opened again."""
    batchers: list[Batcher] = [
        DynBatcher("apps.models:BreaksOnLoad", shared="test") for _ in range(3)
    ]
    await batchers[0].open(wait_ready=False)
    for one in batchers[1:]:
        error = await outcome(asyncio.create_task(one.open()))
        assert "no weights at /models/tiny.bin" in str(error)
        assert "Traceback" in str(error.__cause__)
    await until(lambda: hosts.sockets() == [] and not link_of(batchers[0]).is_connected)
    assert batchers[0].state == "broken"
    assert "takes its place" not in caplog.text
    with pytest.raises(WorkerStartupError, match="no weights"):
        await batchers[0].open()
    for one in batchers:
        await one.aclose()


# --- the host, or a client, is stopped ------------------------------------------------------------


async def test_stopped_host_is_replaced(make: Callable[..., Batcher], hosts: Hosts) -> None:
    async with make() as batcher:
        host = await host_of(batcher)
        (hosts.notes / f"killed.{host}").touch()
        with Watch([host]) as watch:
            os.kill(host, signal.SIGSTOP)
            resent = call(batcher, 3)
            with measured(SOON + 0.1, "the deadline of a call to a stopped host"):
                error = await outcome(call(batcher, 1, timeout=SOON))
            assert isinstance(error, DeadlineExceededError)
            with measured(10.0, "a stopped host is killed"):
                await watch.until_dead()
        assert await outcome(resent) == 6


async def test_other_client_gets_logs_of_stopped_client(
    make: Callable[..., Batcher],
    hosts: Hosts,
    gate: Gate,
    program: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The host does not keep them for it without a bound."""
    stopped = program(client(hosts, gate, WAITS))
    host = stopped.tells()
    async with make() as batcher:
        os.kill(stopped.pid, signal.SIGSTOP)
        while "once" not in caplog.text:
            await asyncio.gather(*(batcher.process_batched("log") for _ in range(100)))
        assert await host_of(batcher) == host
        kill(stopped)
        assert await host_of(batcher) == host


async def test_a_stopped_host_without_clients_is_replaced(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, program: Start
) -> None:
    first = program(client(hosts, gate, WAITS))
    host = first.tells()
    kill(first)
    (hosts.notes / f"killed.{host}").touch()
    with Watch([host]) as watch:
        os.kill(host, signal.SIGSTOP)
        async with make() as batcher:
            assert watch.survivors(0.0) == []
            assert await host_of(batcher) != host


# Tells what it is told of its host, and whether its own process with the same pid lives on once the
# host has been taken for stuck.
NAMESPACE = """
    batcher = make()
    await batcher.open()
    pid = batcher._opening._link.pid
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(pid - 1))
    import subprocess
    innocent = subprocess.Popen(["sleep", "1000"])
    tell((pid, innocent.pid))
    while batcher._opening._link.is_connected:
        await asyncio.sleep(0.01)
    tell(innocent.poll())
    await asyncio.Event().wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")
async def test_no_process_of_another_namespace_is_killed(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, program: Start, tmp_path: Path
) -> None:
    """It has the pid of a stopped host in the namespace of the host."""
    starter = program(client(hosts, gate, WAITS))
    host = starter.tells()
    file = tmp_path / "other.py"
    file.write_text(PREAMBLE + client(hosts, gate, NAMESPACE))
    command = ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert json.loads(other.stdout.readline()) == [host, host]
        kill(starter)
        os.kill(host, signal.SIGSTOP)
        assert json.loads(other.stdout.readline()) is None
        other.kill()
    hosts.kill(host)
    async with make():  # it removes the socket of the dead one
        pass


# --- the lock, connections and descriptors --------------------------------------------------------


@pytest.fixture
def lock(hosts: Hosts) -> Iterator[int]:
    """The lock of the directory, which another process holds."""
    fd = os.open(open_directory() / "lock", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


async def test_an_opening_ends_although_another_holds_the_lock(
    make: Callable[..., Batcher], lock: int
) -> None:
    fcntl.flock(lock, fcntl.LOCK_EX)
    batcher = make(start_timeout=SOON)
    with pytest.raises(WorkerStartupError, match=f"start_timeout={SOON:g}.*holds the lock"):
        await batcher.open()
    await batcher.aclose()


def is_open_as(path: str, fd: str) -> bool:
    with suppress(FileNotFoundError):  # it has just been closed
        return os.readlink(f"/proc/self/fd/{fd}") == path
    return False


@pytest.mark.parametrize("way", ["aclose", "stop"])
async def test_batcher_closes_while_waiting_for_lock(
    make: Callable[..., Batcher], lock: int, way: str
) -> None:
    fcntl.flock(lock, fcntl.LOCK_EX)
    batcher = make()
    opening = asyncio.create_task(batcher.open())
    path = os.readlink(f"/proc/self/fd/{lock}")
    await until(lambda: sum(map(partial(is_open_as, path), os.listdir("/proc/self/fd"))) == 2)
    if way == "aclose":
        await batcher.aclose()
    else:
        batcher.stop()
    assert isinstance(await outcome(opening), BatcherClosedError)


async def test_last_client_ends_while_another_holds_lock(
    make: Callable[..., Batcher], hosts: Hosts, lock: int
) -> None:
    batcher = make()
    await batcher.open()
    with Watch([await host_of(batcher)]) as watch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        await batcher.aclose()
        await watch.until_dead()
    fcntl.flock(lock, fcntl.LOCK_UN)
    async with make():  # it removes the socket of the dead one
        pass


async def test_connection_without_hello_is_not_a_client(
    make: Callable[..., Batcher], hosts: Hosts
) -> None:
    """It takes no room in the queue, and the host does not live for it."""
    batcher = make(max_queue_size=100)
    await batcher.open()
    silent = connect(link_of(batcher)._key, launch_host).connection
    with silent, Watch([await host_of(batcher)]) as watch:
        assert await batcher.process_batched(1) == 2
        session: Any = batcher._opening
        assert session._room == 100
        await batcher.aclose()
        await watch.until_dead()


async def test_a_connection_without_hello_is_closed(
    make: Callable[..., Batcher], hosts: Hosts
) -> None:
    async with make() as batcher:
        silent = connect(link_of(batcher)._key, launch_host).connection
        with silent:
            silent.settimeout(LIMIT)
            assert await asyncio.to_thread(silent.recv, 1) == b""
        assert await batcher.process_batched(1) == 2


async def test_host_without_descriptors_leaves_new_clients_to_another(
    make: Callable[..., Batcher], hosts: Hosts
) -> None:
    async with make() as batcher:
        host = await host_of(batcher)
        before = resource.prlimit(host, resource.RLIMIT_NOFILE)
        used = set(os.listdir(f"/proc/{host}/fd"))
        most = next(one for one in itertools.count() if str(one) not in used)
        resource.prlimit(host, resource.RLIMIT_NOFILE, (most, before[1]))
        # It lives beside the next host, which is an error in every other test.
        (hosts.notes / f"killed.{host}").touch()
        async with make() as other, make() as third:
            assert host != await host_of(other) == await host_of(third)
            assert await batcher.process_batched(1) == 2
            assert await host_of(batcher) == host


# --- clients die and leave ------------------------------------------------------------------------


async def test_last_client_ends_host_of_killed_starter(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, program: Start
) -> None:
    starter = program(client(hosts, gate, WAITS))
    host = starter.tells()
    async with make() as batcher:
        held = call(batcher, "hold")
        visit = await gate.visit()
        kill(starter)
        visit.let_on()
        assert await outcome(held) == "hold"
        assert await host_of(batcher) == host
        watch = Watch([host])
    with watch:
        assert watch.survivors(LIMIT) == []
    assert hosts.loads() == 1


async def test_killed_client_affects_no_other(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, program: Start
) -> None:
    async with make() as batcher:
        other = program(client(hosts, gate, WAITS))
        assert other.tells() == await host_of(batcher)
        kill(other)
        assert await batcher.process_batched(2) == 4


async def test_starter_that_closes_first_reaps_host_later(
    make: Callable[..., Batcher], hosts: Hosts
) -> None:
    starter, other = make(), make()
    await starter.open()
    await other.open()
    host = await host_of(other)
    await starter.aclose()
    assert await host_of(other) == host
    # The fixtures find no zombie.
    await other.aclose()


async def test_killed_last_client_leaves_host_to_next(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, program: Start
) -> None:
    with program(client(hosts, gate, WAITS)) as first:
        host = first.tells()
        kill(first)
        async with make() as batcher:
            assert await host_of(batcher) == host
    assert hosts.loads() == 1


SUPERVISES = """
    import subprocess
    if sys.argv[1:]:
        async with make(shared=True) as batcher:
            tell((os.getpid(), await batcher.process_batched("host")))
            await asyncio.Event().wait()
    children = [subprocess.Popen([sys.executable, __file__, "child"]) for _ in range(2)]
    await asyncio.Event().wait()
"""


@pytest.mark.parametrize("is_group", [False, True], ids=["supervisor", "group"])
def test_killed_supervisor_leaves_nothing_of_server(
    hosts: Hosts, gate: Gate, program: Start, *, is_group: bool
) -> None:
    supervisor = program(client(hosts, gate, SUPERVISES))
    told = dict(supervisor.tells() for _ in range(2))
    (host,) = set(told.values())
    with Watch([host]) as watch:
        if is_group:
            os.killpg(supervisor.pid, signal.SIGKILL)
        else:
            supervisor.kill()
            for pid in told:
                os.kill(pid, signal.SIGKILL)
        with measured(0.1, "a host ends after its supervisor and its clients"):
            assert watch.survivors(LIMIT) == []
    hosts.wait_until_nothing_lives()
    assert hosts.loads() == 1


FORKS = """
    batcher = make()
    await batcher.open()
    tell(await batcher.process_batched("host"))
    warnings.simplefilter("ignore")  # newer Pythons warn of threads
    child = os.fork()
    if child == 0:
        signal.pause()
    await batcher.aclose()
    tell(child)
    os.kill(child, signal.SIGKILL)
"""


def test_forked_child_does_not_hold_the_connection(
    hosts: Hosts, gate: Gate, program: Start
) -> None:
    forking = program(client(hosts, gate, FORKS))
    with Watch([forking.tells()]) as watch:
        forking.tells()
        assert watch.survivors(0.0) == []
    assert forking.finish()[0] == 0


# --- clients that differ --------------------------------------------------------------------------


def warnings_of_hosts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings, but for that of batchers of one name: here they stand for several processes."""
    found = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    return [text for text in found if "another batcher of this name" not in text]


async def test_other_settings_get_another_host_and_one_warning(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    batchers: list[Batcher] = [
        DynBatcher("models.ordinary:Whereabouts", size, shared="test") for size in (2, 3, 3)
    ]
    async with batchers[0], batchers[1], batchers[2]:
        workers = [await one.process_batched(0) for one in batchers]
        assert workers[0] != workers[1] == workers[2]
    (warning,) = warnings_of_hosts(caplog)
    assert "they differ in max_batch_size." in warning


@pytest.mark.usefixtures("hosts")
async def test_environments_that_differ_get_their_own_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    async with AsyncExitStack() as opened:
        for value in ("one", "two"):
            monkeypatch.setenv("A_VARIABLE", value)
            batcher: Batcher = DynBatcher("models.ordinary:Variables", shared="test")
            await opened.enter_async_context(batcher)
            answers.append(await batcher.process_batched("A_VARIABLE"))
    assert answers == ["one", "two"]
    (warning,) = warnings_of_hosts(caplog)
    assert "they differ in the environment variable A_VARIABLE." in warning


@pytest.mark.parametrize("is_imported", [False, True])
async def test_a_changed_model_file_gets_another_host(
    hosts: Hosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_imported: bool,
) -> None:
    """Also if the API process does not import the model."""
    package = tmp_path / "changing"
    package.mkdir()
    (package / "__init__.py").touch()
    file = package / "model.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    @asynccontextmanager
    async def opened(answer: int) -> AsyncIterator[Batcher]:
        file.write_text(
            "class Model:\n"
            "    def infer(self, inputs):\n"
            f"        return [{answer} for _ in inputs]\n"
        )
        os.utime(file, (answer, answer))
        batcher: Batcher = DynBatcher("changing.model:Model", shared="test")
        async with batcher:
            yield batcher

    if is_imported:
        module = type(sys)("changing.model")
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "changing.model", module)
    async with opened(1) as before, opened(2) as after:
        assert [await one.process_batched(0) for one in (before, after)] == [1, 2]
    (warning,) = warnings_of_hosts(caplog)
    assert "the file of the model's module has changed" in warning


@pytest.mark.parametrize("changed", ["helper.py", "weights.txt", "folder/of/weights.txt"])
@pytest.mark.usefixtures("hosts")
async def test_newcomer_after_a_changed_file_gets_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A module that the model's module imports, a file, or one in a folder named by an argument."""
    package = tmp_path / "helped"
    (package / "folder" / "of").mkdir(parents=True)
    for name in ("__init__.py", "helper.py", "weights.txt", "folder/of/weights.txt"):
        (package / name).write_text("text = 'old'")
    (package / "model.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from helped.helper import text\n"
        "class Model:\n"
        "    def __init__(self, file, folders):\n"
        "        files = [Path(file), *folders[0].rglob('*.txt')]\n"
        "        self.texts = [text, *(one.read_text() for one in files)]\n"
        "    def infer(self, inputs):\n"
        "        is_new = any('new' in one for one in self.texts)\n"
        "        return [(is_new, os.getpid()) for _ in inputs]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = str(package / "weights.txt"), [package / "folder"]

    def make() -> Batcher:
        return DynBatcher("helped.model:Model", shared="test", model_args=arguments)

    async with make() as before:
        (package / changed).write_text("text = 'newer'")
        async with make() as after, make() as later:
            answers = [await one.process_batched(0) for one in (before, after, later)]
            assert [is_new for is_new, _ in answers] == [False, True, True]
            assert answers[1] == answers[2]  # of one worker


# --- logs -----------------------------------------------------------------------------------------


async def test_each_record_is_logged_once(
    make: Callable[..., Batcher], hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with make() as starter, make() as other:
        await other.process_batched("log")
        (host,) = hosts.hosts()
        await until(lambda: "once" in caplog.text)
        assert await starter.process_batched(1) == 2
    messages = [one.getMessage() for one in caplog.records]
    assert len([one for one in messages if one.startswith("once")]) == 1
    assert len([one for one in messages if " ready in " in one]) == 1
    opened = [one for one in messages if "opening -> open" in one]
    assert len(opened) == 2  # of each client
    assert len([one for one in messages if f"joined the host process (pid {host})" in one]) == 2


# --- everything at random -------------------------------------------------------------------------

CHURNS = """
    from random import Random
    from fast_batcher import PoisonRequestError, WorkerStartupError
    chance = Random(int(sys.argv[1]) if sys.argv[1:] else os.getpid())
    while True:
        batcher = make(max_restarts=None)
        try:
            await batcher.open()
        except WorkerStartupError as error:
            assert "SIGKILL" in str(error), error
            continue
        numbers = [chance.randrange(1000) for _ in range(chance.randrange(1, 50))]
        calls = (batcher.process_batched(number) for number in numbers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for number, answer in zip(numbers, answers):
            assert answer == 2 * number or isinstance(answer, PoisonRequestError), answer
        tell(batcher._opening._link.pid)
        if chance.random() < 0.1:
            os.kill(os.getpid(), signal.SIGKILL)
        await (batcher.aclose() if chance.random() < 0.5 else asyncio.to_thread(batcher.stop))
"""


async def test_one_host_at_most_while_clients_die(
    make: Callable[..., Batcher], hosts: Hosts, gate: Gate, program: Start
) -> None:
    chance = Random(1)
    code = client(hosts, gate, CHURNS)
    programs = [program(code) for _ in range(3)]
    until = time.monotonic() + 6.0
    killed = 0
    while time.monotonic() < until or not killed:
        number = chance.randrange(len(programs))
        try:
            host = programs[number].tells()
        except AssertionError:
            status, text = programs[number].finish()
            assert status == -signal.SIGKILL, text
            programs[number] = program(code)
            continue
        if host is not None and chance.random() < 0.2:
            hosts.kill(host)
            killed += 1
    for one in programs:
        kill(one)
    # The host, if there is one, would wait for another client.
    batcher: Batcher = make(max_restarts=None)
    async with batcher:
        assert await batcher.process_batched(1) == 2
