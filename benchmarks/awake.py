"""Keeps one CPU from sleeping. A process for each CPU, which `harness` starts with `--awake`.

A CPU with nothing to do sleeps. That of a virtual machine is then given to others, and what a timer
or a message should have woken waits until it is given back: up to tens of milliseconds on a shared
host. Here something always runs, in the scheduler's idle class: whatever else can run takes the CPU
from it at once, so it costs others no more than that.

Source: sched(7), `SCHED_IDLE`.
"""

import os
import sys

# Between two looks for the parent: tens of milliseconds, so that what runs is no system call.
TURNS = 1_000_000


def stay_awake(cpu: int, parent: int) -> None:
    """Run on this CPU until the parent, a process id, has ended."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(TURNS):
            pass


if __name__ == "__main__":
    stay_awake(int(sys.argv[1]), int(sys.argv[2]))
