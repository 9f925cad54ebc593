"""Numbers to text: spreads, ratios, verdicts and tables. No clock, no process, no file."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.scenarios import Figures


@dataclass(frozen=True)
class Measurement:
    """What one fresh process found out, or why it could not."""

    system: str
    scenario: str
    loop: str
    callers: int
    repetition: int
    figures: Figures
    versions: dict[str, str]
    error: str | None = None
    # Of the cores' time meanwhile: what the host of a virtual machine gave to others.
    stolen_percent: float | None = None


@dataclass(frozen=True)
class Spread:
    """The median of some repetitions, and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None for no values at all: nothing was measured."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.low == self.high:  # one repetition
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def number(value: float) -> str:
    """Three significant digits, and no exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.4f}"


@dataclass(frozen=True)
class Series:
    """All repetitions of one measurement."""

    measurements: list[Measurement]

    @classmethod
    def of(
        cls,
        measurements: Iterable[Measurement],
        system: str,
        scenario: str,
        loop: str,
        callers: int,
    ) -> Self:
        """Pick them."""
        wanted = (system, scenario, loop, callers)
        return cls([m for m in measurements if (m.system, m.scenario, m.loop, m.callers) == wanted])

    def spread(self, figure: str) -> Spread | None:
        """One figure over the repetitions that worked."""
        return Spread.of([m.figures[figure] for m in self.measurements if figure in m.figures])

    def ratio(self, figure: str, other: "Series") -> Spread | None:
        """This over the other, repetition by repetition: what slows both cancels out."""
        return Spread.of([mine / theirs for mine, theirs in self.pairs(figure, other)])

    def difference(self, figure: str, other: "Series") -> Spread | None:
        """This minus the other, repetition by repetition."""
        return Spread.of([mine - theirs for mine, theirs in self.pairs(figure, other)])

    def pairs(self, figure: str, other: "Series") -> list[tuple[float, float]]:
        """This and the other of each repetition in which both were measured."""
        others = {m.repetition: m.figures for m in other.measurements if figure in m.figures}
        return [
            (m.figures[figure], others[m.repetition][figure])
            for m in self.measurements
            if figure in m.figures and m.repetition in others
        ]


@dataclass(frozen=True)
class Verdict:
    """A bar, and whether the median keeps it."""

    claim: str
    measured: Spread | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool | None:
        """None if it was not measured."""
        if self.measured is None:
            return None
        return (self.at_most is None or self.measured.median <= self.at_most) and (
            self.at_least is None or self.measured.median >= self.at_least
        )

    def __str__(self) -> str:
        word = {True: "holds", False: "MISSED", None: "not measured"}[self.holds]
        return f"{word:>12}  {self.claim}: {self.measured or '-'}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, the first one left-aligned and the others right-aligned; '-' for None."""
    cells = [list(header), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def failures(measurements: Iterable[Measurement]) -> list[str]:
    """One line for each system that could not be measured, so that none is silently left out."""
    lines = {f"{m.system} on {m.loop}: {m.error}" for m in measurements if m.error is not None}
    return sorted(lines)
