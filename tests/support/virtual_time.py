"""One scheduler, its workers and its callers in virtual time: every moment is an argument."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

from schedulers import make

from fast_batcher._core.policy import Policy, make_policy
from fast_batcher._core.values import Batch, Dispatch, Expire, Release, Request

Seconds = Callable[[float], float]
# Instead of a client: arrivals at moments that were given, and at random ones.
NO_CLIENT, AT_RANDOM = -1, -2


def with_knee(size: float) -> float:
    """A model on a GPU: up to 16 inputs cost what one costs."""
    return 0.004 + 0.00002 * size + 0.00023 * max(0.0, size - 16)


def poisson(rate: float, until: float, seed: int, since: float = 0.0) -> list[float]:
    """Moments of arrival, `rate` per second on average."""
    random = Random(seed)
    moments = [since + random.expovariate(rate)]
    while moments[-1] < until:
        moments.append(moments[-1] + random.expovariate(rate))
    return moments[:-1]


class World:
    """Time goes from event to event; the scheduler is polled after each, as a shell does.

    Args:
        policy: A policy, or its name.
        max_delay: Its bound, seconds.
        clients: Who ask again after each answer; 0 for none.
        pause: How long that takes them, seconds.
        rate: Of arrivals that nobody's answers bring about, per second.
        together: How many of those come at once.
        arrivals: Moments of other arrivals.
        max_latency: The target of every request, seconds.
        timeout: After which a request expires, seconds.
        warm_up: Sizes and seconds of batches that the workers have computed before.
        seed: Of pauses and arrivals.
        lateness: Seconds by which the timer rings late.
        seconds: What a batch of a size takes.
    """

    def __init__(
        self,
        policy: Policy | str = "adaptive",
        *,
        max_delay: float | None = None,
        max_batch_size: int = 64,
        workers: int = 1,
        clients: int = 0,
        pause: Callable[[Random], float] = lambda random: random.uniform(0.1e-3, 1.1e-3),
        rate: float = 0.0,
        together: int = 1,
        arrivals: Iterable[float] = (),
        max_latency: float | None = None,
        timeout: float = 30.0,
        warm_up: Iterable[tuple[float, float]] = (),
        seed: int = 0,
        lateness: float = 0.0,
        seconds: Seconds = with_knee,
    ) -> None:
        self.policy = make_policy(policy, max_delay) if isinstance(policy, str) else policy
        self.scheduler = make(
            self.policy,
            max_batch_size=max_batch_size,
            max_queue_size=100_000,
            timeout=timeout,
            max_latency=max_latency,
            workers=0,
        )
        for worker in range(workers):
            self.scheduler.worker_ready(0.0, worker, warm_up)
        self.seconds = seconds
        self.now = 0.0
        self._max_delay = inf if max_delay is None else max_delay
        self._random = Random(seed)
        self._pause = pause
        self._rate, self._together = rate, together
        self.lateness = lateness
        # Moments and clients.
        self._arrivals = [(self._draw_pause(), client) for client in range(clients)]
        self._arrivals += [(moment, NO_CLIENT) for moment in arrivals]
        if rate:
            self._arrivals.append((self._random.expovariate(rate), AT_RANDOM))
        heapify(self._arrivals)
        self._running: list[tuple[float, int, Batch]] = []
        self._busy_until = [0.0] * workers
        self._wake_at = inf
        # Since when a worker has been free while requests waited, and the bound at that moment.
        self._held: tuple[float, float] | None = None
        # What is to be seen of it.
        self.answered = 0
        self.latency = 0.0
        # Of each request that was answered, or rejected or dropped: its arrival, and for how long
        # it has waited for that. And when each batch was answered.
        self.latencies: list[tuple[float, float]] = []
        self.rejected: list[tuple[float, float]] = []
        self.done_at: dict[int, float] = {}
        self.log: list[tuple[float, Release, int]] = []
        self.longest_hold = 0.0

    def run(self, seconds: float = inf) -> "World":
        """Let so much time pass, or all that happens by itself."""
        end = self.now + seconds
        while True:
            arrival = self._arrivals[0][0] if self._arrivals else inf
            answer = self._running[0][0] if self._running else inf
            now = min(arrival, answer, self._wake_at)
            if now > end or now == inf:
                self.now = end
                return self
            self.now = max(now, self.now)
            while self._running and self._running[0][0] <= now:
                self._answer(heappop(self._running)[2])
            arrived = []
            while self._arrivals and self._arrivals[0][0] <= now:
                arrived += self._next_arrivals()
            for _ in self.scheduler.submit(self.now, arrived):
                self.rejected.append((self.now, 0.0))
            self._poll()

    @property
    def is_holding(self) -> bool:
        """Whether requests wait while a worker is free."""
        return bool(self.scheduler.queue_size and self.scheduler.idle_workers)

    def count_within(self, seconds: float, since: float = 0.0) -> int:
        """Requests that arrived from then on and were answered in time."""
        return sum(took <= seconds for arrival, took in self.latencies if arrival >= since)

    def stall(self, seconds: float) -> None:
        """The loop is blocked: all that happens meanwhile is noticed after it."""
        self.now += seconds

    def share(self, release: Release, since: float = 0.0) -> float:
        """Of the batches since then."""
        releases = [how for moment, how, _ in self.log if moment >= since]
        return releases.count(release) / len(releases)

    def _draw_pause(self) -> float:
        return self.now + self._pause(self._random)

    def _next_arrivals(self) -> list[Request]:
        _, client = heappop(self._arrivals)
        if client != AT_RANDOM:
            return [Request("input", client)]
        heappush(self._arrivals, (self.now + self._random.expovariate(self._rate), AT_RANDOM))
        return [Request("input", NO_CLIENT) for _ in range(self._together)]

    def _answer(self, batch: Batch) -> None:
        assert self.scheduler.batch_done(self.now, batch.worker, batch.id) is batch
        self.done_at[batch.id] = self.now
        for request in batch.requests:
            if request.is_settled:
                continue
            request.is_settled = True
            self.answered += 1
            self.latency += self.now - request.arrival
            self.latencies.append((request.arrival, self.now - request.arrival))
            if request.caller >= 0:
                heappush(self._arrivals, (self._draw_pause(), request.caller))

    def _poll(self) -> None:
        self._notice_hold()
        actions, wake_at = self.scheduler.poll(self.now)
        assert wake_at is None or wake_at > self.now
        for action in actions:
            if isinstance(action, Dispatch):
                self._send(action.batch)
            else:
                assert isinstance(action, Expire)
                arrival = action.request.arrival
                self.rejected.append((arrival, self.now - arrival))
        self._wake_at = wake_at or inf
        self._check_hold()

    def _notice_hold(self) -> None:
        if self._held is not None:
            self.longest_hold = max(self.longest_hold, self.now - self._held[0])

    def _check_hold(self) -> None:
        """A worker is never idle without a reason, and never for long."""
        scheduler = self.scheduler
        # A retired worker may be idle.
        if not scheduler.queue_size or scheduler._workers.least_loaded(1) is None:
            self._held = None
            return
        if self._held is None:
            alone = scheduler._times.by_size.median(1)
            self._held = self.now, min(self._max_delay, alone)
        since, longest = self._held
        assert self._wake_at <= since + longest * (1 + 1e-9)
        self._wake_at += self.lateness

    def _send(self, batch: Batch) -> None:
        self._held = None
        self.log.append((self.now, batch.release, len(batch.requests)))
        start = max(self.now, self._busy_until[batch.worker])
        end = start + self.seconds(len(batch.requests))
        self._busy_until[batch.worker] = end
        heappush(self._running, (end, batch.id, batch))
