"""What does a request cost beside the model, in CPU time of all processes?

A no-op model, callers that ask again as soon as they are answered, the library's time-out on. We
are compared with the floor (awaiting a future that another callback settles) in CPU time of the API
process, and with the peers in CPU time of all processes.
"""

import sys
from collections.abc import Sequence

from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load

MAX_BATCH_SIZE = 64
# The number of callers that the bars are about; others are for information.
CALLERS = 64
# Times the floor, in CPU time of the API process. asyncio's floor is higher, so its bar is lower.
FLOOR_BARS = {"uvloop": 3.0, "asyncio": 2.5}
# Times our CPU time of all processes; "batched.aio" with the model in its thread and on the event
# loop, which a no-op model permits.
PEER_BARS = {
    "batched.aio 0.1 ms": 2.0,
    "batched.aio 0.1 ms on the loop": 2.0,
    "fast_dynamic_batcher tuned": 30.0,
}
TIMES_THE_FLOOR = Compared("api_cpu_us", "floor")
COLUMNS: Columns = {
    "API CPU us/request": "api_cpu_us",
    "workers CPU us": "workers_cpu_us",
    "all CPU us": "all_cpu_us",
    "requests/s": "requests_per_second",
    "p50 ms": "p50_ms",
    "API CPU / floor": TIMES_THE_FLOOR,
}


def plan(systems: Sequence[str], callers: int, seconds: float) -> Table:
    """What to measure with this number of callers."""
    load = Load("NoOp", MAX_BATCH_SIZE, callers, seconds)
    return Table(f"{callers} callers", "full_speed", load, tuple(systems), COLUMNS)


def verdicts(measurements: Sequence[Measurement], measured: Table, loop: str) -> list[Verdict]:
    """The bars on one event loop."""
    bar = FLOOR_BARS[loop]
    found = [
        Verdict(
            f"{loop}: API CPU at most {bar:g} x the floor",
            measured.spread(measurements, "ours", loop, TIMES_THE_FLOOR),
            at_most=bar,
        )
    ]
    for peer, bar in PEER_BARS.items():
        claim = f"{loop}: {peer} uses at least {bar:g} x our CPU of all processes"
        times = measured.spread(measurements, peer, loop, Compared("all_cpu_us", "ours"))
        found.append(Verdict(claim, times, at_least=bar))
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "overhead",
        __doc__ or "",
        systems=("floor", "ours", "ours with Prometheus and traces of 1 %", *PEER_BARS),
        callers=(CALLERS,),
        seconds=2.0,
        quick_seconds=0.5,
    )
    tables = [plan(arguments.systems, one, arguments.seconds) for one in arguments.callers]
    measurements = measure_all(tables, arguments)
    found = [
        verdict
        for measured in tables
        if measured.load.callers == CALLERS
        for loop in arguments.loops
        for verdict in verdicts(measurements, measured, loop)
    ]
    return finish(arguments, measurements, text_of(tables, measurements, arguments.loops), found)


if __name__ == "__main__":
    sys.exit(main())
