"""What a soak looks at while it runs: how late the event loop is, and what the process holds."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, thread_time

from benchmarks.soak.report import Findings, Histogram

# Between questions, seconds.
PROBE_INTERVAL = 0.005
# The promise: the loop is never blocked for longer, and hardly ever for as long; seconds.
MOST_LAG = 0.050
MOST_LAG_P99 = 0.005


class LagProbe:
    """Asks the loop for a turn at fixed times; how late it comes is how long it was blocked.

    By the work of its own thread, or because the machine had its cores for other processes: the
    former is told apart.
    """

    def __init__(self) -> None:
        self._lags = Histogram()
        self._own = Histogram()

    def tell(self, findings: Findings) -> None:
        """Add the figures."""
        p99, most = self._lags.quantile(0.99), self._lags.longest
        findings.check("event loop lag p99, ms", 1000 * p99, "below 5", holds=p99 < MOST_LAG_P99)
        findings.check(
            "event loop lag, longest, ms", 1000 * most, "below 50", holds=most < MOST_LAG
        )
        findings.tell("of that, its thread at work: p99, ms", 1000 * self._own.quantile(0.99))
        findings.tell("of that, its thread at work: longest, ms", 1000 * self._own.longest)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            due = monotonic() + PROBE_INTERVAL
            worked = thread_time()
            await asyncio.sleep(PROBE_INTERVAL)
            lag = max(0.0, monotonic() - due)
            self._lags.add(lag)
            # At most: some of its work was done before it was due.
            self._own.add(min(lag, thread_time() - worked))


@asynccontextmanager
async def probing() -> AsyncIterator[LagProbe]:
    """A probe that runs during the block."""
    probe = LagProbe()
    task = asyncio.create_task(probe.run())
    try:
        yield probe
    finally:
        task.cancel()
        await asyncio.wait([task])


def worker_pids(pid: int | None = None) -> list[int]:
    """Processes that this one, or the one named, has spawned with `multiprocessing`."""
    children = [
        child.decode()
        for path in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children")
        for child in _read(path).split()
    ]
    return [
        int(child) for child in children if b"spawn_main" in _read(Path(f"/proc/{child}/cmdline"))
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the thread or process has just ended
        return b""


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# What `multiprocessing` and this library call what they make there. The machine's other programs
# come and go.
OUR_NAMES = ("pymp-", "psm_", "listener-", "fast_batcher")


def shared_names() -> set[str]:
    """What lies in /dev/shm and /tmp and may be ours."""
    folders = [Path("/dev/shm"), Path("/tmp")]
    return {
        str(path) for one in folders for path in one.iterdir() if path.name.startswith(OUR_NAMES)
    }
