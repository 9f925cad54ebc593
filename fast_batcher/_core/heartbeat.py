"""Detection of idle workers that have stopped responding. Pure: time is an argument.

An idle worker answers a ping at once, unless its process is stopped or stuck. A worker that
computes is never pinged: it cannot answer, and `infer_timeout` limits it.
"""

from math import inf
from typing import Final

# Seconds between pings, and so the longest time for the answer of an idle worker. Often enough to
# find a stuck worker within ten seconds, rarely enough to cost nothing.
INTERVAL: Final = 5.0
# A tick later than this many seconds shows that this process itself was stopped, perhaps with its
# workers (SIGSTOP to the group): then silence is no evidence.
LATENESS: Final = 1.0


class Heartbeat:
    """Pings that have not been answered."""

    def __init__(self) -> None:
        self._pending: set[int] = set()
        self._next_tick = inf

    def tick(self, now: float, idle: list[int]) -> tuple[list[int], list[int]]:
        """Choose the workers to ping, and find silent ones; called every `INTERVAL` seconds.

        Args:
            now: The moment.
            idle: Ready workers without a batch.

        Returns:
            The workers to ping now, and the workers that left the last ping unanswered. These may
            have been given a batch since then: a worker reads the ping before that batch.
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
        """Drop a worker's pending ping: it was answered, or the worker is gone."""
        self._pending.discard(worker)
