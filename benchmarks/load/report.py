"""Measurements of a load test to a table and a picture. No clock, no process."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.load.measurement import Case, Measurement
from benchmarks.report import Spread, number, table

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
# A client process that is busier than this may be what limits the rate.
BUSY_LIMIT = 0.7
PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")


def spread(measurements: Iterable[Measurement], case: Case, figure: str) -> Spread | None:
    """Median and range of a figure over the repetitions of a case."""
    return Spread.of(
        [m.figures[figure] for m in measurements if m.case == case and figure in m.figures]
    )


def total(measurements: Iterable[Measurement], case: Case, figure: str) -> float:
    """Sum of a figure over the repetitions of a case."""
    return sum(m.figures.get(figure, 0) for m in measurements if m.case == case)


def cases(measurements: Iterable[Measurement]) -> list[Case]:
    """List all cases in the order of their first measurement."""
    return list(dict.fromkeys(m.case for m in measurements))


def make_table(measurements: Sequence[Measurement]) -> str:
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


def make_remarks(measurements: Sequence[Measurement], floor: Measurement) -> list[str]:
    """Make the lines below the table: ratios, warnings, and what was lost.

    Args:
        measurements: The measurements in the table.
        floor: Of the client at an app that does nothing.
    """
    busiest = max(m.figures["client_busy"] for m in measurements)
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
        largest = m.figures.get("largest_batch", 0)
        if m.case.max_batch_size and largest > m.case.max_batch_size:
            lines.append(
                f"THE APP DOES NOT READ MAX_BATCH_SIZE: with {m.case.max_batch_size} it made a "
                f"batch of {largest:.0f}."
            )
    for what, count in _lost(measurements).items():
        lines.append(f"Lost: {count} times {what}.")
    return lines


def _ratios(measurements: Sequence[Measurement], clients: int) -> list[float]:
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


def _lost(measurements: Sequence[Measurement]) -> Counter[str]:
    found: Counter[str] = Counter()
    for m in measurements:
        found.update(m.lost)
    return found


def draw(measurements: Sequence[Measurement], path: Path, title: str) -> None:
    """Draw throughput and latency over clients, rate of arrivals and batch size."""
    closed = [c for c in cases(measurements) if c.rate is None and c.max_batch_size is None]
    open_ = [c for c in cases(measurements) if c.rate is not None]
    sized = [c for c in cases(measurements) if c.max_batch_size is not None]
    rows: list[tuple[list[Case], str, Callable[[Case], float]]] = [
        (closed, "clients", lambda case: case.clients),
        (open_, "arrivals per second (Poisson)", lambda case: case.rate or 0.0),
        (sized, "max_batch_size", lambda case: case.max_batch_size or 0),
    ]
    rows = [row for row in rows if row[0]]
    figure = Figure(figsize=(11, 3.6 * len(rows)), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(rows), 2, squeeze=False)
    for (chosen, label, x_of), (throughput, latency) in zip(rows, grid, strict=True):
        for name in dict.fromkeys(case.name for case in chosen):
            points = sorted((case for case in chosen if case.name == name), key=x_of)
            x = [x_of(case) for case in points]
            _plot(throughput, x, measurements, points, "requests_per_second", name)
            for style, percentile in zip(("-", "--", ":"), PERCENTILES, strict=True):
                text = f"{name} {percentile.removesuffix('_ms')}"
                _plot(latency, x, measurements, points, percentile, text, style)
        throughput.set(xlabel=label, ylabel="requests per second", ylim=(0, None))
        latency.set(xlabel=label, ylabel="latency, ms", yscale="log")
        for axes in (throughput, latency):
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _plot(
    axes: Axes,
    x: list[float],
    measurements: Sequence[Measurement],
    points: list[Case],
    figure: str,
    label: str,
    style: str = "-",
) -> None:
    spreads = [spread(measurements, case, figure) for case in points]
    known = [(at, s) for at, s in zip(x, spreads, strict=True) if s is not None]
    if not known:
        return
    medians = [s.median for _, s in known]
    errors = [[s.median - s.low for _, s in known], [s.high - s.median for _, s in known]]
    # One colour per path, whatever the percentile.
    colour = "C0" if label.startswith("batched") else "C1"
    axes.errorbar(
        [at for at, _ in known],
        medians,
        yerr=errors,
        fmt=f"o{style}",
        color=colour,
        label=label,
        markersize=3,
        capsize=2,
    )
