"""When does a waiting batch leave? The interface between the scheduler and its policies. Pure.

The scheduler asks only while a worker is free and requests wait; a full batch always leaves.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from fast_batcher._core.messages import Release
from fast_batcher._core.ranked_queue import Queue
from fast_batcher._core.service_model import ServiceModel


class Load(NamedTuple):
    """What the scheduler has besides the queue."""

    # Requests waiting in the queue.
    waiting: int
    # Requests that workers have and whose callers still wait.
    running: int
    # Workers that are not retired.
    workers: int
    max_batch_size: int
    # How long batches take. It learns from every batch while the policy learns.
    service: ServiceModel


class Policy(ABC):
    """Decides about the batch that is forming; may learn from what the scheduler tells it."""

    # Whether `arrived` and `batch_done` are to be called.
    learns = False

    @abstractmethod
    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Choose what to do with fewer than `max_batch_size` waiting requests and a free worker.

        Args:
            now: The moment of the decision, seconds.
            queue: At least one request.
            load: What else there is.

        Returns:
            Why the batch leaves now, or the moment (later than `now`) until which it is held; a new
            arrival or completion asks again.
        """

    def end_hold(self) -> None:  # noqa: B027  most policies keep nothing of a hold
        """Learn that nothing is held: the batch has left, is empty, or no worker is free."""

    def arrived(self, now: float, count: int, is_idle: bool) -> None:  # noqa: B027
        """Learn that requests have arrived together.

        Args:
            now: The moment.
            count: How many.
            is_idle: Whether there were no others, waiting or running.
        """

    def batch_done(self, now: float, size: int, load: Load) -> None:  # noqa: B027
        """Learn that a worker has answered a batch of this size; `load` is without it."""

    def batch_skipped(self) -> None:  # noqa: B027
        """Learn that a worker has answered a batch while `learns` was False."""


class GreedyPolicy(Policy):
    """A free worker takes what waits at once: work-conserving.

    Source: at Poisson arrivals from 5 to 98 % load its mean latency is within 1 % of the exact
    optimum for models where a batch costs much by itself, and fixed windows cost up to ten times
    as much: `benchmarks/results/simulation-open-loop.txt`.
    """

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Send now."""
        return Release.IDLE


class FixedPolicy(Policy):
    """A batch leaves when it is full, or `max_delay` after the arrival of its oldest request.

    That is the rule of fast_dynamic_batcher's documents.

    Args:
        max_delay: The seconds of that wait; 0 makes it greedy.
    """

    def __init__(self, max_delay: float) -> None:
        self._max_delay = max_delay

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Wait for the end of the oldest request's window, unless its deadline comes first."""
        oldest = queue.oldest()
        assert oldest is not None, "the scheduler asks only while requests wait"
        window_end = oldest.arrival + self._max_delay
        if now >= window_end:
            return Release.WINDOW
        if queue.earliest_deadline() < window_end:
            return Release.DEADLINE
        return window_end
