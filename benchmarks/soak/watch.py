"""What a soak looks at while it runs: how late the event loop is, and what the process holds."""

import asyncio
import gc
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

CORES = os.cpu_count() or 1
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# More than a line of /proc/stat has about a core: ten numbers of 64 bits.
LINE_SIZE = 220


class LagProbe:
    """Asks the loop for a turn at fixed times; how late it comes is how long it was blocked.

    By the work of its own thread, or because the machine had its cores for other processes: the
    former is told apart. A virtual machine's clocks take for work what its host takes from it, so
    of the longest it is told how much that was (steal), and how much Python's garbage collector.
    """

    def __init__(self) -> None:
        self._lags = Histogram()
        self._own = Histogram()
        # Seconds of garbage collection so far, and when the one that runs began.
        self._collected = self._collecting_since = 0.0
        # Of the longest lag, seconds: stolen, and collected.
        self._causes = (0.0, 0.0)

    def tell(self, findings: Findings) -> None:
        """Add the figures."""
        p99, most = self._lags.quantile(0.99), self._lags.longest
        findings.check("event loop lag p99, ms", 1000 * p99, "below 5", holds=p99 < MOST_LAG_P99)
        findings.check(
            "event loop lag, longest, ms", 1000 * most, "below 50", holds=most < MOST_LAG
        )
        findings.tell("of that, its thread at work: p99, ms", 1000 * self._own.quantile(0.99))
        findings.tell("of that, its thread at work: longest, ms", 1000 * self._own.longest)
        stolen, collected = self._causes
        findings.tell("of the longest, taken by the host (steal), ms", 1000 * stolen)
        findings.tell("of the longest, garbage collection, ms", 1000 * collected)

    async def run(self) -> None:
        """Until it is cancelled."""
        gc.callbacks.append(self._note_collection)
        # Kept open and read in one piece: this happens 200 times a second, beside what is measured.
        statistics = os.open("/proc/stat", os.O_RDONLY)
        try:
            while True:
                await self._ask(statistics)
        finally:
            os.close(statistics)
            gc.callbacks.remove(self._note_collection)

    async def _ask(self, statistics: int) -> None:
        stolen = _stolen(statistics)
        due = monotonic() + PROBE_INTERVAL
        worked, collected = thread_time(), self._collected
        await asyncio.sleep(PROBE_INTERVAL)
        lag = max(0.0, monotonic() - due)
        if lag > self._lags.longest:
            # On whatever core the loop was, no more was taken from it than from the one that lost
            # most.
            now = _stolen(statistics)
            most = max(after - before for after, before in zip(now, stolen, strict=True))
            self._causes = most, self._collected - collected
        self._lags.add(lag)
        # At most: some of its work was done before it was due.
        self._own.add(min(lag, thread_time() - worked))

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = monotonic()
        else:
            self._collected += monotonic() - self._collecting_since


def _stolen(statistics: int) -> list[float]:
    """Seconds that the host has taken from each core so far; proc(5), the eighth figure."""
    _, *lines = os.pread(statistics, LINE_SIZE * (1 + CORES), 0).split(b"\n", 1 + CORES)
    return [int(line.split()[8]) / CLOCK_TICKS for line in lines[:CORES]]


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
