"""Who keeps a target of 50 ms, with less and with more requests than the model can compute?

Poisson arrivals at 20, 50 and 80 % of the model's capacity, and at 1.2, 2 and 5 times of it, where
only answers within the target count. Ours has it as `max_latency` and BentoML's dispatcher as its
`max_latency_ms`; `batched` and fast_dynamic_batcher know no target, and have their defaults or are
tuned. The model takes 4 ms and 0.3 ms for each input (`Mid`), in batches of 32.

`batched` computes in the app's process, and batches have no way to go there. Below capacity our
decorators, which compute there too, are measured beside it.
"""

import sys
from collections.abc import Iterable

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.models import SIZED
from benchmarks.report import Measurement, Series, Spread, Verdict, table
from benchmarks.scenarios import PATIENCE, Load
from benchmarks.systems import SYSTEMS

# Five times its capacity are 11 800 requests/s: that many an event loop can take in. With the gpu
# model it would be 19 600, and the loop and not the policy would be what is measured.
MODEL = "Mid"
MAX_BATCH_SIZE = SIZED[MODEL].max_batch_size
LOOP = "uvloop"
# Shares of the bare loop's requests/s.
LOADS = (0.2, 0.5, 0.8)
OVERLOADS = (1.2, 2.0, 5.0)
OURS = "ours 50 ms"
PEERS = (
    "BentoML dispatcher 50 ms",
    "batched.aio",
    "batched.aio 0.1 ms",
    "batched thread",
    "batched thread 0.1 ms",
    "fast_dynamic_batcher",
    "fast_dynamic_batcher tuned",
)
# Ours in the app's process, and who computes there in the same way.
HERE = {"our aio": "batched.aio 0.1 ms", "our thread": "batched thread 0.1 ms"}
# Who is refused can ask somebody else, or show something else, if it is told soon.
MOST_REFUSAL_MS = 10.0
# Column title to figure.
COLUMNS = {
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
    "in time/s": "in_time_per_second",
    "in time": "within_50_ms",
    "refusal p99 ms": "refusal_p99_ms",
    "lost": "lost",
    "all CPU us/answer": "all_cpu_us",
}


def label(load: float) -> str:
    """What the results call it."""
    return f"open loop at {load:.0%}" if load < 1 else f"{load:g} times the capacity"


def measured(load: float, systems: Iterable[str]) -> list[str]:
    """Those that are measured at this load: above capacity, what has no target is no choice."""
    return [system for system in systems if load < 1 or system not in HERE]


def compared(load: float) -> str:
    """The figure that systems are compared in, in the table."""
    return "p50_ms" if load < 1 else "in_time_per_second"


def text_of(measurements: list[Measurement], systems: Iterable[str], loops: Iterable[str]) -> str:
    """A table for each load."""
    parts = []
    for load in (*LOADS, *OVERLOADS):
        for loop in loops:
            ours = Series.of(measurements, OURS, label(load), loop, 0)
            figure = compared(load)
            rows: list[list[object]] = []
            for system in measured(load, systems):
                series = Series.of(measurements, system, label(load), loop, 0)
                cells = [series.spread(one) for one in COLUMNS.values()]
                rows.append([system, *cells, series.ratio(figure, ours)])
            title = "p50 ms" if load < 1 else "in time/s"
            header = ["system", *COLUMNS, f"{title}, times ours"]
            parts.append(f"{label(load)}, {loop}\n{table(header, rows)}")
    return "\n\n".join(parts)


def percentile_ratio(figure: str, ours: Series, theirs: Series) -> Spread | None:
    """Ours over theirs; one that falls on a lost request is later than what was waited for.

    It stands for `PATIENCE` where it is theirs, and for twice of that where it is ours.
    """
    ratios = []
    others = {one.repetition: one.figures for one in theirs.measurements if one.figures}
    for one in ours.measurements:
        if one.figures and one.repetition in others:
            mine = one.figures.get(figure, 2e3 * PATIENCE)
            ratios.append(mine / others[one.repetition].get(figure, 1e3 * PATIENCE))
    return Spread.of(ratios)


def lower(where: str, name: str, ours: Series, peer: str, theirs: Series) -> list[Verdict]:
    """Whether both percentiles of ours, called this, are below those of a peer."""
    return [
        Verdict(
            f"{where}: {figure} of {name} over that of {peer}",
            percentile_ratio(figure, ours, theirs),
            at_most=1.0,
        )
        for figure in ("p50_ms", "p99_ms")
    ]


def verdicts(measurements: list[Measurement], systems: Iterable[str], loop: str) -> list[Verdict]:
    """Against each peer."""
    found = []
    for load in (*LOADS, *OVERLOADS):
        ours = Series.of(measurements, OURS, label(load), loop, 0)
        where = f"{label(load)}, {loop}"
        for peer in [system for system in systems if system != OURS and system not in HERE]:
            theirs = Series.of(measurements, peer, label(load), loop, 0)
            if load < 1:
                found += lower(where, "ours", ours, peer, theirs)
            else:
                claim = f"{where}: answers in time of ours less those of {peer}, per second"
                more = ours.difference("in_time_per_second", theirs)
                found.append(Verdict(claim, more, at_least=0.0))
        for system, peer in HERE.items():
            if load < 1 and {system, peer} <= set(systems):
                ours_here, theirs = (
                    Series.of(measurements, one, label(load), loop, 0) for one in (system, peer)
                )
                found += lower(where, system, ours_here, peer, theirs)
    most = OVERLOADS[-1]
    refusals = Series.of(measurements, OURS, label(most), loop, 0).spread("refusal_p99_ms")
    claim = f"{label(most)}, {loop}: p99 of a refusal of ours at most {MOST_REFUSAL_MS:g} ms"
    return [*found, Verdict(claim, refusals, at_most=MOST_REFUSAL_MS)]


def measure_capacity() -> float:
    """Requests/s of a child process that computes full batches and does nothing else."""
    load = Load(MODEL, MAX_BATCH_SIZE, 0, 1.0)
    (measurement,) = measure_all([Job("bare loop", "saturation", LOOP, load, "capacity")], 1)
    return measurement.figures["requests_per_second"]


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "overload",
        __doc__ or "",
        systems=(OURS, *HERE, *PEERS),
        seconds=3.0,
        quick_seconds=1.0,
        loops=(LOOP,),
        repetitions=3,
        quick_repetitions=1,
    )
    machine = hardware()
    systems = [system for system in SYSTEMS if system in arguments.systems]
    measurements: list[Measurement] = []
    for load in (*LOADS, *OVERLOADS):
        for repetition in range(arguments.repetitions):
            print(
                f"{label(load)}, repetition {repetition + 1} of {arguments.repetitions}",
                file=sys.stderr,
            )
            # Again each time: how late timers are is not the same in every quarter of an hour.
            rate = load * measure_capacity()
            put_on = Load(MODEL, MAX_BATCH_SIZE, 0, arguments.seconds, rate=rate)
            jobs = [
                Job(system, "open_loop", loop, put_on, label(load))
                for loop in arguments.loops
                for system in measured(load, systems)
            ]
            measurements += measure_all(jobs, 1, first=repetition)
    text = text_of(measurements, systems, arguments.loops)
    found = [v for loop in arguments.loops for v in verdicts(measurements, systems, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
