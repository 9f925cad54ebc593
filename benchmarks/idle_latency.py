"""What does a lone request wait beside the model, and what does the library use while nobody asks?

One request every 20 ms at a model that takes 5 ms, against the shortest way to keep the event
loop free: the model in a thread of the same process, `run_in_executor(ThreadPoolExecutor(1), ...)`.
"""

import sys

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.report import Measurement, Series, Verdict, table
from benchmarks.scenarios import Load

# Milliseconds of p50 that we may add to the thread: two more kernel wake-ups and two messages.
ADDED_BAR = 0.10
IDLE_BAR = 0.005
IDLE_SECONDS = 5.0
# Nothing depends on it here.
MAX_BATCH_SIZE = 32
HEADER = (
    "system",
    "loop",
    "p50 ms",
    "p99 ms",
    "p50 beyond thread",
    "p99 beyond thread",
    "idle, share of a core",
)


def row(measurements: list[Measurement], system: str, loop: str) -> list[object]:
    """One line of the table."""
    series = Series.of(measurements, system, "lone_requests", loop, 1)
    thread = Series.of(measurements, "thread", "lone_requests", loop, 1)
    return [
        system,
        loop,
        series.spread("p50_ms"),
        series.spread("p99_ms"),
        series.difference("p50_ms", thread),
        series.difference("p99_ms", thread),
        Series.of(measurements, system, "idle", loop, 1).spread("idle_share_of_core"),
    ]


def verdicts(measurements: list[Measurement], loop: str) -> list[Verdict]:
    """The bars on one event loop."""
    ours = Series.of(measurements, "ours", "lone_requests", loop, 1)
    thread = Series.of(measurements, "thread", "lone_requests", loop, 1)
    idle = Series.of(measurements, "ours", "idle", loop, 1)
    return [
        Verdict(
            f"{loop}: a lone request takes at most {ADDED_BAR:g} ms (p50) more than in a thread",
            ours.difference("p50_ms", thread),
            at_most=ADDED_BAR,
        ),
        Verdict(
            f"{loop}: at most {IDLE_BAR:g} of a core while idle",
            idle.spread("idle_share_of_core"),
            at_most=IDLE_BAR,
        ),
    ]


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "idle_latency", __doc__ or "", systems=("thread", "ours"), seconds=4.0, quick_seconds=2.0
    )
    machine = hardware()
    cases = [(system, loop) for loop in arguments.loops for system in arguments.systems]
    asking = Load("Flat5ms", MAX_BATCH_SIZE, callers=1, seconds=arguments.seconds)
    resting = Load("Flat5ms", MAX_BATCH_SIZE, callers=1, seconds=IDLE_SECONDS)
    measurements = measure_all(
        [Job(system, "lone_requests", loop, asking) for system, loop in cases],
        arguments.repetitions,
    )
    # A share of CPU hardly depends on the machine's mood: once is enough for a rough answer.
    measurements += measure_all(
        [Job(system, "idle", loop, resting) for system, loop in cases if system != "thread"],
        1 if arguments.quick else 3,
    )
    text = table(HEADER, [row(measurements, *case) for case in cases])
    found = [verdict for loop in arguments.loops for verdict in verdicts(measurements, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
