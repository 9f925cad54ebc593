"""`BatcherStats` and `Explanation`, the snapshots of a batcher, and quantiles. Pure."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

# Quantiles look back over this many batches: enough for a stable 95 % quantile (51 samples above
# it), few enough that sorting them takes well under a millisecond.
SAMPLED_BATCHES = 1024


@dataclass(frozen=True)
class BatcherStats:
    """Statistics of a batcher: counts since construction, present load, quantiles of times.

    With `shared` they are those of the host process, and the counts begin with it.

    At any moment `submitted = completed + failed + refused + expired + cancelled + waiting +
    running`.
    """

    state: str
    """"new", "opening", "open", "draining", "closed" or "broken"."""
    workers_ready: int
    """Workers that can take a batch."""
    num_workers: int
    """Workers that there should be; changes with `reconfigure`, and with the load if the setting is
    a range.
    """
    waiting: int
    """Requests in the queue."""
    running: int
    """Requests on workers whose callers still wait."""
    submitted: int
    """Requests accepted into the queue."""
    completed: int
    """Requests that were answered."""
    failed: int
    """Requests that failed for a cause without a count of its own."""
    expired: int
    """Requests whose deadline passed."""
    cancelled: int
    """Requests whose callers left."""
    rejected: int
    """Requests rejected before they were queued; `submitted` does not include them."""
    batches: int
    """Batches sent. Those of a `SteppedModel` are its steps."""
    batch_sizes: dict[int, int]
    """Batches by their number of requests. The size of a step is its number of chunks."""
    releases: dict[str, int]
    """Batches by the reason of their dispatch: "full", "idle", "hold", "window", "deadline",
    "drain" or "retry".
    """
    restarts: int
    """Workers that were replaced, after their death or because they were due to be recycled; not
    the workers that `reload` replaces.
    """
    generation: int
    """Successful calls of `reload`: the generation of the model's arguments, from 0."""
    queue_wait_p50: float | None
    """Median of the seconds from a request's arrival until its worker begins with its batch, over
    recent answered batches; None before the first. With a `SteppedModel` until a stream has a
    place. The latency of a request is this and the time of its batch, plus the transport in both
    directions.
    """
    queue_wait_p95: float | None
    """95 % quantile of the same seconds."""
    infer_p50: float | None
    """Median of the seconds of a batch in `infer`, over recent answered batches; None before the
    first. With a `SteppedModel` those of a step.
    """
    infer_p95: float | None
    """95 % quantile of the same seconds."""
    cache_hits: int = 0
    """Calls whose output was in the `cache`. A hit is no request."""
    cache_misses: int = 0
    """Calls whose output was not in the `cache`."""
    cache_coalesced: int = 0
    """Calls that joined the look-up or computation of an equal input, and count neither as hit nor
    miss.
    """
    cache_lookups: int = 0
    """Inputs that wait for an asynchronous cache now."""
    refused: int = 0
    """Requests that the model has refused with an `InputError`."""
    late_errors: int = 0
    """Batches whose error no caller has got, because the callers had left: their requests had
    expired or were cancelled, and count as such.
    """
    padding: float = 0.0
    """Share of the computation that was filling, 0 to 1, since the batcher was opened. With a
    `collation` that pads or has `allowed_batch_sizes` it is the share of the elements of all
    batches; else that of their cost: inputs are padded to the longest of their batch, and batches
    are filled up to an allowed size. 0 without any of these, and where costs are summed.
    """
    is_reporter: bool = True
    """Whether this process reports the batcher to observers. With `shared` one server process
    reports for all of them; see `observing.ReporterChanged`.
    """
    backlog: float | None = None
    """Predicted seconds in which the ready workers answer all requests that wait and run; 0.0 if
    there are none. None before the first measured batch, and under the policies "greedy" and
    "fixed" unless a setting needs predictions: a `cost`, a `max_latency`, a range of workers. Of a
    `SteppedModel`: seconds until the next stream has a place.
    """
    places: int | None = None
    """Places for streams: `max_batch_size` in each ready worker. None without a `SteppedModel`."""
    live_streams: int = 0
    """Streams of a `SteppedModel` that have a place."""
    chunks: int = 0
    """Chunks that the workers of a `SteppedModel` have sent."""
    sessions: int = 0
    """Live sessions of a `SessionModel`."""
    first_chunk_p50: float | None = None
    """Median of the seconds from the arrival of a stream until its first chunk, over recent
    streams; None before the first.
    """
    first_chunk_p95: float | None = None
    """95 % quantile of the same seconds."""
    chunk_gap_p50: float | None = None
    """Median of the seconds between two chunks of a stream, over recent steps; None before the
    first.
    """
    chunk_gap_p95: float | None = None
    """95 % quantile of the same seconds."""
    gpu_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that PyTorch has reserved on the GPU, by the index of the worker; only of processes of
    this machine that use one. Up to a second old, five where the worker is idle.
    """

    loop_blocked: float = 0.0
    """Seconds for which the event loop of this process was blocked while the batcher was open, at
    least: it could neither send nor answer a request. See docs/observability.md.
    """

    @property
    def mean_batch_size(self) -> float:
        """Requests per batch sent, 0.0 before the first."""
        sent = sum(size * count for size, count in self.batch_sizes.items())
        return sent / self.batches if self.batches else 0.0


Cause = Literal[
    "no data",
    "disabled",
    "arrivals",
    "max_batch_size",
    "allowed_batch_sizes",
    "cost",
    "groups",
    "hold",
    "window",
    "deadline",
    "memory",
    "retries",
]
# What a batch with each cause did.
_PHRASES: dict[Cause, str] = {
    "disabled": "had one request, because batching is off (enabled=False)",
    "arrivals": "took all requests that were waiting",
    "max_batch_size": "had max_batch_size requests, or the largest allowed size",
    "allowed_batch_sizes": "had an allowed size that answers more per second than the next",
    "cost": "reached max_batch_cost",
    "groups": "left requests of other groups waiting (group_by)",
    "hold": "waited until more requests were not worth it",
    "window": "waited for max_delay",
    "deadline": "left early, so that no request was late",
    "memory": "had the size that fits into memory",
    "retries": "had requests that were tried again",
}


@dataclass(frozen=True)
class Explanation:
    """Explanation of the size of recent batches; `str` gives it in sentences."""

    batches: int = 0
    """Batches that it is about, at most 1024."""
    seconds: float = 0.0
    """Seconds from the first of these batches to the last."""
    requests_per_second: float = 0.0
    """Requests that were answered per second."""
    mean_batch_size: float = 0.0
    """Requests per batch."""
    busy: float = 0.0
    """Share of the workers' time in which they had a batch, 0 to 1. No measure of the load: the
    adaptive policy keeps workers busy with smaller batches.
    """
    capacity: float | None = None
    """Requests per second with full batches, predicted from the measured times; None if unknown."""
    cause: Cause = "no data"
    """Limit of the batch size for most requests."""
    cause_share: float = 0.0
    """Share of the requests whose batches had this limit, 0 to 1."""
    advice: str = ""
    """Setting that would change the limit, and its predicted gain."""
    service_times: Sequence[tuple[float, float, float]] = ()
    """Learned seconds of batches: for each range of sizes the mean size, the median and the 95 %
    quantile, by size.
    """
    allowed_batch_sizes: Sequence[int] = ()
    """The allowed batch sizes of the model, from the smallest on; empty if it takes any size."""
    places: int | None = None
    """Places of a worker; None unless the model is a `SteppedModel`, whose batches are its steps
    and whose requests are chunks.
    """
    place_wait: float = 0.0
    """Median of the seconds for which streams waited for a place."""

    @property
    def load(self) -> float | None:
        """Requests per second as a share of the capacity; None if that is unknown."""
        return self.requests_per_second / self.capacity if self.capacity else None

    def __str__(self) -> str:
        """Explain in sentences."""
        if self.cause == "no data":
            told = "batches were answered" if self.places is None else "steps gave chunks"
            return f"No explanation: fewer than two {told}."
        if self.places is not None:
            return (
                f"{self.batches} steps in {number(self.seconds)} seconds: "
                f"{number(self.requests_per_second)} chunks per second; the workers were busy for "
                f"{self.busy:.0%} of the time. On average {number(self.mean_batch_size)} of the "
                f"{self.places} places of a worker have a chunk in a step. Streams waited for a "
                f"place for {number(self.place_wait)} s (median). Advice: {self.advice}."
            )
        load = "" if self.load is None else f", {self.load:.0%} of the capacity"
        share = f"{self.cause_share:.0%}"
        these = (
            "Every batch" if share == "100%" else f"{share} of the requests were in batches that"
        )
        return (
            f"{self.batches} batches in {number(self.seconds)} seconds: "
            f"{number(self.requests_per_second)} requests per second{load}; the workers were busy "
            f"for {self.busy:.0%} of the time. The average batch has "
            f"{number(self.mean_batch_size)} requests. {these} {_PHRASES[self.cause]}. "
            f"Advice: {self.advice}."
        )


def number(value: float) -> str:
    """Format with three significant digits and without an exponent."""
    size = abs(value)
    return f"{value:{'.0f' if size >= 100 else '.3g' if size >= 0.001 or not size else '.4f'}}"


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
