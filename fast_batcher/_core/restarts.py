"""Restart budget and back-off of a dead worker. Pure: time is an argument.

The budget works like a circuit breaker: `max_restarts` deaths within one window spend it, and after
a window without a try there is one again.
"""

from collections import deque
from typing import Final, NamedTuple

# Longest back-off. A try every ten seconds costs nothing, and is soon enough after the cause is
# gone.
MAX_DELAY: Final = 10.0


class NextTry(NamedTuple):
    """Moment of the next start of a dead worker."""

    # Seconds from now.
    delay: float
    # Whether the restart budget is spent: callers should not wait for this worker.
    is_given_up: bool


class Restarts:
    """Restart budget and back-off of one worker.

    Args:
        max_restarts: Most restarts in one window, or None for no limit.
        window: Seconds. After a worker that was ready for this time, the back-off starts again.
        backoff: The first delay, seconds; it doubles from death to death up to 10 s.
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
        self._delay = min(2 * self._delay, max(MAX_DELAY, self._backoff))
        return NextTry(delay, is_given_up=False)
