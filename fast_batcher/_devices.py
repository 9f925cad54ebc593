"""Devices of workers: GPUs, CPU cores, and the threads of numeric libraries. Any process.

Reads the environment, `/dev` and `/proc`. Neither imports a GPU library nor initializes CUDA: a
process that has done so cannot fork, and holds memory on the GPU.
"""

import contextlib
import math
import os
import re
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from fast_batcher.errors import ConfigurationError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

_REMEDY = 'give "auto", "cpu", or a list like ["cuda:0", "cuda:1"] or ["cpu:0-3", "cpu:4-7"]'
_GPU = re.compile(r"cuda:(\d{1,4})")
_CPU = re.compile(r"cpu(?::(\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*))?")


@dataclass(frozen=True)
class Placement:
    """The device of one worker."""

    # Name of the device inside the worker, which sees no other GPU: "cuda:0" or "cpu". None if the
    # user has chosen no devices.
    device: str | None = None
    # CUDA_VISIBLE_DEVICES of the worker; None for the value of the parent process.
    visible_devices: str | None = None
    # The cores to which the worker is pinned; None for all cores of the parent process.
    cores: frozenset[int] | None = None
    # Threads for numeric libraries; None for a share of the cores of the parent process.
    threads: int | None = None
    # The `MpsDaemon` of the GPU; None without one. Workers import this module, and not that one.
    mps: Any = None


def find_gpus(
    environ: Mapping[str, str],
    nodes: Path = Path("/dev"),
    driver: Path = Path("/proc/driver/nvidia/gpus"),
) -> list[str]:
    """Name the GPUs that CUDA would find in this process, as far as the file system tells."""
    visible = _visible_devices(environ)
    if visible is not None:
        count = len(visible)
    else:
        count = len(list(nodes.glob("nvidia[0-9]*"))) or len(list(driver.glob("*")))
    return [f"cuda:{number}" for number in range(count)]


# Devices of GPUs that CUDA or ROCm find without /dev/nvidia0: on WSL, of AMD, on Jetson.
OTHER_NODES = ("dxg", "kfd", "nvhost-gpu", "nvgpu")


def find_missing(
    devices: Sequence[str], environ: Mapping[str, str], nodes: Path = Path("/dev")
) -> list[str]:
    """Name those of the devices that are GPUs this machine does not have, as far as is known.

    A device that `VISIBLE_DEVICES` does not have is an error.
    """
    if _visible_devices(environ) is not None or any(
        (nodes / name).exists() for name in OTHER_NODES
    ):
        return []
    present = find_gpus(environ, nodes)
    return [name for name in devices if _GPU.fullmatch(name) and name not in present]


