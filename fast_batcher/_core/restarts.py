"""When a dead worker is replaced, and when that is given up for a while. Pure: time is an argument.

The budget works like a circuit breaker: it is spent by `max_restarts` in one window, and after a
window without a try there is one again.
"""

from collections import deque
from typing import Final, NamedTuple

# Ten seconds between tries cost nothing, and are soon enough once the cause is gone.
MAX_DELAY: Final = 10.0


class NextTry(NamedTuple):
    """What to do about a worker that is gone."""

    # Seconds from now.
    delay: float
    # Whether the budget is spent, so that waiting for it is pointless.
    is_given_up: bool


class Restarts:
    """The restarts of one worker.

    Args:
        max_restarts: Most in one window, or None for no limit.
        window: Seconds. A worker that has lived as long was not killed by what killed the one
            before: delays start again.
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
        """The worker has become ready, or another in its place before it was lost."""
        if self._ready_at is None:
            self._ready_at = now

    def lost(self, now: float) -> NextTry:
        """The worker has died, or could not start."""
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
