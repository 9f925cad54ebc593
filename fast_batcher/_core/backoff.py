"""How long to wait before a dead worker is replaced. Pure: time is an argument."""

from typing import Final

# The second try comes at once to a person and not at once to a machine that is short of memory.
FIRST_DELAY: Final = 0.1
# Ten seconds between tries cost nothing, and are soon enough once the cause is gone.
MAX_DELAY: Final = 10.0
# A worker that has lived this long was not killed by what killed the one before.
STABLE_AFTER: Final = 60.0


class Backoff:
    """Delays that double from `FIRST_DELAY` to `MAX_DELAY`, and start again after a stable time."""

    def __init__(self) -> None:
        self._delay = FIRST_DELAY
        self._ready_at: float | None = None

    def ready(self, now: float) -> None:
        """The worker has become ready."""
        self._ready_at = now

    def lost(self, now: float) -> float:
        """The worker has died, or could not start; returns the seconds until the next try."""
        if self._ready_at is not None and now - self._ready_at >= STABLE_AFTER:
            self._delay = FIRST_DELAY
        self._ready_at = None
        delay = self._delay
        self._delay = min(2 * self._delay, MAX_DELAY)
        return delay
