"""How much of the model's capacity reaches the callers when more ask than a batch holds?

A model that takes 5 ms and 0.1 ms per input, batches of 32, 128 callers. The ceiling is measured in
the same run: a child process that calls `infer` on lists of 32 and does nothing else.
"""

import sys
from collections.abc import Sequence

from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load

MAX_BATCH_SIZE = 32
# Enough to have one batch running, one ready to go and one on its way back.
CALLERS = 128
SHARE_BAR = 0.98
SHARE = Compared("requests_per_second", "bare loop")
COLUMNS: Columns = {
    "requests/s": "requests_per_second",
    "share of bare loop": SHARE,
    "API CPU us/request": "api_cpu_us",
    "all CPU us": "all_cpu_us",
}


def plan(systems: Sequence[str], callers: int, seconds: float) -> Table:
    """What to measure with this number of callers."""
    load = Load("Linear5ms", MAX_BATCH_SIZE, callers, seconds)
    return Table(f"{callers} callers", "saturation", load, tuple(systems), COLUMNS)


def verdict(measurements: Sequence[Measurement], measured: Table, loop: str) -> Verdict:
    """The bar on one event loop."""
    share = measured.spread(measurements, "ours", loop, SHARE)
    claim = f"{loop}: at least {SHARE_BAR:g} of the bare loop's requests/s"
    return Verdict(claim, share, at_least=SHARE_BAR)


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
    tables = [plan(arguments.systems, one, arguments.seconds) for one in arguments.callers]
    measurements = measure_all(tables, arguments)
    found = [
        verdict(measurements, measured, loop)
        for measured in tables
        if measured.load.callers == CALLERS
        for loop in arguments.loops
    ]
    return finish(arguments, measurements, text_of(tables, measurements, arguments.loops), found)


if __name__ == "__main__":
    sys.exit(main())
