"""Waits of tests: for a call, a model at a gate, the death of a process. No sleeps.

Parent process; the models' side of a gate is `models.base.pass_gate`.
"""

import asyncio
import itertools
import json
import os
import re
import select
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from fast_batcher import BatcherStats, DynBatcher

# The only hang guard, in seconds: no wait of a test is longer. On a busy machine a process that
# imports torch needs more than a minute, so that no shorter guard tells a hang from a slow machine.
LIMIT = 300.0

# A call whose wait must end by its deadline gets one this far away, in seconds: soon for the test,
# and long after everything that does not wait has happened.
SOON = 0.5
# The same where a worker must have begun with the call by then, which takes a turn of another
# process.
SOON_IN_WORKER = 2.0

# Turns of the loop within which everything happens that needs no other process.
AT_ONCE = 100

# For tests in which the loop has no part: what they are about happens in the worker, in the core or
# in the codec, and that both loops tell the same of a worker is tested by itself.
ONE_LOOP: Any = ("asyncio", {"use_uvloop": True})
one_loop = pytest.mark.parametrize("anyio_backend", [ONE_LOOP], ids=["uvloop"], indirect=True)
# Runs a test of a module with one loop on both: opening and closing, threads,
# timers, reading pipes.
both_loops = pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": False}), ONE_LOOP],
    ids=["asyncio", "uvloop"],
    indirect=True,
)

# What was waited for, seconds it took, and the printed figure; the end of the run shows them.
MEASURED: list[tuple[str, float, float]] = []


def shown(value: object) -> str:
    """A value in the name of a test, which is the same in each of several processes."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


@contextmanager
def measured(figure: float, what: str) -> Iterator[None]:
    """Note how long the block takes, beside the figure of an idle machine with two cores."""
    started = monotonic()
    yield
    MEASURED.append((what, monotonic() - started, figure))


def assert_balance(batcher: DynBatcher[Any, Any]) -> BatcherStats:
    """Assert that every submitted request has ended or is still inside."""
    stats = batcher.stats
    out = stats.completed + stats.failed + stats.refused + stats.expired + stats.cancelled
    assert stats.submitted == out + stats.waiting + stats.running
    return stats


def call(batcher: DynBatcher[Any, Any], value: Any, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(batcher.process_batched(value, **options))


async def outcome(task: "asyncio.Task[Any]") -> Any:
    """Result or error of a task."""
    async with asyncio.timeout(LIMIT):
        await asyncio.wait([task])
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()


async def order_of_ends(*calls: "Awaitable[Any]") -> list[int]:
    """The positions of these calls in the order in which they end, with whatever outcome."""
    ended: list[int] = []

    async def note(position: int, call: "Awaitable[Any]") -> None:
        await asyncio.gather(call, return_exceptions=True)
        ended.append(position)

    await asyncio.gather(*[note(position, call) for position, call in enumerate(calls)])
    return ended


async def turns(count: int = 3) -> None:
    """Let the loop turn, so that everything that is ready to run has run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop turn until this is true of a batcher, which does not tell when it becomes so."""
    async with asyncio.timeout(LIMIT):
        for turn in itertools.count():
            if is_so():
                return
            # What takes longer is waited for without taking a core from the process that does it.
            await asyncio.sleep(0 if turn < AT_ONCE else 0.001)


class Visit:
    """A model that waits at a gate."""

    def __init__(self, connection: socket.socket, message: dict[str, Any]) -> None:
        self._connection = connection
        # The model's process.
        self.pid: int = message["pid"]
        # What it had to say.
        self.note: Any = message["note"]

    def let_on(self) -> None:
        """Let it go on. Harmless if it is dead, or has been let on."""
        self._connection.close()


class Gate:
    """A gate at which models report and wait until the test lets them continue.

    Args:
        path: Of a socket that does not exist yet; models are given it as an argument.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._visits: list[Visit] = []

    async def visit(self) -> Visit:
        """Wait for the next visitor."""
        async with asyncio.timeout(LIMIT):
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()
            loop.add_reader(self._listener, arrived.set_result, None)
            try:
                await arrived
            finally:
                loop.remove_reader(self._listener)
        return self._accept()

    def wait(self) -> Visit:
        """The same for a test without a loop."""
        assert select.select([self._listener], [], [], LIMIT)[0], "nobody came to the gate"
        return self._accept()

    def close(self) -> None:
        """Let everybody on, now and from now on."""
        for visit in self._visits:
            visit.let_on()
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)

    def _accept(self) -> Visit:
        connection, _ = self._listener.accept()
        # It has written its line before it waits, so reading it takes no time.
        connection.settimeout(LIMIT)
        with connection.makefile("rb") as lines:
            self._visits.append(Visit(connection, json.loads(lines.readline())))
        return self._visits[-1]


class Watch:
    """Sees processes die. Make it as soon as their numbers are known.

    They may have died by then, but their numbers cannot be somebody else's yet.
    """

    def __init__(self, pids: list[int]) -> None:
        self._descriptors: dict[int, int] = {}
        for pid in pids:
            with suppress(ProcessLookupError):  # a program tells its workers, and ends
                self._descriptors[os.pidfd_open(pid)] = pid

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def survivors(self, seconds: float) -> list[int]:
        """Wait until all are dead, or so many seconds; those that are not dead then."""
        deadline = monotonic() + seconds
        poller = select.poll()
        alive = set(self._descriptors)
        for descriptor in alive:
            poller.register(descriptor, select.POLLIN)
        while alive:
            dead = poller.poll(max(0.0, deadline - monotonic()) * 1000)
            if not dead:
                break
            for descriptor, _ in dead:
                poller.unregister(descriptor)
                alive.discard(descriptor)
        return [self._descriptors[descriptor] for descriptor in alive]

    async def until_dead(self) -> None:
        """Wait until all are dead, while the loop runs on."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT):
            for descriptor in self._descriptors:
                dead = loop.create_future()
                loop.add_reader(descriptor, dead.set_result, None)
                try:
                    await dead
                finally:
                    loop.remove_reader(descriptor)
