"""Every batcher that runs inside an app's process, under the same loads, in the same run.

Each with its defaults and tuned, beside one request at a time in a thread and in a process, and the
floor. Parts: `overhead` (a no-op model, callers that ask again at once), `idle` (a lone request
every 20 ms, and nothing), `saturation` (more callers than a batch holds), `open-loop` (requests
that come when they come, at shares of the model's capacity), `arrays` (602 KB for each request).
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.harness import SEED, Job, finish, hardware, measure_all, parse_arguments
from benchmarks.limit import LIMIT, open_loop_limit
from benchmarks.report import Measurement, Series, Spread, Verdict, table
from benchmarks.scenarios import Load
from benchmarks.systems import COMPARED, PEERS, PEERS_WITH_A_PROCESS, SYSTEMS

# Like uvicorn, which takes uvloop where it is installed.
LOOP = "uvloop"
# 1 is a quiet app, 64 fills one batch, 512 is a crowd.
CALLERS = (1, 64, 512)
# The batch size and callers of `benchmarks.saturation`, whose model this is.
SATURATION_BATCH = 32
SATURATION_CALLERS = 128
# Shares of the bare loop's requests/s.
LOADS = (0.2, 0.5, 0.8, 0.95)
# Of those where p50 and p99 are compared, and the share of answers within 50 ms at the highest.
COMPARED_LOADS = (0.5, 0.8)
IN_TIME_BAR = 0.99
ARRAY_BATCH = 16
ARRAY_CALLERS = 32
ARRAY_MODELS = {"ArrayLabel": "602 KB arrays, a label back", "ArrayEcho": "602 KB arrays and back"}
IDLE_SECONDS = 4.0
# It runs the model on the event loop, which only a no-op model permits.
ON_THE_LOOP = "batched.aio 0.1 ms on the loop"


@dataclass(frozen=True)
class Table:
    """One scenario's measurements: which ones, and the figures to show."""

    title: str
    label: str
    callers: int
    systems: tuple[str, ...]
    # Column title to figure.
    columns: dict[str, str]

    @property
    def compared(self) -> str:
        """The title of the column in which all are compared with us: CPU, or else the first one."""
        (found, *_) = [
            title for title, f in self.columns.items() if f == "all_cpu_us"
        ] or self.columns
        return found


CPU_COLUMNS = {
    "API CPU us/request": "api_cpu_us",
    "workers CPU us": "workers_cpu_us",
    "all CPU us": "all_cpu_us",
}
OVERHEAD_COLUMNS = {
    **CPU_COLUMNS,
    "requests/s": "requests_per_second",
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
}
LATENCY_COLUMNS = {"p50 ms": "p50_ms", "p99 ms": "p99_ms"}
OPEN_COLUMNS = {
    **LATENCY_COLUMNS,
    "within 50 ms": "within_50_ms",
    "lost": "lost",
    "all CPU us/request": "all_cpu_us",
}


def name_callers(count: int) -> str:
    """In words."""
    return "1 caller" if count == 1 else f"{count} callers"


def load_label(share: float) -> str:
    """What the results call an open loop."""
    return f"open loop at {share:.0%}"


def plan(systems: Iterable[str], parts: Iterable[str]) -> dict[str, list[Table]]:
    """What to measure, by part."""
    chosen = [s for s in SYSTEMS if s in systems]
    with_model = tuple(s for s in chosen if s not in ("floor", "bare loop", ON_THE_LOOP))
    batching = tuple(s for s in with_model if s not in ("thread", "process pool"))
    no_ceiling = tuple(s for s in chosen if s != "bare loop")
    bare = tuple(s for s in chosen if s == "bare loop")
    plans = {
        "overhead": [
            Table(
                f"No-op model, batches of 64, {name_callers(callers)}",
                "full_speed",
                callers,
                no_ceiling,
                OVERHEAD_COLUMNS,
            )
            for callers in CALLERS
        ],
        "idle": [
            Table(
                "A lone request every 20 ms, a model of 5 ms",
                "lone_requests",
                1,
                with_model,
                LATENCY_COLUMNS,
            ),
            Table("Nobody asks", "idle", 1, with_model, {"share of a core": "idle_share_of_core"}),
        ],
        "saturation": [
            Table(
                f"A model of 5 ms and 0.1 ms each, batches of {SATURATION_BATCH}, "
                f"{SATURATION_CALLERS} callers",
                "saturation",
                SATURATION_CALLERS,
                bare + with_model,
                {"requests/s": "requests_per_second", **CPU_COLUMNS},
            )
        ],
        "open-loop": [
            Table(
                f"The same model, Poisson arrivals at {share:.0%} of its capacity",
                load_label(share),
                0,
                (*batching, LIMIT),
                OPEN_COLUMNS,
            )
            for share in LOADS
        ],
        "arrays": [
            Table(
                f"No-op model, {title}, {ARRAY_CALLERS} callers",
                model,
                ARRAY_CALLERS,
                with_model,
                OVERHEAD_COLUMNS,
            )
            for model, title in ARRAY_MODELS.items()
        ],
    }
    return {part: plans[part] for part in parts}


def load_of(measured: Table, seconds: float, capacity: float) -> tuple[str, Load]:
    """The scenario function's name and the load for one table."""
    if measured.label == "full_speed":
        return "full_speed", Load("NoOp", 64, measured.callers, seconds)
    if measured.label in ARRAY_MODELS:
        return "full_speed", Load(measured.label, ARRAY_BATCH, ARRAY_CALLERS, seconds)
    if measured.label == "lone_requests":
        # 400 of them if not quick, so that their 99th percentile is not the worst but one.
        return "lone_requests", Load("Flat5ms", 32, 1, 12 * seconds)
    if measured.label == "idle":
        return "idle", Load("Flat5ms", 32, 1, IDLE_SECONDS)
    if measured.label == "saturation":
        return "saturation", Load("Linear5ms", SATURATION_BATCH, SATURATION_CALLERS, 2 * seconds)
    (share,) = [share for share in LOADS if load_label(share) == measured.label]
    load = Load("Linear5ms", SATURATION_BATCH, 0, 3 * seconds, rate=share * capacity)
    return "open_loop", load


