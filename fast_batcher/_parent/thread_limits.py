"""The environment a worker is started in: how many threads its numeric libraries may use.

Runs in the starter thread of the parent, and leaves the parent's own environment alone. Set in the
child it would come too late: a numeric library reads it when it is imported, and importing the
user's main module may import one.
"""

import math
import os
from collections.abc import Mapping
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


def worker_environment(environ: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """A copy of `environ` that limits numeric threads to a worker's share of the cores.

    What the user has set wins.
    """
    share = str(max(1, usable_cores() // num_workers))
    # Other threads may remove variables during the copy.
    present = ((name, environ.get(name)) for name in list(environ))
    own = {name: value for name, value in present if value is not None}
    return dict.fromkeys(THREAD_VARIABLES, share) | own


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
