"""How fast, and for how much CPU, do large arrays reach the model and come back?

Parts: `stacked` (from the last arrival of a batch to one array in the worker), `cpu` (of all
processes, compared with a memcpy of the bytes), `callers` (requests/s of callers that ask again at
once, beside other ways into another process), `lag` (how late the event loop is meanwhile). What a
memcpy takes is measured in the same run, in a process that does nothing else.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.report import Measurement, Series, Spread, Verdict, table
from benchmarks.scenarios import ARRAY_SHAPE, Load

# As peers.
LOOP = "uvloop"
MEMCPY, IDLE = "memcpy", "idle loop"
OURS, PIPE = "ours", "ours by pipe"
OURS_FULL = "ours, full batches"
FULL = (OURS_FULL, "ours by pipe, full batches", "fast_dynamic_batcher, full batches")
# Other ways into another process. The pools are without batches: one array per call.
PEERS = ("fast_dynamic_batcher", "fast_dynamic_batcher tuned", "process pool")
OTHERS = (*PEERS, "process pool of tensors")
SYSTEMS = (MEMCPY, IDLE, OURS, PIPE, *FULL, *OTHERS)
# Milliseconds beyond one item's memcpy, from the last arrival to one array in the worker.
STACKED_BAR = 0.5
# Times the memcpy, in CPU of all processes; on top of what tiny inputs cost, and of reading.
CPU_BAR = 2.5
# Times the requests/s of each peer, with a label back and with the array back.
RATE_BARS = {"ArrayLabel": 15.0, "ArrayEcho": 3.0}
MODELS = {"ArrayLabel": "a label back", "ArrayRead": "read, a label back", "ArrayEcho": "and back"}


@dataclass(frozen=True)
class Case:
    """Arrays of one size, as many as a batch holds, from as many callers."""

    name: str
    count: int
    shape: tuple[int, ...]

    def load(self, model: str, seconds: float) -> Load:
        """Of this case."""
        return Load(model, self.count, self.count, seconds, array_shape=self.shape)


SMALL = Case("32 x 64 KB", 32, (16_000,))
MIDDLE = Case("32 x 602 KB", 32, ARRAY_SHAPE)
LARGE = Case("8 x 6 MB", 8, (1_500_000,))
HUGE = Case("2 x 100 MB", 2, (25_000_000,))
NOBODY = Case("nobody asks", 0, (1,))
CASES = (SMALL, MIDDLE, LARGE)
# Milliseconds that the event loop may be late, at the 99th percentile.
LAG_BARS = {LARGE: 5.0, HUGE: 50.0}


def tiny(case: Case) -> Case:
    """The same without the bytes: what a request costs by itself."""
    return Case(f"{case.count} x 4 bytes", case.count, (1,))


@dataclass(frozen=True)
class Table:
    """Some measurements that are shown and judged together."""

    title: str
    case: Case
    model: str
    scenario: str
    systems: tuple[str, ...]
    # Column title to figure.
    columns: dict[str, str]

    @property
    def label(self) -> str:
        """What the results call it."""
        return label_of(self.scenario, self.case, self.model)


STACKED_COLUMNS = {
    "ms": "stacked_ms",
    "longest ms": "stacked_max_ms",
    "share of whole batches": "whole",
}
COPYING_COLUMNS = {
    "memcpy ms": "memcpy_ms",
    "after a pause ms": "arriving_memcpy_ms",
    "memcpy CPU us": "memcpy_cpu_us",
    "reading CPU us": "read_cpu_us",
}
CPU_COLUMNS = {
    "API CPU us/request": "api_cpu_us",
    "workers CPU us": "workers_cpu_us",
    "all CPU us": "all_cpu_us",
}
CALLERS_COLUMNS = {
    "requests/s": "requests_per_second",
    **CPU_COLUMNS,
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
}
LAG_COLUMNS = {
    "lag p50 ms": "lag_p50_ms",
    "lag p99 ms": "lag_p99_ms",
    "longest ms": "lag_max_ms",
    "requests/s": "requests_per_second",
}


def label_of(scenario: str, case: Case, model: str) -> str:
    """What the results call a measurement."""
    return f"{scenario}, {case.name}, {model}"


def _stacked(case: Case) -> Table:
    title = f"{case.name}, from the last arrival to one array in the worker"
    return Table(title, case, "ArrayStacked", "last_arrival", FULL, STACKED_COLUMNS)


def _copying(case: Case) -> Table:
    title = f"{case.name}, one of them without any library"
    return Table(title, case, "ArrayEcho", "copying", (MEMCPY,), COPYING_COLUMNS)


def _cpu(case: Case, model: str) -> Table:
    title = f"{case.name}, {MODELS[model]}, {case.count} callers"
    return Table(title, case, model, "full_speed", (OURS, PIPE), CPU_COLUMNS)


def _callers(model: str) -> Table:
    title = f"{MIDDLE.name}, {MODELS[model]}, {MIDDLE.count} callers"
    return Table(title, MIDDLE, model, "full_speed", (OURS, PIPE, *OTHERS), CALLERS_COLUMNS)


def _lag(case: Case) -> Table:
    title = f"{case.name}, {MODELS['ArrayRead']}, {case.count} callers: how late the event loop is"
    return Table(title, case, "ArrayRead", "loop_lag", (OURS, PIPE), LAG_COLUMNS)


def plan(systems: Iterable[str], parts: Iterable[str]) -> list[Table]:
    """What to measure; nothing twice."""
    sizes = (*dict.fromkeys(map(tiny, CASES)), *CASES)
    plans: dict[str, list[Table]] = {
        "stacked": [*map(_stacked, CASES), *map(_copying, CASES)],
        "cpu": [
            *(_cpu(case, "ArrayRead") for case in sizes),
            *(_cpu(case, "ArrayEcho") for case in sizes if case != MIDDLE),
            # For other systems too.
            _callers("ArrayEcho"),
            *map(_copying, CASES),
        ],
        "callers": [_callers("ArrayLabel"), _callers("ArrayEcho")],
        "lag": [
            Table("Nobody asks", NOBODY, "ArrayEcho", "loop_lag", (IDLE,), LAG_COLUMNS),
            *map(_lag, (LARGE, HUGE)),
        ],
    }
    chosen = [one for part in parts for one in plans[part]]
    wanted = set(systems)
    return [
        replace(one, systems=tuple(name for name in one.systems if name in wanted))
        for one in {one.label: one for one in chosen}.values()
    ]


def verdicts(measurements: list[Measurement], parts: Iterable[str], loop: str) -> list[Verdict]:
    """The bars, on one event loop."""
    found = _Found(measurements, loop)
    judges: dict[str, Callable[[], list[Verdict]]] = {
        "stacked": found.judge_stacked,
        "cpu": found.judge_cpu,
        "callers": found.judge_callers,
        "lag": found.judge_lag,
    }
    return [verdict for part in parts for verdict in judges[part]()]


class _Found:
    """What was measured on one event loop."""

    def __init__(self, measurements: list[Measurement], loop: str) -> None:
        self._measurements = measurements
        self._loop = loop

    def judge_stacked(self) -> list[Verdict]:
        return [
            Verdict(
                f"{self._loop}: {case.name}: ms from the last arrival to one array, beyond a "
                f"memcpy of one item{pause}",
                self._combined(
                    lambda stacked, memcpy: stacked - memcpy,
                    (OURS_FULL, "last_arrival", case, "ArrayStacked", "stacked_ms"),
                    (MEMCPY, "copying", case, "ArrayEcho", figure),
                ),
                at_most=STACKED_BAR,
            )
            for case in CASES
            # The last arrival comes after a pause too.
            for pause, figure in (
                (" after a pause", "arriving_memcpy_ms"),
                (" behind others", "memcpy_ms"),
            )
        ]

    def judge_cpu(self) -> list[Verdict]:
        found = []
        for case in CASES:
            for model, copies, reads in (("ArrayRead", 1, 1), ("ArrayEcho", 2, 0)):

                def times(
                    used: float,
                    tiny: float,
                    copy: float,
                    read: float,
                    copies: int = copies,
                    reads: int = reads,
                ) -> float:
                    return (used - tiny - reads * read) / (copies * copy)

                ratio = self._combined(
                    times,
                    (OURS, "full_speed", case, model, "all_cpu_us"),
                    (OURS, "full_speed", tiny(case), model, "all_cpu_us"),
                    (MEMCPY, "copying", case, "ArrayEcho", "memcpy_cpu_us"),
                    (MEMCPY, "copying", case, "ArrayEcho", "read_cpu_us"),
                )
                claim = (
                    f"{self._loop}: {case.name}, {MODELS[model]}: CPU of all processes beyond tiny "
                    f"inputs{' and reading' * reads}, times {copies} memcpy"
                )
                found.append(Verdict(claim, ratio, at_most=CPU_BAR))
        return found

    def judge_callers(self) -> list[Verdict]:
        return [
            Verdict(
                f"{self._loop}: {MIDDLE.name}, {MODELS[model]}: requests/s, times those of {peer}",
                self._combined(
                    lambda ours, theirs: ours / theirs,
                    (OURS, "full_speed", MIDDLE, model, "requests_per_second"),
                    (peer, "full_speed", MIDDLE, model, "requests_per_second"),
                ),
                at_least=bar,
            )
            for model, bar in RATE_BARS.items()
            for peer in PEERS
        ]

    def judge_lag(self) -> list[Verdict]:
        return [
            Verdict(
                f"{self._loop}: {case.name}: ms that the event loop is late, p99",
                self._combined(
                    lambda lag: lag, (OURS, "loop_lag", case, "ArrayRead", "lag_p99_ms")
                ),
                at_most=bar,
            )
            for case, bar in LAG_BARS.items()
        ]

    def _combined(
        self, combine: Callable[..., float], *wanted: tuple[str, str, Case, str, str]
    ) -> Spread | None:
        """A figure made of others, repetition by repetition: what slows all cancels out."""
        columns: list[dict[int, float]] = []
        for system, scenario, case, model, figure in wanted:
            label = label_of(scenario, case, model)
            series = Series.of(self._measurements, system, label, self._loop, case.count)
            columns.append(
                {
                    m.repetition: m.figures[figure]
                    for m in series.measurements
                    if figure in m.figures
                }
            )
        shared = set.intersection(*map(set, columns))
        return Spread.of([combine(*(column[one] for column in columns)) for one in sorted(shared)])


def text_of(measurements: list[Measurement], tables: Iterable[Table], loops: list[str]) -> str:
    """All tables."""
    parts = []
    for one in tables:
        rows: list[list[object]] = []
        for loop in loops:
            for system in one.systems:
                series = Series.of(measurements, system, one.label, loop, one.case.count)
                rows.append([system, loop, *map(series.spread, one.columns.values())])
        if rows:
            parts += [one.title, table(["system", "loop", *one.columns], rows) + "\n"]
    return "\n".join(parts)


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "payload",
        __doc__ or "",
        systems=SYSTEMS,
        seconds=2.0,
        quick_seconds=0.5,
        loops=(LOOP,),
        parts=("stacked", "cpu", "callers", "lag"),
        repetitions=5,
        quick_repetitions=1,
    )
    machine = hardware()
    tables = plan(arguments.systems, arguments.parts)
    jobs = [
        Job(system, one.scenario, loop, one.case.load(one.model, arguments.seconds), one.label)
        for one in tables
        for loop in arguments.loops
        for system in one.systems
    ]
    measurements = measure_all(jobs, arguments.repetitions)
    text = text_of(measurements, tables, arguments.loops)
    found = [v for loop in arguments.loops for v in verdicts(measurements, arguments.parts, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
