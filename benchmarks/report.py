"""Numbers to text: spreads, ratios, verdicts and tables. No clock, no process, no file."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.scenarios import Figures, Load
from fast_batcher._load.report import Spread


@dataclass(frozen=True)
class Measurement:
    """What one fresh process measured, or why it could not."""

    system: str
    scenario: str
    loop: str
    callers: int
    repetition: int
    figures: Figures
    versions: dict[str, str]
    error: str | None = None
    # Percent of the cores' time meanwhile that the host of a virtual machine gave to others.
    stolen_percent: float | None = None


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
        return Spread.of(list(self.by_repetition(figure).values()))

    def pairs(self, figure: str, other: "Series") -> list[tuple[float, float]]:
        """This and the other, for each repetition in which both were measured."""
        mine, theirs = self.by_repetition(figure), other.by_repetition(figure)
        return [(value, theirs[number]) for number, value in mine.items() if number in theirs]

    def by_repetition(self, figure: str) -> dict[int, float]:
        """One figure of each repetition that worked."""
        return {m.repetition: m.figures[figure] for m in self.measurements if figure in m.figures}


@dataclass(frozen=True)
class Compared:
    """A column: a figure combined with that of another system, repetition by repetition.

    What slows the machine in a repetition slows both and cancels out.
    """

    figure: str
    system: str
    combine: Callable[[float, float], float] = operator.truediv


# Column title to figure, or to a figure compared with another system's.
Columns = Mapping[str, str | Compared]


@dataclass(frozen=True)
class Table:
    """One load, the systems that are measured under it, and the figures that are shown.

    Attributes:
        title: Above the table.
        scenario: The function in the measured process.
        load: What it is given.
        systems: Names in `benchmarks.systems.SYSTEMS`, in the order of the rows.
        columns: What is shown of each system.
        label: What the results call the load; "" for the scenario's name.
        share: Of an open loop, its rate as a share of the capacity; 0 for another load.
    """

    title: str
    scenario: str
    load: Load
    systems: tuple[str, ...]
    columns: Columns
    label: str = ""
    share: float = 0.0

    @property
    def name(self) -> str:
        """What the results call the load."""
        return self.label or self.scenario

    def series(self, measurements: Iterable[Measurement], system: str, loop: str) -> Series:
        """All repetitions of one system under this load."""
        return Series.of(measurements, system, self.name, loop, self.load.callers)

    def spread(
        self, measurements: Sequence[Measurement], system: str, loop: str, column: str | Compared
    ) -> Spread | None:
        """One cell; None if it was not measured."""
        series = self.series(measurements, system, loop)
        if isinstance(column, str):
            return series.spread(column)
        pairs = series.pairs(column.figure, self.series(measurements, column.system, loop))
        return Spread.of([column.combine(mine, theirs) for mine, theirs in pairs])

    def text(self, measurements: Sequence[Measurement], loop: str) -> str:
        """The title, and a row for each system."""
        rows = [
            [
                system,
                *(self.spread(measurements, system, loop, one) for one in self.columns.values()),
            ]
            for system in self.systems
        ]
        return f"{self.title}, {loop}\n{table(['system', *self.columns], rows)}"


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
    """Align columns of text: the first to the left, the others to the right; '-' for None."""
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
    """One line for each system that could not be measured."""
    lines = {f"{m.system} on {m.loop}: {m.error}" for m in measurements if m.error is not None}
    return sorted(lines)
