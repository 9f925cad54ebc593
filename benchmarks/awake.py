"""Keeps one CPU from sleeping long. `harness` starts one process for each CPU with `--awake`.

An idle CPU sleeps. The host of a virtual machine then gives it to others, and what a timer or a
message should have woken waits until it is given back: up to tens of milliseconds on a shared host.
A hypervisor waits a little before it gives a CPU away, so a CPU that wakes often enough is kept.

This process wakes and sleeps again and again in the scheduler's idle class (`SCHED_IDLE`, see
sched(7)): any other process takes the CPU from it at once. It does not compute in between: when it
did, event loops were late by 4 ms, a tick of the kernel.
"""

import os
import sys
import time
from pathlib import Path

# Seconds. Hosts poll for up to 200 us before they give a CPU away (`halt_poll_ns` of KVM).
NAP = 50e-6


def stay_awake(cpu: int, parent: int) -> None:
    """Run on this CPU until the parent, a process id, has ended."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Otherwise the kernel doubles the nap, to wake for several timers at once.
    Path("/proc/self/timerslack_ns").write_text("1")
    while os.getppid() == parent:
        time.sleep(NAP)


if __name__ == "__main__":
    stay_awake(int(sys.argv[1]), int(sys.argv[2]))
