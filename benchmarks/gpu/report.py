"""Rows of the parts to tables and a picture. No process."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reference_experiment import CEILING_BARS, SPEED_UP_BAR
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load

RATE = "requests_per_second"
BUSY: Columns = {"API busy": "api_busy", "GPU busy": "gpu_busy"}
OVER_HTTP: Columns = {
    "requests/s": RATE,
    "of the bare loop": Compared(RATE, "bare loop"),
    "over unbatched": Compared(RATE, "unbatched"),
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
    "mean batch": "mean_batch",
    "API CPU ms": "api_cpu_ms",
    "client busy": "client_busy",
    "GPU busy": "gpu_busy",
    "lost": "lost",
}
# Columns of each table.
COLUMNS: Mapping[str, Columns] = {
    "resnet": OVER_HTTP,
    "encoder": OVER_HTTP,
    "reference": {
        "seconds": "seconds",
        "requests/s": RATE,
        "of the bare loop": Compared(RATE, "bare loop"),
        "over one by one": Compared(RATE, "one by one"),
        "GPU busy": "gpu_busy",
        "lost": "lost",
    },
    "lengths": {
        "requests/s": RATE,
        "of sorted": Compared(RATE, "bare loop, sorted"),
        "over FIFO": Compared(RATE, "FIFO"),
        "padding": "padding",
        "mean batch": "mean_batch",
        **BUSY,
        "lost": "lost",
    },
    "copies": {
        "ms": "ms",
        "of whole": Compared("ms", "whole"),
        "caller waits ms": "waited_ms",
        "GB/s": "gb_per_s",
    },
    "times": {"eager": "eager", "CUDA graph": "graph", "compiled": "compiled"},
    "processes": {
        "requests/s": RATE,
        "over 1 worker": Compared(RATE, "1 worker"),
        **BUSY,
        "lost": "lost",
    },
    "prepare": {
        "requests/s": RATE,
        "over inside infer": Compared(RATE, "inside infer"),
        **BUSY,
        "lost": "lost",
    },
    "faults": {
        "calls": "calls",
        "answered": "answered",
        "failed": "failed",
        "lost": "lost",
        "largest batch": "largest_batch",
        "restarts": "restarts",
        "longest gap s": "recovery_s",
    },
}
# The bars of `reference_experiment` on a GPU, by column.
REFERENCE_BARS = {"of the bare loop": CEILING_BARS["cuda"], "over one by one": SPEED_UP_BAR}
# No load of `benchmarks.scenarios`: the parts make their own.
NO_LOAD = Load("", 0, 0, 0.0)
# Tables per row of the picture.
PICTURE_COLUMNS = 2


@dataclass
class Results:
    """Everything that the parts have written so far.

    Args:
        device: "cuda" or "cpu".
    """

    device: str
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    titles: dict[str, str] = field(default_factory=dict)

    def read(self, rows: Path) -> None:
        """Add the rows of a part."""
        for line in rows.read_text().splitlines():
            row = json.loads(line)
            if "note" in row:
                self.notes.append(row["note"])
            elif "title" in row:
                self.titles[row["table"]] = row["title"]
            else:
                self._add(row["table"], row["system"], row["repetition"], row["figures"])

    def add_failure(self, part: str, reason: str) -> None:
        """Add a part that failed, or that has not ended in time."""
        self._add(part, part, 0, {}, reason)

    def _add(
        self,
        table: str,
        system: str,
        repetition: int,
        figures: dict[str, float],
        error: str | None = None,
    ) -> None:
        found = Measurement(system, table, self.device, 0, repetition, figures, {}, error)
        self.measurements.append(found)

    def tables(self) -> list[Table]:
        """Make the tables that have rows, without columns that no row has."""
        tables = [self._make_table(name, title) for name, title in self.titles.items()]
        return [table for table in tables if table.systems]

    def _make_table(self, name: str, title: str) -> Table:
        rows = [m for m in self.measurements if m.scenario == name and m.error is None]
        systems = tuple(dict.fromkeys(m.system for m in rows))
        measured = {figure for m in rows for figure in m.figures}
        columns = {
            text: column
            for text, column in COLUMNS[name].items()
            if (column if isinstance(column, str) else column.figure) in measured
        }
        return Table(title, name, NO_LOAD, systems, columns)

    def text(self) -> str:
        """Put tables and notes below each other."""
        tables = [table.text(self.measurements, self.device) for table in self.tables()]
        return "\n\n".join([*tables, "\n".join(self.notes)])

    def verdicts(self) -> list[Verdict]:
        """Make the bars of the reference experiment on a GPU."""
        tables = [table for table in self.tables() if table.name == "reference"]
        return [
            Verdict(
                f"ours {column}: at least {bar:g}",
                table.spread(self.measurements, "ours", self.device, table.columns[column]),
                at_least=bar,
            )
            for table in tables
            if self.device == "cuda"
            for column, bar in REFERENCE_BARS.items()
            if column in table.columns
        ]

    def draw(self, path: Path, title: str) -> None:
        """Draw requests per second or the last column as bars; the times of batches as lines.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        tables = self.tables()
        if not tables:
            return
        lines = -(-len(tables) // PICTURE_COLUMNS)
        figure = Figure(figsize=(12, 3.2 * lines), layout="constrained")
        figure.suptitle(title)
        grid = figure.subplots(lines, PICTURE_COLUMNS, squeeze=False).flat
        for axes, table in zip(grid, tables, strict=False):
            axes.set_title(table.title, fontsize="x-small")
            usual = "requests/s" if "requests/s" in table.columns else [*table.columns][-1]
            columns = table.columns if table.name == "times" else [usual]
            for column in columns:
                values = self._medians(table, table.columns[column])
                if table.name == "times":
                    axes.plot([*values], [*values.values()], marker="o", label=column)
                    axes.set(ylabel="ms", yscale="log")
                    axes.legend(fontsize="small")
                else:
                    axes.barh([*values], [*values.values()])
                    axes.set(xlabel=column)
                    axes.invert_yaxis()
        for axes in [*grid]:  # cells without a table
            axes.set_axis_off()
        figure.savefig(path, dpi=110)

    def _medians(self, table: Table, column: str | Compared) -> dict[str, float]:
        spreads = {
            system: table.spread(self.measurements, system, self.device, column)
            for system in table.systems
        }
        return {name: spread.median for name, spread in spreads.items() if spread is not None}


def count_lost(measurements: Sequence[Measurement]) -> int:
    """Count the requests that got neither an answer of their own nor an error of their own."""
    return round(sum(m.figures.get("lost", 0) for m in measurements))
