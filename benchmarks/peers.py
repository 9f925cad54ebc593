"""Every batcher that runs inside an app's process, under the same loads, in the same run.

Each with its defaults and tuned, beside one request at a time in a thread and in a process, and the
floor. Parts: `overhead` (a no-op model, callers that ask again at once), `idle` (a lone request
every 20 ms, and none), `saturation` (more callers than a batch holds), `open-loop` (requests that
arrive at random, at shares of the model's capacity), `arrays` (602 KB for each request).
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks import idle_latency, overhead, saturation
from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load
from benchmarks.systems import COMPARED, PEERS, PEERS_WITH_A_PROCESS, SYSTEMS

# Like uvicorn, which takes uvloop where it is installed.
LOOP = "uvloop"
# 1 is a quiet app, 64 fills one batch, 512 is a crowd.
CALLERS = (1, 64, 512)
# Shares of the bare loop's requests/s.
LOADS = (0.2, 0.5, 0.8, 0.95)
# The loads at which p50 and p99 are compared, and the share of answers within 50 ms at the highest.
COMPARED_LOADS = (0.5, 0.8)
IN_TIME_BAR = 0.99
ARRAY_BATCH = 16
ARRAY_CALLERS = 32
ARRAY_MODELS = {"ArrayLabel": "602 KB arrays, a label back", "ArrayEcho": "602 KB arrays and back"}
# It runs the model on the event loop, which only a no-op model permits.
ON_THE_LOOP = "batched.aio 0.1 ms on the loop"

CPU_COLUMNS = {
    "API CPU us/request": "api_cpu_us",
    "workers CPU us": "workers_cpu_us",
    "all CPU us": "all_cpu_us",
}
LATENCY_COLUMNS = {"p50 ms": "p50_ms", "p99 ms": "p99_ms"}
CPU_TIMES_OURS = {"all CPU us, times ours": Compared("all_cpu_us", "ours")}
LONE_COLUMNS: Columns = {**LATENCY_COLUMNS, "p50 ms, times ours": Compared("p50_ms", "ours")}
SATURATION_COLUMNS: Columns = {
    "requests/s": "requests_per_second",
    **CPU_COLUMNS,
    **CPU_TIMES_OURS,
}
OVERHEAD_COLUMNS: Columns = {
    **CPU_COLUMNS,
    "requests/s": "requests_per_second",
    **LATENCY_COLUMNS,
    **CPU_TIMES_OURS,
}
OPEN_COLUMNS: Columns = {
    **LATENCY_COLUMNS,
    "within 50 ms": "within_50_ms",
    "lost": "lost",
    "all CPU us/request": "all_cpu_us",
    **CPU_TIMES_OURS,
}


def name_callers(count: int) -> str:
    """Name a number of callers."""
    return "1 caller" if count == 1 else f"{count} callers"


def load_label(share: float) -> str:
    """What the results call an open loop."""
    return f"open loop at {share:.0%}"


def plan(systems: Iterable[str], parts: Iterable[str], seconds: float) -> dict[str, list[Table]]:
    """What to measure, by part."""
    chosen = [one for one in SYSTEMS if one in systems]
    with_model = tuple(one for one in chosen if one not in ("floor", "bare loop", ON_THE_LOOP))
    no_ceiling = tuple(one for one in chosen if one != "bare loop")
    batching = tuple(one for one in with_model if one not in ("thread", "process pool"))
    bare = tuple(one for one in chosen if one == "bare loop")
    plans = {
        "overhead": [
            replace(
                overhead.plan(no_ceiling, callers, seconds),
                title=f"No-op model, batches of 64, {name_callers(callers)}",
                columns=OVERHEAD_COLUMNS,
            )
            for callers in CALLERS
        ],
        "idle": [
            # 400 requests if not quick, so that their 99th percentile is not the worst but one.
            replace(
                idle_latency.plan_lone(with_model, 12 * seconds),
                columns=LONE_COLUMNS,
            ),
            idle_latency.plan_idle(with_model),
        ],
        "saturation": [
            replace(
                saturation.plan(bare + with_model, saturation.CALLERS, 2 * seconds),
                title="A model of 5 ms and 0.1 ms each, batches of 32, 128 callers",
                columns=SATURATION_COLUMNS,
            )
        ],
        "open-loop": [
            Table(
                f"The same model, Poisson arrivals at {share:.0%} of its capacity",
                "open_loop",
                Load("Linear5ms", saturation.MAX_BATCH_SIZE, 0, 3 * seconds),
                batching,
                OPEN_COLUMNS,
                label=load_label(share),
                share=share,
            )
            for share in LOADS
        ],
        "arrays": [
            Table(
                f"No-op model, {title}, {ARRAY_CALLERS} callers",
                "full_speed",
                Load(model, ARRAY_BATCH, ARRAY_CALLERS, seconds),
                with_model,
                OVERHEAD_COLUMNS,
                label=model,
            )
            for model, title in ARRAY_MODELS.items()
        ],
    }
    return {part: plans[part] for part in parts}


def verdicts(
    measurements: Sequence[Measurement], parts: dict[str, list[Table]], loop: str
) -> list[Verdict]:
    """The bars: against every peer that was measured, and what an open loop asks of us alone."""
    found: list[Verdict] = []
    for measured in parts.get("overhead", []):
        peers = PEERS if measured.load.callers > 1 else PEERS_WITH_A_PROCESS
        found += compare(measurements, measured, loop, "all_cpu_us", peers)
    if "idle" in parts:
        lone, idle = parts["idle"]
        found += compare(measurements, lone, loop, "p50_ms", PEERS)
        found += compare(measurements, lone, loop, "p99_ms", PEERS)
        found += compare(measurements, idle, loop, "idle_share_of_core", PEERS_WITH_A_PROCESS)
    for measured in parts.get("open-loop", []):
        if measured.share in COMPARED_LOADS:
            found += compare(measurements, measured, loop, "p50_ms", PEERS)
            found += compare(measurements, measured, loop, "p99_ms", PEERS)
        found.append(promise(measurements, measured, loop))
    return found


def compare(
    measurements: Sequence[Measurement],
    measured: Table,
    loop: str,
    figure: str,
    peers: Iterable[str],
) -> list[Verdict]:
    """Whether a figure of ours is below each peer's. A peer that lost requests may have none."""
    return [
        Verdict(
            f"{measured.title}, {loop}: {figure} of ours over that of {peer}",
            measured.spread(measurements, "ours", loop, Compared(figure, peer)),
            at_most=1.0,
        )
        for peer in peers
        if peer in measured.systems
    ]


def promise(measurements: Sequence[Measurement], measured: Table, loop: str) -> Verdict:
    """What an open loop asks of us alone."""
    where = f"{measured.title}, {loop}"
    if measured.share == LOADS[-1]:
        in_time = measured.spread(measurements, "ours", loop, "within_50_ms")
        claim = f"{where}: share answered by ours within 50 ms"
        return Verdict(claim, in_time, at_least=IN_TIME_BAR)
    lost = measured.spread(measurements, "ours", loop, "lost")
    return Verdict(f"{where}: share lost by ours", lost, at_most=0.0)


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
    parts = plan(arguments.systems, arguments.parts, arguments.seconds)
    tables = [measured for part in parts.values() for measured in part]
    measurements = measure_all(tables, arguments)
    found = [v for loop in arguments.loops for v in verdicts(measurements, parts, loop)]
    return finish(arguments, measurements, text_of(tables, measurements, arguments.loops), found)


if __name__ == "__main__":
    sys.exit(main())
