"""Environment variables of a worker: its GPU, and the threads of its numeric libraries.

Runs on the spawner thread of the parent, and does not change the parent's environment. The child
could not set the variables in time: a numeric library reads them when it is imported, and the
user's main module may import one.
"""

import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

from fast_batcher._devices import VISIBLE_DEVICES

# Variables from which builds of NumPy, SciPy and PyTorch read the size of their thread pools. Two
# workers that each use all cores are slower together than one.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class CoreClaim:
    """A batcher's claim to a share of the cores, from its construction to its close."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.take()

    def take(self) -> None:
        """Claim the share; may be called again."""
        _claims[self] = None

    def release(self) -> None:
        """Leave the share to the other batchers."""
        _claims.pop(self, None)


# Batchers that are open or may be opened. Before the first opening, too: the workers of one batcher
# are often started before the next one is opened.
_claims: "weakref.WeakKeyDictionary[CoreClaim, None]" = weakref.WeakKeyDictionary()


def thread_share(num_workers: int) -> int:
    """Divide the cores among the workers of all batchers of this process."""
    # Another thread may construct a batcher meanwhile: a list of references is taken at once.
    owners = [reference() for reference in _claims.keyrefs()]
    claimed = sum(owner.num_workers for owner in owners if owner is not None)
    return max(1, usable_cores() // max(claimed, num_workers))


def worker_environment(
    environ: Mapping[str, str], threads: int, visible_devices: str | None
) -> dict[str, str]:
    """Copy `environ` for a worker, and limit its numeric threads."""
    # Other threads may remove variables during the copy.
    present = ((name, environ.get(name)) for name in list(environ))
    own = {name: value for name, value in present if value is not None}
    if visible_devices is not None:
        own[VISIBLE_DEVICES] = visible_devices
    return dict.fromkeys(THREAD_VARIABLES, str(threads)) | own


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
