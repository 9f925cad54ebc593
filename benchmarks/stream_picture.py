"""Draws first chunks against load from the results of `benchmarks.streams`, for docs/streams.md.

python -m benchmarks.stream_picture
"""

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, ROOT
from benchmarks.report import Measurement, Series
from benchmarks.streams import CLIENTS, CONTINUOUS, IDEAL, LOOP, WHOLE

PICTURE = ROOT / "docs" / "images" / "first_chunk.svg"
# System, its name in the picture, its colour.
LINES = (
    (WHOLE, "whole answers", "#b45309"),
    (CONTINUOUS, "streams, joins between steps", "#2563a8"),
    (IDEAL, "ideal", "#6b7280"),
)


def main(path: Path = PICTURE) -> None:
    """Draw and store."""
    stored = json.loads((RESULTS / "streams.json").read_text())
    measurements = [Measurement(**one) for one in stored["measurements"]]
    loads = [name for one in measurements if (name := one.scenario).startswith("load ")]
    shares = {name: int(name.removeprefix("load ").removesuffix("%")) for name in loads}
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for system, label, colour in LINES:
        for figure_name, style in (("first_p50_ms", "-"), ("first_p99_ms", ":")):
            spreads = {
                share: Series.of(measurements, system, name, LOOP, CLIENTS).spread(figure_name)
                for name, share in shares.items()
            }
            known = {share: spread for share, spread in spreads.items() if spread is not None}
            axes.plot(
                [*known],
                [spread.median for spread in known.values()],
                f"o{style}",
                color=colour,
                markersize=3,
                label=label if style == "-" else None,
            )
    axes.set(xlabel="load, % of the ideal's capacity", ylabel="first chunk, ms", yscale="log")
    axes.set_title("p50, and dotted p99", fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    with mpl.rc_context({"svg.hashsalt": "streams"}):  # the same file each time
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
