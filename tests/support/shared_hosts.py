"""Host processes of a test: a directory of sockets of their own, and none is left afterwards."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from paths import PYTHONPATH
from waits import LIMIT, Watch


def join_reapers() -> None:
    """Wait for the hosts of this process that end: a thread waits for each."""
    for thread in threading.enumerate():
        if thread.name == "fast_batcher-reaper":
            thread.join(LIMIT)


class Hosts:
    """The directory of sockets, and everything that was started with it."""

    def __init__(self) -> None:
        self.runtime = Path(tempfile.mkdtemp(dir="/tmp", prefix="h"))
        # For models.sharing.Shared.
        self.notes = self.runtime / "notes"
        self.notes.mkdir()

    def loads(self) -> int:
        """Number of loaded models."""
        return len([*self.notes.glob("load.*")])

    def hosts(self) -> list[int]:
        """The hosts that have loaded a model, in no order."""
        return [int(path.suffix[1:]) for path in self.notes.glob("host.*")]

    def sockets(self) -> list[str]:
        return [path.name for path in self.runtime.rglob("*.sock")]

    def kill(self, host: int) -> None:
        """Kill a host; another may start before this one is dead."""
        (self.notes / f"killed.{host}").touch()
        with suppress(ProcessLookupError):
            os.kill(host, signal.SIGKILL)

    def living(self) -> list[int]:
        """Hosts and workers of this directory; servers and programs, too, while they live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime):
                    found.append(process.pid)
        return found

    def wait_until_nothing_lives(self) -> None:
        """Wait for the last process; workers of a killed host end some time after it."""
        with Watch(self.living()) as watch:
            assert watch.survivors(LIMIT) == []
        assert self.sockets() == []


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """A directory of sockets; nothing is left, and two hosts of one key have never lived."""
    hosts = Hosts()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(hosts.runtime))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, hosts.runtime)
        at_end.callback(_kill_all, hosts)
        yield hosts
        hosts.wait_until_nothing_lives()
        join_reapers()
        assert [*hosts.notes.glob("two.*")] == []


def _kill_all(hosts: Hosts) -> None:
    for pid in hosts.living():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
