"""`explain` names the cause of the batch sizes in constructed situations, in virtual time."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import Any

import pytest
from schedulers import make
from virtual_time import Seconds, poisson, with_knee

from fast_batcher._cli.simulation import Arrivals, open_scheduler, simulate
from fast_batcher._core.explanation import BatchSample, Setup, explain
from fast_batcher._core.policy import make_policy
from fast_batcher._core.queue import SummedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Batch, Dispatch, Group, Release, Request
from fast_batcher.stats import Explanation, number

SIZE = 32
# Requests per second that a worker computes in full batches.
CAPACITY = SIZE / with_knee(SIZE)


class Shell:
    """Serves arrivals with one worker; batches of more than `room` requests run out of memory.

    Each of the `clients` asks again some 0.2 ms after its answer. A batch of n takes `seconds(n)`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        room: float = inf,
        clients: int = 0,
        seconds: Seconds = with_knee,
    ) -> None:
        self.scheduler = scheduler
        self.samples: list[BatchSample] = []
        self._room, self._clients, self._seconds = room, clients, seconds
        self._due = [0.0] * clients
        self._running: list[Batch] = []
        self._done_at = self._wake_at = inf
        self._random = Random(5)

    def run(self, arrivals: Sequence[float], make_request: Callable[[int], Request]) -> None:
        self._due += arrivals
        heapify(self._due)
        until = max(arrivals, default=3.0)
        made = 0
        while (now := min(self._done_at, self._wake_at, *self._due[:1])) <= until:
            if now == self._done_at:
                self._finish(now)
            while self._due and self._due[0] <= now:
                heappop(self._due)
                self.scheduler.submit(now, [make_request(made)])
                made += 1
            actions, wake_at = self.scheduler.poll(now)
            self._wake_at = inf if wake_at is None else wake_at
            self._running += [one.batch for one in actions if isinstance(one, Dispatch)]
            if self._done_at == inf and self._running:
                self._done_at = now + self._seconds(len(self._running[0].requests))

    def _finish(self, now: float) -> None:
        batch, self._done_at = self._running.pop(0), inf
        has_raised = len(batch.requests) > self._room
        assert self.scheduler.batch_done(now, 0, batch.id, has_raised) is batch
        if has_raised:
            self.scheduler.batch_raised(now, batch, out_of_memory=True, is_fatal=False)
        else:
            size = len(batch.requests)
            waited = batch.began_at - batch.requests[batch.id % size].arrival
            took = (batch.began_at, now, size, batch.release, batch.left_waiting)
            self.samples.append(BatchSample(*took, waited, now - batch.began_at))
            for _ in range(size if self._clients else 0):
                heappush(self._due, now + self._random.uniform(1e-4, 3e-4))
        if self._running:
            self._done_at = now + self._seconds(len(self._running[0].requests))


def run(
    scheduler: Scheduler,
    arrivals: Sequence[float],
    *,
    make_request: Callable[[int], Request] = lambda number: Request(number, None),
    room: float = inf,
    clients: int = 0,
) -> list[BatchSample]:
    shell = Shell(scheduler, room, clients)
    shell.run(arrivals, make_request)
    return shell.samples


def arrive(share: float, seconds: float = 2.0) -> list[float]:
    """Poisson arrivals at a share of the capacity."""
    return poisson(share * CAPACITY, seconds, seed=3)


def grouped(number: int) -> Request:
    request = Request(number, None)
    request.group = GROUPS[number % len(GROUPS)]
    return request


def priced(number: int) -> Request:
    request = Request(number, None)
    request.cost = 10.0
    return request


GROUPS = [Group(key) for key in range(6)]


def few_arrivals() -> list[BatchSample]:
    return run(make(max_batch_size=SIZE), arrive(0.2))


def overload() -> list[BatchSample]:
    return run(make(max_batch_size=SIZE, max_queue_size=100), arrive(2.0))


def cost_limit() -> list[BatchSample]:
    packer = SummedPacker(80.0)
    return run(make(max_batch_size=SIZE, packer=packer), arrive(0.5), make_request=priced)


def groups() -> list[BatchSample]:
    return run(make(max_batch_size=SIZE, is_grouped=True), arrive(0.6), make_request=grouped)


def hold() -> list[BatchSample]:
    policy = make_policy("adaptive", None)
    return run(make(policy, max_batch_size=64), [], clients=32)


def window() -> list[BatchSample]:
    return run(make(make_policy("fixed", 0.02), max_batch_size=SIZE), arrive(0.1))


