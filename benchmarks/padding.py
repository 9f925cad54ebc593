"""What does a budget of padded tokens gain where texts of unlike lengths wait in a queue?

The embedding model of `examples/embeddings` as it is there, batches of 32, and 128 callers with
texts whose lengths are log-normal. Plain: batches in order of arrival. By cost: `cost` counts a
text's tokens and `max_batch_cost` bounds a batch's, padded, so that batches are of near lengths.
The same texts in the same order for all, each of them answered.
"""

import sys

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.report import Measurement, Series, Verdict, table
from benchmarks.scenarios import Load

MODEL = "MiniLM"
PLAIN = "embeddings in order"
# A budget that bounds no batch, and one that does.
BY_COST = ("embeddings by cost", "embeddings by cost, 2048")
MAX_BATCH_SIZE = 32
# Four batches: what the batch packer chooses from.
CALLERS = 128
LEAST_RATIO = 1.5
FIGURES = ("requests_per_second", "p50_ms", "p99_ms", "all_cpu_us")
HEADER = (
    *("system", "loop", "callers", "requests/s", "p50 ms", "p99 ms", "all CPU us/request"),
    *("requests/s, times in order", "p50, times in order"),
)


def row(measurements: list[Measurement], system: str, loop: str, callers: int) -> list[object]:
    """One line of the table."""
    series = Series.of(measurements, system, "queue_of_texts", loop, callers)
    plain = Series.of(measurements, PLAIN, "queue_of_texts", loop, callers)
    return [
        system,
        loop,
        callers,
        *(series.spread(figure) for figure in FIGURES),
        *(series.ratio(figure, plain) for figure in ("requests_per_second", "p50_ms")),
    ]


def verdicts(measurements: list[Measurement], loop: str, callers: int) -> list[Verdict]:
    """The bars, for each budget."""
    found = []
    plain = Series.of(measurements, PLAIN, "queue_of_texts", loop, callers)
    for system in BY_COST:
        by_cost = Series.of(measurements, system, "queue_of_texts", loop, callers)
        where = f"{loop}, {callers} callers, {system}"
        rates = by_cost.ratio("requests_per_second", plain)
        claim = f"{where}: at least {LEAST_RATIO:g} times the requests/s of the order"
        found.append(Verdict(claim, rates, at_least=LEAST_RATIO))
        claim = f"{where}: p50 over that of the order"
        found.append(Verdict(claim, by_cost.ratio("p50_ms", plain), at_most=1.0))
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "padding",
        __doc__ or "",
        systems=(PLAIN, *BY_COST),
        callers=(CALLERS,),
        loops=("uvloop",),
        seconds=15.0,
        quick_seconds=5.0,
        repetitions=3,
        quick_repetitions=1,
    )
    machine = hardware()
    cases = [
        (system, loop, callers)
        for loop in arguments.loops
        for callers in arguments.callers
        for system in arguments.systems
    ]
    measurements = measure_all(
        [
            Job(
                system,
                "queue_of_texts",
                loop,
                Load(MODEL, MAX_BATCH_SIZE, callers, arguments.seconds),
            )
            for system, loop, callers in cases
        ],
        arguments.repetitions,
    )
    text = table(HEADER, [row(measurements, *case) for case in cases])
    found = [
        verdict
        for loop in arguments.loops
        for callers in arguments.callers
        for verdict in verdicts(measurements, loop, callers)
    ]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
