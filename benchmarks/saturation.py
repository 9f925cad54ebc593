"""How much of the model's capacity reaches the callers when more ask than a batch holds?

A model that takes 5 ms and 0.1 ms per input, batches of 32, 128 callers. The ceiling is measured in
the same run: a child process that calls `infer` on lists of 32 and does nothing else.
"""

import sys

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.report import Measurement, Series, Spread, Verdict, table
from benchmarks.scenarios import Load

MAX_BATCH_SIZE = 32
# Enough to have one batch running, one ready to go and one on its way back.
CALLERS = 128
SHARE_BAR = 0.98
HEADER = ("system", "loop", "requests/s", "share of bare loop", "API CPU us/request", "all CPU us")


def row(measurements: list[Measurement], system: str, loop: str, callers: int) -> list[object]:
    """One line of the table."""
    series = Series.of(measurements, system, "saturation", loop, callers)
    return [
        system,
        loop,
        series.spread("requests_per_second"),
        share(measurements, system, loop, callers),
        series.spread("api_cpu_us"),
        series.spread("all_cpu_us"),
    ]


def share(measurements: list[Measurement], system: str, loop: str, callers: int) -> Spread | None:
    """Of the bare loop's requests/s."""
    bare = Series.of(measurements, "bare loop", "saturation", loop, callers)
    series = Series.of(measurements, system, "saturation", loop, callers)
    return series.ratio("requests_per_second", bare)


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "saturation",
        __doc__ or "",
        systems=("bare loop", "ours"),
        callers=(CALLERS,),
        seconds=5.0,
        quick_seconds=2.0,
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
                system,
                "saturation",
                loop,
                Load("Linear5ms", MAX_BATCH_SIZE, callers, arguments.seconds),
            )
            for system, loop, callers in cases
        ],
        arguments.repetitions,
    )
    text = table(HEADER, [row(measurements, *case) for case in cases])
    found = [
        Verdict(
            f"{loop}: at least {SHARE_BAR:g} of the bare loop's requests/s",
            share(measurements, "ours", loop, CALLERS),
            at_least=SHARE_BAR,
        )
        for loop in arguments.loops
    ]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
