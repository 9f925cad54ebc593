"""Scaling of a range of workers, in virtual time."""

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil
from typing import Any

import pytest
from schedulers import make, submit
from virtual_time import World, poisson

from fast_batcher._core.explanation import HIGH_LOAD
from fast_batcher._core.queue import SummedPacker
from fast_batcher._core.scaling import (
    DEFAULT_TARGET,
    PATIENCE,
    QUIET,
    SCALING_INTERVAL,
    Scaling,
    ScalingDecision,
    WorkerLoad,
)
from fast_batcher._core.service_model import Shape
from fast_batcher._core.values import Request

# A full batch of 8 takes 0.4 seconds: a worker answers 20 requests per second.
SIZE = 8
CAPACITY = 20.0


def seconds_of(size: float) -> float:
    return 0.08 + 0.04 * size


class Cluster:
    """A batcher whose workers take `loading` seconds to load, and are scaled."""

    def __init__(
        self,
        arrivals: list[float],
        *,
        fewest: int = 1,
        most: int = 8,
        loading: float = 5.0,
        clients: int = 0,
        max_latency: float | None = None,
        seconds: Callable[[float], float] = seconds_of,
    ) -> None:
        self.world = World(
            max_batch_size=SIZE,
            workers=fewest,
            arrivals=arrivals,
            clients=clients,
            max_latency=max_latency,
            timeout=3600.0,
            warm_up=[(1, seconds(1)), (SIZE, seconds(SIZE))],
            seconds=seconds,
        )
        self.scheduler = self.world.scheduler
        self.scheduler.learn_times()
        self._scaling = Scaling(fewest, most, max_latency)
        self._loading = loading
        self.wanted = fewest
        # Ids of the workers by index, and moments at which further ones are ready.
        self._workers = [*range(fewest)]
        self._coming: list[float] = []
        self.decisions: list[tuple[float, ScalingDecision]] = []

    def run(self, seconds: float) -> "Cluster":
        """Let so much time pass."""
        for _ in range(round(seconds / SCALING_INTERVAL)):
            self.world.run(SCALING_INTERVAL)
            self.look()
        return self

    def look(self) -> None:
        """Measure, and carry out the decision."""
        world, now = self.world, self.world.now
        while self._coming and self._coming[0] <= now:
            heappop(self._coming)
            self._workers.append(len(world._busy_until))
            world._busy_until.append(0.0)
            self.scheduler.worker_ready(now, self._workers[-1])
        rejected = len(world.rejected)
        decision = self._scaling.decide(
            now,
            WorkerLoad(
                wanted=self.wanted,
                ready=len(self._workers),
                is_loading=len(self._workers) < self.wanted,
                is_failing=False,
                arrived=world.answered + rejected + len(self.scheduler.open_requests()),
                rejected=rejected,
                backlog=self.backlog,
                full_batch=self.scheduler.full_batch,
            ),
        )
        if decision is None:
            return
        self.decisions.append((now, decision))
        for _ in range(self.wanted, decision.workers):
            heappush(self._coming, now + self._loading)
        for _ in range(decision.workers, self.wanted):
            self.scheduler.retire(self._workers.pop())
        self.wanted = decision.workers

    @property
    def backlog(self) -> float:
        """The predicted seconds of work, now."""
        seconds = self.scheduler.seconds_of_backlog(self.world.now)
        assert seconds is not None
        return seconds

    @property
    def counts(self) -> list[int]:
        """The numbers of workers that were decided, in order."""
        return [decision.workers for _, decision in self.decisions]


def test_load_step_starts_several_workers_at_once() -> None:
    cluster = Cluster(poisson(3 * CAPACITY, 300.0, seed=1)).run(300.0)
    moment, decision = cluster.decisions[0]
    # The backlog has to grow to its target, and to stay above it.
    assert moment <= PATIENCE + DEFAULT_TARGET + 2 * SCALING_INTERVAL
    assert 3 / HIGH_LOAD <= decision.workers <= 3 / HIGH_LOAD + 2
    assert max(cluster.counts) <= 3 / HIGH_LOAD + 3
    assert decision.reason.startswith("the backlog is ")
    assert cluster.backlog < DEFAULT_TARGET
    assert not cluster.world.rejected


