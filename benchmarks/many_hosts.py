"""Simulates 1,000 workers behind 1 and behind 50 hosts in virtual time, prints a table, stores it.

Each host runs the library's scheduler. A router gives each request to a host. Every number follows
from the seed: the same command gives the same table on any machine. It is about one minute long.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from statistics import fmean, quantiles
from typing import NamedTuple

from benchmarks.harness import RESULTS, hardware, store
from benchmarks.report import table
from fast_batcher._core.policy import make_policy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Dispatch, Limits, Request

WORKERS, HOSTS = 1000, 50
MAX_BATCH_SIZE = 32
# A batch of n takes FIXED + EACH * n seconds: half of a full batch's time is fixed.
FIXED, EACH = 0.128, 0.004
FULL = FIXED + EACH * MAX_BATCH_SIZE
CAPACITY = WORKERS * MAX_BATCH_SIZE / FULL
# Lengths in times of a full batch. The warm-up fills the queues and does not count.
WARM_UP, COUNTED = 4, 8
LOADS = (0.5, 0.8, 0.95)
SEED = 1
# Seconds between two reports of a host's backlog to the routers.
REPORT_INTERVAL = 0.1
# Connections that keep-alive binds to one host each: four for each worker.
CONNECTIONS = 4 * WORKERS


class Cell(NamedTuple):
    """One simulation."""

    router: str
    hosts: int
    load: float


@dataclass(frozen=True)
class Outcome:
    """The figures of a cell; latencies in times of a full batch."""

    cell: Cell
    requests: int
    p50: float
    p99: float
    batch_size: float


class Host:
    """A scheduler and its workers."""

    def __init__(self, workers: int) -> None:
        limits = Limits(
            max_batch_size=MAX_BATCH_SIZE,
            max_queue_size=8 * MAX_BATCH_SIZE * WORKERS,
            timeout=1000 * FULL,
        )
        self.scheduler = Scheduler(make_policy("adaptive", None), limits)
        for worker in range(workers):
            sizes = (1, MAX_BATCH_SIZE)
            warm_up = [(float(size), FIXED + EACH * size) for size in sizes]
            self.scheduler.worker_ready(0.0, worker, warm_up)
        # When each worker has computed its batches.
        self.free_at = [0.0] * workers
        self.in_flight = 0
        # `in_flight` as the routers know it.
        self.reported = 0
        self.wake_at = inf


def make_router(name: str, hosts: list[Host], random: Random) -> Callable[[], Host]:
    """Make the function that chooses the host of the next request."""
    turns = count()
    # Connections are unequal: the busiest asks some twenty times as often as the median one.
    bound = random.choices(hosts, k=CONNECTIONS)
    weights = [random.lognormvariate(0.0, 1.0) for _ in range(CONNECTIONS)]
    chosen = iter(random.choices(bound, weights, k=int(CAPACITY * FULL * (WARM_UP + COUNTED)) + 1))

    def choose_of_two() -> Host:
        first, second = random.choice(hosts), random.choice(hosts)
        host = first if first.reported <= second.reported else second
        host.reported += 1  # this router's own requests are known to it at once
        return host

    routers: dict[str, Callable[[], Host]] = {
        "one queue": lambda: hosts[0],
        "in turn": lambda: hosts[next(turns) % len(hosts)],
        "at random": lambda: random.choice(hosts),
        "by connection": lambda: next(chosen),
        "fewer of two": choose_of_two,
    }
    return routers[name]


class Simulation:
    """All requests of a cell in virtual time."""

    def __init__(self, cell: Cell) -> None:
        self._random = random = Random(SEED)
        self._rate = cell.load * CAPACITY
        self._hosts = [Host(WORKERS // cell.hosts) for _ in range(cell.hosts)]
        self._route = make_router(cell.router, self._hosts, random)
        self._order = count()  # of events at one moment
        # Ends of batches, and alarms of schedulers with worker -1:
        # moment, order, host, worker, batch.
        self._events: list[tuple[float, int, Host, int, int]] = []
        self._next_arrival = random.expovariate(self._rate)
        self._next_report = 0.0
        self.latencies: list[float] = []
        self.sizes: list[int] = []

    def run(self) -> None:
        """Let time pass to the end of the counted part."""
        while True:
            now = min(self._next_arrival, self._events[0][0] if self._events else inf)
            if now >= (WARM_UP + COUNTED) * FULL:
                return
            if now >= self._next_report:
                for host in self._hosts:
                    host.reported = host.in_flight
                self._next_report = now + REPORT_INTERVAL
            if now == self._next_arrival:
                self._arrive(now)
            else:
                self._handle_event(now)

    def _arrive(self, now: float) -> None:
        host = self._route()
        host.in_flight += 1
        host.scheduler.submit(now, [Request(now, None)])
        self._next_arrival = now + self._random.expovariate(self._rate)
        self._decide(host, now)

    def _handle_event(self, now: float) -> None:
        _, _, host, worker, batch_id = heappop(self._events)
        if worker < 0 and host.wake_at != now:
            return  # the alarm was put off
        if worker >= 0:
            batch = host.scheduler.batch_done(now, worker, batch_id)
            assert batch is not None, "each batch ends once"
            host.in_flight -= len(batch.requests)
            for request in batch.requests:
                request.is_settled = True
                if request.value >= WARM_UP * FULL:
                    self.latencies.append(now - request.value)
        self._decide(host, now)

    def _decide(self, host: Host, now: float) -> None:
        actions, wake_at = host.scheduler.poll(now)
        for action in actions:
            assert isinstance(action, Dispatch), "the queue has room, and no deadline passes"
            size, worker = len(action.batch.requests), action.batch.worker
            self.sizes.append(size)
            # A busy worker has one batch ahead.
            done_at = host.free_at[worker] = max(now, host.free_at[worker]) + FIXED + EACH * size
            heappush(self._events, (done_at, next(self._order), host, worker, action.batch.id))
        host.wake_at = inf if wake_at is None else wake_at
        if host.wake_at < inf:
            heappush(self._events, (host.wake_at, next(self._order), host, -1, 0))


def simulate(cell: Cell) -> Outcome:
    """Simulate a cell."""
    simulation = Simulation(cell)
    simulation.run()
    latencies = simulation.latencies
    cuts = quantiles(latencies, n=100)
    return Outcome(cell, len(latencies), cuts[49] / FULL, cuts[98] / FULL, fmean(simulation.sizes))


def list_cells() -> list[Cell]:
    """List all cells, load by load."""
    routers = ("in turn", "at random", "by connection", "fewer of two")
    return [
        cell
        for load in LOADS
        for cell in (Cell("one queue", 1, load), *(Cell(router, HOSTS, load) for router in routers))
    ]


def make_table(outcomes: list[Outcome]) -> str:
    """Make the table; latencies are in times of a full batch."""
    header = ("load", "router", "hosts", "requests", "p50", "p99", "p99 of one queue", "batch size")
    rows = []
    for outcome in outcomes:
        cell = outcome.cell
        base = next(one for one in outcomes if one.cell == Cell("one queue", 1, cell.load))
        figures = f"{outcome.p50:.2f}", f"{outcome.p99:.2f}", f"{outcome.p99 / base.p99:.2f}x"
        start = f"{cell.load:.0%}", cell.router, cell.hosts, outcome.requests
        rows.append((*start, *figures, f"{outcome.batch_size:.1f}"))
    title = f"{WORKERS} workers; latencies in times of a full batch ({FULL:g} s)"
    return f"{title}\n{table(header, rows)}"


def main() -> int:
    """Simulate, print and store."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.many_hosts", description=(__doc__ or "").splitlines()[0]
    ).parse_args()
    machine = hardware()
    outcomes = []
    for cell in list_cells():
        outcomes.append(simulate(cell))
        print(f"{cell.load:.0%} {cell.router}", file=sys.stderr)
    path = RESULTS / "many_hosts.json"
    settings = {"seed": SEED, "workers": WORKERS, "report_interval": REPORT_INTERVAL}
    how = "one run, virtual time"
    text = make_table(outcomes)
    store(path, "many_hosts", machine, settings, outcomes, how, text, versions={})
    return 0


if __name__ == "__main__":
    sys.exit(main())
