"""Explanation of a stepped model's recent steps: whether streams wait for places. Pure.

What more places would give is read from a service model of the steps, which tells how the time of
a step grows with its streams.
"""

from collections.abc import Iterable, Sequence

from fast_batcher._core.explanation import LEAST_GAIN, BatchSample, Setup
from fast_batcher._core.service_model import ServiceModel
from fast_batcher.stats import Cause, Explanation, number

# Share of the places from which a step counts as full.
FULL_STEP = 0.9


def explain_streams(
    samples: Sequence[BatchSample], setup: Setup, begun: Iterable[tuple[float, float]]
) -> Explanation:
    """Explain recent steps, oldest first.

    `begun` are the moments of streams' first chunks, and the seconds that they waited for places.
    """
    if len(samples) < 2:
        return Explanation(places=setup.max_batch_size)
    service = ServiceModel()
    for sample in samples:
        service.observe(sample.size, max(sample.infer_seconds, 1e-9))
    seconds = max(samples[-1].answered_at - samples[0].began_at, 1e-9)
    chunks = sum(sample.size for sample in samples)
    taken = chunks / len(samples)
    step = service.median(taken)
    busy = sum(sample.infer_seconds for sample in samples) / (seconds * setup.num_workers)
    waits = sorted(waited for moment, waited in begun if moment >= samples[0].began_at)
    wait = waits[len(waits) // 2] if waits else 0.0
    cause: Cause = "arrivals"
    if wait > step:  # a stream that finds a place waits no longer than until the next step
        is_full = taken >= FULL_STEP * setup.max_batch_size
        cause = "cost" if setup.has_cost_limit and not is_full else "max_batch_size"
    return Explanation(
        batches=len(samples),
        seconds=seconds,
        requests_per_second=chunks / seconds,
        mean_batch_size=taken,
        busy=min(busy, 1.0),
        cause=cause,
        cause_share=sum((one > step) == (wait > step) for one in waits) / max(len(waits), 1),
        advice=_advise_places(cause, setup, service),
        service_times=service.points(),
        places=setup.max_batch_size,
        place_wait=wait,
    )


def _advise_places(cause: Cause, setup: Setup, service: ServiceModel) -> str:
    """Return what would change the wait for a place, or the time between chunks."""
    places, workers = setup.max_batch_size, setup.num_workers + 1
    points = service.points()
    smallest, largest = points[0][0], points[-1][0]
    if cause == "cost":
        return "a higher max_batch_cost lets a worker have more streams at a time"
    if cause == "arrivals":
        half = places // 2
        is_known = half and smallest <= half and largest >= FULL_STEP * places
        if is_known and 2 * service.median(half) < (1 + LEAST_GAIN) * service.median(2 * half):
            return (
                f"max_batch_size={half} gives as many chunks per second, and half the time between "
                "two chunks: the time of a step grows with its streams"
            )
        return "nothing to change: streams find free places"
    if largest < 2 * smallest:
        return (
            f"max_batch_size={2 * places} or num_workers={workers}: no other steps than of "
            f"{number(largest)} streams were measured, so which of them gains more is unknown"
        )
    growth = service.median(2 * places) / service.median(places)
    if 2 / growth < 1 + LEAST_GAIN:
        return (
            f"num_workers={workers} if there is a core or GPU for it: more places would not help, "
            f"because a step of {2 * places} streams is predicted to take twice as long"
        )
    return (
        f"max_batch_size={2 * places} is predicted to give {2 / growth - 1:.0%} more chunks per "
        f"second, and {growth - 1:.0%} more time between two chunks"
    )
