"""The settings of a scheduler. Pure values."""

from dataclasses import dataclass
from math import inf
from typing import Final

# A busy worker gets one batch ahead, and only a full one: it hides the hand-over at saturation and
# costs no latency below it. Source: a second batch that was not full cost 60 % of the median
# latency at part load, a full one nothing.
BATCHES_PER_WORKER: Final = 2


@dataclass(frozen=True)
class Limits:
    """What a scheduler may do, and for how long. Durations are in seconds; None is no limit."""

    max_batch_size: int
    # Most requests waiting, and most bytes of them together.
    max_queue_size: int
    max_queue_bytes: int | None = None
    # From arrival to deadline where the caller names none. A worker that has run a batch for as
    # long, and for which no caller waits, counts as stalled.
    timeout: float | None = None
    # From arrival to target: see `Admission`.
    max_latency: float | None = None
    # For how long a batch may run before its worker is replaced.
    infer_timeout: float | None = None
    # Whether a request may be computed twice.
    idempotent: bool = True
    # Whether a batch for which `infer` raised is divided to find the culprit.
    isolate_errors: bool = True
    # Most batches that a worker has; above 1, one that waits full behind the one that runs.
    batches_per_worker: int = BATCHES_PER_WORKER


def or_infinite(limit: float | None) -> float:
    """A limit as a number."""
    return inf if limit is None else limit
