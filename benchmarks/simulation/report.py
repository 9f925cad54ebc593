"""Tables and verdicts of the simulated cells. No process, no clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import Verdict, table
from benchmarks.simulation.bounds import Estimate, percent_over
from benchmarks.simulation.cells import (
    ALONE,
    BOUND,
    CALM,
    COLUMNS,
    GREEDY,
    IN_FLIGHT,
    NO_TARGET,
    OPTIMUM,
    OURS,
    OVERLOADS,
    PRODUCT,
    SHARES,
    TRUE,
    WHOLE,
    WITH_COSTS,
    Cell,
    Outcome,
)
from benchmarks.simulation.loads import RARE
from benchmarks.simulation.models import MODELS
from fast_batcher._load.report import Spread
from fast_batcher.stats import number

# Percent over the optimum, by model. On cpu a batch costs little by itself, so the optimum sends
# fewer than wait; a policy that sends all that wait is 2 to 3 % above it.
MOST_REGRET = {"gpu": 1.0, "mid": 1.0, "cpu": 3.5}
# Percent below greedy, and by how much the upper bound may be above the mean's bar.
MOST_LOSS, BOUND_SLACK = 1.0, 0.5
# Where the hold has to pay: the model, the clients, their pause and the percent over greedy.
GAIN_MODEL, GAIN_CLIENTS, LEAST_GAIN = "gpu", 32, 25.0
GAIN_PAUSE = "uniform 0.1 to 1.1 ms"
# Percent of the capacity at the highest overload, and milliseconds until a caller is rejected.
LEAST_GOODPUT, MOST_LOSS_MS = 97.0, 10.0
# Points of goodput in bursts below the bound, and above ours without a target.
MOST_BELOW_BOUND, LEAST_BURST_GAIN = 6.0, 20.0
# Times its p99 alone at the same total load that of a rare method may be.
MOST_RARE_P99 = 2.0
# Percent of the requests/s with the true times; percent below those by n x L, in any cell; and
# percent above the p99 by n x L.
LEAST_OF_TRUE, MOST_BELOW_PRODUCT, MOST_P99_GAIN = 90.0, 2.0, 0.0
# Where the true times gain this many percent over n x L, ours gain as many.
WORTH_LEARNING = 10.0
# Percent of the optimum's requests/s at more than the capacity; percent of those of all waiting
# requests by which a mean may be lower by chance, and those by which a p99 may be longer.
MOST_BELOW_CAPACITY, MOST_BELOW_WHOLE, MOST_P99_OVER_WHOLE = 3.0, 0.5, 0.5
# Times their p99 without a flood that p99 of the others may be, where they use the capacity without
# it; and full batches otherwise: one that runs, one behind it and their own. A little more for
# requests of one client that overlap.
MOST_OVER_CALM, MOST_FULL_BATCHES = 1.5, 3.05
# The figures that are stored of each run, by part.
STORED = {
    "open-loop": ("mean_ms", "p50_ms", "p99_ms", "batch_size"),
    "closed-loop": ("answered_per_second", "p50_ms", "batch_size"),
    "overload": ("in_time_per_second", "loss_p99_ms", "p50_ms", "lost"),
    "bursts": ("in_time", "loss_p99_ms", "p99_ms", "lost"),
    "costs": ("mean_ms", "p99_ms", "batch_size"),
    "padded": ("answered_per_second", "p50_ms", "p99_ms", "batch_size"),
    "methods": ("mean_ms", "p50_ms", "p99_ms", "lost", "batch_size"),
    "stairs": ("answered_per_second", "mean_ms", "p50_ms", "p99_ms", "batch_size"),
    "shares": ("answered_per_second", "p50_ms", "p99_ms"),
}


@dataclass
class Result:
    """A cell and the figures of its seeds: by system and figure, a value per seed or None."""

    cell: Cell
    figures: dict[str, dict[str, list[float | None]]]

    @classmethod
    def of(cls, cell: Cell, outcomes: Sequence[Outcome]) -> "Result":
        """Gather the figures that are stored, with six digits."""
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

    def values(self, system: str, figure: str) -> list[float]:
        """One figure by seed; empty if the system or a seed has none."""
        values = self.figures.get(system, {}).get(figure, [])
        present = [value for value in values if value is not None]
        return present if len(present) == len(values) else []

    def estimate(self, system: str, figure: str, factor: float = 1.0) -> Estimate | None:
        """The mean of a figure."""
        return Estimate.of([factor * value for value in self.values(system, figure)])

    def over(self, system: str, other: str, figure: str) -> Estimate | None:
        """By how many percent one system is over the other, seed by seed."""
        mine, theirs = self.values(system, figure), self.values(other, figure)
        return percent_over(mine, theirs) if mine and theirs else None

    def goodput(self, system: str) -> Estimate | None:
        """Answers within the target, percent of the capacity."""
        capacity = MODELS[self.cell.model].capacity
        return self.estimate(system, "in_time_per_second", 100 / capacity)

    def points(self, system: str, other: str) -> Spread | None:
        """Points of the share in time by which one system is above the other."""
        pairs = zip(self.values(system, "in_time"), self.values(other, "in_time"), strict=False)
        return _spread(Estimate.of([100 * (mine - theirs) for mine, theirs in pairs]))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _spread(estimate: Estimate | None) -> Spread | None:
    return None if estimate is None else estimate.spread


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


def _rate_of_optimum(result: Result, system: str) -> object:
    if system == OPTIMUM:
        rate = result.estimate(OPTIMUM, "answered_per_second")
        return rate and f"{number(rate.mean)}/s"
    return _signed(result.over(system, OPTIMUM, "answered_per_second"))


def _over_product(result: Result, system: str) -> object:
    if system == PRODUCT:
        rate = result.estimate(PRODUCT, "answered_per_second")
        return rate and f"{number(rate.mean)}/s"
    return _signed(result.over(system, PRODUCT, "answered_per_second"))


def _p99_over_product(result: Result, system: str) -> object:
    if system == PRODUCT:
        p99 = result.estimate(PRODUCT, "p99_ms")
        return p99 and f"{number(p99.mean)} ms"
    return _signed(result.over(system, PRODUCT, "p99_ms"))


def _times_over(result: Result, system: str, base: str) -> Estimate | None:
    """A p99 as a multiple of another system's, seed by seed; None if a seed has no answers."""
    pairs = zip(result.values(system, "p99_ms"), result.values(base, "p99_ms"), strict=False)
    return Estimate.of([mine / other for mine, other in pairs])