def name_devices(devices: str | Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the devices as a list of names; "auto" is all GPUs, or the CPU without any."""
    if devices == "auto":
        return find_gpus(environ) or ["cpu"]
    return [devices] if isinstance(devices, str) else [*devices]


def place_workers(
    devices: Sequence[str] | None, num_workers: int, environ: Mapping[str, str]
) -> list[Placement]:
    """Assign the devices to the workers in turn, so that the first workers do not share one."""
    if devices is None:
        return [Placement()] * num_workers
    names = [devices[index % len(devices)] for index in range(num_workers)]
    sharers = Counter(names)
    placements = {name: _place(name, devices, sharers[name], environ) for name in sharers}
    return [placements[name] for name in names]


def check_devices(name: str, value: Any) -> None:
    """Check that a value has the form of the setting `devices`."""
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, list | tuple) and len(names) > 0
    if not is_list or not (value == "auto" or all(map(_is_device, names))):
        raise ConfigurationError(f"{name}={value!r:.100}: {_REMEDY}")


def _is_device(name: object) -> bool:
    return isinstance(name, str) and bool(_GPU.fullmatch(name) or _CPU.fullmatch(name))


def _visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES: indexes, UUIDs or MIG names; None if unset.

    CUDA ignores what follows an invalid entry, for example "-1".
    """
    value = environ.get(VISIBLE_DEVICES)
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")]
    return list(takewhile(lambda entry: entry and entry not in ("-1", "NoDevFiles"), entries))


def _place(
    name: str, devices: Sequence[str], sharers: int, environ: Mapping[str, str]
) -> Placement:
    if gpu := _GPU.fullmatch(name):
        return Placement("cuda:0", _select_gpu(int(gpu[1]), devices, environ))
    # The empty list of GPUs hides them from libraries that would use one by default.
    if name == "cpu":
        return Placement("cpu", "")
    cores = _parse_cores(name.removeprefix("cpu:"))
    _check_cores(cores, name, devices)
    return Placement("cpu", "", cores, max(1, len(cores) // sharers))


def _select_gpu(number: int, devices: Sequence[str], environ: Mapping[str, str]) -> str:
    visible = _visible_devices(environ)
    if visible is None:
        return str(number)
    if number >= len(visible):
        raise ConfigurationError(
            f"devices={devices!r:.100}: 'cuda:{number}' counts from 0 in {VISIBLE_DEVICES}="
            f"{environ[VISIBLE_DEVICES]!r:.60}, which has {len(visible)} devices"
        )
    return visible[number]


def _parse_cores(ranges: str) -> frozenset[int]:
    """Return the cores of "0-3,8"."""
    cores: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _check_cores(cores: frozenset[int], name: str, devices: Sequence[str]) -> None:
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigurationError(
            f"devices={devices!r:.100}: workers can be pinned to cores on Linux only; give 'cpu'"
        )
    available = os.sched_getaffinity(0)
    if not cores:
        raise ConfigurationError(
            f"devices={devices!r:.100}: the range of {name!r} ends before it begins"
        )
    if not cores <= available:
        raise ConfigurationError(
            f"devices={devices!r:.100}: {name!r} names cores that this process may not use; it has "
            f"{_describe_cores(available)}"
        )


def _describe_cores(cores: set[int]) -> str:
    """Write cores as in "0-3,8"."""
    text = ""
    for core in sorted(cores):
        if core - 1 not in cores:
            text += f",{core}"
        elif core + 1 not in cores:
            text += f"-{core}"
    return text[1:]


# Variables from which builds of NumPy, SciPy and PyTorch read the size of their thread pools. Two
# workers that each use all cores are slower together than one.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def share_cores(cores: Collection[int], index: int, count: int) -> frozenset[int] | None:
    """Divide the cores among `count` workers, in the order of their numbers.

    Returns:
        The cores of the worker with this index, or None if there are fewer cores than workers.
    """
    first, end = len(cores) * index // count, len(cores) * (index + 1) // count
    return frozenset(sorted(cores)[first:end]) if len(cores) >= count else None


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
    """Copy `environ` for a worker, with its GPU and the limit of its numeric threads.

    `OMP_NUM_THREADS` of the user is for all libraries, as without us: each of them reads it, unless
    it finds a variable of its own.

    The child could not set the variables in time: a numeric library reads them when it is imported,
    and the user's main module may import one.
    """
    # Other threads may remove variables during the copy.
    present = ((name, environ.get(name)) for name in list(environ))
    own = {name: value for name, value in present if value is not None}
    if visible_devices is not None:
        own[VISIBLE_DEVICES] = visible_devices
    # It may be a list, with a number for each level of nested threads.
    of_user = own.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return dict.fromkeys(THREAD_VARIABLES, of_user or str(threads)) | own


def usable_cores() -> int:
    """Count the cores of this process.

    `PYTHON_CPU_COUNT` counts as for Python; otherwise the CPU affinity, and the smallest quota of a
    control group, rounded up.
    """
    told = os.environ.get("PYTHON_CPU_COUNT", "")
    if told.isdecimal() and int(told):
        return int(told)
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [quota for folder in list_control_groups("cpu") if (quota := read_quota(folder))]
    return max(1, min([cores, *map(math.ceil, quotas)]))


CGROUPS = Path("/sys/fs/cgroup")


def list_control_groups(
    controller: str, root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """List the folders of this process's control groups, of versions 1 and 2, and of their parents.

    A service has one in its slice. A container sees its own as the root, whatever `own` says.
    """
    with contextlib.suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") or not controllers:
                group = PurePosixPath(path.lstrip("/"))
                top = root / controller if controllers else root
                yield from [top / one for one in (group, *group.parents)]


def read_quota(folder: Path) -> float | None:
    """Read the cores that a control group allows, None without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            texts = [(folder / name).read_text(encoding="utf-8") for name in names]
            quota, period = map(int, " ".join(texts).split())
            return quota / period if quota > 0 < period else None
    return None
