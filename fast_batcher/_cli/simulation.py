"""Virtual time: a scheduler, the arrivals, and workers that take given times. No process, no clock.

At each moment the scheduler is told the answers of the workers, then the arrivals, those of one
moment together; then it decides once. The same times and the same seeds give the same figures.
`fast-batcher tune` and `benchmarks/simulation` use it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import (
    Batch,
    Dispatch,
    Expire,
    Fail,
    Request,
    Skip,
    settle_open,
)
from fast_batcher._opening.kinds import BatchKind
from fast_batcher.settings import Settings

# Returns the seconds of a batch that begins at this moment, by the numbers of its requests.
Seconds = Callable[[float, Sequence[int]], float]


class Arrivals:
    """Requests at given moments, whatever the answers: an open loop.

    Args:
        moments: Rising, seconds.
    """

    def __init__(self, moments: Iterable[float]) -> None:
        self._moments = iter(moments)
        # The next arrival's moment, infinite if none is known.
        self.next_at = next(self._moments, inf)

    def pop(self) -> int:
        """Take the next arrival and return the number of its client, in an open loop 0."""
        self.next_at = next(self._moments, inf)
        return 0

    def settled(self, now: float, client: int) -> None:
        """Learn that this client has its answer or rejection."""


class History:
    """Outcomes of the requests, by their numbers, which rise with their arrival."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        # The moments of the answer, and of the rejection or expiry; infinite without one.
        self.answers: list[float] = []
        self.losses: list[float] = []
        self.batch_sizes: list[int] = []


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw the arrivals of many independent users, in order.

    Args:
        rate: Per second.
        seconds: From 0 to then.
        seed: Of the gaps. At another rate the same gaps are stretched.
    """
    random = Random(f"poisson {seed}")
    moments = []
    now = random.expovariate(1.0) / rate
    while now < seconds:
        moments.append(now)
        now += random.expovariate(1.0) / rate
    return moments


def open_scheduler(
    max_batch_size: int, num_workers: int, allowed: tuple[int, ...], **options: Any
) -> Scheduler:
    """Make the scheduler of a batcher whose other options are defaults; its workers are ready."""
    settings = Settings(max_batch_size=max_batch_size, num_workers=num_workers, **options)
    policy = make_policy(settings.policy, settings.max_delay)
    methods = [Method("infer", None, max_batch_size)]
    scheduler = BatchKind.make_scheduler(settings, methods, policy)
    for worker in range(num_workers):
        scheduler.worker_ready(0.0, worker, allowed={"infer": allowed})
    return scheduler


class _Simulation:
    """Passes arrivals, batches and answers on, and records the outcome of each request."""

    def __init__(
        self, scheduler: Scheduler, load: Arrivals, seconds: Seconds, costs: Sequence[float]
    ) -> None:
        self.history = History()
        self._costs = costs
        self._scheduler = scheduler
        self._load = load
        self._seconds = seconds
        # The batches of each worker, which computes one after the other.
        self._batches: defaultdict[int, deque[Batch]] = defaultdict(deque)
        # The end of each busy worker's first batch, and the worker.
        self._ends: list[tuple[float, int]] = []
        # Batches that their workers need not compute.
        self._skipped: set[int] = set()
        self._wake_at: float | None = None

    @property
    def next_at(self) -> float:
        """The next moment at which something happens, infinite if nothing can."""
        next_end = self._ends[0][0] if self._ends else inf
        return min(self._load.next_at, next_end, inf if self._wake_at is None else self._wake_at)

    def advance(self, now: float) -> None:
        """Let everything happen that happens at this moment."""
        while self._ends and self._ends[0][0] <= now:
            self._finish_batch(now)
        if self._load.next_at <= now:
            self._submit_arrivals(now)
        actions, self._wake_at = self._scheduler.poll(now)
        for action in actions:
            if isinstance(action, Dispatch):
                self._send(now, action.batch)
            elif isinstance(action, Expire):
                self._end(now, [action.request], self.history.losses)
            elif isinstance(action, Skip):
                self._skipped.add(action.batch.id)
            elif isinstance(action, Fail):
                raise action.error

    def _submit_arrivals(self, now: float) -> None:
        history, arrived = self.history, []
        while self._load.next_at <= now:
            number = len(history.arrivals)
            arrived.append(Request(number, self._load.pop()))
            if self._costs:
                arrived[-1].cost = self._costs[number % len(self._costs)]
            history.arrivals.append(now)
            history.answers.append(inf)
            history.losses.append(inf)
        rejected = self._scheduler.submit(now, arrived)
        self._end(now, [request for request, _ in rejected], history.losses)

    def _send(self, now: float, batch: Batch) -> None:
        self.history.batch_sizes.append(len(batch.requests))
        self._batches[batch.worker].append(batch)
        if len(self._batches[batch.worker]) == 1:
            self._begin_batch(now, batch)

    def _begin_batch(self, now: float, batch: Batch) -> None:
        seconds = 0.0
        if batch.id not in self._skipped:
            seconds = self._seconds(now, [request.value for request in batch.requests])
        heappush(self._ends, (now + seconds, batch.worker))

    def _finish_batch(self, now: float) -> None:
        """Answer the batch that ends now; its worker begins with the one behind it."""
        _, worker = heappop(self._ends)
        batch = self._batches[worker].popleft()
        if self._batches[worker]:
            self._begin_batch(now, self._batches[worker][0])
        self._scheduler.batch_done(now, worker, batch.id)
        self._end(now, settle_open(batch.requests), self.history.answers)

    def _end(self, now: float, requests: Iterable[Request], outcomes: list[float]) -> None:
        for request in requests:
            outcomes[request.value] = now
            self._load.settled(now, request.caller)


def simulate(
    scheduler: Scheduler,
    load: Arrivals,
    seconds: Seconds,
    until: float = inf,
    costs: Sequence[float] = (),
) -> History:
    """Let virtual time pass until then, or until nothing can happen any more.

    Args:
        scheduler: Whose workers are ready.
        load: The arrivals.
        seconds: Of a batch.
        until: The moment after which nothing happens.
        costs: Of the requests, which take them in turn; empty without costs.
    """
    simulation = _Simulation(scheduler, load, seconds, costs)
    while (now := simulation.next_at) < inf and now <= until:
        simulation.advance(now)
    return simulation.history


def simulate_steps(
    load: Arrivals, draw_length: Callable[[], int], places: int, seconds: Seconds, end: float = inf
) -> History:
    """Let streams join at each boundary of a worker's steps until `end`, or until all have ended.

    Args:
        load: The arrivals.
        draw_length: Returns the chunks of the next stream that joins.
        places: Streams that run at a time.
        seconds: Of a step, instead of a batch.
        end: The moment after which no step begins.

    Returns:
        The streams that have joined, in this order. An answer is a first chunk, a batch is a step.
    """
    history, now = History(), 0.0
    # Moments and clients of the waiting streams; clients and remaining chunks of the running ones.
    waiting: deque[tuple[float, int]] = deque()
    running: list[tuple[int, int]] = []
    while now < end and (running or waiting or load.next_at < inf):
        if not (running or waiting):
            now = max(now, load.next_at)
        while load.next_at <= now:
            waiting.append((load.next_at, load.pop()))
        joining = [waiting.popleft() for _ in range(min(places - len(running), len(waiting)))]
        running += [(client, draw_length()) for _, client in joining]
        now += seconds(now, range(len(running)))
        history.arrivals += [moment for moment, _ in joining]
        history.answers += [now] * len(joining)
        history.batch_sizes.append(len(running))
        for client, left in running:
            if left <= 1:
                load.settled(now, client)
        running = [(client, left - 1) for client, left in running if left > 1]
    return history
