"""What a soak finds out, and its table."""

import bisect
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import table


@dataclass
class Findings:
    """The table rows of one scenario: what, measured, wanted, and whether it holds."""

    scenario: str
    rows: list[tuple[str, str, str, bool | None]] = field(default_factory=list)

    def check(self, what: str, measured: object, wanted: str, *, holds: bool) -> None:
        """Add a figure that has a bar."""
        self.rows.append((what, _text(measured), wanted, holds))

    def none(self, what: str, count: int) -> None:
        """Add a count that must be zero."""
        self.check(what, count, "0", holds=count == 0)

    def tell(self, what: str, measured: object) -> None:
        """Add a figure without a bar."""
        self.rows.append((what, _text(measured), "", None))

    @property
    def holds(self) -> bool:
        """Whether every bar is met."""
        return all(row[3] is not False for row in self.rows)


def make_table(all_findings: Sequence[Findings]) -> str:
    """One line per figure."""
    verdicts = {True: "holds", False: "MISSED", None: ""}
    rows = [
        [findings.scenario, what, measured, wanted, verdicts[holds]]
        for findings in all_findings
        for what, measured, wanted, holds in findings.rows
    ]
    return table(("scenario", "what", "measured", "wanted", ""), rows)


def as_data(findings: Findings) -> dict[str, Any]:
    """Convert to what the JSON file stores."""
    keys = ("what", "measured", "wanted", "holds")
    rows = [dict(zip(keys, row, strict=True)) for row in findings.rows]
    return {"scenario": findings.scenario, "rows": rows}


class Histogram:
    """Durations in bins of 0.1 ms up to 2 s; a list of them would itself be memory growth."""

    def __init__(self) -> None:
        self._counts = [0] * 20_000
        self.count = 0
        # Seconds.
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[min(int(seconds * 10_000), len(self._counts) - 1)] += 1
        self.count += 1
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float:
        """The upper end of the bin that this share of the durations reaches, seconds."""
        reached = list(itertools.accumulate(self._counts))
        return (bisect.bisect_left(reached, share * self.count) + 1) / 10_000


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope per second, and half the width of its 95 % confidence interval.

    Source: simple linear regression; 1.96 for the t quantile, as there are hundreds of samples.
    """
    rise, start = statistics.linear_regression(times, values)
    mean = statistics.fmean(times)
    spread = sum((time - mean) ** 2 for time in times)
    pairs = zip(times, values, strict=True)
    errors = sum((value - start - rise * time) ** 2 for time, value in pairs)
    return rise, 1.96 * (errors / max(1, len(times) - 2) / spread) ** 0.5


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
