"""Says when requests come: a process of its own, so that the measured one cannot hold it up.

    python -m benchmarks.arrivals RATE SECONDS SEED

The gaps are drawn from an exponential distribution, which is what many independent users make
(a Poisson process). At each arrival it writes the moment at which it was due to stdout, as a
little-endian double on the clock of `time.perf_counter`; then it waits for the end of its input, so
that its CPU time can still be read.
"""

import os
import random
import struct
import sys
import time

# Of one read at the other end.
RECORD = struct.Struct("<d")


def due_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals at `rate` per second, in seconds from the start."""
    gaps = random.Random(seed)
    times = []
    now = gaps.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += gaps.expovariate(rate)
    return times


def main() -> None:
    """Draw all arrivals, then wait for each and tell of it."""
    rate, seconds, seed = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    times = due_times(rate, seconds, seed)
    output = sys.stdout.fileno()
    start = time.perf_counter()
    sent = 0
    while sent < len(times):
        late = time.perf_counter() - start - times[sent]
        if late < 0:
            time.sleep(-late)
        # All that are due by now, in one write: after a hold-up they come together.
        now = time.perf_counter() - start
        due = sent + 1
        while due < len(times) and times[due] <= now:
            due += 1
        os.write(output, b"".join(RECORD.pack(start + moment) for moment in times[sent:due]))
        sent = due
    os.close(output)
    sys.stdin.read()


if __name__ == "__main__":
    main()
