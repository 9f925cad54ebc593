"""What the simulated cells say: tables and verdicts. No process, no clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import Spread, Verdict, number, table
from benchmarks.simulation.bounds import Estimate, difference, percent_over
from benchmarks.simulation.cells import (
    ALL_SYSTEMS,
    BENTO,
    BOUND,
    GREEDY,
    OPTIMUM,
    OPTIMUM_OF_ALL,
    OURS,
    RULE,
    Cell,
    Outcome,
)
from benchmarks.simulation.models import MODELS

# Percent over the optimum, the mean over seeds and its upper bound; and below greedy.
MOST_REGRET, MOST_REGRET_BOUND = 1.0, 1.5
# Where the hold has to pay: the model, the clients and the percent over greedy.
GAIN_MODEL, GAIN_CLIENTS, LEAST_GAIN = "gpu", 32, 25.0
GAIN_PAUSE = "uniform 0.1 to 1.1 ms"
# Percent of capacity at the highest overload, and milliseconds until a caller knows.
LEAST_GOODPUT, MOST_LOSS_MS = 97.0, 10.0
# Points of goodput over BentoML's controller on that model, and on the others.
LEAST_BURST_GAIN, MOST_BURST_LOSS = 8.0, 1.0
# Percent of all requests, the slow start's among them.
LEAST_AFTER_SLOW_START = 90.0
# What is stored of each run, by part.
STORED = {
    "open-loop": ("mean_ms", "p50_ms", "p99_ms", "batch_size"),
    "closed-loop": ("answered_per_second", "p50_ms", "batch_size"),
    "overload": ("in_time_per_second", "loss_p99_ms", "p50_ms", "lost"),
    "bursts": ("in_time", "loss_p99_ms", "p99_ms", "lost"),
    "slow-start": ("in_time", "lost"),
    "costs": ("mean_ms", "p99_ms", "batch_size"),
}


@dataclass
class Result:
    """A cell and what its seeds have said: by system and figure, a value per seed or None."""

    cell: Cell
    figures: dict[str, dict[str, list[float | None]]]

    @classmethod
    def of(cls, cell: Cell, outcomes: Sequence[Outcome]) -> "Result":
        """Gather what is stored of them, with five digits."""
        return cls(
            cell,
            {
                system: {
                    name: [_rounded(outcome[system].get(name)) for outcome in outcomes]
                    for name in STORED[cell.part]
                }
                for system in outcomes[0]
            },
        )

    @classmethod
    def read(cls, stored: dict[str, Any]) -> "Result":
        """From what `asdict` has made of it."""
        cell = stored["cell"] | {"systems": tuple(stored["cell"]["systems"])}
        return cls(Cell(**cell), stored["figures"])

    def as_data(self) -> dict[str, Any]:
        """For the stored file."""
        return asdict(self)

    def values(self, system: str, figure: str) -> list[float]:
        """By seed; empty if it was not simulated or one seed has no such figure."""
        values = self.figures.get(system, {}).get(figure, [])
        present = [value for value in values if value is not None]
        return present if len(present) == len(values) else []

    def estimate(self, system: str, figure: str, factor: float = 1.0) -> Estimate | None:
        """The mean of a figure."""
        return Estimate.of([factor * value for value in self.values(system, figure)])

    def over(self, system: str, other: str, figure: str) -> Estimate | None:
        """By how many percent one is over the other, seed by seed."""
        mine, theirs = self.values(system, figure), self.values(other, figure)
        return percent_over(mine, theirs) if mine and theirs else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


Column = Callable[[Result, str], object]


def tables(results: Sequence[Result]) -> str:
    """The tables of one part."""
    layout = LAYOUT[results[0].cell.part]
    return "\n\n".join(f"{title}\n{_table(results, column)}" for title, column in layout)


def _table(results: Sequence[Result], column: Column) -> str:
    names = [
        name
        for name in (OPTIMUM, OPTIMUM_OF_ALL, RULE, BOUND, *ALL_SYSTEMS)
        if any(name in r.figures for r in results)
    ]
    rows = [[_row_name(result.cell), *(column(result, n) for n in names)] for result in results]
    return table(["", *names], rows)


def _row_name(cell: Cell) -> str:
    if cell.part == "closed-loop":
        return f"{cell.model}, {cell.pause}, {cell.x:.0f}"
    return f"{cell.model} {cell.x:.0%}"


def _regret(result: Result, system: str) -> object:
    if system == OPTIMUM:
        mean = result.estimate(OPTIMUM, "mean_ms")
        return mean and f"{number(mean.mean)} ms"
    return _signed(result.over(system, OPTIMUM, "mean_ms"))


def _gain(result: Result, system: str) -> object:
    if system == GREEDY:
        rate = result.estimate(GREEDY, "answered_per_second")
        return rate and f"{number(rate.mean)}/s"
    return _signed(result.over(system, GREEDY, "answered_per_second"))


def _goodput(result: Result, system: str) -> object:
    capacity = MODELS[result.cell.model].capacity
    return result.estimate(system, "in_time_per_second", 100 / capacity)


def _loss_ms(result: Result, system: str) -> object:
    return result.estimate(system, "loss_p99_ms")


def _in_time(result: Result, system: str) -> object:
    return result.estimate(system, "in_time", 100)


def _mean_ms(result: Result, system: str) -> object:
    return result.estimate(system, "mean_ms")


def _signed(estimate: Estimate | None) -> str | None:
    if estimate is None:
        return None
    return f"{estimate.mean:+.2f} ±{number(estimate.high - estimate.mean)}"


# By part, its tables.
LAYOUT: dict[str, tuple[tuple[str, Column], ...]] = {
    "open-loop": (
        ("Poisson arrivals: mean latency, % over the optimum on the same arrivals", _regret),
    ),
    "closed-loop": (("Clients that ask again: answers per second, % over greedy", _gain),),
    "overload": (
        ("More than the model can do: answers within the target, % of capacity", _goodput),
        ("The same: p99 until a request is refused or expires, ms", _loss_ms),
    ),
    "bursts": (("Bursts: answers within the target, % of all requests", _in_time),),
    "slow-start": (("Three slow batches, then none: answers within the target, %", _in_time),),
    "costs": (("Log-normal lengths, padded batches: mean latency, ms", _mean_ms),),
}


def verdicts(results: Sequence[Result], part: str) -> list[Verdict]:
    """Every bar of this part, whose results they are; for many cells the worst one."""
    judges = {
        "open-loop": _judge_open_loop,
        "closed-loop": _judge_closed_loop,
        "overload": _judge_overload,
        "bursts": _judge_bursts,
        "slow-start": _judge_slow_start,
    }
    return judges[part](results) if part in judges else []


def _worst(
    claim: str, found: Iterable[tuple[Cell, Estimate | None]], *, bound: float, mean: float
) -> list[Verdict]:
    """The highest mean and the highest upper bound, each with its cell's name."""
    known = [(cell, estimate) for cell, estimate in found if estimate is not None]
    if not known:
        return [Verdict(claim, None, at_most=mean)]
    cell, worst = max(known, key=lambda one: one[1].mean)
    bound_cell, highest = max(known, key=lambda one: one[1].high)
    high = Spread(highest.high, highest.high, highest.high)
    return [
        Verdict(f"{claim}: worst of {len(known)} ({cell})", worst.spread, at_most=mean),
        Verdict(f"{claim}: highest 95 % bound ({bound_cell})", high, at_most=bound),
    ]