@pytest.mark.parametrize("loading", [0.5, 30.0, 180.0])
def test_workers_that_load_count_as_present(loading: float) -> None:
    cluster = Cluster(poisson(2 * CAPACITY, 600.0, seed=2), loading=loading).run(600.0)
    # The backlog of the loading time is worked off by few more than the load alone needs.
    assert max(cluster.counts) <= 2 / HIGH_LOAD + 4
    while_loading = [now for now, _ in cluster.decisions if now < loading]
    assert len(while_loading) <= 2
    assert cluster.counts[-1] >= 2 / HIGH_LOAD
    assert cluster.backlog < DEFAULT_TARGET


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_sufficient_workers_stay_unchanged(load: float) -> None:
    """The adaptive policy keeps the workers busy at each of them."""
    cluster = Cluster(poisson(2 * load * CAPACITY, 600.0, seed=3), fewest=2).run(600.0)
    assert cluster.decisions == []


def test_bursts_shorter_than_a_start_change_nothing() -> None:
    # Each minute the requests of 1.5 seconds of one worker at once.
    bursts = [60.0 * minute for minute in range(1, 10) for _ in range(30)]
    assert Cluster(bursts).run(600.0).decisions == []


def test_load_that_returns_soon_keeps_its_workers() -> None:
    arrivals: list[float] = []
    for minute in range(0, 16, 2):
        since = 60.0 * minute
        arrivals += poisson(3 * CAPACITY, since + 60.0, seed=minute, since=since)
    cluster = Cluster(arrivals).run(16 * 60.0)
    assert cluster.counts == sorted(cluster.counts)
    assert len(cluster.counts) <= 3


@pytest.mark.parametrize("load", [1.0, 1.3, 1.6])
def test_worker_number_does_not_oscillate(load: float) -> None:
    cluster = Cluster(poisson(load * CAPACITY, 5 * QUIET, seed=4)).run(5 * QUIET)
    assert cluster.counts == sorted(cluster.counts)


def test_idle_workers_end_one_by_one() -> None:
    cluster = Cluster(poisson(6 * CAPACITY, 60.0, seed=5), fewest=2).run(60.0)
    most = cluster.wanted
    assert most >= 6
    cluster.decisions.clear()
    cluster.run(10 * QUIET)
    assert cluster.counts == [*range(most - 1, 1, -1)]
    moments = [now for now, _ in cluster.decisions]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert all(gap >= QUIET for gap in gaps)
    # All that was asked is answered.
    assert cluster.scheduler.open_requests() == []
    assert not cluster.world.rejected


def test_the_upper_bound_is_kept() -> None:
    cluster = Cluster(poisson(6 * CAPACITY, 120.0, seed=6), most=3).run(120.0)
    assert cluster.counts == [3]


def test_rejections_start_workers() -> None:
    cluster = Cluster(poisson(2.5 * CAPACITY, 300.0, seed=7), max_latency=0.6).run(300.0)
    assert "requests are rejected" in cluster.decisions[0][1].reason
    assert cluster.wanted >= 3
    late = [moment for moment, _ in cluster.world.rejected if moment > 60.0]
    assert len(late) < 0.01 * len(cluster.world.latencies)


def test_slow_model_alone_starts_no_worker() -> None:
    """A full batch takes ten times `DEFAULT_TARGET`, and a batch always waits for another."""
    arrivals = poisson(0.3 * SIZE / 10.0, 900.0, seed=8)
    cluster = Cluster(arrivals, seconds=lambda size: 9.0 + size / 8).run(900.0)
    assert cluster.decisions == []


def test_closed_loop_clients_limit_the_workers() -> None:
    # Four batches wait for one worker; with four workers none waits.
    cluster = Cluster([], clients=5 * SIZE, loading=1.0).run(300.0)
    assert 2 <= cluster.wanted <= 4


# The measured backlog.


