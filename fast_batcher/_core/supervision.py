"""Supervision of workers: heartbeat, recycling, restarts, surplus. Pure."""

from collections import deque
from collections.abc import Collection, Mapping
from math import inf
from typing import Final, NamedTuple

# Seconds between pings, and so the longest time for the answer of an idle worker. Often enough to
# find a stuck worker within ten seconds, rarely enough to cost nothing.
HEARTBEAT_INTERVAL: Final = 5.0
# A tick later than this many seconds shows that this process itself was stopped, perhaps with its
# workers (SIGSTOP to the group): then silence is no evidence.
LATENESS: Final = 1.0


class Heartbeat:
    """Pings that have not been answered.

    An idle worker answers a ping at once, unless its process is stopped or stuck. A worker that
    computes is never pinged: it cannot answer, and `infer_timeout` limits it.
    """

    def __init__(self) -> None:
        self._pending: set[int] = set()
        self._next_tick = inf

    def tick(self, now: float, idle: list[int]) -> tuple[list[int], list[int]]:
        """Choose the workers to ping, and find silent ones.

        Called every `HEARTBEAT_INTERVAL` seconds.
        """
        is_late = now > self._next_tick + LATENESS
        self._next_tick = now + HEARTBEAT_INTERVAL
        silent = [] if is_late else sorted(self._pending)
        self._pending.difference_update(silent)
        to_ping = [worker for worker in idle if worker not in self._pending]
        to_ping = [worker for worker in to_ping if worker not in silent]
        self._pending.update(to_ping)
        return to_ping, silent

    def answered(self, worker: int) -> None:
        """Drop a worker's pending ping: it was answered, or the worker is gone."""
        self._pending.discard(worker)


# A worker above the limit after its first batch is as large as the model needs: a replacement
# would be no smaller.
BATCHES_OF_A_FRESH_WORKER: Final = 1


class Recycling:
    """Limits after which a worker is replaced: a fresh process starts without the model's leaks."""

    def __init__(self, max_batches: int | None, max_rss_bytes: int | None) -> None:
        self._max_batches = max_batches
        self._max_rss_bytes = max_rss_bytes
        # Whether any worker is ever due.
        self.is_wanted = max_batches is not None or max_rss_bytes is not None
        # A fresh worker was above the memory limit, which therefore cannot detect a leak.
        self.is_limit_too_low = False

    def is_due(self, batches: int, rss_bytes: int) -> bool:
        """Return whether a worker is to be replaced."""
        if self._max_batches is not None and batches >= self._max_batches:
            return True
        if self._max_rss_bytes is None or rss_bytes < self._max_rss_bytes:
            return False
        self.is_limit_too_low |= batches <= BATCHES_OF_A_FRESH_WORKER
        return not self.is_limit_too_low


# Longest back-off. A try every ten seconds costs nothing, and is soon enough after the cause is
# gone.
MAX_BACKOFF: Final = 10.0


class NextTry(NamedTuple):
    """Moment of the next start of a dead worker."""

    # Seconds from now.
    delay: float
    # Whether the restart budget is spent: callers should not wait for this worker.
    is_given_up: bool


class Restarts:
    """Restart budget and back-off of one worker.

    The budget works like a circuit breaker: the next death after `max_restarts` restarts within one
    window spends it, and after a window without a try there is one again.
    """

    def __init__(self, max_restarts: int | None, window: float, backoff: float) -> None:
        self._max_restarts = max_restarts
        self._window = window
        self._backoff = backoff
        self._delay = backoff
        self._ready_at: float | None = None
        # The moments of the restarts that count.
        self._restarts: deque[float] = deque()

    def ready(self, now: float) -> None:
        """Record that the worker, or its successor, has become ready."""
        if self._ready_at is None:
            self._ready_at = now

    def lost(self, now: float) -> NextTry:
        """Record that the worker has died or could not start; return when to start another."""
        if self._ready_at is not None and now - self._ready_at >= self._window:
            self._delay = self._backoff
        self._ready_at = None
        restarts = self._restarts
        while restarts and restarts[0] <= now - self._window:
            restarts.popleft()
        if self._max_restarts is not None and len(restarts) >= self._max_restarts:
            return NextTry(self._window, is_given_up=True)
        if self._max_restarts is not None:  # else they are never read
            restarts.append(now)
        delay = self._delay
        self._delay = min(2 * self._delay, max(MAX_BACKOFF, self._backoff))
        return NextTry(delay, is_given_up=False)


def choose_surplus(ready: Mapping[int, bool], count: int) -> list[int]:
    """Choose the workers to remove so that `count` are left.

    Args:
        ready: Whether each worker is ready, by index.
        count: Workers that there should be.

    Returns:
        Indexes: first of workers that are not ready, then the highest.
    """
    first = sorted(ready, key=lambda index: (ready[index], -index))
    return first[: max(0, len(ready) - count)]


def choose_added(present: Collection[int], count: int) -> list[int]:
    """Choose the indexes of further workers so that there are `count`: the lowest free ones."""
    free = [index for index in range(count) if index not in present]
    return free[: max(0, count - len(present))]
