"""What does a lone request wait beside the model, and what does an idle library use?

One request every 20 ms at a model that takes 5 ms, against the shortest way to keep the event
loop free: the model in a thread of the same process, `run_in_executor(ThreadPoolExecutor(1), ...)`.
The same at a model that does nothing, against bare pipes to another process.
"""

import operator
import sys
from collections.abc import Sequence

from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.report import Columns, Compared, Measurement, Table, Verdict
from benchmarks.scenarios import Load

# Milliseconds of p50 that we may add to the thread: two more kernel wake-ups and two messages.
ADDED_BAR = 0.10
# Times the p50 of bare pipes, most of which is two wake-ups of a sleeping process.
PIPE_BAR = 1.25
# Share of a core while idle.
IDLE_BAR = 0.005
IDLE_SECONDS = 5.0
# Nothing depends on it here.
MAX_BATCH_SIZE = 32
BEYOND_THREAD = Compared("p50_ms", "thread", operator.sub)
LONE_COLUMNS: Columns = {
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
    "p50 beyond thread": BEYOND_THREAD,
    "p99 beyond thread": Compared("p99_ms", "thread", operator.sub),
}
TIMES_PIPE = Compared("p50_ms", "pipe")
PIPE_COLUMNS: Columns = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "p50, times pipe": TIMES_PIPE}
IDLE_COLUMNS = {"share of a core": "idle_share_of_core"}


def plan_lone(systems: Sequence[str], seconds: float) -> Table:
    """What to measure with one request at a time."""
    load = Load("Flat5ms", MAX_BATCH_SIZE, callers=1, seconds=seconds)
    title = "A lone request every 20 ms, a model of 5 ms"
    return Table(title, "lone_requests", load, tuple(systems), LONE_COLUMNS)


def plan_pipe(seconds: float) -> Table:
    """What to measure with one request at a time, beside bare pipes."""
    load = Load("NoOp", MAX_BATCH_SIZE, callers=1, seconds=seconds)
    title = "A lone request every 20 ms, a model that does nothing"
    return Table(title, "lone_requests", load, ("pipe", "ours"), PIPE_COLUMNS, "pipe")


def plan_idle(systems: Sequence[str]) -> Table:
    """What to measure without any request."""
    load = Load("Flat5ms", MAX_BATCH_SIZE, callers=1, seconds=IDLE_SECONDS)
    return Table("No requests", "idle", load, tuple(systems), IDLE_COLUMNS)


def verdicts(
    measurements: Sequence[Measurement], lone: Table, pipe: Table, idle: Table, loop: str
) -> list[Verdict]:
    """The bars on one event loop."""
    return [
        Verdict(
            f"{loop}: a lone request takes at most {ADDED_BAR:g} ms (p50) more than in a thread",
            lone.spread(measurements, "ours", loop, BEYOND_THREAD),
            at_most=ADDED_BAR,
        ),
        Verdict(
            f"{loop}: a lone request takes at most {PIPE_BAR:g} times the p50 of bare pipes",
            pipe.spread(measurements, "ours", loop, TIMES_PIPE),
            at_most=PIPE_BAR,
        ),
        Verdict(
            f"{loop}: at most {IDLE_BAR:g} of a core while idle",
            idle.spread(measurements, "ours", loop, "idle_share_of_core"),
            at_most=IDLE_BAR,
        ),
    ]


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "idle_latency", __doc__ or "", systems=("thread", "ours"), seconds=4.0, quick_seconds=2.0
    )
    lone = plan_lone(arguments.systems, arguments.seconds)
    idle = plan_idle([system for system in arguments.systems if system != "thread"])
    pipe = plan_pipe(arguments.seconds)
    tables = [lone, pipe, idle]
    measurements = measure_all(tables, arguments)
    text = text_of(tables, measurements, arguments.loops)
    found = [
        verdict
        for loop in arguments.loops
        for verdict in verdicts(measurements, lone, pipe, idle, loop)
    ]
    return finish(arguments, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
