"""Figures of simulated requests. No process, no clock."""

from collections.abc import Iterable
from math import inf

import numpy as np

from fast_batcher._cli.simulation import History


def select(record: History, requests: Iterable[int]) -> History:
    """Return the record of some requests, with the batches of all."""
    selected = History()
    selected.batch_sizes = record.batch_sizes
    for request in requests:
        selected.arrivals.append(record.arrivals[request])
        selected.answers.append(record.answers[request])
        selected.losses.append(record.losses[request])
    return selected


def figures_of(record: History, start: float, end: float, target: float = inf) -> dict[str, float]:
    """Compute figures of the requests that arrived from `start` until `end`.

    Args:
        record: The outcomes.
        start: Seconds; the warm-up before it does not count.
        end: Seconds.
        target: Seconds within which an answer is in time.
    """
    arrivals = np.array(record.arrivals)
    counted = (arrivals >= start) & (arrivals < end)
    latencies = (np.array(record.answers) - arrivals)[counted]
    until_lost = (np.array(record.losses) - arrivals)[counted]
    latencies = latencies[np.isfinite(latencies)]
    until_lost = until_lost[np.isfinite(until_lost)]
    total = max(1, int(counted.sum()))
    answers = np.array(record.answers)
    figures = {
        "requests": float(counted.sum()),
        "answered_per_second": float(((answers >= start) & (answers < end)).sum()) / (end - start),
        "in_time_per_second": float((latencies <= target).sum()) / (end - start),
        "in_time": float((latencies <= target).sum()) / total,
        "lost": 1 - len(latencies) / total,
        "batch_size": float(np.mean(record.batch_sizes)) if record.batch_sizes else 0.0,
    }
    if len(latencies):
        figures["mean_ms"] = 1e3 * float(latencies.mean())
        figures["p50_ms"] = 1e3 * float(np.quantile(latencies, 0.50))
        figures["p99_ms"] = 1e3 * float(np.quantile(latencies, 0.99))
    if len(until_lost):
        figures["loss_p99_ms"] = 1e3 * float(np.quantile(until_lost, 0.99))
    return figures