def _spread(estimate: Estimate | None) -> Spread | None:
    return None if estimate is None else estimate.spread


def _judge_open_loop(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for name in (OPTIMUM, OPTIMUM_OF_ALL):
        for model in MODELS:
            cells = [r for r in results if r.cell.model == model]
            regrets = [(r.cell, r.over(OURS, name, "mean_ms")) for r in cells]
            claim = f"{model}: mean latency over the {name} at most {MOST_REGRET:g} %"
            found += _worst(claim, regrets, mean=MOST_REGRET, bound=MOST_REGRET_BOUND)
    return found


def _judge_closed_loop(results: Sequence[Result]) -> list[Verdict]:
    gains = [(r.cell, r.over(OURS, GREEDY, "answered_per_second")) for r in results]
    losses = [(cell, g and Estimate(-g.mean, -g.high, -g.low)) for cell, g in gains]
    claim = f"answers per second at most {MOST_REGRET:g} % below greedy"
    found = _worst(claim, losses, mean=MOST_REGRET, bound=MOST_REGRET_BOUND)
    wanted = (GAIN_MODEL, GAIN_PAUSE, float(GAIN_CLIENTS))
    gain = next((g for c, g in gains if (c.model, c.pause, c.x) == wanted), None)
    claim = f"{GAIN_CLIENTS} clients, {GAIN_MODEL}: at least +{LEAST_GAIN:g} % over greedy"
    return [*found, Verdict(claim, _spread(gain), at_least=LEAST_GAIN)]


def _judge_overload(results: Sequence[Result]) -> list[Verdict]:
    highest = max((r.cell.x for r in results), default=0.0)
    found = []
    for result in results:
        if result.cell.x == highest:
            where = f"{result.cell.model}, {highest:g} x capacity"
            capacity = MODELS[result.cell.model].capacity
            goodput = result.estimate(OURS, "in_time_per_second", 100 / capacity)
            loss = result.estimate(OURS, "loss_p99_ms")
            found += [
                Verdict(
                    f"{where}: in time at least {LEAST_GOODPUT:g} % of capacity",
                    _spread(goodput),
                    at_least=LEAST_GOODPUT,
                ),
                Verdict(
                    f"{where}: p99 of a rejection at most {MOST_LOSS_MS:g} ms",
                    _spread(loss),
                    at_most=MOST_LOSS_MS,
                ),
            ]
    return found


def _judge_bursts(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for result in results:
        points = difference(
            [100 * value for value in result.values(OURS, "in_time")],
            [100 * value for value in result.values(BENTO, "in_time")],
        )
        model = result.cell.model
        bar = LEAST_BURST_GAIN if model == GAIN_MODEL else -MOST_BURST_LOSS
        claim = f"bursts, {model}: in time at least {bar:+g} points over BentoML's controller"
        found.append(Verdict(claim, _spread(points), at_least=bar))
    return found


def _judge_slow_start(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for result in results:
        in_time = result.estimate(OURS, "in_time", 100)
        claim = f"slow start, {result.cell.model}: in time at least {LEAST_AFTER_SLOW_START:g} %"
        found.append(Verdict(claim, _spread(in_time), at_least=LEAST_AFTER_SLOW_START))
    return found
