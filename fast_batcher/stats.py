"""Counters and their snapshot, `BatcherStats`. Runs in the API process, on the caller's thread."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

# Quantiles look back over this many batches: enough for a stable 95 % quantile (51 samples above
# it), few enough that sorting them takes well under a millisecond.
SAMPLED_BATCHES = 1024


@dataclass(frozen=True)
class BatcherStats:
    """Statistics of a batcher: counts since construction, present load, quantiles of times.

    At any moment `submitted = completed + failed + expired + cancelled + waiting + running`.
    """

    # "new", "opening", "open", "draining", "closed" or "broken".
    state: str
    # Workers that can take a batch, out of `num_workers`.
    workers_ready: int
    num_workers: int
    # Requests in the queue, and requests on workers whose callers still wait.
    waiting: int
    running: int
    # Requests accepted into the queue since construction, and those of them that have ended.
    submitted: int
    completed: int
    failed: int
    expired: int
    cancelled: int
    # Requests rejected before they were queued; `submitted` does not include them.
    rejected: int
    # Batches sent; by size; by reason of dispatch (see `Release`).
    batches: int
    batch_sizes: dict[int, int]
    releases: dict[str, int]
    # Workers that were replaced, after their death or because they were due to be recycled.
    restarts: int
    # Quantiles over recent answered batches, None before the first: seconds from a request's
    # arrival until its worker begins with its batch, and seconds of a batch in `infer`. The latency
    # of a request is their sum plus the transport in both directions.
    queue_wait_p50: float | None
    queue_wait_p95: float | None
    infer_p50: float | None
    infer_p95: float | None

    @property
    def mean_batch_size(self) -> float:
        """Requests per batch sent, 0.0 before the first."""
        sent = sum(size * count for size, count in self.batch_sizes.items())
        return sent / self.batches if self.batches else 0.0


@dataclass
class Counters:
    """The running counts behind `BatcherStats`."""

    # Requests that were accepted, and how requests ended: by an `Outcome`.
    submitted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    # (seconds waited, weight) of answered batches: one request of each, weighted by its size.
    queue_waits: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=SAMPLED_BATCHES)
    )
    infer_times: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=SAMPLED_BATCHES)
    )

    def count_batch(self, size: int, release: str) -> None:
        """Count a batch that is sent."""
        self.batch_sizes[size] += 1
        self.releases[release] += 1

    def snapshot(
        self, *, state: str, workers_ready: int, num_workers: int, waiting: int, running: int
    ) -> BatcherStats:
        """Copy the present counts, completed by the batcher's state and load."""
        queue_wait_p50, queue_wait_p95 = weighted_quantiles(self.queue_waits, (0.50, 0.95))
        infer_p50, infer_p95 = weighted_quantiles(self.infer_times, (0.50, 0.95))
        return BatcherStats(
            state=state,
            workers_ready=workers_ready,
            num_workers=num_workers,
            waiting=waiting,
            running=running,
            submitted=self.submitted,
            completed=self.outcomes["completed"],
            failed=self.outcomes["failed"],
            expired=self.outcomes["expired"],
            cancelled=self.outcomes["cancelled"],
            rejected=self.outcomes["rejected"],
            batches=sum(self.batch_sizes.values()),
            batch_sizes=dict(sorted(self.batch_sizes.items())),
            releases={str(release): count for release, count in self.releases.items()},
            restarts=self.restarts,
            queue_wait_p50=queue_wait_p50,
            queue_wait_p95=queue_wait_p95,
            infer_p50=infer_p50,
            infer_p95=infer_p95,
        )


def weighted_quantiles(
    samples: Collection[tuple[float, int]], shares: Sequence[float]
) -> list[float | None]:
    """Return for each share the smallest value that reaches it, None without samples.

    Args:
        samples: Pairs of value and positive weight, in any order.
        shares: Shares of the total weight, 0 to 1.
    """
    if not samples:
        return [None] * len(shares)
    ordered = sorted(samples)
    reached = list(accumulate(weight for _, weight in ordered))
    return [ordered[bisect_left(reached, q * reached[-1])][0] for q in shares]
