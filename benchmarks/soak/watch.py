"""What a soak observes of its own process: how late the event loop is, and what it holds."""

import asyncio
import gc
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, thread_time

from benchmarks.soak.report import Findings, Histogram

# Between two probes, seconds.
PROBE_INTERVAL = 0.005
# The promise: the event loop is never blocked for longer, and hardly ever for as long; seconds.
MOST_LAG = 0.050
MOST_LAG_P99 = 0.005
# Names that `multiprocessing` and this library give to their files; other programs come and go.
OUR_NAMES = ("pymp-", "psm_", "listener-", "fast_batcher")


class LagProbe:
    """Measures how late a timer of the event loop fires, and how much of that the loop worked.

    The rest is time that the machine gave to other processes. For the longest lag it also tells
    how long Python's garbage collector ran.
    """

    def __init__(self) -> None:
        self._lags = Histogram()
        self._own = Histogram()
        # Seconds of garbage collection so far, and when the current one began.
        self._collected = self._collecting_since = 0.0
        # Seconds of garbage collection during the longest lag.
        self._collected_in_longest = 0.0

    def tell(self, findings: Findings, *, large_inputs: bool = False) -> None:
        """Add the figures.

        Args:
            findings: Where to.
            large_inputs: Whether other processes copy and read large inputs on all cores; then the
                99th percentile has the longer bar, and the longest lag has none.
        """
        p99, longest = self._lags.quantile(0.99), self._lags.longest
        bar = MOST_LAG if large_inputs else MOST_LAG_P99
        wanted = f"below {1000 * bar:g}"
        findings.check("event loop lag p99, ms", 1000 * p99, wanted, holds=p99 < bar)
        what = "event loop lag, longest, ms"
        if large_inputs:
            findings.tell(what, 1000 * longest)
        else:
            wanted = f"below {1000 * MOST_LAG:g}"
            findings.check(what, 1000 * longest, wanted, holds=longest < MOST_LAG)
        findings.tell("of that, its thread at work: p99, ms", 1000 * self._own.quantile(0.99))
        findings.tell("of that, its thread at work: longest, ms", 1000 * self._own.longest)
        what = "of the longest, garbage collection, ms"
        findings.tell(what, 1000 * self._collected_in_longest)

    async def run(self) -> None:
        """Probe until cancelled."""
        gc.callbacks.append(self._note_collection)
        try:
            while True:
                await self._probe()
        finally:
            gc.callbacks.remove(self._note_collection)

    async def _probe(self) -> None:
        due = monotonic() + PROBE_INTERVAL
        worked, collected = thread_time(), self._collected
        await asyncio.sleep(PROBE_INTERVAL)
        lag = max(0.0, monotonic() - due)
        if lag > self._lags.longest:
            self._collected_in_longest = self._collected - collected
        self._lags.add(lag)
        # At most: part of that work was done before the timer was due.
        self._own.add(min(lag, thread_time() - worked))

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = monotonic()
        else:
            self._collected += monotonic() - self._collecting_since


@asynccontextmanager
async def probing() -> AsyncIterator[LagProbe]:
    """Run a probe during the block."""
    probe = LagProbe()
    task = asyncio.create_task(probe.run())
    try:
        yield probe
    finally:
        task.cancel()
        await asyncio.wait([task])


def worker_pids() -> list[int]:
    """Find the processes that this one has spawned with `multiprocessing`."""
    children = [
        child.decode()
        for path in Path("/proc/self/task").glob("*/children")
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
    """Count the open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def shared_mappings() -> int:
    """Count the mappings of this library's shared memory in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:fast_batcher")


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def shared_names() -> set[str]:
    """Find what lies in /dev/shm and the temporary directory and may be ours."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {
        str(path) for one in folders for path in one.iterdir() if path.name.startswith(OUR_NAMES)
    }
