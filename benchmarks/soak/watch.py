"""What a soak looks at while it runs: how late the event loop is, and what the process holds."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, thread_time
from traceback import StackSummary
from typing import IO

from benchmarks.soak.report import Findings, Histogram

# Between questions, seconds.
PROBE_INTERVAL = 0.005
# While the loop is late, between looks at what it is at, seconds.
LOOK_INTERVAL = 0.010
# Of its calls, the innermost: enough to tell who called what.
CALLS_TOLD = 4
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
    packer is told apart. Of the longest it is told what Python's garbage collector took, what the
    host took as far as it says so (steal), how long a core stood still even for a process that
    comes before all others, and what the loop's thread was found at, most often.
    """

    def __init__(self) -> None:
        self._lags = Histogram()
        self._own = Histogram()
        # Seconds of garbage collection so far, and when the one that runs began.
        self._collected = self._collecting_since = 0.0
        # Of the longest lag, seconds: stolen, and collected. When it began. What was found.
        self._causes = (0.0, 0.0)
        self._longest_since = 0.0
        self._longest_at: list[str] = []
        # When the next turn is due, and what the loop's thread was found at since then.
        self._due = monotonic()
        self._at: list[str] = []
        self._metronomes = _Metronomes()

    def tell(self, findings: Findings) -> None:
        """Add the figures."""
        p99, most = self._lags.quantile(0.99), self._lags.longest
        findings.check("event loop lag p99, ms", 1000 * p99, "below 5", holds=p99 < MOST_LAG_P99)
        findings.check(
            "event loop lag, longest, ms", 1000 * most, "below 50", holds=most < MOST_LAG
        )
        self._tell_causes(findings)

    def tell_of_large_inputs(self, findings: Findings) -> None:
        """The same, where other processes copy and read on all cores: that is promised less of."""
        p99 = self._lags.quantile(0.99)
        findings.check("event loop lag p99, ms", 1000 * p99, "below 50", holds=p99 < MOST_LAG)
        findings.tell("event loop lag, longest, ms", 1000 * self._lags.longest)
        self._tell_causes(findings)

    def _tell_causes(self, findings: Findings) -> None:
        findings.tell("of that, its thread at work: p99, ms", 1000 * self._own.quantile(0.99))
        findings.tell("of that, its thread at work: longest, ms", 1000 * self._own.longest)
        stolen, collected = self._causes
        findings.tell("of the longest, taken by the host (steal), ms", 1000 * stolen)
        findings.tell("of the longest, garbage collection, ms", 1000 * collected)
        findings.tell("of the longest, a core stood still, ms", self._stood_still())
        found = Counter(self._longest_at).most_common(1)
        findings.tell("of the longest, found at", found[0][0] if found else "nothing")

    def _stood_still(self) -> float | str:
        """Milliseconds of the longest lag in which one core gave nobody a turn, at most."""
        if self._metronomes.stalls is None:
            return "not known: no real-time priority"
        since, until = self._longest_since, self._longest_since + self._lags.longest
        stalls = self._metronomes.stalls
        shares = (min(until, begun + late) - max(since, begun) for begun, late in stalls)
        return 1000 * max(0.0, max(shares, default=0.0))

    async def run(self) -> None:
        """Until it is cancelled."""
        gc.callbacks.append(self._note_collection)
        ended = threading.Event()
        looking = threading.Thread(target=self._look, args=(threading.get_ident(), ended))
        looking.start()
        # Kept open and read in one piece: this happens 200 times a second, beside what is measured.
        statistics = os.open("/proc/stat", os.O_RDONLY)
        try:
            with _metronomes() as metronomes:
                self._metronomes = metronomes
                while True:
                    await self._ask(statistics)
        finally:
            os.close(statistics)
            gc.callbacks.remove(self._note_collection)
            ended.set()
            looking.join()

    async def _ask(self, statistics: int) -> None:
        stolen = _stolen(statistics)
        self._due = due = monotonic() + PROBE_INTERVAL
        worked, collected = thread_time(), self._collected
        await asyncio.sleep(PROBE_INTERVAL)
        lag = max(0.0, monotonic() - due)
        found, self._at = self._at, []
        if lag > self._lags.longest:
            # On whatever core the loop was, no more was taken from it than from the one that lost
            # most.
            now = _stolen(statistics)
            most = max(after - before for after, before in zip(now, stolen, strict=True))
            self._causes = most, self._collected - collected
            self._longest_since, self._longest_at = due, found
        self._lags.add(lag)
        # At most: some of its work was done before it was due.
        self._own.add(min(lag, thread_time() - worked))

    def _look(self, thread: int, ended: threading.Event) -> None:
        """In a thread: what the loop is at, while it is late."""
        while not ended.wait(LOOK_INTERVAL):
            if monotonic() - self._due < LOOK_INTERVAL:
                continue
            frames = sys._current_frames()  # noqa: SLF001  there is no public way
            calls = StackSummary.extract(
                traceback.walk_stack(frames[thread]), limit=CALLS_TOLD, lookup_lines=False
            )
            self._at.append(
                " < ".join(f"{Path(call.filename).name}:{call.lineno}" for call in calls)
            )

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = monotonic()
        else:
            self._collected += monotonic() - self._collecting_since


class _Metronomes:
    """One process per core; what they have found is there after the block."""

    def __init__(self) -> None:
        # Start and seconds; None where the machine doesn't let them come first.
        self.stalls: list[tuple[float, float]] | None = None


@contextmanager
def _metronomes() -> Iterator[_Metronomes]:
    found = _Metronomes()
    command = [sys.executable, "-m", "benchmarks.soak.metronome"]
    with ExitStack() as files:
        # Files, as nobody reads meanwhile and a pipe would be full some day.
        running = []
        for core in sorted(os.sched_getaffinity(0)):
            file = files.enter_context(TemporaryFile())
            running.append((subprocess.Popen([*command, str(core)], stdout=file), file))
        try:
            yield found
        finally:
            for process, _ in running:
                process.terminate()
            if all(process.wait() == -signal.SIGTERM for process, _ in running):
                found.stalls = [stall for _, file in running for stall in _read_stalls(file)]


def _read_stalls(file: IO[bytes]) -> list[tuple[float, float]]:
    file.seek(0)
    lines = (line.split() for line in file)
    return [(float(begun), float(late)) for begun, late in lines]


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


def shared_mappings() -> int:
    """Parts of this process's memory that are a file without a name of ours."""
    return Path("/proc/self/maps").read_text().count("/memfd:fast_batcher")


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
