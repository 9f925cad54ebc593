"""What does a call of a decorated function cost, and how do the decorators compare with batched's?

Both decorate the same function, in batches of 64: `batched` with its default of 5 ms between
batches, and with the 0.1 ms that cost it the least. CPU time at full speed with a no-op, the
latency of a lone request beside a plain thread at a function of 5 ms, and what an idle one uses.
"""

import sys
from collections.abc import Iterable, Sequence

from benchmarks import idle_latency, overhead
from benchmarks.harness import finish, measure_all, parse_arguments, text_of
from benchmarks.idle_latency import BEYOND_THREAD
from benchmarks.overhead import CALLERS
from benchmarks.report import Compared, Measurement, Table, Verdict

# Ours, and the decorators of batched that run the function in the same place.
RIVALS = {
    "our aio": ("batched.aio", "batched.aio 0.1 ms"),
    "our aio on the loop": ("batched.aio 0.1 ms on the loop",),
    "our thread": ("batched thread", "batched thread 0.1 ms"),
}
# Of a rival's CPU time per request.
CPU_BAR = 0.5
# Milliseconds of p50 beyond a plain thread, and share of a core while idle.
ADDED_BAR = 0.3
IDLE_BAR = 0.003
SYSTEMS = ("floor", "thread", *RIVALS, *(rival for rivals in RIVALS.values() for rival in rivals))


def plan(systems: Sequence[str], seconds: float) -> list[Table]:
    """What to measure: at full speed, with lone requests, and without any.

    On the event loop a function of 5 ms stops the loop, so only its cost is compared.
    """
    apart = [one for one in systems if one != "floor" and "on the loop" not in one]
    return [
        overhead.plan([one for one in systems if one != "thread"], CALLERS, seconds),
        idle_latency.plan_lone(apart, 2 * seconds),
        idle_latency.plan_idle([one for one in apart if one != "thread"]),
    ]


def verdicts(
    measurements: Sequence[Measurement], tables: Iterable[Table], loop: str
) -> list[Verdict]:
    """The bars on one event loop."""
    busy, lone, idle = tables
    found = []
    for ours, rivals in RIVALS.items():
        for rival in rivals:
            claim = f"{loop}: {ours} uses at most {CPU_BAR:g} of the CPU of {rival}"
            share = busy.spread(measurements, ours, loop, Compared("all_cpu_us", rival))
            found.append(Verdict(claim, share, at_most=CPU_BAR))
        if ours not in lone.systems:
            continue
        claim = f"{loop}: {ours} takes at most {ADDED_BAR:g} ms (p50) more than a thread"
        added = lone.spread(measurements, ours, loop, BEYOND_THREAD)
        found.append(Verdict(claim, added, at_most=ADDED_BAR))
        claim = f"{loop}: {ours} uses at most {IDLE_BAR:g} of a core while idle"
        used = idle.spread(measurements, ours, loop, "idle_share_of_core")
        found.append(Verdict(claim, used, at_most=IDLE_BAR))
    return found


def main() -> int:
    """Measure, print, store."""
    arguments = parse_arguments(
        "decorators", __doc__ or "", systems=SYSTEMS, seconds=2.0, quick_seconds=0.5
    )
    tables = plan(arguments.systems, arguments.seconds)
    measurements = measure_all(tables, arguments)
    found = [v for loop in arguments.loops for v in verdicts(measurements, tables, loop)]
    return finish(arguments, measurements, text_of(tables, measurements, arguments.loops), found)


if __name__ == "__main__":
    sys.exit(main())
