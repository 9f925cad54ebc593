"""Pictures and README tables from the stored results; measures nothing.

python -m benchmarks.publish          draw and write
python -m benchmarks.publish --check  end with 1 if a README does not say what the results say
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, ROOT
from benchmarks.limit import LIMIT
from benchmarks.payload import MIDDLE, label_of
from benchmarks.peers import CALLERS, LOADS, SATURATION_CALLERS, load_label, name_callers
from benchmarks.report import Measurement, Series, Spread, number
from benchmarks.simulation.cells import RUNS
from benchmarks.simulation.pictures import PICTURES as PICTURES_OF_PARTS

PEERS_JSON = RESULTS / "peers.json"
PAYLOAD_JSON = RESULTS / "payload.json"
README = ROOT / "README.md"
BENCHMARKS_README = ROOT / "benchmarks" / "README.md"
# What the benchmarks' README shows in full.
REPORTS = (
    "overhead",
    "idle_latency",
    "saturation",
    "peers",
    "payload",
    "reference_experiment-cpu",
    "load_test",
    "hold",
    "overload",
    "differential",
    "padding",
    *(f"simulation-{part}" for part in RUNS),
)
# The pictures that belong to a report.
PICTURES = {
    "peers": ("peers-overhead.png", "peers-open-loop.png", "peers-idle.png"),
    "payload": ("payload.png",),
    "load_test": ("load_test.png",),
    **{f"simulation-{part}": (f"simulation-{part}.png",) for part in PICTURES_OF_PARTS},
}
NOTHING_STORED = "No results are stored; `make bench-all` makes them."
OURS = "ours"
# What the main README compares: each peer with its defaults and tuned, whichever is better there.
COMPARED = {
    "**fast_batcher**": (OURS,),
    "fast_dynamic_batcher": ("fast_dynamic_batcher", "fast_dynamic_batcher tuned"),
    "batched.aio": ("batched.aio", "batched.aio 0.1 ms"),
    "batched (thread)": ("batched thread", "batched thread 0.1 ms"),
    "async-batcher": ("async-batcher", "async-batcher 1 ms"),
    "BentoML dispatcher": ("BentoML dispatcher", "BentoML dispatcher 100 ms"),
    "Ray Serve batch": ("Ray Serve batch", "Ray Serve batch tuned"),
}
# The same for large arrays.
COMPARED_LARGE = {
    "**fast_batcher**": (OURS,),
    "fast_dynamic_batcher": ("fast_dynamic_batcher", "fast_dynamic_batcher tuned"),
    "process pool": ("process pool",),
    "torch.multiprocessing": ("process pool of tensors",),
}
# Of these figures more is better.
MORE_IS_BETTER = {"requests_per_second", "within_50_ms"}
# One hue for us, so that we are found at once; the peers' families are told apart by name.
OURS_COLOUR = "#d1495b"
PEER_COLOUR = "#8d99ae"
# Of the other lines in the open loop: Okabe and Ito's palette, safe for colour-blind readers.
FAMILY_COLOURS = {
    "batched.aio": "#0072b2",
    "batched thread": "#56b4e9",
    "fast_dynamic_batcher": "#e69f00",
    "async-batcher": "#009e73",
    "BentoML dispatcher": "#cc79a7",
    "Ray Serve batch": "#000000",
    LIMIT: "#bbbbbb",
}


class Results:
    """One results file."""

    def __init__(self, path: Path) -> None:
        self.stored: dict[str, Any] = json.loads(path.read_text())
        self._measurements = [Measurement(**m) for m in self.stored["measurements"]]
        (self.loop, *_) = dict.fromkeys(m.loop for m in self._measurements)

    def spread(self, system: str, scenario: str, callers: int, figure: str) -> Spread | None:
        """One figure of one system; None if it was not measured."""
        series = Series.of(self._measurements, system, scenario, self.loop, callers)
        return series.spread(figure)

    def systems(self, scenario: str) -> list[str]:
        """Those that were measured there, in their order."""
        return list(dict.fromkeys(m.system for m in self._measurements if m.scenario == scenario))

    def provenance(self) -> str:
        """Where the figures come from."""
        hardware, stored = self.stored["hardware"], self.stored
        return (
            f"{stored['date'][:10]}, {hardware['processor']}, {hardware['cores']} cores, Python "
            f"{hardware['python']}, {self.loop}; median of {stored['settings']['repetitions']}. "
            f"`{stored['command']}`"
        )


# What is asked: in words, the scenario, callers, the figure.
Question = tuple[str, str, int, str]


def overview(results: Results) -> str:
    """The main README's table of small inputs."""
    last = load_label(LOADS[-1])
    at_80 = load_label(0.8)
    questions: list[Question] = [
        (
            f"CPU of all processes, us per request, {name_callers(callers)}",
            "full_speed",
            callers,
            "all_cpu_us",
        )
        for callers in CALLERS
    ]
    questions += [
        ("A lone request at a 5 ms model, p50 ms", "lone_requests", 1, "p50_ms"),
        ("Idle, share of a core", "idle", 1, "idle_share_of_core"),
        ("Saturated, requests/s", "saturation", SATURATION_CALLERS, "requests_per_second"),
        ("Poisson arrivals at 80 % of capacity, p50 ms", at_80, 0, "p50_ms"),
        ("the same, p99 ms", at_80, 0, "p99_ms"),
        ("at 95 %: answered within 50 ms", last, 0, "within_50_ms"),
    ]
    lines = [
        "Against every batcher that runs inside an app's process, in one run on one machine. Each",
        "has its defaults or is tuned as well as we could, whichever is better in that row. Ours",
        "and the tuned make batches of 32; by default async-batcher has no limit, and BentoML",
        "takes 100. `-` is for what was not measured or was lost on the way:",
        "",
    ]
    return "\n".join([*lines, *_compare(results, COMPARED, questions), "", results.provenance()])


