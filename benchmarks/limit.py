"""What an open loop would look like behind a batcher that costs nothing. No process, no clock.

A free model takes what waits, up to a full batch, in no time; then it computes. Who makes batches
of the same size by the same rule can be no better; other rules and larger batches may be.
"""

from bisect import bisect_right

from benchmarks.arrivals import due_times
from benchmarks.models import linear_seconds
from benchmarks.scenarios import WARM_UP_SECONDS, Figures, Load

# What the results call it.
LIMIT = "no cost (reckoned)"


def open_loop_limit(load: Load, capacity: float) -> Figures:
    """The figures of an open loop with the very arrivals that `load` brings.

    Args:
        load: Of `Linear5ms`.
        capacity: Requests/s of the model on full batches, measured: its timer is late by as much as
            full batches take longer than they should.
    """
    due = due_times(load.rate, WARM_UP_SECONDS + load.seconds, load.seed)
    most = load.max_batch_size
    late = most / capacity - linear_seconds(most)
    latencies: list[float] = []
    free_at = 0.0
    begin = 0
    while begin < len(due):
        start = max(free_at, due[begin])
        end = min(bisect_right(due, start), begin + most)
        free_at = start + linear_seconds(end - begin) + late
        latencies += [free_at - moment for moment in due[begin:end]]
        begin = end
    counted = sorted(latencies[bisect_right(due, WARM_UP_SECONDS) :])
    return {
        "p50_ms": 1e3 * counted[len(counted) // 2],
        "p99_ms": 1e3 * counted[len(counted) * 99 // 100],
        "lost": 0.0,
        "within_50_ms": sum(latency <= 0.050 for latency in counted) / len(counted),
    }
