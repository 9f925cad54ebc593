"""Prometheus metrics of server processes that share a host, while processes and hosts go."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from programs import Program, program
from prometheus_client.parser import text_string_to_metric_families
from servers import get
from shared_hosts import Hosts, hosts
from waits import LIMIT, Watch, until

__all__ = ["hosts", "program"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


CODE = """
import warnings
sys.path[:] = {path!r}
from models.sharing import Shared
from prometheus_client import CollectorRegistry, start_http_server
from fast_batcher.prometheus import instrument
registry = CollectorRegistry()
batcher = DynBatcher(
    Shared, shared="test", name="shared", restart_backoff=0.01, model_args=({notes!r},)
)
{early}
async def main():
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ending.set)
    async with batcher:
        {late}
        server, _ = start_http_server(0, "127.0.0.1", registry)
        tell(server.server_port)
        await ending.wait()
    tell("closed")
    signal.pause()
asyncio.run(main())
"""
INSTRUMENT = "instrument(batcher, registry)"


class Process:
    """A server process, as a scrape sees it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pid = program.pid
        self.is_open = True
        self._url = f"http://127.0.0.1:{program.tells()}/metrics"

    def read(self, name: str) -> float:
        text = get(self._url).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"fast_batcher_{name}":
                    return float(sample.value)
        return 0.0

    @property
    def shown(self) -> list[float]:
        """Ready workers and restarts."""
        return [self.read("workers_ready"), self.read("worker_restarts_total")]

    def leave(self) -> None:
        """Close its batcher in order."""
        self.is_open = False
        os.kill(self.pid, signal.SIGUSR1)
        assert self.program.tells() == "closed"

    def kill(self) -> None:
        self.is_open = False
        with Watch([self.pid]) as watch:
            self.program.kill()
            assert watch.survivors(LIMIT) == []


@pytest.fixture
def start(hosts: Hosts, program: Callable[..., Program]) -> Iterator[Callable[..., Process]]:
    """Starts server processes, which leave at the end, so that no host waits for the next."""
    started: list[Process] = []

    def start(early: str = INSTRUMENT, late: str = "") -> Process:
        parts = {"path": sys.path, "notes": str(hosts.notes), "early": early, "late": late}
        started.append(Process(program(CODE.format(**parts))))
        return started[-1]

    yield start
    for one in started:
        if one.is_open:
            one.leave()


async def kill_worker(hosts: Hosts) -> None:
    """Kill the worker of the present host; the workers of a killed host end by themselves."""

    def find() -> list[int]:
        loaded = [int(path.suffix[1:]) for path in hosts.notes.glob("load.*")]
        return [*filter(is_running, loaded)]

    await until(lambda: len(find()) == 1)
    os.kill(find()[0], signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", ["leave", "kill"])
async def test_next_reporter_repeats_no_restart(
    hosts: Hosts, start: Callable[..., Process], how: str
) -> None:
    first, second = start(), start()
    await until(lambda: first.shown == [1, 0] and second.shown == [0, 0])
    await kill_worker(hosts)
    await until(lambda: first.shown == [1, 1])
    getattr(first, how)()
    await until(lambda: second.shown == [1, 0])
    if how == "leave":
        assert first.shown == [0, 1]
    await kill_worker(hosts)
    await until(lambda: second.shown == [1, 1])


async def test_resumed_process_no_longer_reports(
    hosts: Hosts, start: Callable[..., Process]
) -> None:
    first, second = start(), start()
    await until(lambda: first.shown == [1, 0] and second.shown == [0, 0])
    os.kill(first.pid, signal.SIGSTOP)
    await until(lambda: second.shown == [1, 0])
    await kill_worker(hosts)
    await until(lambda: second.shown == [1, 1])
    os.kill(first.pid, signal.SIGCONT)
    await until(lambda: first.shown == [0, 0])
    assert second.shown == [1, 1]


async def test_new_host_continues_counts_of_old_host(
    hosts: Hosts, start: Callable[..., Process]
) -> None:
    processes = start(), start()

    def total() -> tuple[float, float]:
        shown = [one.shown for one in processes]
        return sum(one[0] for one in shown), sum(one[1] for one in shown)

    for restarts in (1, 2, 3):
        await kill_worker(hosts)
        await until(lambda: total() == (1, restarts))  # noqa: B023  awaited in this turn
        (host,) = filter(is_running, hosts.hosts())
        hosts.kill(host)
        await until(lambda: [*filter(is_running, hosts.hosts())] not in ([], [host]))  # noqa: B023
        await until(lambda: total() == (1, restarts))  # noqa: B023


async def test_late_instrumentation_adds_no_gauges(
    hosts: Hosts, start: Callable[..., Process]
) -> None:
    first = start()
    second = start(early="", late=INSTRUMENT)
    await until(lambda: first.shown == [1, 0] and second.shown == [0, 0])
    first.leave()
    await until(lambda: second.shown == [1, 0])