def memory() -> list[BatchSample]:
    return run(make(max_batch_size=SIZE, max_queue_size=100), arrive(1.0), room=8)


def nothing() -> list[BatchSample]:
    return run(make(), [])


SITUATIONS: list[tuple[Callable[[], list[BatchSample]], str, dict[str, Any], str]] = [
    (few_arrivals, "arrivals", {}, "nothing to change"),
    (overload, "max_batch_size", {}, "larger batches would not help"),
    (cost_limit, "cost", {"has_cost_limit": True}, "a higher max_batch_cost"),
    (groups, "groups", {"is_grouped": True}, "fewer different keys"),
    (hold, "hold", {"max_batch_size": 64}, "nothing to change: the hold"),
    (overload, "disabled", {"is_enabled": False}, "enabled=True lets requests"),
    (window, "window", {}, "policy='adaptive' sends at once"),
    (memory, "memory", {"is_short_of_memory": True}, "the model ran out of memory"),
    # A method's own limit, or the limit before `reconfigure`.
    (overload, "max_batch_size", {"max_batch_size": 2 * SIZE}, "most of these batches had"),
    (nothing, "no data", {}, ""),
]


def explained(samples: list[BatchSample], **setup: Any) -> Explanation:
    known = {"max_batch_size": SIZE, "num_workers": 1, "has_cost_limit": False, "is_grouped": False}
    return explain(samples, Setup(**(known | setup)))


@pytest.mark.parametrize(
    ("situation", "cause", "setup", "advice"),
    SITUATIONS,
    ids=[situation.__name__ for situation, *_ in SITUATIONS],
)
def test_the_cause_is_named(
    situation: Callable[[], list[BatchSample]], cause: str, setup: dict[str, Any], advice: str
) -> None:
    found = explained(situation(), **setup)
    assert (found.cause, found.advice.startswith(advice)) == (cause, True), found
    assert str(found).endswith(".")


def test_numbers_are_written_without_an_exponent() -> None:
    samples = [BatchSample(i, i + 1.0, 12_345, Release.IDLE, 0, 0.0, 1.0) for i in range(2000)]
    found = str(explained(samples, max_batch_size=2**20))
    assert "2000 batches in 2000 seconds: 12345 requests per second" in found
    assert "The average batch has 12345 requests" in found
    sizes = [(0.001, "0.001"), (0.00012, "0.0001"), (0.0, "0"), (1.26, "1.26"), (99.96, "100")]
    assert [number(value) for value, _ in sizes] == [text for _, text in sizes]


def test_scheduler_remembers_out_of_memory() -> None:
    scheduler = make(max_batch_size=SIZE, max_queue_size=100)
    assert not scheduler.is_short_of_memory
    run(scheduler, arrive(1.0), room=8)
    assert scheduler.is_short_of_memory


def test_explanation_has_figures_of_the_run() -> None:
    found = explained(few_arrivals())
    assert found.requests_per_second == pytest.approx(0.2 * CAPACITY, rel=0.1)
    assert found.load is not None
    assert 0.1 < found.load < 0.4
    assert found.load < found.busy < 1
    busy = explained(overload())
    assert busy.busy == pytest.approx(1, abs=0.02)
    assert busy.mean_batch_size > SIZE - 1
    assert busy.capacity == pytest.approx(CAPACITY, rel=0.05)


def serve_padded(moments: Sequence[float], *, is_padded: bool) -> tuple[Scheduler, float]:
    """Serve texts of which each tenth is long; return the scheduler and the requests per second."""
    random = Random(2)
    costs = [1000.0 if random.random() < 0.1 else 10.0 for _ in range(2000)]

    def seconds(_: float, numbers: Sequence[int]) -> float:
        of = [costs[number % len(costs)] for number in numbers]
        return 0.01 + 1e-5 * (len(of) * max(of) if is_padded else sum(of))

    options = {"max_queue_size": len(moments), "timeout": None, "cost": len}
    scheduler = open_scheduler(SIZE, 1, (), cost_is_padded=is_padded, **options)
    history = simulate(scheduler, Arrivals(moments), seconds, costs=costs)
    return scheduler, len(moments) / max(history.answers)


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_load_with_costs_is_that_of_packed_batches(is_padded: bool, share: float) -> None:
    """At any load: batches of long texts take longer, and are filled with their like."""
    _, capacity = serve_padded([0.0] * 2000, is_padded=is_padded)
    moments = poisson(share * capacity, 10.0, seed=3)
    scheduler, rate = serve_padded(moments, is_padded=is_padded)
    samples = [BatchSample(at, at + 1 / rate, 1, Release.IDLE, 0, 0.0, 0.0) for at in (0, 1 / rate)]
    found = explained(samples, seconds_each=scheduler.seconds_each)
    assert found.load == pytest.approx(share, rel=0.25)


