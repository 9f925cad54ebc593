"""Environment variables of a worker that limit the threads of numeric libraries.

Runs on the starter thread of the parent, and does not change the parent's environment. The child
could not set the variables in time: a numeric library reads them when it is imported, and the
user's main module may import one.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path

# Variables from which builds of NumPy, SciPy and PyTorch read the size of their thread pools. Two
# workers that each use all cores are slower together than one.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def worker_environment(environ: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Copy `environ`, and limit numeric threads to a worker's share of the cores.

    Variables that the user has set keep their values.
    """
    share = str(max(1, usable_cores() // num_workers))
    # Other threads may remove variables during the copy.
    present = ((name, environ.get(name)) for name in list(environ))
    own = {name: value for name, value in present if value is not None}
    return dict.fromkeys(THREAD_VARIABLES, share) | own


def usable_cores() -> int:
    """Count the cores of this process: its CPU affinity, and a container's quota rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = read_quota(Path("/sys/fs/cgroup/cpu.max"))
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def read_quota(path: Path) -> float | None:
    """Read the cores that a cgroup v2 file ("max 100000", "150000 100000") allows, or None."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
