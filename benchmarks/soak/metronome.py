"""Tells when the machine itself stood still: a process that comes before all others on one core.

It runs beside a soak. What it has to wait for is none of the soak's work: the host has taken the
core away, or the kernel has kept it.
"""

import os
import sys
from time import monotonic, sleep

# Between turns, seconds. A hundred turns a second take half a percent of a core.
INTERVAL = 0.010
# Shorter waits are not told of, seconds: the soak's bar is 50 ms.
SHORTEST = 0.002


def main(core: int) -> int:
    """Write a line per wait: when it began, and its seconds. 1 if it may not come first."""
    parent = os.getppid()
    os.sched_setaffinity(0, {core})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return 1
    while os.getppid() == parent:
        due = monotonic() + INTERVAL
        sleep(INTERVAL)
        late = monotonic() - due
        if late > SHORTEST:
            os.write(1, f"{due} {late}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