def test_gain_with_costs_is_that_of_packed_batches() -> None:
    """A warm-up of short texts, and batches of texts that fill them, tell nothing of the size."""
    times = {SIZE: 0.002, 2 * SIZE: 0.001}
    samples = [BatchSample(at, at + 1.0, SIZE, Release.FULL, 9, 0.0, 1.0) for at in range(9)]
    advice = explained(samples, seconds_each=times.get).advice
    assert advice == "nothing to change: the workers have time left"
    times = {SIZE: 0.03, 2 * SIZE: 0.015}
    advice = explained(samples, seconds_each=times.get).advice
    assert advice.startswith("max_batch_size=64 is predicted to raise the capacity by 100%")


@pytest.mark.parametrize(
    ("release", "size", "setup", "cause"),
    [
        (Release.RETRY, 4, {}, "retries"),
        (Release.DEADLINE, 4, {}, "deadline"),
        (Release.IDLE, 4, {"has_cost_limit": True}, "cost"),
        (Release.FULL, SIZE, {}, "max_batch_size"),
    ],
)
def test_idle_workers_need_no_change(
    release: Release, size: int, setup: dict[str, Any], cause: str
) -> None:
    samples = [BatchSample(number, number + 0.1, size, release, 1, 0.0, 0.1) for number in range(9)]
    found = explained(samples, **setup)
    assert found.cause == cause
    if cause == "max_batch_size":
        assert found.advice == "nothing to change: the workers have time left"


def test_advice_without_a_second_measured_size() -> None:
    samples = [BatchSample(at, at + 1.0, 1, Release.FULL, 9, 0.0, 1.0) for at in range(9)]
    advice = explained(samples, max_batch_size=1).advice
    assert advice.startswith("no other size than 1 was measured")
    assert advice.endswith("try max_batch_size=2")


# --- what a larger size gains ---------------------------------------------------------------------


def linear(size: float) -> float:
    return 0.0025 * size


def fixed(_: float) -> float:
    return 0.02


def affine(size: float) -> float:
    return 0.02 + 0.0025 * size


def explain_run(
    seconds: Seconds, *, warm: bool, clients: int = 24, arrivals: Sequence[float] = ()
) -> Explanation:
    """The explanation of a run with batches of at most 8."""
    scheduler = make(make_policy("adaptive", None), max_batch_size=8)
    if warm:
        scheduler.worker_lost(0)
        scheduler.worker_ready(0.0, 0, [(size, seconds(size)) for size in (1, 8)])
    shell = Shell(scheduler, clients=clients, seconds=seconds)
    shell.run(arrivals, lambda number: Request(number, None))
    setup = Setup(8, 1, has_cost_limit=False, is_grouped=False)
    return explain(shell.samples, setup, scheduler.service.points())


NO_GAIN = "larger batches would not help: one of 16 is predicted to take twice as long"
UNKNOWN = "no other size than 8 was measured"
TIME_LEFT = "nothing to change: the workers have time left"
# Full batches, each as the worker is half way to the next.
HALF_LOAD = [0.04 * number for number in range(50) for _ in range(8)]


@pytest.mark.parametrize(
    ("seconds", "situation", "advice", "capacity"),
    [
        (linear, {"warm": True}, NO_GAIN, 400.0),
        (linear, {"warm": False}, UNKNOWN, 400.0),
        (
            fixed,
            {"warm": True},
            "max_batch_size=16 is predicted to raise the capacity by 100%",
            400,
        ),
        (fixed, {"warm": False}, UNKNOWN, 400.0),
        (
            affine,
            {"warm": True},
            "max_batch_size=16 is predicted to raise the capacity by 33%",
            200,
        ),
        (affine, {"warm": False}, UNKNOWN, 200.0),
        (linear, {"warm": True, "clients": 0, "arrivals": HALF_LOAD}, TIME_LEFT, 400.0),
        (fixed, {"warm": True, "clients": 0, "arrivals": HALF_LOAD}, TIME_LEFT, 400.0),
        (
            fixed,
            {"warm": True, "clients": 0, "arrivals": poisson(200.0, 3.0, seed=3)},
            "nothing to change: batches hold what arrives",
            400.0,
        ),
        (linear, {"warm": False, "clients": 1}, "nothing to change", None),
    ],
)
def test_advice_is_true_for_a_known_model(
    seconds: Seconds, situation: dict[str, Any], advice: str, capacity: float | None
) -> None:
    found = explain_run(seconds, **situation)
    assert found.advice.startswith(advice), found
    assert found.capacity == (None if capacity is None else pytest.approx(capacity, rel=0.05))