def overview_of_large(results: Results) -> str:
    """The main README's table of large inputs."""
    label, echo = (label_of("full_speed", MIDDLE, model) for model in ("ArrayLabel", "ArrayEcho"))
    callers = MIDDLE.count
    questions: list[Question] = [
        ("A label back, requests/s", label, callers, "requests_per_second"),
        ("the same, CPU of all processes, us per request", label, callers, "all_cpu_us"),
        ("The array back, requests/s", echo, callers, "requests_per_second"),
        ("the same, CPU of all processes, us per request", echo, callers, "all_cpu_us"),
    ]
    lines = [
        f"Images as arrays of 602 KB, from {callers} callers who ask again as soon as they are",
        "answered. fast_dynamic_batcher has its defaults or is tuned, whichever is better; the",
        "pools take one array per call:",
        "",
    ]
    table = _compare(results, COMPARED_LARGE, questions)
    return "\n".join([*lines, *table, "", results.provenance()])


def _compare(
    results: Results, compared: dict[str, tuple[str, ...]], questions: list[Question]
) -> list[str]:
    """A row per question, a column per library."""
    lines = ["| | " + " | ".join(compared) + " |", "|---|" + "---:|" * len(compared)]
    for text, label, callers, figure in questions:
        best = max if figure in MORE_IS_BETTER else min
        cells = []
        for systems in compared.values():
            spreads = [results.spread(system, label, callers, figure) for system in systems]
            medians = [spread.median for spread in spreads if spread is not None]
            cells.append(number(best(medians)) if medians else "-")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return lines


def full_text(path: Path) -> str:
    """A stored report, as it was printed, below its pictures; a word where there is none."""
    if not path.with_suffix(".txt").exists():
        return NOTHING_STORED
    pictures = [f"![{name}](results/{name})\n" for name in PICTURES.get(path.name, ())]
    return "".join(pictures) + f"```text\n{path.with_suffix('.txt').read_text().strip()}\n```"


