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
    """Settings and limits of a scheduler. Durations are in seconds; None is no limit."""

    max_batch_size: int
    # Most requests waiting, and most bytes of them together.
    max_queue_size: int
    max_queue_bytes: int | None = None
    # From arrival to deadline, for callers that name none. A worker that has run a batch for this
    # time, and for whose batch no caller waits, counts as stalled.
    timeout: float | None = None
    # From arrival to target: see `Admission`.
    max_latency: float | None = None
    # Longest run of a batch; then its worker is replaced.
    infer_timeout: float | None = None
    # Whether a request may be computed twice.
    idempotent: bool = True
    # Whether a batch for which `infer` raised is divided to find the culprit.
    isolate_errors: bool = True
    # Most batches of a worker with one stage: one that runs, and above 1 full ones that wait behind
    # it. See `most_batches`.
    batches_per_worker: int = BATCHES_PER_WORKER


def most_batches(stages: int, batches_per_worker: int = BATCHES_PER_WORKER) -> int:
    """Return the most batches of a worker: each stage but the first runs one more."""
    return batches_per_worker + stages - 1


def or_infinite(limit: float | None) -> float:
    """Return the limit, infinity for None."""
    return inf if limit is None else limit
