"""What does the hold gain in real processes, where callers return soon, and what can it lose?

The adaptive policy against greedy, in a closed loop: 1 to 64 clients that ask again 0.1 to 1.1 ms
after their answer, and the simulation's gpu model, whose worker sleeps as long as the model would
compute. The two are measured one right after the other, every other pair in reverse order.
"""

import sys
from collections.abc import Sequence

from benchmarks.harness import finish, measure_all, parse_arguments
from benchmarks.report import Measurement, Table, Verdict, table
from benchmarks.scenarios import Load
from benchmarks.simulation.bounds import Estimate, percent_over
from benchmarks.simulation.models import MODELS
from fast_batcher._load.report import Spread

MODEL = "Gpu"
CLIENTS = (1, 2, 4, 8, 16, 32, 48, 64)
ADAPTIVE, GREEDY = "ours", "ours greedy"
# Percent of greedy's requests/s, at 95 % confidence.
MOST_LOSS = 3.0
# What the hold is there for; in the simulation it gains 25 % and more.
GAIN_CLIENTS = 32
COLUMNS = {"requests/s": "requests_per_second", "batch": "batch_size", "p50 ms": "p50_ms"}


def plan(systems: Sequence[str], clients: int, seconds: float) -> Table:
    """What to measure with this number of clients."""
    load = Load(MODEL, MODELS["gpu"].max_batch_size, clients, seconds)
    title = "1 client" if clients == 1 else f"{clients} clients"
    return Table(title, "closed_loop", load, tuple(systems), COLUMNS)


def gain(measurements: Sequence[Measurement], measured: Table, loop: str) -> Estimate | None:
    """By how many percent adaptive answers more than greedy, over the pairs; None for one pair."""
    adaptive = measured.series(measurements, ADAPTIVE, loop)
    pairs = adaptive.pairs("requests_per_second", measured.series(measurements, GREEDY, loop))
    if len(pairs) < 2:  # no bounds
        return None
    return percent_over([mine for mine, _ in pairs], [other for _, other in pairs])


def text_of(measurements: Sequence[Measurement], tables: Sequence[Table], loop: str) -> str:
    """One table for each event loop, with a row for each number of clients."""
    sides = {"adaptive": ADAPTIVE, "greedy": GREEDY}
    names = [f"{side} {title}" for title in COLUMNS for side in sides]
    rows: list[list[object]] = []
    for one in tables:
        found = gain(measurements, one, loop)
        percent = found and f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
        cells = [
            one.spread(measurements, system, loop, figure)
            for figure in COLUMNS.values()
            for system in sides.values()
        ]
        rows.append([one.load.callers, percent, *cells])
    return f"{loop}\n{table(['clients', 'gain % (95 % bounds)', *names], rows)}"


def verdicts(measurements: Sequence[Measurement], measured: Table, loop: str) -> list[Verdict]:
    """The bars on one event loop with this number of clients."""
    estimate = gain(measurements, measured, loop)
    claim = f"{loop}, {measured.title}: 95 % bound of the loss at most {MOST_LOSS:g} %"
    loss = Spread.of([-estimate.low] if estimate else [])
    found = [Verdict(claim, loss, at_most=MOST_LOSS)]
    if measured.load.callers == GAIN_CLIENTS:
        claim = f"{loop}, {measured.title}: 95 % bound of the gain above 0 %"
        least = Spread.of([estimate.low] if estimate else [])
        found.append(Verdict(claim, least, at_least=0.0))
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "hold",
        __doc__ or "",
        systems=(ADAPTIVE, GREEDY),
        callers=CLIENTS,
        seconds=2.0,
        quick_seconds=0.5,
        repetitions=10,
        quick_repetitions=2,
    )
    tables = [plan(arguments.systems, one, arguments.seconds) for one in arguments.callers]
    measurements = measure_all(tables, arguments)
    text = "\n\n".join(text_of(measurements, tables, loop) for loop in arguments.loops)
    found = [
        verdict
        for loop in arguments.loops
        for measured in tables
        for verdict in verdicts(measurements, measured, loop)
    ]
    return finish(arguments, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
