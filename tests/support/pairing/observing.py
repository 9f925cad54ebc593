"""What is left of a run, and how long its event loop stood still. The process of the tests."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fast_batcher._core import scaling
from fast_batcher._opening import opening

# Logged texts that say of themselves that they should not occur.
_NEVER = ("internal error", "broke the protocol", "never retrieved", "exception in callback")


def children_of(pid: int) -> list[int]:
    """Return the living children of a process, but for Python's resource tracker."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except (OSError, ValueError):
            continue
    return [child for child in found if not _is_tracker(child)]


def _is_tracker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return b"resource_tracker" in command or state == "Z"


def hold() -> dict[str, set[str]]:
    """Return what this process holds, by kind."""
    descriptors = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            descriptors.add(f"{path.name}:{os.readlink(path)}")
        except OSError:
            continue
    return {
        "process": {str(child) for child in children_of(os.getpid())},
        "thread": {f"{one.name} {one.ident}" for one in threading.enumerate()},
        "descriptor": descriptors,
        "shared memory": {
            path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")
        },
    }


def find_left(before: dict[str, set[str]], seconds: float) -> list[str]:
    """Wait until nothing is held that was not held before; return what still is."""
    until = time.monotonic() + seconds
    while True:
        now = hold()
        # Threads and descriptors that the interpreter makes once are no leak: the first run warms.
        left = [f"{kind} {one}" for kind in now for one in sorted(now[kind] - before[kind])]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


class Pulse:
    """How late the event loop is, and whether it stood still without computing."""

    def __init__(self) -> None:
        # Moments and lateness of late beats.
        self.beats: list[tuple[float, float]] = []
        # Seconds in which the loop's thread neither ran nor waited for a core.
        self.blocked = 0.0
        # The moment at which the next beat is due.
        self._due = time.monotonic()

    async def run(self) -> None:
        while True:
            before, used = time.monotonic(), _used()
            self._due = before + 0.01
            await asyncio.sleep(0.01)
            now = time.monotonic()
            late = now - before - 0.01
            if late > 0.02:
                self.beats.append((now, late))
            self.blocked = max(self.blocked, late - (_used() - used))

    def lateness(self, since: float) -> float:
        """Return the sum of the lateness of the loop since a moment.

        After a block of the loop a caller may run before the beat that is as late.
        """
        past = sum(late for moment, late in self.beats if moment >= since)
        return past + max(0.0, time.monotonic() - max(since, self._due))


def _used() -> float:
    """Return the seconds that this thread has run or waited for a core."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


class _Catching(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(part in text.lower() for part in _NEVER):
            if record.exc_info:
                text += f": {record.exc_info[1]!r}"
            self.texts.append(text)


@contextmanager
def catch_logs() -> Iterator[list[str]]:
    """Collect the logged texts that should not occur."""
    handler = _Catching()
    loggers = [logging.getLogger(name) for name in ("asyncio", "fast_batcher")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler.texts
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True


# Constants of scaling in this process: a run is too short for two minutes of little load.
_QUICK = {"SCALING_INTERVAL": 0.02, "PATIENCE": 0.05, "QUIET": 0.1, "RATE_WINDOW": 0.3}


@contextmanager
def quicken_scaling() -> Iterator[None]:
    """Let the number of workers follow the load within a run, as it otherwise does in minutes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in _QUICK.items():
            patch.setattr(scaling, name, seconds)
        patch.setattr(opening, "SCALING_INTERVAL", _QUICK["SCALING_INTERVAL"])
        yield
