"""What does a request cost beside the model, in CPU time of all processes?

A no-op model, callers that ask again as soon as they are answered, the library's time-out on. We
are compared with the floor (awaiting a future that somebody settles) in CPU of the API process,
which all requests share, and with the peers in CPU of all processes.
"""

import sys

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.report import Measurement, Series, Spread, Verdict, table
from benchmarks.scenarios import Load

MAX_BATCH_SIZE = 64
# The number of callers that the bars are about; others are for information.
CALLERS = 64
# Times the floor, in CPU of the API process. asyncio's floor is higher, so its bar is lower.
FLOOR_BARS = {"uvloop": 3.0, "asyncio": 2.5}
# Times our CPU of all processes; "batched.aio" with the model in its thread, and without, which
# a no-op model permits.
PEER_BARS = {
    "batched.aio 0.1 ms": 2.0,
    "batched.aio 0.1 ms on the loop": 2.0,
    "fast_dynamic_batcher tuned": 30.0,
}
HEADER = (
    "system",
    "loop",
    "callers",
    "API CPU us/request",
    "workers CPU us",
    "all CPU us",
    "requests/s",
    "p50 ms",
    "API CPU / floor",
    "waking a process us",
)


def verdicts(measurements: list[Measurement], loop: str) -> list[Verdict]:
    """The bars on one event loop."""

    def series(system: str) -> Series:
        return Series.of(measurements, system, "full_speed", loop, CALLERS)

    ours = series("ours")
    bar = FLOOR_BARS[loop]
    found = [
        Verdict(
            f"{loop}: API CPU at most {bar:g} x the floor",
            ours.ratio("api_cpu_us", series("floor")),
            at_most=bar,
        )
    ]
    for peer, bar in PEER_BARS.items():
        found.append(
            Verdict(
                f"{loop}: {peer} uses at least {bar:g} x our CPU of all processes",
                series(peer).ratio("all_cpu_us", ours),
                at_least=bar,
            )
        )
    return found


def row(measurements: list[Measurement], system: str, loop: str, callers: int) -> list[object]:
    """One line of the table."""
    series = Series.of(measurements, system, "full_speed", loop, callers)
    floor = Series.of(measurements, "floor", "full_speed", loop, callers)
    figures = ("api_cpu_us", "workers_cpu_us", "all_cpu_us", "requests_per_second", "p50_ms")
    spreads: list[Spread | None] = [series.spread(figure) for figure in figures]
    ratio = series.ratio("api_cpu_us", floor)
    return [system, loop, callers, *spreads, ratio, series.spread("wake_us")]


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "overhead",
        __doc__ or "",
        systems=("floor", "ours", *PEER_BARS),
        callers=(CALLERS,),
        seconds=2.0,
        quick_seconds=0.5,
    )
    machine = hardware()
    cases = [
        (system, loop, callers)
        for callers in arguments.callers
        for loop in arguments.loops
        for system in arguments.systems
    ]
    measurements = measure_all(
        [
            Job(
                system, "full_speed", loop, Load("NoOp", MAX_BATCH_SIZE, callers, arguments.seconds)
            )
            for system, loop, callers in cases
        ],
        arguments.repetitions,
    )
    text = table(HEADER, [row(measurements, *case) for case in cases])
    found = [verdict for loop in arguments.loops for verdict in verdicts(measurements, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
