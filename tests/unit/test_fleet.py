"""The fleet: what is started, replaced and ended, in virtual time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from fast_batcher._core.fleet import EndWorker, Fleet, Replica, StartWorker
from fast_batcher._core.supervision import MAX_BACKOFF, Restarts, choose_added, choose_surplus

BACKOFF = 0.1
WINDOW = 60.0


@dataclass(eq=False)
class Process:
    """A worker as the fleet sees it."""

    model_spec: object
    shared_device: str | None = None
    has_lost_device: bool = False
    is_ready: bool = False
    is_serving: bool = False


class Pool:
    """Carries out what the fleet decides; workers are ready, fail and die as a test says."""

    def __init__(
        self, count: int, max_restarts: int | None = None, devices: Sequence[str | None] = (None,)
    ) -> None:
        self.fleet = Fleet(count, "old", lambda: Restarts(max_restarts, WINDOW, BACKOFF))
        self.devices = devices
        self.now = 0.0
        self.ended: list[EndWorker] = []
        self.most_at_once = 0
        self.act()

    def act(self) -> None:
        for action in self.fleet.reconcile(self.now):
            if isinstance(action, StartWorker):
                self.start(action.replica)
            else:
                self.ended.append(action)
        successors = [one for one in self.fleet.replicas.values() if one.successor is not None]
        self.most_at_once = max(self.most_at_once, len(successors))

    def start(self, replica: Replica) -> None:
        device = self.devices[replica.index % len(self.devices)]
        process = Process(replica.model, device)
        if replica.worker is None:
            replica.worker = process
        else:
            assert replica.successor is None
            replica.successor = process

    @property
    def processes(self) -> list[Process]:
        found = [(one.worker, one.successor) for one in self.fleet.replicas.values()]
        return [process for pair in found for process in pair if process is not None]

    @property
    def loading(self) -> list[Process]:
        return [process for process in self.processes if not process.is_serving]

    @property
    def models(self) -> list[object]:
        return [one.worker and one.worker.model_spec for one in self.fleet.replicas.values()]

    def ready(self, process: Process) -> bool:
        process.is_ready = process.is_serving = True
        is_restart = self.fleet.ready(self.now, process)
        self.act()
        return is_restart

    def fail(self, process: Process, error: Exception | None = None) -> None:
        self.fleet.failed(self.now, process, error or OSError("no weights"))
        self.act()

    def lose(self, process: Process) -> None:
        process.is_ready = process.is_serving = False
        self.fleet.lost(self.now, process)
        self.act()

    def lose_device(self, process: Process) -> list[Process]:
        """Kill the processes that the fleet names, too; return them."""
        others: list[Process] = self.fleet.find_sharers(process)
        for each in others:
            each.has_lost_device = True
        for each in (process, *others):
            each.is_ready = False
        return others

    def wait(self) -> None:
        """Go on to the next moment that the fleet has named."""
        moment = self.fleet.wake_at(self.now)
        assert self.now < moment < float("inf")
        self.now = moment
        self.act()

    def load_all(self) -> None:
        while self.loading:
            self.ready(self.loading[0])


def opened(
    count: int, max_restarts: int | None = None, devices: Sequence[str | None] = (None,)
) -> Pool:
    """Return a pool of which all workers are ready."""
    pool = Pool(count, max_restarts, devices)
    assert len(pool.loading) == count
    assert (pool.fleet.is_loading, pool.fleet.all_were_ready) == (True, False)
    assert [pool.ready(process) for process in pool.loading] == [False] * count
    assert (pool.fleet.is_loading, pool.fleet.all_were_ready) == (False, True)
    return pool


def test_lost_worker_is_started_again_after_the_back_off() -> None:
    pool = opened(2)
    pool.lose(pool.processes[0])
    assert pool.loading == []
    assert pool.fleet.is_loading
    assert pool.fleet.wake_at(pool.now) == BACKOFF
    pool.wait()
    (process,) = pool.loading
    assert pool.ready(process), "it follows one that was lost"


def test_spent_restarts_are_given_up_until_a_worker_is_ready() -> None:
    pool = opened(2, max_restarts=0)
    pool.lose(pool.processes[0])
    assert (pool.fleet.is_failing, pool.fleet.is_given_up) == (True, False)
    assert not pool.fleet.is_loading
    pool.wait()
    assert pool.now == WINDOW
    pool.fail(pool.loading[0])
    assert pool.fleet.is_failing
    pool.wait()
    pool.load_all()
    assert not pool.fleet.is_failing


def test_workers_of_a_device_die_together() -> None:
    pool = opened(6, devices=["a", None, "b"])
    first, alone, second, third, *_ = pool.processes
    assert pool.lose_device(alone) == [], "it shares no device"
    assert pool.lose_device(first) == [third]
    assert second.is_ready


def test_only_the_worker_with_the_fault_spends_a_restart() -> None:
    pool = opened(2, max_restarts=0, devices=["a"])
    first, second = pool.processes
    pool.lose_device(first)
    pool.lose(first)
    assert (pool.loading, pool.fleet.is_failing) == ([], True)
    pool.lose(second)
    (process,) = pool.loading  # without a back-off
    assert pool.ready(process)
    pool.lose(process)
    assert pool.fleet.is_given_up


def test_workers_without_places_die_with_their_device() -> None:
    pool = opened(3, devices=["a"])
    first, second, third = pool.processes
    pool.fleet.count = 2
    pool.act()
    assert pool.fleet.find(third) is None, "it finishes its batches"
    assert pool.lose_device(first) == [second, third]
    pool.lose(third)
    assert pool.fleet.find_sharers(first) == [second]


def test_successor_that_dies_with_its_device_does_not_fail_the_reload() -> None:
    pool = opened(2, devices=["a"])
    reload = pool.fleet.begin_reload("new")
    pool.act()
    first, successor, second = pool.processes
    assert pool.lose_device(second) == [first, successor]
    pool.fail(successor)
    assert (reload.error, pool.loading) == (None, [])
    pool.lose(first)
    pool.load_all()
    pool.lose(second)
    pool.wait()
    pool.load_all()
    assert (pool.models, reload.error, reload.is_over) == (["new", "new"], None, True)


def test_all_restarts_are_spent() -> None:
    pool = Pool(1, max_restarts=0)
    pool.fail(pool.loading[0])
    assert pool.fleet.is_given_up


def test_due_workers_are_replaced_one_after_the_other() -> None:
    pool = opened(3)
    first = pool.processes
    for replica in pool.fleet.replicas.values():
        replica.is_due = True
    pool.act()
    for count in (1, 2, 3):
        (process,) = pool.loading
        assert pool.ready(process), "it follows one that was recycled"
        assert pool.ended[-1] == EndWorker(first[count - 1], has_successor=True)
        # The next one waits until the memory of this one is free.
        assert pool.loading == []
        pool.lose(pool.ended[-1].worker)
    assert (len(pool.ended), pool.loading, pool.most_at_once) == (3, [], 1)


def test_successor_that_cannot_start_is_tried_again_later() -> None:
    pool = opened(1)
    pool.fleet.replicas[0].is_due = True
    pool.act()
    pool.fail(pool.loading[0])
    assert pool.loading == []
    assert not pool.fleet.is_failing
    pool.wait()
    assert (pool.now, len(pool.loading)) == (MAX_BACKOFF, 1)


def test_successor_takes_the_place_of_a_worker_that_dies_meanwhile() -> None:
    pool = opened(1)
    pool.fleet.replicas[0].is_due = True
    pool.act()
    worker, successor = pool.processes
    pool.lose(worker)
    assert pool.processes == [successor]
    pool.ready(successor)
    assert (pool.processes, pool.ended) == ([successor], [])


def test_worker_that_is_being_ended_gets_no_successor() -> None:
    pool = opened(1)
    pool.processes[0].is_ready = False
    pool.fleet.replicas[0].is_due = True
    pool.act()
    assert pool.loading == []


def test_further_and_surplus_workers() -> None:
    pool = opened(1)
    pool.fleet.count = 3
    assert pool.fleet.is_loading
    pool.act()
    assert (len(pool.loading), len(pool.processes)) == (2, 3)
    last = pool.loading[-1]
    pool.ready(last)
    pool.fleet.count = 1
    pool.act()
    # The worker that still loads, then the one with the highest index.
    assert [action.has_successor for action in pool.ended] == [False, False]
    assert pool.ended[1].worker is last
    assert list(pool.fleet.replicas) == [0]
    pool.lose(last)
    assert pool.fleet.find(last) is None


def test_last_ready_worker_is_not_removed_for_workers_that_load() -> None:
    pool = Pool(2)
    pool.fleet.count = 1
    pool.act()
    assert len(pool.fleet.replicas) == 2, "none is ready, and it is unknown which one will be"
    pool.ready(pool.loading[1])
    assert list(pool.fleet.replicas) == [1]


def test_reload_replaces_one_worker_after_the_other() -> None:
    pool = opened(3)
    reload = pool.fleet.begin_reload("new")
    pool.act()
    for count in (1, 2, 3):
        (process,) = pool.loading
        assert not pool.ready(process), "it was asked for"
        assert pool.models == ["new"] * count + ["old"] * (3 - count)
    assert (reload.is_over, reload.error, pool.most_at_once) == (True, None, 1)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_after_a_failure_the_replaced_workers_go_back(good: int) -> None:
    pool = opened(3)
    reload, error = pool.fleet.begin_reload("new"), ValueError("no such file")
    pool.act()
    for _ in range(good):
        pool.ready(pool.loading[0])
    pool.fail(pool.loading[0], error)
    pool.load_all()
    assert pool.models == ["old"] * 3
    assert (reload.is_over, reload.error) == (True, error)


def test_worker_that_cannot_go_back_ends_and_is_restarted_with_its_model() -> None:
    pool = opened(3)
    reload = pool.fleet.begin_reload("new")
    pool.act()
    pool.ready(pool.loading[0])
    pool.ready(pool.loading[0])
    pool.fail(pool.loading[0])
    rejected = pool.processes[0]
    pool.fail(pool.loading[0])
    assert pool.ended[-1] == EndWorker(rejected, has_successor=False)
    pool.load_all()
    assert (pool.models, reload.is_over) == ([None, "old", "old"], True)
    pool.fleet.reload = None
    for back_off in (BACKOFF, 2 * BACKOFF):
        began = pool.now
        pool.wait()
        assert pool.now == began + back_off
        pool.fail(pool.loading[0])
    pool.wait()
    pool.load_all()
    assert pool.models == ["old", "old", "old"]


def test_reload_waits_for_workers_that_load() -> None:
    pool = Pool(1)
    reload = pool.fleet.begin_reload("new")
    pool.act()
    pool.ready(pool.loading[0])
    (process,) = pool.loading
    assert (process.model_spec, reload.is_over) == ("new", False)
    pool.ready(process)
    assert reload.is_over


def test_reload_restarts_a_worker_that_was_given_up_at_once() -> None:
    pool = opened(2, max_restarts=0)
    pool.lose(pool.processes[1])
    reload = pool.fleet.begin_reload("new")
    pool.act()
    pool.ready(pool.loading[0])
    assert pool.now == 0.0
    pool.load_all()
    assert (pool.models, reload.is_over) == (["new", "new"], True)


def test_number_of_workers_changes_after_the_reload() -> None:
    pool = opened(2)
    pool.fleet.begin_reload("new")
    pool.fleet.count = 1
    pool.act()
    pool.load_all()
    assert len(pool.fleet.replicas) == 2
    pool.fleet.reload = None
    pool.act()
    assert (pool.models, list(pool.fleet.replicas)) == (["new"], [0])


def happen(pool: Pool, choose: random.Random) -> None:
    """Let a random event come, or change a random wish."""
    serving = [process for process in pool.processes if process.is_serving]
    event = choose.choice(["ready", "ready", "fail", "lose", "count", "reload", "due"])
    if event == "ready" and pool.loading:
        pool.ready(choose.choice(pool.loading))
    elif event == "fail" and pool.loading:
        pool.fail(choose.choice(pool.loading))
    elif event == "lose" and serving:
        pool.lose(choose.choice(serving))
    elif event == "count":
        pool.fleet.count = choose.randint(1, 4)
    elif event == "reload" and pool.fleet.reload is None:
        pool.fleet.begin_reload(object())  # each reload has a model of its own
    elif event == "due":
        for replica in pool.fleet.replicas.values():
            replica.is_due = choose.random() < 0.5
    pool.act()


def calm_down(pool: Pool) -> None:
    """Let everything succeed from now on, until nothing happens any more."""
    for _ in range(100):
        pool.load_all()
        for action in pool.ended:
            pool.fleet.lost(pool.now, action.worker)
        if pool.fleet.reload is not None and pool.fleet.reload.is_over:
            pool.fleet.reload = None
        pool.act()
        if not pool.loading and pool.fleet.wake_at(pool.now) < float("inf"):
            pool.wait()


@pytest.mark.parametrize("seed", range(300))
def test_random_events_lead_to_what_is_wished(seed: int) -> None:
    choose = random.Random(seed)
    pool = Pool(choose.randint(1, 4), choose.choice([None, 0, 2]))
    for _ in range(60):
        if pool.fleet.reload is not None and pool.fleet.reload.is_over:
            pool.fleet.reload = None
        happen(pool, choose)
    calm_down(pool)
    assert pool.most_at_once <= 1
    assert pool.fleet.reload is None
    assert len(pool.fleet.replicas) == pool.fleet.count
    assert all(replica.is_ready for replica in pool.fleet.replicas.values())
    assert not pool.fleet.is_loading
    assert not pool.fleet.is_failing
    (model,) = {replica.model for replica in pool.fleet.replicas.values()}
    assert set(pool.models) == {model}, "no worker has a model that a reload has rejected"


@pytest.mark.parametrize(
    ("ready", "count", "removed"),
    [
        ({0: True, 1: True, 2: True}, 1, [2, 1]),
        ({0: False, 1: True, 2: False}, 1, [2, 0]),
        ({0: False, 4: True}, 1, [0]),
        ({0: True}, 1, []),
        ({0: True}, 5, []),
    ],
)
def test_surplus_is_what_is_not_ready_and_then_the_highest(
    ready: dict[int, bool], count: int, removed: list[int]
) -> None:
    assert choose_surplus(ready, count) == removed


@pytest.mark.parametrize(
    ("present", "count", "added"),
    [({0, 1}, 4, [2, 3]), ({1, 4}, 4, [0, 2]), ({1}, 1, []), ({5, 6}, 1, [])],
)
def test_added_workers_get_the_lowest_free_indexes(
    present: set[int], count: int, added: list[int]
) -> None:
    assert choose_added(present, count) == added
