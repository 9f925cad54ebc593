"""Interface of the policies, which decide how long a batch that is not full waits. Pure.

The scheduler asks its policy only while a worker is free and requests wait; a full batch leaves
at once.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from fast_batcher._core.messages import Release
from fast_batcher._core.ranked_queue import Queue
from fast_batcher._core.service_model import ServiceModel


class Load(NamedTuple):
    """State of the scheduler that a policy may read, besides the queue."""

    # Requests waiting in the queue.
    waiting: int
    # Requests on workers whose callers still wait.
    running: int
    # Workers that are not retired.
    workers: int
    max_batch_size: int
    # Seconds of batches by size. It observes every batch while the policy learns.
    service: ServiceModel


class Policy(ABC):
    """Decides when the next batch leaves; may learn from arrivals and finished batches."""

    # Whether `arrived` and `batch_done` are to be called.
    learns = False
    # Whether `decide` may return a moment now; otherwise the batch leaves without asking.
    may_hold = True

    @abstractmethod
    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Choose what to do with fewer than `max_batch_size` waiting requests and a free worker.

        Args:
            now: The moment of the decision, seconds.
            queue: At least one request.
            load: The rest of the scheduler's state.

        Returns:
            The reason for which the batch leaves now, or the moment (later than `now`) until which
            it is held; a new arrival or completion asks again.
        """

    def end_hold(self) -> None:  # noqa: B027  most policies keep nothing of a hold
        """Learn that nothing is held: the batch has left, is empty, or no worker is free."""

    def arrived(self, now: float, count: int, is_idle: bool) -> None:  # noqa: B027
        """Learn that requests have arrived together.

        Args:
            now: The moment.
            count: Number of requests.
            is_idle: Whether no other request was waiting or running.
        """

    def batch_done(self, now: float, size: int, load: Load) -> None:  # noqa: B027
        """Learn that a worker has answered a batch of this size; `load` no longer includes it."""

    def batch_skipped(self) -> None:  # noqa: B027
        """Learn that a worker has answered a batch while `learns` was False."""


class GreedyPolicy(Policy):
    """Work-conserving policy: a free worker takes the waiting requests at once.

    Source: at Poisson arrivals from 5 to 98 % load its mean latency is within 1 % of the exact
    optimum for models with a high fixed cost per batch, and fixed windows cost up to ten times
    as much: `benchmarks/results/simulation-open-loop.txt`.
    """

    may_hold = False

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Send now."""
        return Release.IDLE


class FixedPolicy(Policy):
    """Fixed window: a batch leaves `max_delay` after the arrival of its oldest request, or full.

    This is the documented rule of fast_dynamic_batcher.

    Args:
        max_delay: The window in seconds; 0 makes the policy greedy.
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