def test_backlog_is_work_per_ready_worker() -> None:
    scheduler = make(max_batch_size=SIZE, timeout=100.0, workers=0)
    assert (scheduler.seconds_of_backlog(0.0), scheduler.full_batch) == (None, None)
    times = [(1, seconds_of(1)), (SIZE, seconds_of(SIZE))]
    scheduler.worker_ready(0.0, 7, times)
    full = scheduler.service.median(SIZE)
    assert scheduler.full_batch == (full, SIZE)
    assert scheduler.seconds_of_backlog(0.0) == 0.0
    # Of five full batches and a half, two go to the worker and the rest waits.
    submit(scheduler, 0.0, 5 * SIZE + SIZE // 2)
    scheduler.poll(0.0)
    assert scheduler.queue_size == 3 * SIZE + SIZE // 2
    work = 5 * full + scheduler.service.median(SIZE / 2)
    assert scheduler.seconds_of_backlog(0.0) == pytest.approx(work)
    assert scheduler.seconds_of_backlog(0.3) == pytest.approx(work - 0.3)
    scheduler.worker_ready(0.3, 8)
    assert scheduler.seconds_of_backlog(0.3) == pytest.approx((work - 0.3) / 2)
    # A worker that leaves answers what it has, and nothing more.
    scheduler.retire(7)
    assert scheduler.seconds_of_backlog(0.3) == pytest.approx(work - 2 * full)


def test_the_backlog_of_unequal_requests_follows_their_costs() -> None:
    packer = SummedPacker(100.0)
    scheduler = make(max_batch_size=SIZE, packer=packer, workers=0)
    for cost in (10.0, 100.0):
        packer.times.observe(Shape(5, 20.0, cost), cost / 100)
    requests = [Request("input", None) for _ in range(30)]
    for request in requests:
        request.cost = 20.0
    assert scheduler.submit(0.0, requests) == []
    # Without a worker the seconds are those of one.
    assert scheduler.seconds_of_backlog(0.0) == pytest.approx(6.0)


# A decision for itself.


def load(**changes: Any) -> WorkerLoad:
    usual = WorkerLoad(
        wanted=2,
        ready=2,
        is_loading=False,
        is_failing=False,
        arrived=0,
        rejected=0,
        backlog=10.0,
        full_batch=(0.4, SIZE),
    )
    return usual._replace(**changes)


def decide(scaling: Scaling, since: float, until: float, **changes: Any) -> list[int]:
    """The numbers that are decided while the load stays as it is."""
    moments = [since + step * SCALING_INTERVAL for step in range(int((until - since) * 2))]
    looks = [scaling.decide(now, load(**changes)) for now in moments]
    return [decision.workers for decision in looks if decision]


def test_nothing_is_decided_while_no_worker_is_ready() -> None:
    assert decide(Scaling(1, 8, None), 0.0, 600.0, ready=0, is_loading=True) == []


@pytest.mark.parametrize("is_loading", [True, False])
def test_nothing_is_decided_before_a_time_was_measured(is_loading: bool) -> None:
    unknown = {"full_batch": None, "backlog": None, "is_loading": is_loading, "wanted": 1}
    assert decide(Scaling(1, 8, None), 0.0, 600.0, **unknown) == []


def test_no_worker_ends_while_another_loads() -> None:
    scaling = Scaling(1, 8, None)
    assert decide(scaling, 0.0, 10 * QUIET, backlog=0.0, is_loading=True) == []
    assert decide(scaling, 10 * QUIET, 11 * QUIET + 1, backlog=0.0) == [1]


def test_no_worker_ends_that_live_streams_or_sessions_need() -> None:
    scaling = Scaling(1, 8, None)
    assert decide(scaling, 0.0, 10 * QUIET, backlog=0.0, needed=2) == []
    assert decide(scaling, 10 * QUIET, 11 * QUIET + 1, backlog=0.0, needed=1) == [1]


def test_late_measurement_is_ignored() -> None:
    """The process was stopped: what has arrived meanwhile is about to be answered."""
    scaling = Scaling(1, 8, None)
    assert decide(scaling, 0.0, PATIENCE) == []
    assert decide(scaling, 3600.0, 3600.0 + PATIENCE, arrived=10**6) == []
    assert decide(scaling, 3600.0 + PATIENCE, 3601.0 + PATIENCE, arrived=10**6) == [3]


def test_shrinking_backlog_starts_no_worker() -> None:
    scaling = Scaling(1, 8, None)
    backlogs = [20.0 * 0.9 ** (step / 2) for step in range(40)]
    looks = [scaling.decide(step / 2, load(backlog=value)) for step, value in enumerate(backlogs)]
    assert set(looks) == {None}


def test_failing_worker_stops_scaling_up() -> None:
    scaling = Scaling(1, 8, None)
    assert decide(scaling, 0.0, 600.0, ready=1, is_failing=True) == []
    assert decide(scaling, 600.0, 601.0 + QUIET, ready=1, is_failing=True, backlog=0.0) == [1]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """An hour at rest says nothing about the arrivals since."""
    scaling = Scaling(1, 100, None)
    assert decide(scaling, 0.0, 3600.0, wanted=1, ready=1, backlog=0.0) == []
    looks = [
        scaling.decide(3600.0 + step / 2, load(wanted=1, ready=1, arrived=100 * step))
        for step in range(5)
    ]
    # 200 requests per second.
    assert [decision.workers for decision in looks if decision] == [ceil(10 / HIGH_LOAD)]
