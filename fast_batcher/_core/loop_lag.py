"""Lag of an event loop: when it was blocked, and whether to warn. Pure."""

from collections import deque
from math import inf
from typing import Final

# Seconds between two ticks: a block of this length is always seen, and four timers a second cost
# less than a thousandth of a core.
TICK: Final = 0.25
# Lateness in seconds from which a tick counts: a process that waits for a core is late by less.
LEAST_LAG: Final = 0.05
# A warning follows when the loop was blocked for this many seconds of the window, a tenth of it,
# and the next one a minute later: an operator reads one line a minute.
WINDOW: Final = 10.0
SERIOUS: Final = 1.0
WARNING_INTERVAL: Final = 60.0
# Share of a request's time for which the loop was blocked, from which its error says so.
GUILTY_SHARE: Final = 0.25


class LoopLag:
    """Times at which an event loop was blocked, as far as ticks that come late show it.

    A block begins up to `TICK` seconds before the tick that it delays, so all figures are minima.
    """

    def __init__(self, now: float) -> None:
        self._due = now + TICK
        # Begin and end of the blocks of the last minute.
        self._blocks: deque[tuple[float, float]] = deque(maxlen=int(WARNING_INTERVAL / TICK))
        self._warn_at = -inf

    def restart(self, now: float) -> None:
        """Expect a tick again, after a time without."""
        self._due = now + TICK

    def tick(self, now: float) -> float:
        """Note a tick; return the seconds for which the loop was blocked before it."""
        due, self._due = self._due, now + TICK
        if now - due < LEAST_LAG:
            return 0.0
        self._blocks.append((due, now))
        return now - due

    def blocked(self, since: float, now: float) -> float:
        """Return the seconds between two moments for which the loop was blocked, at least."""
        # The last block has not ended if the next tick is overdue.
        blocks = (*self._blocks, (self._due, now))
        return sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in blocks)

    def find_delay(self, since: float, now: float) -> float:
        """Return the seconds for which the loop has delayed a request that ends late, or 0.0."""
        seconds = self.blocked(since, now)
        return seconds if seconds >= max(LEAST_LAG, GUILTY_SHARE * (now - since)) else 0.0

    def find_warning(self, now: float) -> float:
        """Return the blocked seconds of the last `WINDOW` if a warning is due, else 0.0."""
        seconds = self.blocked(now - WINDOW, now)
        if now < self._warn_at or seconds < SERIOUS:
            return 0.0
        self._warn_at = now + WARNING_INTERVAL
        return seconds
