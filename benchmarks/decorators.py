"""What does a call of a decorated function cost, and how do the decorators compare with batched's?

The same function is decorated by both, in batches of 64: with `batched`'s default of 5 ms between
batches, and with the 0.1 ms that cost it the least. CPU at full speed with a no-op, the latency of
a lone request beside a plain thread at a function of 5 ms, and what is used while nobody asks.
"""

import sys

from benchmarks.harness import Job, finish, hardware, measure_all, parse_arguments
from benchmarks.report import Measurement, Series, Verdict, table
from benchmarks.scenarios import Load

MAX_BATCH_SIZE = 64
CALLERS = 64
# Ours, and those of batched that run the function in the same place.
RIVALS = {
    "our aio": ("batched.aio", "batched.aio 0.1 ms"),
    "our aio on the loop": ("batched.aio 0.1 ms on the loop",),
    "our thread": ("batched thread", "batched thread 0.1 ms"),
}
# Of a rival's CPU per request.
CPU_BAR = 0.5
# Milliseconds of p50 beyond a plain thread, and share of a core while idle.
ADDED_BAR = 0.3
IDLE_BAR = 0.003
IDLE_SECONDS = 5.0
SYSTEMS = ("floor", "thread", *RIVALS, *(rival for rivals in RIVALS.values() for rival in rivals))
HEADER = (
    "system",
    "loop",
    "CPU us/request",
    "requests/s",
    "lone p50 ms",
    "beyond thread",
    "idle, share of a core",
)


def row(measurements: list[Measurement], system: str, loop: str) -> list[object]:
    """One line of the table."""
    busy = Series.of(measurements, system, "full_speed", loop, CALLERS)
    lone = Series.of(measurements, system, "lone_requests", loop, 1)
    thread = Series.of(measurements, "thread", "lone_requests", loop, 1)
    idle = Series.of(measurements, system, "idle", loop, 1)
    return [
        system,
        loop,
        busy.spread("all_cpu_us"),
        busy.spread("requests_per_second"),
        lone.spread("p50_ms"),
        lone.difference("p50_ms", thread),
        idle.spread("idle_share_of_core"),
    ]


def verdicts(measurements: list[Measurement], loop: str) -> list[Verdict]:
    """The bars on one event loop."""
    found = []
    thread = Series.of(measurements, "thread", "lone_requests", loop, 1)
    for ours, rivals in RIVALS.items():
        busy = Series.of(measurements, ours, "full_speed", loop, CALLERS)
        for rival in rivals:
            other = Series.of(measurements, rival, "full_speed", loop, CALLERS)
            found.append(
                Verdict(
                    f"{loop}: {ours} uses at most {CPU_BAR:g} of the CPU of {rival}",
                    busy.ratio("all_cpu_us", other),
                    at_most=CPU_BAR,
                )
            )
        if ours == "our aio on the loop":  # it has no thread to be compared with
            continue
        lone = Series.of(measurements, ours, "lone_requests", loop, 1)
        found.append(
            Verdict(
                f"{loop}: {ours} takes at most {ADDED_BAR:g} ms (p50) more than a thread",
                lone.difference("p50_ms", thread),
                at_most=ADDED_BAR,
            )
        )
        found.append(
            Verdict(
                f"{loop}: {ours} uses at most {IDLE_BAR:g} of a core while idle",
                Series.of(measurements, ours, "idle", loop, 1).spread("idle_share_of_core"),
                at_most=IDLE_BAR,
            )
        )
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "decorators", __doc__ or "", systems=SYSTEMS, seconds=2.0, quick_seconds=0.5
    )
    machine = hardware()
    busy = Load("NoOp", MAX_BATCH_SIZE, CALLERS, arguments.seconds)
    lone = Load("Flat5ms", MAX_BATCH_SIZE, callers=1, seconds=2 * arguments.seconds)
    resting = Load("Flat5ms", MAX_BATCH_SIZE, callers=1, seconds=IDLE_SECONDS)
    cases = [(system, loop) for loop in arguments.loops for system in arguments.systems]
    # On the loop, a function of 5 ms stops it: only its cost is compared.
    apart = [case for case in cases if case[0] != "floor" and "on the loop" not in case[0]]
    measurements = measure_all(
        [Job(system, "full_speed", loop, busy) for system, loop in cases if system != "thread"],
        arguments.repetitions,
    )
    measurements += measure_all(
        [Job(system, "lone_requests", loop, lone) for system, loop in apart], arguments.repetitions
    )
    # A share of CPU hardly depends on the machine's mood: once is enough for a rough answer.
    measurements += measure_all(
        [Job(system, "idle", loop, resting) for system, loop in apart if system != "thread"],
        1 if arguments.quick else 3,
    )
    text = table(HEADER, [row(measurements, *case) for case in cases])
    found = [verdict for loop in arguments.loops for verdict in verdicts(measurements, loop)]
    return finish(arguments, machine, measurements, text, found)


if __name__ == "__main__":
    sys.exit(main())
