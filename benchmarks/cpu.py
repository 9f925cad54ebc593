"""CPU time of a process and of everything it started. Runs in the measured process; Linux only."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self


def process_cpu(pid: int) -> float:
    """CPU seconds that all threads of one process, living and ended, have used so far.

    From the process's own clock, in nanoseconds: the clock ticks of `/proc/PID/stat` are 10 ms
    wide, and `/proc/PID/schedstat` counts the first thread alone. The number is what
    clock_getcpuclockid(3) computes (`CPUCLOCK_SCHED` is 2).
    """
    return time.clock_gettime(~pid << 3 | 2)


def descendants(pid: int) -> list[int]:
    """Find the process ids of all living children, grandchildren and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may itself contain blanks and parentheses.
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    ahead = [pid]
    while ahead:
        for child in children.get(ahead.pop(), []):
            found.append(child)
            ahead.append(child)
    return found


@dataclass(frozen=True)
class TreeCpu:
    """CPU seconds of this process (`api`) and of its descendants (`workers`)."""

    api: float
    workers: float

    @classmethod
    def read(cls) -> Self:
        """Read both; a child that has ended counts once we have waited for it."""
        workers = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        for pid in descendants(os.getpid()):
            try:
                workers += process_cpu(pid)
            except OSError:
                continue  # it ended while we looked
        return cls(api=time.process_time(), workers=workers)

    def since(self, start: "TreeCpu") -> "TreeCpu":
        """Subtract what `start` had read."""
        return TreeCpu(self.api - start.api, self.workers - start.workers)


def read_ticks() -> tuple[int, int]:
    """Read the ticks of all cores since boot, and how many of them the host gave to others.

    From `/proc/stat`, see proc(5); the times of guests are included in those of users.
    """
    numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, numbers)), int(numbers[7])


def stolen_percent(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Compute the host's share of the cores' time between two readings, in percent."""
    return round(100 * (after[1] - before[1]) / max(1, after[0] - before[0]), 2)
