"""What does a model gain from joins between its steps, and what does a chunk cost?

A step takes 10 ms and 0.5 ms for each live stream; it computes nothing, it waits as for a GPU.
Answers have 4 to 64 chunks, and 32 streams run at a time. Four ways to serve them are compared with
the ideal, which is simulated: a stream joins at each boundary of a step, at no cost but the
model's. Only the systems inside the program are comparable; LitServe is measured over HTTP.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random

from benchmarks.harness import SEED, finish, measure_all, parse_arguments, text_of
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Figures, Load
from benchmarks.simulation.loads import ClosedLoop
from benchmarks.stepping import MEAN, PLACES, STEP_TIMES, draw_arrivals, draw_length
from benchmarks.stream_loads import WARM_UP_SECONDS, first_chunks
from fast_batcher._cli.simulation import Arrivals, simulate_steps

LOOP = "uvloop"
CLIENTS = 64
CONTINUOUS, WHOLE, BARE, IDEAL = "continuous", "whole answers", "pipe and queues", "ideal"
SYSTEMS = (WHOLE, "static batches, streamed", CONTINUOUS, BARE, "LitServe, streamed batches")
# Loads of the open loops, as shares of the ideal's capacity; the bar is about `BUSY`.
BUSY = 0.7
SHARES = (0.2, 0.35, 0.5, BUSY, 0.9)
QUICK_SHARES = (0.35, BUSY)
STEP_TIME = STEP_TIMES["Steps"]
CAPACITY = PLACES / STEP_TIME.of(PLACES) / MEAN
# Virtual seconds of a closed loop.
IDEAL_SECONDS = 600.0

RATE, STEPS = "requests_per_second", "steps_per_second"
OF_IDEAL = Compared(STEPS, IDEAL)
CLOSED_COLUMNS: Columns = {
    "requests/s": RATE,
    "of the ideal": Compared(RATE, IDEAL),
    "steps/s": STEPS,
    "steps/s of the ideal": OF_IDEAL,
    "live streams": "live",
    "first p50 ms": "first_p50_ms",
    "first p99 ms": "first_p99_ms",
}
OPEN_COLUMNS: Columns = {
    "first p50 ms": "first_p50_ms",
    "first p99 ms": "first_p99_ms",
    "p50 steps": "first_p50_steps",
    "p99 steps": "first_p99_steps",
}
TIMES_BARE = Compared("all_cpu_us", BARE)
CPU_COLUMNS: Columns = {
    "chunks/s": "chunks_per_second",
    "API CPU us/chunk": "api_cpu_us",
    "worker CPU us": "workers_cpu_us",
    "all CPU us": "all_cpu_us",
    "all / bare": TIMES_BARE,
}
STEPS_BAR, FIRST_BAR, CPU_BAR = 0.95, 2.2, 1.5


def plan(shares: Sequence[float], systems: Sequence[str], seconds: float) -> list[Table]:
    """What to measure."""
    load = Load("Steps", PLACES, CLIENTS, seconds)
    chosen = tuple(systems)
    tables = [
        Table(f"{CLIENTS} clients that ask again", "closed_streams", load, chosen, CLOSED_COLUMNS)
    ]
    for share in shares:
        name = f"load {share:.0%}"
        title = f"{share:.0%} of the ideal's capacity of {CAPACITY:.0f} requests/s"
        open_load = replace(load, rate=share * CAPACITY)
        tables.append(Table(title, "open_streams", open_load, chosen, OPEN_COLUMNS, label=name))
    endless = Load("QuickSteps", PLACES, PLACES, seconds)
    title = f"{PLACES} endless streams, steps of 1 ms"
    both = tuple(one for one in chosen if one in (CONTINUOUS, BARE))
    return [*tables, Table(title, "endless_streams", endless, both, CPU_COLUMNS)]


def compute_ideal(load: Load, seed: int) -> Figures:
    """Simulate the ideal under a load, for the same arrivals as the systems."""
    random = Random(seed)
    if load.rate:
        drawn = draw_arrivals(load.rate, WARM_UP_SECONDS + load.seconds, seed)
        lengths = iter([length for _, length in drawn])
        arrivals = Arrivals(moment for moment, _ in drawn)
    else:
        lengths = iter(lambda: draw_length(random), None)
        arrivals = ClosedLoop(load.callers, lambda _: 0.0, seed)
    history = simulate_steps(
        arrivals,
        lambda: next(lengths),
        PLACES,
        lambda _, live: STEP_TIME.of(len(live)),
        inf if load.rate else IDEAL_SECONDS,
    )
    pairs = zip(history.arrivals, history.answers, strict=True)
    firsts = [first - arrived for arrived, first in pairs if arrived >= WARM_UP_SECONDS]
    seconds, steps = history.answers[-1], len(history.batch_sizes)
    live = sum(history.batch_sizes) / steps
    figures = {RATE: load.rate or len(history.arrivals) / seconds, STEPS: steps / seconds}
    figures |= {"live": live}
    return {**figures, **first_chunks(firsts), "step_ms": 1e3 * STEP_TIME.of(live)}


def add_ideal(
    tables: Sequence[Table], measurements: Sequence[Measurement], repetitions: int
) -> list[Measurement]:
    """Add the ideal's figures, and the first chunks in steps of the ideal's mean size."""
    found = list(measurements)
    step_ms: dict[tuple[str, int], float] = {}
    for table in tables:
        for repetition in range(repetitions):
            if table.scenario == "endless_streams":
                continue
            figures = compute_ideal(table.load, SEED + repetition)
            step_ms[table.name, repetition] = figures["step_ms"]
            callers = table.load.callers
            found.append(Measurement(IDEAL, table.name, LOOP, callers, repetition, figures, {}))
    return [_in_steps(one, step_ms.get((one.scenario, one.repetition))) for one in found]


def _in_steps(measurement: Measurement, step_ms: float | None) -> Measurement:
    figures = measurement.figures
    if step_ms is None or "first_p50_ms" not in figures:
        return measurement
    steps = {
        f"first_p{percent}_steps": figures[f"first_p{percent}_ms"] / step_ms for percent in (50, 99)
    }
    return replace(measurement, figures={**figures, **steps})


def verdicts(tables: Sequence[Table], measurements: Sequence[Measurement]) -> list[Verdict]:
    """The bars."""
    closed, *open_, endless = tables
    busy = next(one for one in open_ if one.name == f"load {BUSY:.0%}")

    return [
        Verdict(
            f"at least {STEPS_BAR:.0%} of the ideal steps/s with {CLIENTS} clients",
            closed.spread(measurements, CONTINUOUS, LOOP, OF_IDEAL),
            at_least=STEPS_BAR,
        ),
        Verdict(
            f"p50 of the first chunk at most {FIRST_BAR} steps at {BUSY:.0%} load",
            busy.spread(measurements, CONTINUOUS, LOOP, "first_p50_steps"),
            at_most=FIRST_BAR,
        ),
        Verdict(
            f"CPU time of a chunk, all processes: at most {CPU_BAR} x the bare floor's",
            endless.spread(measurements, CONTINUOUS, LOOP, TIMES_BARE),
            at_most=CPU_BAR,
        ),
    ]


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "streams",
        __doc__ or "",
        systems=SYSTEMS,
        loops=(LOOP,),
        seconds=10.0,
        quick_seconds=1.0,
        repetitions=3,
        quick_repetitions=1,
    )
    shares = QUICK_SHARES if arguments.quick else SHARES
    tables = plan(shares, arguments.systems, arguments.seconds)
    measured = measure_all(tables, arguments)
    measurements = add_ideal(tables, measured, arguments.repetitions)
    shown = [
        table
        if table.scenario == "endless_streams"
        else replace(table, systems=(*table.systems, IDEAL))
        for table in tables
    ]
    text = text_of(shown, measurements, [LOOP])
    return finish(arguments, measurements, text, verdicts(tables, measurements))


if __name__ == "__main__":
    sys.exit(main())