def rows(measurements: list[Measurement], measured: Table, loop: str) -> list[list[object]]:
    """One per system; the last column compares with us in what the table is about."""
    figure = measured.columns[measured.compared]
    ours = Series.of(measurements, "ours", measured.label, loop, measured.callers)
    found: list[list[object]] = []
    for system in measured.systems:
        series = Series.of(measurements, system, measured.label, loop, measured.callers)
        cells: list[Spread | None] = [series.spread(f) for f in measured.columns.values()]
        found.append([system, *cells, series.ratio(figure, ours)])
    return found


def text_of(measurements: list[Measurement], tables: Iterable[Table], loops: list[str]) -> str:
    """All tables."""
    parts = []
    for measured in tables:
        for loop in loops:
            header = ["system", *measured.columns, f"{measured.compared}, times ours"]
            parts.append(f"{measured.title}, {loop}")
            parts.append(table(header, rows(measurements, measured, loop)) + "\n")
    return "\n".join(parts)


def verdicts(
    measurements: list[Measurement], parts: dict[str, list[Table]], loop: str
) -> list[Verdict]:
    """What has to hold against every peer that was measured, and of ourselves."""
    found: list[Verdict] = []
    for measured in parts.get("overhead", []):
        peers = PEERS if measured.callers > 1 else PEERS_WITH_A_PROCESS
        found += compare(measurements, measured, loop, "all_cpu_us", peers)
    for measured in parts.get("idle", []):
        if measured.label == "idle":
            peers = PEERS_WITH_A_PROCESS
            found += compare(measurements, measured, loop, "idle_share_of_core", peers)
        else:
            found += compare(measurements, measured, loop, "p50_ms", PEERS)
            found += compare(measurements, measured, loop, "p99_ms", PEERS)
    for measured in parts.get("open-loop", []):
        if measured.label in map(load_label, COMPARED_LOADS):
            found += compare(measurements, measured, loop, "p50_ms", PEERS)
            found += compare(measurements, measured, loop, "p99_ms", PEERS)
        found.append(promise(measurements, measured, loop))
    return found


def compare(
    measurements: list[Measurement], measured: Table, loop: str, figure: str, peers: Iterable[str]
) -> list[Verdict]:
    """Whether a figure of ours is below that of each peer. One that lost requests may have none."""
    ours = Series.of(measurements, "ours", measured.label, loop, measured.callers)
    found = []
    for peer in peers:
        if peer in measured.systems:
            theirs = Series.of(measurements, peer, measured.label, loop, measured.callers)
            claim = f"{measured.title}, {loop}: {figure} of ours over that of {peer}"
            found.append(Verdict(claim, ours.ratio(figure, theirs), at_most=1.0))
    return found


def promise(measurements: list[Measurement], measured: Table, loop: str) -> Verdict:
    """What an open loop asks of us alone."""
    ours = Series.of(measurements, "ours", measured.label, loop, measured.callers)
    if measured.label == load_label(LOADS[-1]):
        claim = f"{measured.title}, {loop}: share answered by ours within 50 ms"
        return Verdict(claim, ours.spread("within_50_ms"), at_least=IN_TIME_BAR)
    claim = f"{measured.title}, {loop}: share lost by ours"
    return Verdict(claim, ours.spread("lost"), at_most=0.0)


def measure_capacity() -> float:
    """Requests/s of a child process that computes full batches and does nothing else.

    Measured again for every repetition: timers are late by another tenth of a millisecond in
    another quarter of an hour, and at 95 % of capacity that is a large part of what is left.
    """
    load = Load("Linear5ms", SATURATION_BATCH, 0, 1.0)
    (measurement,) = measure_all([Job("bare loop", "saturation", LOOP, load, "capacity")], 1)
    return measurement.figures["requests_per_second"]


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "peers",
        __doc__ or "",
        systems=COMPARED,
        seconds=0.7,
        quick_seconds=0.3,
        loops=(LOOP,),
        parts=("overhead", "idle", "saturation", "open-loop", "arrays"),
        repetitions=3,
        quick_repetitions=1,
    )
    machine = hardware()
    parts = plan(arguments.systems, arguments.parts)
    measurements: list[Measurement] = []
    tables = [measured for part in parts.values() for measured in part]
    for number, measured in enumerate(tables, 1):
        for repetition in range(arguments.repetitions):
            turn = f"repetition {repetition + 1} of {arguments.repetitions}"
            print(f"Table {number} of {len(tables)}, {turn}: {measured.title}", file=sys.stderr)
            capacity = measure_capacity() if measured.columns is OPEN_COLUMNS else 0.0
            scenario, load = load_of(measured, arguments.seconds, capacity)
            jobs = [
                Job(system, scenario, loop, load, measured.label)
                for loop in arguments.loops
                for system in measured.systems
                if system != LIMIT
            ]
            measurements += measure_all(jobs, 1, first=repetition)
            if LIMIT in measured.systems:
                figures = open_loop_limit(replace(load, seed=SEED + repetition), capacity)
                measurements += [
                    Measurement(LIMIT, measured.label, loop, 0, repetition, figures, {})
                    for loop in arguments.loops
                ]
    text = text_of(measurements, tables, arguments.loops)
    found = [v for loop in arguments.loops for v in verdicts(measurements, parts, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
