"""How fast, and for how much CPU time, do large arrays reach the model and come back?

Parts: `stacked` (from the last arrival of a batch to one array in the worker, beside what a memcpy
takes in a process that does nothing else), `callers` (requests/s of callers that ask again at once,
beside other ways into another process), `rows` (a row of a table as tensor, array and list).
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.arrays import KINDS
from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.peers import CPU_COLUMNS, LATENCY_COLUMNS, LOOP
from benchmarks.report import Compared, Measurement, Series, Table, Verdict
from benchmarks.scenarios import ARRAY_SHAPE, Load
from benchmarks.systems import PEERS_WITH_A_PROCESS
from fast_batcher._load.report import Spread

OURS, OURS_FULL, MEMCPY = "ours", "ours, full batches", "memcpy"
FULL = (OURS_FULL, "fast_dynamic_batcher, full batches")
# Other ways into another process. The pools do not batch: one array per call. The pool of tensors
# uses the shared memory of torch.multiprocessing and has no bar.
PEERS = (*PEERS_WITH_A_PROCESS, "process pool")
SYSTEMS = (MEMCPY, *FULL, OURS, *PEERS, "process pool of tensors")
# Milliseconds beyond one array's memcpy, from the last arrival to one array in the worker.
STACKED_BAR = 0.6
# Times the requests/s of each peer, with a label back and with the array back.
RATE_BARS = {"ArrayLabel": 15.0, "ArrayEcho": 3.0}
MODELS = {"ArrayLabel": "a label back", "ArrayEcho": "the array back"}
STACKED_COLUMNS = {
    "ms": "stacked_ms",
    "longest ms": "stacked_max_ms",
    "share of whole batches": "whole",
}
# Times the CPU time of an array.
ROW_BAR = 1.3
ROW_MODELS = {"RowIn": "a row of a table in", "RowOut": "a row of a table back"}
ROW_COLUMNS = {
    f"{kind}: {figure}": f"{kind}_{figure}" for kind in KINDS for figure in ("us", "bytes")
}
CALLERS_COLUMNS = {"requests/s": "requests_per_second", **CPU_COLUMNS, **LATENCY_COLUMNS}


@dataclass(frozen=True)
class Case:
    """Arrays of one size, as many as a batch holds, from as many callers."""

    name: str
    count: int
    shape: tuple[int, ...]


SMALL = Case("32 x 64 KB", 32, (16_000,))
MIDDLE = Case("32 x 602 KB", 32, ARRAY_SHAPE)
LARGE = Case("8 x 6 MB", 8, (1_500_000,))
CASES = (SMALL, MIDDLE, LARGE)


def label_of(scenario: str, case: Case, model: str) -> str:
    """What the results call a measurement."""
    return f"{scenario}, {case.name}, {model}"


def plan(systems: Iterable[str], parts: Iterable[str], seconds: float) -> dict[str, list[Table]]:
    """What to measure, by part."""

    def table(title: str, scenario: str, case: Case, model: str) -> Table:
        load = Load(model, case.count, case.count, seconds, array_shape=case.shape)
        label = label_of(scenario, case, model)
        return Table(f"{case.name}, {title}", scenario, load, (), {}, label)

    def stacked(case: Case) -> Table:
        title = "from the last arrival to one array in the worker"
        whole = table(title, "last_arrival", case, "ArrayStacked")
        return replace(whole, systems=FULL, columns=STACKED_COLUMNS)

    def copying(case: Case) -> Table:
        whole = table("a memcpy of one of them", "copying", case, "ArrayEcho")
        return replace(whole, systems=(MEMCPY,), columns={"memcpy ms": "memcpy_ms"})

    def callers(model: str) -> Table:
        title = f"{MODELS[model]}, {MIDDLE.count} callers"
        whole = table(title, "full_speed", MIDDLE, model)
        others = tuple(one for one in SYSTEMS if one not in (MEMCPY, *FULL))
        return replace(whole, systems=others, columns=CALLERS_COLUMNS)

    def one_row(model: str) -> Table:
        load = Load(model, 64, 64, seconds, row="tensor")
        title = f"{ROW_MODELS[model]}, 384 numbers: CPU us of all processes and bytes a request"
        return Table(title, "rows", load, (OURS,), ROW_COLUMNS, f"rows, {model}")

    plans = {
        "rows": [one_row(model) for model in ROW_MODELS],
        "stacked": [*map(stacked, CASES), *map(copying, CASES)],
        "callers": [callers(model) for model in MODELS],
    }
    wanted = set(systems)
    return {
        part: [
            replace(one, systems=tuple(name for name in one.systems if name in wanted))
            for one in plans[part]
        ]
        for part in parts
    }


def verdicts(
    measurements: Sequence[Measurement], parts: dict[str, list[Table]], loop: str
) -> list[Verdict]:
    """The bars, on one event loop."""
    found = []
    if "stacked" in parts:
        found += [_judge_stacked(measurements, case, loop) for case in CASES]
    for measured, (model, bar) in zip(parts.get("callers", []), RATE_BARS.items(), strict=False):
        for peer in PEERS:
            claim = f"{loop}: {MIDDLE.name}, {MODELS[model]}: requests/s, times those of {peer}"
            times = measured.spread(measurements, OURS, loop, Compared("requests_per_second", peer))
            found.append(Verdict(claim, times, at_least=bar))
    for measured in parts.get("rows", []):
        times = measured.spread(measurements, OURS, loop, "tensor_times")
        claim = f"{loop}: {measured.title}: CPU of a tensor, times that of an array"
        found.append(Verdict(claim, times, at_most=ROW_BAR))
    return found


def _judge_stacked(measurements: Sequence[Measurement], case: Case, loop: str) -> Verdict:
    stacked, memcpy = (
        Series.of(measurements, system, label_of(*what), loop, case.count).by_repetition(figure)
        for system, what, figure in (
            (OURS_FULL, ("last_arrival", case, "ArrayStacked"), "stacked_ms"),
            (MEMCPY, ("copying", case, "ArrayEcho"), "memcpy_ms"),
        )
    )
    both = stacked.keys() & memcpy.keys()
    beyond = Spread.of([stacked[one] - memcpy[one] for one in both])
    claim = f"{loop}: {case.name}: ms from the last arrival to one array, beyond a memcpy of one"
    return Verdict(claim, beyond, at_most=STACKED_BAR)


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "payload",
        __doc__ or "",
        systems=SYSTEMS,
        seconds=2.0,
        quick_seconds=0.5,
        loops=(LOOP,),
        parts=("stacked", "callers", "rows"),
        repetitions=5,
        quick_repetitions=1,
    )
    parts = plan(arguments.systems, arguments.parts, arguments.seconds)
    tables = [one for part in parts.values() for one in part if one.systems]
    measurements = measure_all(tables, arguments)
    found = [v for loop in arguments.loops for v in verdicts(measurements, parts, loop)]
    return finish(arguments, measurements, text_of(tables, measurements, arguments.loops), found)


if __name__ == "__main__":
    sys.exit(main())
