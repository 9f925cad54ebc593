"""When does a waiting batch leave? The seam between the scheduler and its rules. Pure.

The scheduler asks only while a worker is free and requests wait; a full batch always leaves.
A policy answers with a `Release` (send the oldest requests now) or with the moment until which
it holds the batch. It may remember what it saw through `batch_done`.
"""

from math import inf
from typing import Protocol

from fast_batcher._core.messages import Batch, Release
from fast_batcher._core.request_queue import RequestQueue


class Policy(Protocol):
    """Decides about the batch that is forming."""

    # Whether `batch_done` is to be called; saves the others a call per batch.
    learns: bool
    # Whether `decide` always says `Release.IDLE`.
    is_greedy: bool

    def decide(self, now: float, queue: RequestQueue) -> Release | float:
        """Choose what to do with fewer than `max_batch_size` waiting requests and a free worker.

        Args:
            now: The moment of the decision, seconds.
            queue: At least one request.

        Returns:
            Why the batch leaves now, or the moment (later than `now`) until which it is held; a new
            arrival or completion asks again.
        """

    def batch_done(self, now: float, batch: Batch) -> None:
        """Learn from a batch that a worker has answered."""

    def limit_delay(self, max_delay: float | None) -> None:
        """Hold no batch for more than so many seconds from now on; None for no such limit."""


class GreedyPolicy:
    """Work-conserving: a free worker takes what waits at once.

    Source: at Poisson arrivals from 5 to 98 % load its mean latency is within 0.5 % of the exact
    optimum, where fixed windows cost up to ten times as much.
    """

    learns = False
    is_greedy = True

    def decide(self, now: float, queue: RequestQueue) -> Release | float:
        """Send now."""
        return Release.IDLE

    def batch_done(self, now: float, batch: Batch) -> None:
        """Nothing to learn."""

    def limit_delay(self, max_delay: float | None) -> None:
        """It holds none."""


class FixedPolicy:
    """The rule of fast_dynamic_batcher's documents: a full batch, or `max_delay` after the first.

    Args:
        max_delay: Seconds from the arrival of the oldest request; 0 makes it greedy.
    """

    learns = False
    is_greedy = False

    def __init__(self, max_delay: float) -> None:
        self._max_delay = max_delay

    def decide(self, now: float, queue: RequestQueue) -> Release | float:
        """Wait for the end of the oldest request's window, unless its deadline comes first."""
        oldest = queue.oldest()
        assert oldest is not None, "the scheduler asks only while requests wait"
        window_end = oldest.arrival + self._max_delay
        if now >= window_end:
            return Release.WINDOW
        if queue.earliest_deadline() < window_end:
            return Release.DEADLINE
        return window_end

    def batch_done(self, now: float, batch: Batch) -> None:
        """Nothing to learn."""

    def limit_delay(self, max_delay: float | None) -> None:
        """Also for what waits already."""
        self._max_delay = inf if max_delay is None else max_delay


def make_policy(name: str, max_delay: float | None) -> Policy:
    """The policy of this name; "adaptive" is greedy with late binding.

    Args:
        name: "adaptive", "greedy" or "fixed".
        max_delay: Seconds; the bound on deliberate waiting, which only "fixed" makes use of.
    """
    if name == "fixed":
        return FixedPolicy(inf if max_delay is None else max_delay)
    return GreedyPolicy()