def _slowdown_over(base: str) -> Callable[[Result, str], object]:
    def slowdown(result: Result, system: str) -> object:
        if system == base:
            p99 = result.estimate(base, "p99_ms")
            return p99 and f"{number(p99.mean)} ms"
        return _times_over(result, system, base)

    return slowdown


def _signed(estimate: Estimate | None) -> str | None:
    if estimate is None:
        return None
    return f"{estimate.mean:+.2f} ±{number(estimate.high - estimate.mean)}"


# By part, its tables: the title, and what a cell of it shows of a system.
TABLES: dict[str, tuple[tuple[str, Callable[[Result, str], object]], ...]] = {
    "open-loop": (
        ("Poisson arrivals: mean latency, % over the optimum on the same arrivals", _regret),
    ),
    "closed-loop": (("Clients that ask again: answers per second, % over greedy", _gain),),
    "overload": (
        ("More than the model can do: answers in time, % of the capacity", Result.goodput),
        (
            "p99 until a request is rejected or expires, ms",
            lambda result, system: result.estimate(system, "loss_p99_ms"),
        ),
    ),
    "bursts": (
        (
            "Bursts: answers in time, % of all requests",
            lambda result, system: result.estimate(system, "in_time", 100),
        ),
    ),
    "costs": (
        (
            "Log-normal lengths, padded batches: mean latency, ms",
            lambda result, system: result.estimate(system, "mean_ms"),
        ),
    ),
    "padded": (
        ("Padded batches of an encoder: answers per second, % over n x L", _over_product),
        ("p99, % over n x L", _p99_over_product),
    ),
    "methods": (
        (
            "Two methods, one at ten times the rate of the other: p99, times the rare one's alone",
            _slowdown_over(ALONE),
        ),
    ),
    "shares": (
        (
            "Nine clients beside one that sends 100 times the capacity: p99, times that without it",
            _slowdown_over(CALM),
        ),
        (
            "Answers per second to the nine",
            lambda result, system: result.estimate(system, "answered_per_second"),
        ),
    ),
    "stairs": (
        ("Compiled models: answers per second, % over the optimum", _rate_of_optimum),
        ("Mean latency, % over the optimum", _regret),
        ("p99, ms", lambda result, system: result.estimate(system, "p99_ms")),
    ),
}


