"""The simulator's pictures, from what is stored."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.simulation.cells import (
    ALL_SYSTEMS,
    BENTO,
    GREEDY,
    NO_TARGET,
    OPTIMUM,
    OURS,
    PAUSES,
    WITH_COSTS,
)
from benchmarks.simulation.models import MODELS
from benchmarks.simulation.report import Result

# Okabe and Ito's palette, safe for colour-blind readers; ours is thick besides.
COLOURS = {
    OURS: "#d1495b",
    NO_TARGET: "#999999",
    WITH_COSTS: "#7a5195",
    GREEDY: "#000000",
    "fixed 1 ms": "#e69f00",
    "fixed 5 ms": "#b07800",
    "FDB 5 ms": "#009e73",
    "FDB 100 ms": "#00614a",
    "batched 5 ms": "#0072b2",
    BENTO: "#cc79a7",
    "AIMD": "#56b4e9",
}
# Percent over the optimum up to which the scale is linear.
LINEAR_PERCENT = 2.0


def draw(part: str, results: Sequence[Result], path: Path) -> None:
    """The picture of one part, if it has one."""
    if part in PICTURES:
        PICTURES[part](results).savefig(path, dpi=110)


def _draw_open_loop(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    figure.suptitle("Poisson arrivals: mean latency over the exact optimum")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, model in zip(panels, MODELS, strict=True):
        cells = [r for r in results if r.cell.model == model]
        for system in ALL_SYSTEMS:
            points = [(100 * r.cell.x, r.over(system, OPTIMUM, "mean_ms")) for r in cells]
            _line(axes, system, [(x, e.mean) for x, e in points if e is not None])
        axes.set_yscale("symlog", linthresh=LINEAR_PERCENT)
        axes.set(xlabel="load, % of capacity", title=model)
        _tidy(axes)
    panels[0].set_ylabel("% over the optimum")
    panels[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw_closed_loop(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    figure.suptitle("Clients that ask again after a pause: answers per second over greedy")
    grid = figure.subplots(len(PAUSES), len(MODELS), sharex=True, squeeze=False)
    for row, pause in zip(grid, PAUSES, strict=True):
        for axes, model in zip(row, MODELS, strict=True):
            cells = [r for r in results if (r.cell.model, r.cell.pause) == (model, pause)]
            for system in ALL_SYSTEMS:
                points = [(r.cell.x, r.over(system, GREEDY, "answered_per_second")) for r in cells]
                _line(axes, system, [(x, e.mean) for x, e in points if e is not None])
            axes.set_xscale("log", base=2)
            axes.set_ylim(-60, 60)
            axes.set_title(f"{model}, pause {pause}", fontsize="medium")
            _tidy(axes)
        row[0].set_ylabel("% over greedy")
    for axes in grid[-1]:
        axes.set_xlabel("clients")
    grid[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw_in_time(results: Sequence[Result]) -> Figure:
    is_overload = results[0].cell.part == "overload"
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    loads = " / ".join(f"{x:g}" for x in dict.fromkeys(result.cell.x for result in results))
    title = f"Offered {loads} times the capacity" if is_overload else "Bursts"
    figure.suptitle(f"{title}: answers within the target")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (name, model) in zip(panels, MODELS.items(), strict=True):
        _bars(axes, [r for r in results if r.cell.model == name], model.capacity)
        axes.set_title(f"{name}, target {1e3 * model.target:.0f} ms", fontsize="medium")
        _tidy(axes)
    panels[0].set_ylabel("% of capacity" if is_overload else "% of all requests")
    return figure


def _bars(axes: Axes, results: Sequence[Result], capacity: float) -> None:
    """One group per cell, one bar per system."""
    systems = [s for s in ALL_SYSTEMS if any(s in r.figures for r in results)]
    width = 0.8 / max(1, len(results))
    for number, result in enumerate(results):
        if result.cell.part == "overload":
            found = [result.estimate(s, "in_time_per_second", 100 / capacity) for s in systems]
        else:
            found = [result.estimate(s, "in_time", 100) for s in systems]
        axes.bar(
            [position + number * width - 0.4 + width / 2 for position in range(len(systems))],
            [0.0 if estimate is None else estimate.mean for estimate in found],
            width=0.9 * width,
            color=[COLOURS[system] for system in systems],
        )
    axes.set_xticks(range(len(systems)), systems, rotation=45, ha="right", fontsize="small")


def _line(axes: Axes, system: str, points: list[tuple[float, float]]) -> None:
    if not points:  # it is not in this part
        return
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        marker="o",
        markersize=3,
        color=COLOURS[system],
        linewidth=3 if system == OURS else 1.2,
        label=system,
        zorder=3 if system == OURS else 2,
    )


def _tidy(axes: Axes) -> None:
    axes.grid(visible=True, axis="both", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# By part.
PICTURES: dict[str, Callable[[Sequence[Result]], Figure]] = {
    "open-loop": _draw_open_loop,
    "closed-loop": _draw_closed_loop,
    "overload": _draw_in_time,
    "bursts": _draw_in_time,
}
