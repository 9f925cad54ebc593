"""The environment a worker is started in: how many threads its numeric libraries may use.

Runs in the starter thread of the parent. Set in the child it would come too late: a numeric library
reads it when it is imported, and importing the user's main module may import one.
"""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Every thread pool that NumPy, SciPy and PyTorch builds read their size from. With each worker
# taking all cores, two workers on a CPU are slower than one.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

# `os.environ` belongs to the whole process: two batchers that start at the same time take turns.
_environ_lock = threading.Lock()


@contextmanager
def limited_threads(num_workers: int) -> Iterator[None]:
    """Limit, for processes started in this block, numeric threads to a worker's share of the cores.

    What the user has set wins. The environment is restored at the end of the block.
    """
    share = str(max(1, usable_cores() // num_workers))
    with _environ_lock:
        added = [name for name in THREAD_VARIABLES if name not in os.environ]
        try:
            os.environ.update(dict.fromkeys(added, share))
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


def usable_cores() -> int:
    """Cores that this process may use: its CPU affinity, and a container's CPU quota rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = read_quota(Path("/sys/fs/cgroup/cpu.max"))
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def read_quota(path: Path) -> float | None:
    """The cores that a cgroup v2 quota file ("max 100000", "150000 100000") allows, or None."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