def tables(results: Sequence[Result]) -> str:
    """Put the tables of one part below each other."""
    names = [name for name in COLUMNS if any(name in one.figures for one in results)]
    found = []
    for title, cell_of in TABLES[results[0].cell.part]:
        rows = [[str(one.cell), *(cell_of(one, name) for name in names)] for one in results]
        found.append(f"{title}\n{table(['', *names], rows)}")
    return "\n\n".join(found)


def verdicts(results: Sequence[Result], part: str) -> list[Verdict]:
    """Judge every bar of this part."""
    judges = {
        "open-loop": _judge_open_loop,
        "closed-loop": _judge_closed_loop,
        "overload": _judge_overload,
        "bursts": _judge_bursts,
        "costs": _judge_costs,
        "padded": _judge_padded,
        "methods": _judge_methods,
        "stairs": _judge_stairs,
        "shares": _judge_shares,
    }
    return judges[part](results)


def _worst(claim: str, found: Iterable[tuple[Cell, Estimate | None]], most: float) -> list[Verdict]:
    """Judge the highest mean and the highest upper bound of many cells."""
    known = [(cell, estimate) for cell, estimate in found if estimate is not None]
    if not known:
        return [Verdict(claim, None, at_most=most)]
    cell, worst = max(known, key=lambda one: one[1].mean)
    bound_cell, highest = max(known, key=lambda one: one[1].high)
    return [
        Verdict(f"{claim}: worst of {len(known)} ({cell})", worst.spread, at_most=most),
        Verdict(
            f"{claim}: highest 95 % bound ({bound_cell})",
            Spread.of([highest.high]),
            at_most=most + BOUND_SLACK,
        ),
    ]


