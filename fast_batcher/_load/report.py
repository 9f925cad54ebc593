"""Figures of a load test over its repetitions: spreads, warnings, comparison, picture.

No clock, no process.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fast_batcher._load.measurement import Case, LoadMeasurement
from fast_batcher.stats import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A client process that is busier than this may be what limits the rate.
BUSY_LIMIT = 0.7
PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")
# The figures of two runs that are compared; the 99th percentile of a short run rests on a few
# answers.
COMPARED = ("requests_per_second", "p50_ms", "p95_ms", "first_p50_ms", "gap_p50_ms")


@dataclass(frozen=True)
class Spread:
    """The median of some repetitions, and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Compute it; None for no values."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.low == self.high:  # one repetition
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def spread(measurements: Iterable[LoadMeasurement], case: Case, figure: str) -> Spread | None:
    """Median and range of a figure over the repetitions of a case."""
    return Spread.of(
        [m.figures[figure] for m in measurements if m.case == case and figure in m.figures]
    )


def total(measurements: Iterable[LoadMeasurement], case: Case, figure: str) -> float:
    """Sum of a figure over the repetitions of a case."""
    return sum(m.figures.get(figure, 0) for m in measurements if m.case == case)


def cases(measurements: Iterable[LoadMeasurement]) -> list[Case]:
    """List all cases in the order of their first measurement."""
    return list(dict.fromkeys(m.case for m in measurements))


def count_lost(measurements: Iterable[LoadMeasurement]) -> Counter[str]:
    """Count what came instead of good answers."""
    found: Counter[str] = Counter()
    for m in measurements:
        found.update(m.lost)
    return found


def describe_lost(measurements: Iterable[LoadMeasurement]) -> str:
    """Say in one line what came instead of good answers; "" for nothing."""
    measurements = list(measurements)
    text = ", ".join(f"{n} times {what}" for what, n in count_lost(measurements).items())
    first = next((m.first_error for m in measurements if m.first_error), "")
    return f"{text}; the first: {' '.join(first.split())}" if first else text


def find_busiest(measurements: Iterable[LoadMeasurement]) -> float:
    """Return the largest share of a measurement in which a client process was busy."""
    return max(m.figures["client_busy"] for m in measurements)


@dataclass(frozen=True)
class Comparison:
    """A figure of one load in two runs."""

    load: str
    figure: str
    earlier: Spread
    now: Spread
    # The figure now as a multiple of the earlier one; the range is that of all pairs.
    ratio: Spread
    # None if the ranges overlap: no difference was seen.
    is_better: bool | None


def compare(now: Sequence[LoadMeasurement], earlier: Sequence[LoadMeasurement]) -> list[Comparison]:
    """Compare the loads that are in both runs, whatever their paths."""
    before = {(case.clients, case.rate): case for case in cases(earlier)}
    found = []
    for case in cases(now):
        old = before.get((case.clients, case.rate))
        for figure in COMPARED:
            # The rate of an open loop is that of the arrivals.
            if old is None or (figure == "requests_per_second" and case.rate is not None):
                continue
            pair = spread(earlier, old, figure), spread(now, case, figure)
            if pair[0] is not None and pair[1] is not None and pair[0].low > 0:
                found.append(_compare_spreads(case.load, figure, pair[0], pair[1]))
    return found


def _compare_spreads(load: str, figure: str, earlier: Spread, now: Spread) -> Comparison:
    ratio = Spread(now.median / earlier.median, now.low / earlier.high, now.high / earlier.low)
    is_better = None
    if now.low > earlier.high or now.high < earlier.low:
        is_better = (now.low > earlier.high) == (figure == "requests_per_second")
    return Comparison(load, figure, earlier, now, ratio, is_better)


def draw_loads(measurements: Sequence[LoadMeasurement], path: Path, title: str) -> None:
    """Draw throughput and latency over clients, rate of arrivals and batch size.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: The end of the file's name is no format of pictures.
    """
    import matplotlib.figure

    closed = [c for c in cases(measurements) if c.rate is None and c.max_batch_size is None]
    open_ = [c for c in cases(measurements) if c.rate is not None]
    sized = [c for c in cases(measurements) if c.max_batch_size is not None]
    rows: list[tuple[list[Case], str, Callable[[Case], float]]] = [
        (closed, "clients", lambda case: case.clients),
        (open_, "arrivals per second (Poisson)", lambda case: case.rate or 0.0),
        (sized, "max_batch_size", lambda case: case.max_batch_size or 0),
    ]
    rows = [row for row in rows if row[0]]
    figure = matplotlib.figure.Figure(figsize=(11, 3.6 * len(rows)), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(rows), 2, squeeze=False)
    for (chosen, label, x_of), (throughput, latency) in zip(rows, grid, strict=True):
        # One colour per path, whatever the percentile.
        for colour, name in enumerate(dict.fromkeys(case.name for case in chosen)):
            points = sorted((case for case in chosen if case.name == name), key=x_of)
            x = [x_of(case) for case in points]
            values = [spread(measurements, case, "requests_per_second") for case in points]
            _plot(throughput, x, values, name, f"C{colour}")
            for style, percentile in zip(("-", "--", ":"), PERCENTILES, strict=True):
                text = f"{name} {percentile.removesuffix('_ms')}"
                values = [spread(measurements, case, percentile) for case in points]
                _plot(latency, x, values, text, f"C{colour}", style)
        throughput.set(xlabel=label, ylabel="requests per second", ylim=(0, None))
        latency.set(xlabel=label, ylabel="latency, ms", yscale="log")
        for axes in (throughput, latency):
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _plot(
    axes: "Axes",
    x: list[float],
    spreads: list[Spread | None],
    label: str,
    colour: str,
    style: str = "-",
) -> None:
    known = [(at, s) for at, s in zip(x, spreads, strict=True) if s is not None]
    if not known:
        return
    medians = [s.median for _, s in known]
    errors = [[s.median - s.low for _, s in known], [s.high - s.median for _, s in known]]
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
