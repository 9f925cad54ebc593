"""Which idle workers have stopped to answer. Pure: time is an argument.

A worker that computes is left alone: that it says nothing then means nothing, and `infer_timeout`
is for it. An idle one answers a ping at once, unless it is stopped or stuck.
"""

from math import inf
from typing import Final

# Between pings, and so the longest that an idle worker may take to answer one. Often enough that a
# stuck worker is found within ten seconds, rarely enough to cost nothing.
INTERVAL: Final = 5.0
# A tick that comes later than this says that this process itself did not run: then no worker is
# judged, as a whole group that was stopped for ten seconds is not dead.
LATENESS: Final = 1.0


class Heartbeat:
    """Pings that have not been answered."""

    def __init__(self) -> None:
        self._pending: set[int] = set()
        self._next_tick = inf

    def tick(self, now: float, idle: list[int]) -> tuple[list[int], list[int]]:
        """To be called every `INTERVAL` seconds.

        Args:
            now: The moment.
            idle: The workers that are ready and have nothing to do.

        Returns:
            The workers to send a ping now, and the workers that left the last one unanswered: a
            worker that was given work since had the ping before it.
        """
        is_late = now > self._next_tick + LATENESS
        self._next_tick = now + INTERVAL
        silent = [] if is_late else sorted(self._pending)
        self._pending.difference_update(silent)
        to_ping = [worker for worker in idle if worker not in self._pending]
        to_ping = [worker for worker in to_ping if worker not in silent]
        self._pending.update(to_ping)
        return to_ping, silent

    def answered(self, worker: int) -> None:
        """A ping was answered, or the worker is no more."""
        self._pending.discard(worker)
