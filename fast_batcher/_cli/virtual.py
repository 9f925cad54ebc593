"""Virtual time: the scheduler of the library, workers that take measured times, and arrivals.

No process, no clock: the same measurements and the same seed give the same figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from fast_batcher._core.policy import make_policy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Dispatch, Expire, Limits, Request

# Draws the seconds of a batch of a size.
Seconds = Callable[[int, Random], float]
# The default of `DynBatcher`; what waits longer is lost here, too.
TIMEOUT = 30.0
# Share of the arrivals at the start that do not count: the policy learns, and the queue fills.
WARM_UP = 0.2


@dataclass(frozen=True)
class Outcome:
    """The figures of one load."""

    answered_per_second: float
    # Share of the requests that were rejected or expired, 0 to 1.
    lost: float
    # Seconds from arrival to answer.
    p50: float
    p95: float
    p99: float
    mean_batch_size: float


def poisson(rate: float, requests: int, seed: int) -> list[float]:
    """Draw the moments of this many independent arrivals, `rate` per second."""
    random = Random(seed)
    moments, now = [], 0.0
    for _ in range(requests):
        now += random.expovariate(rate)
        moments.append(now)
    return moments


class Simulation:
    """A batcher under a load.

    Args:
        moments: Of the arrivals, rising, seconds.
        seconds: Draws the time of a batch.
        max_batch_size: As of `DynBatcher`.
        num_workers: As of `DynBatcher`.
        max_latency: As of `DynBatcher`, None for no target.
        seed: Of the times of batches.
    """

    def __init__(
        self,
        moments: Sequence[float],
        seconds: Seconds,
        max_batch_size: int,
        num_workers: int,
        max_latency: float | None = None,
        seed: int = 0,
    ) -> None:
        limits = Limits(
            max_batch_size=max_batch_size,
            max_queue_size=max(1024, 8 * max_batch_size * num_workers),
            timeout=TIMEOUT,
            max_latency=max_latency,
        )
        self._scheduler = Scheduler(make_policy("adaptive", None), limits)
        for worker in range(num_workers):
            self._scheduler.worker_ready(0.0, worker)
        self._moments = moments
        self._seconds = seconds
        self._random = Random(seed)
        # When each worker has computed its batches: a busy one has another ahead.
        self._free_at = [0.0] * num_workers
        self._order = count()
        # Ends of batches: moment, order, worker and batch.
        self._events: list[tuple[float, int, int, int]] = []
        self._wake_at = inf
        self._latencies: list[float] = []
        self._last_answer = 0.0
        self._sizes: list[int] = []

    def run(self) -> Outcome:
        """Let time pass until every request has ended."""
        arrivals = iter(self._moments)
        next_arrival = next(arrivals, inf)
        while True:
            now = min(next_arrival, self._events[0][0] if self._events else inf, self._wake_at)
            if now == inf:
                return self._sum_up()
            if now == next_arrival:
                self._scheduler.submit(now, [Request(now, None)])
                next_arrival = next(arrivals, inf)
            elif self._events and now == self._events[0][0]:
                self._finish(now)
            self._decide(now)

    def _finish(self, now: float) -> None:
        _, _, worker, batch_id = heappop(self._events)
        batch = self._scheduler.batch_done(now, worker, batch_id)
        assert batch is not None, "each batch ends once"
        counted = self._moments[int(WARM_UP * len(self._moments))]
        for request in batch.requests:
            if not request.is_settled:
                request.is_settled = True
                if request.value >= counted:
                    self._latencies.append(now - request.value)
                    self._last_answer = now

    def _decide(self, now: float) -> None:
        actions, wake_at = self._scheduler.poll(now)
        for action in actions:
            if isinstance(action, Dispatch):
                size, worker = len(action.batch.requests), action.batch.worker
                self._sizes.append(size)
                begin = max(now, self._free_at[worker])
                done_at = self._free_at[worker] = begin + self._seconds(size, self._random)
                heappush(self._events, (done_at, next(self._order), worker, action.batch.id))
            else:
                assert isinstance(action, Expire), "nothing fails here"
        self._wake_at = inf if wake_at is None else wake_at

    def _sum_up(self) -> Outcome:
        first = int(WARM_UP * len(self._moments))
        counted = len(self._moments) - first
        latencies = sorted(self._latencies) or [inf]

        def quantile(share: float) -> float:
            return latencies[min(len(latencies) - 1, int(share * len(latencies)))]

        answered = len(self._latencies)
        span = max(self._last_answer, self._moments[-1]) - self._moments[first]
        return Outcome(
            answered_per_second=answered / span if span else 0.0,
            lost=1 - answered / counted if counted else 0.0,
            p50=quantile(0.50),
            p95=quantile(0.95),
            p99=quantile(0.99),
            mean_batch_size=sum(self._sizes) / max(1, len(self._sizes)),
        )
