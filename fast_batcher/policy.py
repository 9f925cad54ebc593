"""`BatchPolicy`, the protocol of a rule of your own for the moment at which a batch leaves.

Leaf module; the scheduler calls the rule, also in the virtual time of `fast-batcher tune`.
"""

from typing import NamedTuple, Protocol, runtime_checkable


class QueueSummary(NamedTuple):
    """Waiting requests while a worker is free. Durations are in seconds."""

    size: int
    """Waiting requests, fewer than `max_batch_size`."""
    max_batch_size: int
    """Most requests of a batch."""
    waited: float
    """The time that the oldest has waited."""
    until_target: float
    """The time from now to the target of the oldest, by `max_latency` or its own `timeout`;
    negative if it has passed, and infinite without one.
    """
    running: int
    """Requests that workers have."""
    workers: int
    """Ready workers."""


class LearnedTimes(Protocol):
    """Seconds of batches, as the batcher has measured them."""

    def median(self, size: float, /) -> float:
        """Return the median time of batches of this size."""

    def high(self, size: float, /) -> float:
        """Return the 95 % quantile of the times of batches of this size."""


@runtime_checkable
class BatchPolicy(Protocol):
    """A rule for `DynBatcher(..., policy=Rule())`.

    It must be a pure function of its arguments: `fast-batcher tune` calls it in virtual time. The
    batcher still sends a full batch at once, and any batch in time for the deadlines in it.
    """

    def hold(self, queue: QueueSummary, times: LearnedTimes, /) -> float:
        """Return the seconds for which a batch that is not full is held for more requests.

        Called when a worker is free, and again after each arrival and each answer; with sessions
        for the requests of each worker, and for the requests without a session. A hold that is over
        sends the batch. Also 0 or less sends it. Not called before a batch was measured. If it
        raises, the batch is sent, and the error is logged.
        """
