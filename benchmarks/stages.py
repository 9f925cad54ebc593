"""What does work gain that a model does in `prepare`, beside `infer`, instead of in it?

JPEG files are decoded, and an `infer` of 5 ms and 0.1 ms per input follows, which computes nothing:
it waits as for a GPU. Full batches of 32, and more callers than the stages hold. Over HTTP, beside
Mosec: `http --parts pictures`.
"""

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load

MAX_BATCH_SIZE = 32
# Two batches for each stage, and for the queue.
CALLERS = 6 * MAX_BATCH_SIZE
STAGES, INSIDE, INSIDE_THREADS = "in stages", "inside infer", "inside infer, 2 threads"
DECODING, INFER = "decoding alone", "infer alone"
SYSTEMS = (STAGES, INSIDE, INSIDE_THREADS, DECODING, INFER)
RATE = "requests_per_second"
COLUMNS: Columns = {
    "requests/s": RATE,
    "over inside infer": Compared(RATE, INSIDE),
    "API CPU us/request": "api_cpu_us",
    "all CPU us": "all_cpu_us",
}
OVER_INSIDE, OF_SLOWER = 1.6, 0.95


def verdicts(measurements: Sequence[Measurement], table: Table, loop: str) -> list[Verdict]:
    """The bars on one event loop."""
    rates = {
        name: median(table.series(measurements, name, loop).by_repetition(RATE).values() or [0.0])
        for name in (DECODING, INFER)
    }
    slower = min(rates, key=lambda name: rates[name])
    found = []
    for other, bar in ((INSIDE, OVER_INSIDE), (slower, OF_SLOWER)):
        spread = table.spread(measurements, STAGES, loop, Compared(RATE, other))
        claim = f"{loop}: at least {bar:g} x the requests/s of {other}"
        found.append(Verdict(claim, spread, at_least=bar))
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "stages",
        __doc__ or "",
        systems=SYSTEMS,
        loops=("uvloop",),
        seconds=5.0,
        quick_seconds=2.0,
    )
    load = Load("Picture", MAX_BATCH_SIZE, CALLERS, arguments.seconds)
    table = Table("pictures", "saturation", load, tuple(arguments.systems), COLUMNS)
    measurements = measure_all([table], arguments)
    found = [one for loop in arguments.loops for one in verdicts(measurements, table, loop)]
    return finish(arguments, measurements, text_of([table], measurements, arguments.loops), found)


if __name__ == "__main__":
    sys.exit(main())