def put(document: str, mark: str, text: str) -> str:
    """The document with what stands between its two marks replaced.

    Raises:
        ValueError: It has no such marks.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"there is no {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document)


def draw_bars(
    results: Results,
    path: Path,
    title: str,
    panels: Sequence[tuple[str, str, int, str, bool]],
) -> None:
    """Horizontal bars, one panel per question.

    Args:
        results: What was measured.
        path: Of the picture.
        title: Above all panels.
        panels: Title, scenario, callers, figure, and whether the axis is logarithmic.
    """
    systems = results.systems(panels[0][1])[::-1]
    size = (3.2 + 3.4 * len(panels), 0.9 + 0.34 * len(systems))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (text, scenario, callers, name, is_log) in zip(grid, panels, strict=True):
        spreads = [results.spread(system, scenario, callers, name) for system in systems]
        medians = [0.0 if s is None else s.median for s in spreads]
        colours = [OURS_COLOUR if system == OURS else PEER_COLOUR for system in systems]
        axes.barh(systems, medians, color=colours, height=0.7)
        for position, spread in enumerate(spreads):
            at = 0 if spread is None else spread.median
            label = " not measured" if spread is None else f" {number(spread.median)}"
            axes.text(at, position, label, va="center", fontsize="small")
        if is_log:
            axes.set_xscale("log")
        axes.margins(x=0.25)
        axes.set_title(text, fontsize="medium")
        _tidy(axes)
    figure.savefig(path, dpi=110)


def draw_open_loop(results: Results, path: Path) -> None:
    """p50 and p99 over the load; a line ends where requests were lost."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(
        f"Poisson arrivals at shares of the model's capacity (5 ms + 0.1 ms each), {results.loop}"
    )
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(panels, (("p50_ms", "p50"), ("p99_ms", "p99")), strict=True):
        for system in results.systems(load_label(LOADS[0])):
            family = next((f for f in FAMILY_COLOURS if system.startswith(f)), OURS)
            spreads = [results.spread(system, load_label(load), 0, name) for load in LOADS]
            points = [(x, s.median) for x, s in zip(LOADS, spreads, strict=True) if s]
            axes.plot(
                [100 * x for x, _ in points],
                [y for _, y in points],
                marker="o",
                markersize=4,
                color=FAMILY_COLOURS.get(family, OURS_COLOUR),
                linewidth=3 if system == OURS else 1.3,
                linestyle="--" if system == family != OURS else "-",
                label=system,
                zorder=3 if system == OURS else 2,
            )
        axes.set(xlabel="load, % of the bare loop", title=title, yscale="log")
        axes.set_xticks([100 * load for load in LOADS])
        _tidy(axes)
    panels[0].set_ylabel("latency from the arrival, ms")
    panels[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)


def _tidy(axes: Axes) -> None:
    axes.grid(visible=True, axis="both", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(results: Results) -> None:
    """All pictures."""
    draw_bars(
        results,
        RESULTS / "peers-overhead.png",
        f"CPU of all processes, us per request (no-op model, {results.loop})",
        [(name_callers(n), "full_speed", n, "all_cpu_us", True) for n in CALLERS],
    )
    draw_bars(
        results,
        RESULTS / "peers-idle.png",
        f"A lone request every 20 ms at a 5 ms model ({results.loop})",
        [
            ("p50, ms", "lone_requests", 1, "p50_ms", False),
            ("p99, ms", "lone_requests", 1, "p99_ms", False),
            ("share of a core, nobody asks", "idle", 1, "idle_share_of_core", False),
        ],
    )
    draw_open_loop(results, RESULTS / "peers-open-loop.png")


def draw_large(results: Results) -> None:
    """The picture of large inputs."""
    draw_bars(
        results,
        RESULTS / "payload.png",
        f"Arrays of 602 KB from {MIDDLE.count} callers, a label back ({results.loop})",
        [
            (text, label_of("full_speed", MIDDLE, "ArrayLabel"), MIDDLE.count, figure, True)
            for text, figure in (
                ("requests/s", "requests_per_second"),
                ("CPU of all processes, us per request", "all_cpu_us"),
            )
        ],
    )


def main() -> int:
    """Draw and write, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    results = Results(PEERS_JSON) if PEERS_JSON.exists() else None
    large = Results(PAYLOAD_JSON) if PAYLOAD_JSON.exists() else None
    details = BENCHMARKS_README.read_text()
    for name in REPORTS:
        details = put(details, name, full_text(RESULTS / name))
    front = put(README.read_text(), "peers", overview(results) if results else NOTHING_STORED)
    front = put(front, "payload", overview_of_large(large) if large else NOTHING_STORED)
    texts = {README: front, BENCHMARKS_README: details}
    if arguments.check:
        stale = [path.name for path, text in texts.items() if path.read_text() != text]
        print(f"stale: {stale}; run `python -m benchmarks.publish`" if stale else "up to date")
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    if results:
        draw(results)
    if large:
        draw_large(large)
    return 0


if __name__ == "__main__":
    sys.exit(main())
