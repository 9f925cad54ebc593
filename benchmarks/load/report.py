"""Measurements of the load test to a table and remarks. No clock, no process."""

import statistics
from collections.abc import Sequence

from benchmarks.report import table
from fast_batcher._load.measurement import LoadMeasurement
from fast_batcher._load.report import (
    BUSY_LIMIT,
    cases,
    count_lost,
    find_busiest,
    spread,
    total,
)
from fast_batcher.stats import number

# Column titles and the figures below them.
COLUMNS = {
    "requests/s": "requests_per_second",
    "p50 ms": "p50_ms",
    "p95 ms": "p95_ms",
    "p99 ms": "p99_ms",
    "mean batch": "mean_batch",
    "API CPU ms": "api_cpu_ms",
    "workers CPU ms": "workers_cpu_ms",
    "client busy": "client_busy",
    "lag p99 ms": "lag_p99_ms",
    "GPU busy": "gpu_busy",
}
# Of all repetitions together, since a median of few events says little.
SUMS = {"requests": "requests", "lost": "lost", "late": "late"}


def make_table(measurements: Sequence[LoadMeasurement]) -> str:
    """Make a row per case; columns without a measurement are left out."""
    measured = {figure for m in measurements for figure in m.figures}
    columns = {title: figure for title, figure in COLUMNS.items() if figure in measured}
    header = ["path", "load", "batch limit", *columns, *SUMS]
    rows: list[list[object]] = []
    for case in cases(measurements):
        figures = [spread(measurements, case, figure) for figure in columns.values()]
        sums = [number(total(measurements, case, figure)) for figure in SUMS.values()]
        rows.append([case.name, case.load, case.max_batch_size, *figures, *sums])
    return table(header, rows)


def make_remarks(measurements: Sequence[LoadMeasurement], floor: LoadMeasurement) -> list[str]:
    """Make the lines below the table: ratios, warnings, and what was lost.

    Args:
        measurements: The measurements in the table.
        floor: Of the client at an app that does nothing.
    """
    busiest = find_busiest(measurements)
    lines = [
        f"The client takes {number(floor.figures['client_cpu_us'])} us of CPU per request and "
        f"reaches {number(floor.figures['requests_per_second'])}/s at a bare ASGI app; in the "
        f"measurements above it was busy for {busiest:.0%} of the time at most."
    ]
    if busiest > BUSY_LIMIT:
        lines.append("THE CLIENT MAY HAVE BEEN THE LIMIT: raise --client-processes.")
    for clients in dict.fromkeys(m.case.clients for m in measurements if m.case.rate is None):
        ratios = _ratios(measurements, clients)
        if ratios:
            ratio = statistics.median(ratios)
            lines.append(f"{clients} clients: batched answers {ratio:.2f} times as many.")
    for m in measurements:
        limit = m.figures.get("max_batch_size", 0)
        if m.case.max_batch_size and limit != m.case.max_batch_size:
            lines.append(
                f"THE APP DOES NOT READ MAX_BATCH_SIZE: with {m.case.max_batch_size} its limit is "
                f"{limit:.0f}."
            )
    for what, count in count_lost(measurements).items():
        lines.append(f"Lost: {count} times {what}.")
    return lines


def _ratios(measurements: Sequence[LoadMeasurement], clients: int) -> list[float]:
    """Batched over unbatched, repetition by repetition."""
    rates = {
        (m.case.name, m.repetition): m.figures["requests_per_second"]
        for m in measurements
        if m.case.clients == clients and m.case.rate is None and m.case.max_batch_size is None
    }
    return [
        rate / rates["unbatched", repetition]
        for (name, repetition), rate in rates.items()
        if name == "batched" and rates.get(("unbatched", repetition))
    ]