def _judge_open_loop(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for model, most in MOST_REGRET.items():
        regrets = [
            (one.cell, one.over(OURS, OPTIMUM, "mean_ms"))
            for one in results
            if one.cell.model == model
        ]
        claim = f"{model}: mean latency over the optimum at most {most:g} %"
        found += _worst(claim, regrets, most)
    return found


def _judge_closed_loop(results: Sequence[Result]) -> list[Verdict]:
    gains = [(one.cell, one.over(OURS, GREEDY, "answered_per_second")) for one in results]
    losses = [(cell, g and Estimate(-g.mean, -g.high, -g.low)) for cell, g in gains]
    found = _worst(f"answers per second at most {MOST_LOSS:g} % below greedy", losses, MOST_LOSS)
    wanted = (GAIN_MODEL, GAIN_PAUSE, float(GAIN_CLIENTS))
    gain = next((g for c, g in gains if (c.model, c.pause, c.x) == wanted), None)
    claim = f"{GAIN_CLIENTS} clients, {GAIN_MODEL}: at least +{LEAST_GAIN:g} % over greedy"
    return [*found, Verdict(claim, _spread(gain), at_least=LEAST_GAIN)]


def _judge_overload(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for one in results:
        if one.cell.x != OVERLOADS[-1]:
            continue
        where = f"{one.cell.model}, {one.cell.x:g} x the capacity"
        claim = f"{where}: in time at least {LEAST_GOODPUT:g} % of the capacity"
        found.append(Verdict(claim, _spread(one.goodput(OURS)), at_least=LEAST_GOODPUT))
        loss = one.estimate(OURS, "loss_p99_ms")
        claim = f"{where}: p99 until a rejection at most {MOST_LOSS_MS:g} ms"
        found.append(Verdict(claim, _spread(loss), at_most=MOST_LOSS_MS))
    return found


def _judge_bursts(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for one in results:
        where = f"bursts, {one.cell.model}: in time"
        claim = f"{where} at most {MOST_BELOW_BOUND:g} points below the bound"
        found.append(Verdict(claim, one.points(BOUND, OURS), at_most=MOST_BELOW_BOUND))
        claim = f"{where} at least {LEAST_BURST_GAIN:g} points more than without a target"
        found.append(Verdict(claim, one.points(OURS, NO_TARGET), at_least=LEAST_BURST_GAIN))
    return found


def _judge_costs(results: Sequence[Result]) -> list[Verdict]:
    over = [(one.cell, one.over(WITH_COSTS, OURS, "mean_ms")) for one in results]
    # The mean alone: near the capacity, latencies without costs differ by a factor between seeds.
    return _worst("mean latency with costs over that without, %", over, 0.0)[:1]


def _judge_padded(results: Sequence[Result]) -> list[Verdict]:
    rate = "answered_per_second"
    below_true = [(one.cell, _negative(one.over(WITH_COSTS, TRUE, rate))) for one in results]
    most = 100 - LEAST_OF_TRUE
    found = _worst(f"requests/s at most {most:g} % below those with true times", below_true, most)
    below = [(one.cell, _negative(one.over(WITH_COSTS, PRODUCT, rate))) for one in results]
    claim = f"requests/s at most {MOST_BELOW_PRODUCT:g} % below those by n x L"
    found += _worst(claim, below, MOST_BELOW_PRODUCT)
    for one in results:
        possible = one.over(TRUE, PRODUCT, rate)
        if possible is not None and possible.mean >= WORTH_LEARNING:
            claim = f"{one.cell}: requests/s at least +{WORTH_LEARNING:g} % over n x L"
            gain = _spread(one.over(WITH_COSTS, PRODUCT, rate))
            found.append(Verdict(claim, gain, at_least=WORTH_LEARNING))
    p99 = [(one.cell, one.over(WITH_COSTS, PRODUCT, "p99_ms")) for one in results]
    return [*found, *_worst("p99 over that by n x L, %", p99, MOST_P99_GAIN)[:1]]


def _negative(estimate: Estimate | None) -> Estimate | None:
    return estimate and Estimate(-estimate.mean, -estimate.high, -estimate.low)


def _judge_methods(results: Sequence[Result]) -> list[Verdict]:
    claim = f"p99 of the rare method at most {MOST_RARE_P99:g} times that alone"
    return [
        Verdict(
            f"{one.cell}: {claim}", _spread(_times_over(one, RARE, ALONE)), at_most=MOST_RARE_P99
        )
        for one in results
    ]


def _judge_shares(results: Sequence[Result]) -> list[Verdict]:
    found = []
    for one in results:
        model = MODELS[one.cell.model]
        if one.cell.x == IN_FLIGHT[-1]:
            claim = f"p99 at most {MOST_OVER_CALM:g} times that without the flood"
            p99, most = _times_over(one, SHARES, CALM), MOST_OVER_CALM
        else:
            claim = "p99 at most three full batches"
            full = 1e3 * model.seconds(model.max_batch_size)
            p99, most = one.estimate(SHARES, "p99_ms", 1 / full), MOST_FULL_BATCHES
        found.append(Verdict(f"{one.cell}: {claim}", _spread(p99), at_most=most))
    return found


def _judge_stairs(results: Sequence[Result]) -> list[Verdict]:
    rate = "answered_per_second"
    full = [one for one in results if one.cell.x > 1]
    below = [(one.cell, _negative(one.over(OURS, OPTIMUM, rate))) for one in full]
    claim = f"requests/s at most {MOST_BELOW_CAPACITY:g} % below the optimum at saturation"
    found = _worst(claim, below, MOST_BELOW_CAPACITY)
    losses = [(one.cell, _negative(one.over(OURS, WHOLE, rate))) for one in results]
    claim = f"requests/s at most {MOST_BELOW_WHOLE:g} % below those of all waiting"
    found += _worst(claim, losses, MOST_BELOW_WHOLE)
    p99 = [(one.cell, one.over(OURS, WHOLE, "p99_ms")) for one in results]
    return [*found, *_worst("p99 over that of all waiting, %", p99, MOST_P99_OVER_WHOLE)[:1]]
