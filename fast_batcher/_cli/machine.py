"""Checks of the machine and of what is installed. Nothing is started."""

import contextlib
import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import product
from pathlib import Path

from fast_batcher._cli.checks import Check
from fast_batcher._devices import find_gpus, list_control_groups, usable_cores
from fast_batcher._transport.progress import make_memory_file
from fast_batcher._version import __version__

# A server of 256 connections with a few workers, of which each takes about ten.
ENOUGH_DESCRIPTORS = 1024
# The default of `max_shared_bytes`, and as much again for an app and a small model.
ENOUGH_MEMORY = 1 << 30
# What each extra brings.
EXTRAS = {
    "fastapi": "fastapi",
    "prometheus": "prometheus-client",
    "opentelemetry": "opentelemetry-api",
    "ray": "ray",
}
# Faster, or read by the library where they are installed.
OTHERS = ("uvloop", "uvicorn", "numpy", "torch", "orjson")


def check_machine() -> Iterator[Check]:
    """Check what the library stands on."""
    yield _check_python()
    yield _check_loop()
    yield _check_memfd()
    yield _check_descriptors()
    yield _check_memory()
    yield _check_core_count()
    yield _check_gpus()
    yield _check_packages()


def _check_python() -> Check:
    text = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    if sys.platform != "linux":
        remedy = "large inputs and outputs are copied through pipes; use Linux for production"
        return Check("Python", "warning", text, remedy)
    return Check("Python", "good", text)


def _check_loop() -> Check:
    found = _find("uvloop")
    if not found:
        remedy = "pip install uvloop: a request costs a third less CPU time"
        return Check("event loop", "warning", "asyncio, uvloop is not installed", remedy)
    return Check("event loop", "good", found[0])


def _check_memfd() -> Check:
    name = "shared memory"
    try:
        os.close(os.memfd_create("fast_batcher-doctor"))
    except (AttributeError, OSError) as error:
        text = f"memfd_create does not work: {error}"
    else:
        return Check(name, "good", "memfd_create works")
    try:
        os.close(make_memory_file(1))
    except OSError as error:
        remedy = "no worker can start; allow memfd_create in the container's seccomp profile"
        return Check(name, "bad", f"{text}; nor does /dev/shm: {error}", remedy)
    remedy = "/dev/shm is used instead, and needs room for large inputs and outputs (--shm-size)"
    return Check(name, "warning", text, remedy)


def _check_descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_DESCRIPTORS:
        remedy = "raise the limit: ulimit -n 4096"
        if hard != resource.RLIM_INFINITY and hard < ENOUGH_DESCRIPTORS:
            remedy = (
                f"raise the hard limit, {hard}, too: LimitNOFILE=4096 of systemd, --ulimit "
                "nofile=4096 of Docker, or /etc/security/limits.conf"
            )
        text = f"this process may open {soft} files and sockets"
        return Check("descriptors", "bad", text, remedy)
    return Check("descriptors", "good", f"{soft} files and sockets")


def _check_memory() -> Check:
    left = _available_memory()
    if left is None:
        return Check("memory", "warning", "the free memory cannot be read", "")
    text = f"{left / 2**30:.1f} GiB are free"
    if left < ENOUGH_MEMORY:
        return Check(
            "memory", "warning", text, "lower max_shared_bytes and num_workers, or give more memory"
        )
    return Check("memory", "good", text)


def _available_memory() -> int | None:
    """Return the bytes that are left to this process, by the machine and by its control group."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, of_version in product(list_control_groups("memory"), names):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            most, used = [int((folder / one).read_text(encoding="utf-8")) for one in of_version]
            found.append(most - used)
    return min(found, default=None)


def _check_core_count() -> Check:
    cores = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{cores} for this process"
    if threads is not None and threads.isdigit() and int(threads) > cores:
        remedy = "unset it: each worker gets its share of the cores"
        return Check("cores", "warning", f"{text}, and OMP_NUM_THREADS={threads}", remedy)
    if cores == 1:
        remedy = "workers and the event loop take time from each other; give two cores or more"
        return Check("cores", "warning", text, remedy)
    return Check("cores", "good", text)


def _check_gpus() -> Check:
    gpus = find_gpus(os.environ)
    if not gpus:
        return Check("GPU", "good", "none; models run on the CPU")
    driver = "no driver was found"
    with contextlib.suppress(OSError, IndexError):
        driver = (
            Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
        )
    return Check("GPU", "good", f"{', '.join(gpus)}; {driver}")


def _check_packages() -> Check:
    extras = [f"{extra} ({found})" for extra, name in EXTRAS.items() for found in _find(name)]
    others = [found for name in OTHERS for found in _find(name)]
    lists = ", ".join(extras) or "none", ", ".join(others) or "none"
    # The package may be on the path without being installed.
    text = f"fast_batcher {__version__}; extras: {lists[0]}; besides: {lists[1]}"
    return Check("packages", "good", text)


def _find(package: str) -> list[str]:
    """Return the package with its version; nothing if it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return [f"{package} {metadata.version(package)}"]
    return []
