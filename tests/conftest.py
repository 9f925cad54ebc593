"""Fixtures of every test: both event loops, and a check that nothing is left behind.

Parent process, pytest's own thread.
"""

import faulthandler
import gc
import os
import resource
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import uvloop
from ray_nodes import cluster, nodes
from shared_hosts import hosts
from waits import MEASURED, Gate

# Fixtures of tests in several folders.
__all__ = ["cluster", "hosts", "nodes"]

# How long an example takes depends on the machine, and says nothing about it being right. A change
# is judged by the same examples each time; `make soak` looks for others.
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ours", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ours")


BACKENDS: dict[str, Any] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
}


@pytest.fixture(params=[*BACKENDS.values()], ids=[*BACKENDS], scope="session")
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The loops that async tests run on, for anyio's plugin."""
    return request.param


# By folder, the one loop that is enough for tests that start processes and do not name their loops
# themselves: both occur.
ONE_LOOP = {
    **dict.fromkeys(("memory", "faults", "unit"), "asyncio"),
    **dict.fromkeys(("contract", "edge", "fastapi"), "uvloop"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out slow runs on a second event loop."""
    items[:] = [item for item in items if not _is_on_a_second_loop(item)]


def _is_on_a_second_loop(item: pytest.Item) -> bool:
    enough = ONE_LOOP.get(item.path.parent.name, "")
    call = getattr(item, "callspec", None)  # of parametrized tests
    backend = None if call is None else call.params.get("anyio_backend")
    is_second = backend in BACKENDS.values() and backend != BACKENDS.get(enough)
    names_loops = any("anyio_backend" in mark.args[:1] for mark in item.iter_markers("parametrize"))
    is_slow = item.get_closest_marker("slow") is not None
    return bool(enough) and is_second and is_slow and not names_loops


def pytest_collection_finish() -> None:
    """Let collections of garbage look at the objects of tests alone.

    With all that is loaded, torch and Ray among it, each would take up to half a second, which is
    more than a minute of the whole run.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Holdings:
    """Resources of this process that must be released."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> "Holdings":
        """Look."""
        return cls(
            children=frozenset(_children()),
            # But for anyio's own: a closed loop does not wait for them to end.
            threads=frozenset(
                thread
                for thread in threading.enumerate()
                if not type(thread).__module__.startswith("anyio.")
            ),
            descriptors=frozenset(_descriptors()),
            # But for semaphores: nothing of ours makes them, and those of other programs on the
            # machine outlive these by a moment.
            shared_memory=frozenset(
                path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")
            ),
        )

    def beyond(self, before: "Holdings") -> dict[str, list[str]]:
        """New resources, by kind."""
        return {
            kind: sorted(str(one) for one in new)
            for kind in self.__dataclass_fields__
            if (new := getattr(self, kind) - getattr(before, kind))
        }


def _children() -> Iterator[int]:
    # The kernel lists them by the thread that started them.
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            yield from map(int, path.read_text().split())


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the directory
            yield f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}"


def _is_used_elsewhere(name: str) -> bool:
    """Whether a program that is not of ours has this shared memory: the whole machine shares it."""
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    for process in psutil.process_iter():
        if process.pid not in ours:
            with suppress(OSError):
                if f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                    return True
    return not Path("/dev/shm", name).exists()


@pytest.fixture(scope="session", autouse=True)
def _everlasting() -> None:
    """Start what lives as long as the interpreter, whoever needs it first."""
    # CPython's own process, started with the first spawn.
    resource_tracker.ensure_running()
    # libuv opens a pipe for signals, once per process, with the first loop.
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def _only_slow_tests_start_processes(
    _everlasting: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    """After a test that is not marked as slow: no child process of it has ended."""
    before = _faults_of_children()
    yield
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow or _faults_of_children() == before, "it starts a process: mark it slow"


def _faults_of_children() -> int:
    # Page faults of those that have ended; a process that had none does not exist.
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


@pytest.fixture(scope="session", autouse=True)
def _sockets_of_hosts() -> Iterator[None]:
    """Give hosts a directory of this process; the user's is common to all that run tests."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left(_everlasting: None) -> Iterator[None]:
    """After the test: no process, thread, descriptor or shared memory that was not there before."""
    before = Holdings.now()
    yield
    left = Holdings.now().beyond(before)
    shared_memory = left.pop("shared_memory", [])
    if mine := [name for name in shared_memory if not _is_used_elsewhere(name)]:
        left["shared_memory"] = mine
    assert not left, f"the test has left behind: {left}"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate at which models wait."""
    gate = Gate(str(tmp_path / "gate"))
    yield gate
    gate.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was measured over to the process that prints it, if this is another."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["measured"] = MEASURED


class Failures:
    """Prints each failure at once: a run that is stopped from outside prints no summary."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print it, if it is one."""
        if report.failed:
            self._terminal.section(f"{report.when} of {report.nodeid}")
            self._terminal.write_line(report.longreprtext)
            for title, text in report.sections:
                self._terminal.write_line(f"{title}:\n{text}")


class TeardownGuard:
    """Ends a process whose test hangs after a failure.

    pytest cancels its own guard at a failure, because a debugger may follow.
    """

    def __init__(self) -> None:
        # The standard error of pytest; a test's own is captured.
        self._stderr = os.dup(2)

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        """Guard what is left of the test; pytest cancels it at its end."""
        if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
            limit = float(node.config.getini("faulthandler_timeout"))
            faulthandler.dump_traceback_later(limit, exit=True, file=self._stderr)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Guard teardowns; print failures in the process that has the terminal."""
    config.pluginmanager.register(TeardownGuard())
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(Failures(terminal))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take it over."""
    # One that has crashed has left nothing.
    MEASURED.extend(getattr(node, "workeroutput", {}).get("measured", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the cost of each folder of tests, and measured times beside their bounds."""
    terminalreporter.section("seconds by folder, summed over the processes")
    for folder, total in sorted(_costs(terminalreporter).items(), key=lambda one: -one[1]):
        terminalreporter.write_line(f"{total:8.1f} s  {folder}")
    if MEASURED:
        terminalreporter.section("measured, and the figures of an idle machine")
    for what, seconds, figure in sorted(MEASURED, key=lambda one: (one[0], one[1])):
        terminalreporter.write_line(f"{1000 * seconds:8.1f} ms of {1000 * figure:5.0f} ms  {what}")


def _costs(terminalreporter: Any) -> dict[str, float]:
    """Return the seconds of set-up, calls and teardown of each folder of tests."""
    costs: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = Path(report.nodeid.partition("::")[0])
                costs[path.parent.as_posix()] += report.duration
    return costs