@pytest.mark.parametrize(
    ("learned", "capacity"),
    [
        # The warm-up had inputs that are far shorter than those of the requests.
        ((64.0, 0.0005, 0.0005), None),
        # The times scatter.
        ((64.0, 0.018, 0.018), 64 / 0.018),
    ],
)
def test_times_of_the_warm_up_that_requests_contradict_do_not_count(
    learned: tuple[float, float, float], capacity: float | None
) -> None:
    samples = [
        BatchSample(0.02 * number, 0.02 * (number + 1), 8, Release.IDLE, 0, 0.0, 0.02)
        for number in range(20)
    ]
    found = explain(samples, Setup(64, 1, has_cost_limit=False, is_grouped=False), [learned])
    assert found.capacity == (None if capacity is None else pytest.approx(capacity))


def test_reason_and_mean_are_told_apart() -> None:
    sizes = [8, 8, 8, 8, 4]
    samples = [
        BatchSample(at, at + 1.0, size, Release.FULL if size == 8 else Release.IDLE, 0, 0.0, 1.0)
        for at, size in enumerate(sizes)
    ]
    found = explained(samples, max_batch_size=8)
    assert found.cause == "max_batch_size"
    assert found.cause_share == pytest.approx(32 / 36)
    assert "average batch has 7.2 requests. 89% of the requests were in batches that had" in str(
        found
    )


def test_larger_size_is_advised_if_it_gains() -> None:
    samples = [
        BatchSample(number, number + 0.9 + size / 1000, size, Release.FULL, 9, 0.0, 0.9)
        for number, size in enumerate([8, 16, SIZE] * 10)
    ]
    assert explained(samples).cause == "max_batch_size"
    full = [one for one in samples if one.size == SIZE]
    found = explained([*samples, *full])
    assert found.advice.startswith("max_batch_size=64 is predicted to raise the capacity by 9")


# --- allowed sizes --------------------------------------------------------------------------------

STEPS = (1, 8, 32, 64)
LEARNED = [(1.0, 0.004, 0.004), (8.0, 0.005, 0.005), (32.0, 0.008, 0.008), (64.0, 0.014, 0.014)]


def filled(sizes: Sequence[int], left_waiting: int = 0) -> list[BatchSample]:
    """Batches of these sizes, one after the other, with the times of `LEARNED`."""
    found, now = [], 0.0
    for size in sizes:
        seconds = next(seconds for step, seconds, _ in LEARNED if step >= size)
        release = Release.FULL if size == 64 else Release.IDLE
        found.append(BatchSample(now, now + seconds, size, release, left_waiting, 0.0, seconds))
        now += seconds
    return found


@pytest.mark.parametrize(
    ("sizes", "left_waiting", "cause", "advice"),
    [
        (
            [33, 40, 36, 64],
            0,
            "arrivals",
            "batches of 33 to 40 are filled to 64: a step at 40 would answer 1.5 times as many",
        ),
        ([20, 20, 20], 0, "arrivals", "batches of 20 are filled to 32: a step at 20 would answer"),
        ([64, 62, 63], 0, "arrivals", "nothing to change: batches hold what arrives"),
        ([32, 8, 1], 0, "arrivals", "nothing to change: batches hold what arrives"),
        ([32, 32, 32], 9, "allowed_batch_sizes", "nothing to change: the next larger size"),
        (
            [64, 64, 64],
            9,
            "max_batch_size",
            "max_batch_size=128 with an allowed size of as many is",
        ),
    ],
)
def test_advice_names_a_step(sizes: list[int], left_waiting: int, cause: str, advice: str) -> None:
    samples = filled(sizes * 10, left_waiting)
    # No batch is larger than the largest allowed size, 64.
    setup = Setup(100, 1, has_cost_limit=False, is_grouped=False, allowed_batch_sizes=STEPS)
    found = explain(samples, setup, LEARNED)
    assert found.cause == cause
    assert found.advice.startswith(advice), found.advice
    assert found.capacity == pytest.approx(64 / 0.014, rel=0.05)
