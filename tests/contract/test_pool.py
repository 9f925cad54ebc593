"""The workers of a batcher, with real processes: started, replaced, ended, and what is told."""

import asyncio
import functools
import importlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import psutil
import pytest
from models.base import Echo
from models.crashing import Stuck
from models.loading import NeverLoads
from models.ordinary import GatedOnLoad, WritesAtExit
from waits import LIMIT, SOON, Gate, Watch, turns

from fast_batcher._observers import Observers
from fast_batcher._parent import pool as pools
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.sending import BatchSender, FrameWorker
from fast_batcher._parent.staging import MemoryService
from fast_batcher._parent.worker_handle import Exit, Outcomes, WorkerHandle, describe_exit
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import Kind, pack_header
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model import check_model
from fast_batcher.settings import Settings

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Told:
    """Events of pools, in order, and the pools to stop after the test."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.exits: list[Exit] = []
        # Of the warm-up of the worker that was ready last.
        self.times: list[tuple[int, float]] = []
        # The workers that are ready, by id.
        self.links: dict[int, FrameWorker] = {}
        self._changed = asyncio.Event()
        self._pools: list[Pool] = []

    def open(self, model: Any, *args: Any, **settings: Any) -> Pool:
        """Make a pool and open it."""
        checked = Settings(**settings)
        spec = check_model(model, args, None, checked.max_frame_bytes)
        loop = asyncio.get_running_loop()
        memory = MemoryService(loop, checked.max_shared_bytes, "tested")
        me: Any = self
        sender = BatchSender(checked, memory, {}, "tested")
        make_worker = functools.partial(WorkerProcess, sender)
        pool = Pool(spec, checked, me, memory, Observers("tested"), "tested", make_worker)
        self._pools.append(pool)
        pool.open()
        return pool

    async def ready(self, model: Any, *args: Any, **settings: Any) -> Pool:
        """The same, and wait until every worker is ready."""
        pool = self.open(model, *args, **settings)
        await self.until(lambda: self.count("ready") == settings.get("num_workers", 1))
        return pool

    def _tell(self, event: str, what: Any) -> None:
        self.events.append((event, what))
        self._changed.set()

    def send(self, worker: int, *inputs: Any) -> None:
        """Send a batch."""
        self.links[worker].send(Kind.ATOMS, 7, pickling.dumps(list(inputs)))

    def worker_ready(
        self, worker: WorkerHandle, times: list[tuple[int, float]], *, is_restart: bool
    ) -> None:
        self.times = times
        assert isinstance(worker, FrameWorker)
        self.links[worker.id] = worker
        self._tell("ready", worker.id)

    def worker_retired(self, worker: int) -> None:
        self._tell("retired", worker)

    def worker_lost(self, worker: int, exit: Exit) -> None:
        self.exits.append(exit)
        del self.links[worker]
        self._tell("lost", (worker, exit.text))

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        self._tell("failed", error)

    def workers_given_up(self, reason: str, seconds: float) -> None:
        self._tell("given up", reason)

    def idle_workers(self) -> list[int]:
        return []

    def reported(
        self, worker: int, batch_id: int, seconds: float, answer: Outcomes, report: Any = None
    ) -> None:
        self._tell("answer", answer())

    def count(self, event: str) -> int:
        return [name for name, _ in self.events].count(event)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until what was told makes this true."""
        async with asyncio.timeout(LIMIT):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        for pool in self._pools:
            pool.stop(0.0)


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    told = Told()
    yield told
    told.close()


def pids_of(pool: Pool) -> list[int]:
    return sorted(pid for worker in [*pool.workers.values()] if (pid := worker.pid) is not None)


def children_of(thread: threading.Thread) -> list[int]:
    path = Path(f"/proc/self/task/{thread.native_id}/children")
    return sorted(map(int, path.read_text().split()))


async def test_a_dead_worker_is_told_and_replaced(told: Told) -> None:
    pool = await told.ready(Echo, num_workers=2)
    first, second = pids_of(pool)
    os.kill(first, signal.SIGKILL)
    await told.until(lambda: told.count("lost") == 1)
    ((worker, exit_text),) = [what for event, what in told.events if event == "lost"]
    assert exit_text == "signal 9 (SIGKILL, possibly out of memory)"
    assert worker not in told.links
    await told.until(lambda: told.count("ready") == 3)
    # Another process of the same replica.
    assert told.events[-1] == ("ready", 2)
    assert told.links[2].index == worker
    assert second in pids_of(pool)
    assert first not in pids_of(pool)


async def test_loss_is_reported_with_last_batch(
    told: Told,
) -> None:
    pool = await told.ready(Echo)
    link = told.links[0]
    told.send(0, "a")
    await told.until(lambda: told.count("answer") == 1)
    os.kill(pids_of(pool)[0], signal.SIGKILL)
    await told.until(lambda: told.count("lost") == 1)
    (exit,) = told.exits
    assert (exit.is_clean, exit.is_ours, exit.may_be_out_of_memory) == (False, False, True)
    assert (exit.taken, exit.begun) == (7, 7)
    link.send(Kind.ATOMS, 1, b"to a dead worker")
    link.fill(link.reserve(), [(Kind.ATOMS, 1, b"to a dead worker")])


async def test_parent_kill_is_not_out_of_memory(told: Told) -> None:
    pool = await told.ready(Echo)
    pool.kill(0)
    await told.until(lambda: told.count("lost") == 1)
    (exit,) = told.exits
    assert exit.text == "signal 9 (SIGKILL)"
    assert (exit.is_ours, exit.may_be_out_of_memory) == (True, False)


class SpeaksEarly:
    """Sends a frame of its own while it is loaded, by the only pipe that it can write into."""

    def __init__(self, kind: int, body: bytes) -> None:
        (ends,) = importlib.import_module("fast_batcher._worker.main")._kept_open
        os.write(ends[1].fileno(), pack_header(kind, len(body), 0, 0.0) + body)

    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.READY, b"x"),
        (Kind.ATOMS, pickling.dumps([1])),
    ],
)
async def test_worker_with_invalid_start_frame_is_killed(
    told: Told, caplog: pytest.LogCaptureFixture, kind: int, body: bytes
) -> None:
    told.open(SpeaksEarly, int(kind), body)
    await told.until(lambda: told.count("failed") == 1)
    ((_, error),) = told.events
    assert "ended with signal 9" in str(error)
    assert "tested: worker 0" in caplog.text
    assert "broke the protocol and is replaced" in caplog.text


async def test_failed_process_start_leaves_nothing(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture for every test sees that no descriptor is left."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(spawn, "_python_exe", b"/nowhere/python")
    pool = told.open(Echo)
    await told.until(lambda: told.count("failed") == 1)
    ((_, error),) = told.events
    assert "worker 0 could not be started: FileNotFoundError" in str(error)
    assert pids_of(pool) == []


async def test_frames_of_replaced_worker_are_dropped(
    told: Told, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However late the worker handles SIGTERM, it is not killed.
    monkeypatch.setattr(pools, "TERMINATE_GRACE", LIMIT)
    pool = await told.ready(Stuck, gate.path, "plainly", stop_timeout=LIMIT)
    told.send(0, "stuck")
    await gate.visit()
    pool.replace(0)
    await told.until(lambda: told.count("ready") == 2)
    assert told.events == [("ready", 0), ("lost", (0, "signal 15 (SIGTERM)")), ("ready", 1)]


async def test_an_atexit_hook_of_the_model_runs(told: Told, tmp_path: Any) -> None:
    path = tmp_path / "log"
    pool = await told.ready(WritesAtExit, str(path), stop_timeout=LIMIT)
    await pool.aclose()
    assert path.read_text() == "ended\n"
    assert told.events[-1] == ("lost", (0, "exit code 0"))
    assert told.exits[-1].is_clean


async def test_closing_does_not_wait_for_loading_worker(told: Told, gate: Gate) -> None:
    pool = told.open(NeverLoads, gate.path, stop_timeout=10 * LIMIT)
    visit = await gate.visit()
    with Watch([visit.pid]) as worker:
        async with asyncio.timeout(LIMIT):
            await pool.aclose()
        assert worker.survivors(0.0) == []
    assert told.events == []


async def test_stop_ends_the_wait_of_close(told: Told, gate: Gate) -> None:
    pool = await told.ready(Stuck, gate.path, "plainly", stop_timeout=10 * LIMIT)
    told.send(0, "stuck")
    await gate.visit()
    closing = asyncio.create_task(pool.aclose())
    await turns()
    pool.stop(0.0)
    async with asyncio.timeout(LIMIT):
        await closing


async def test_stopping_ends_workers_in_every_stage(told: Told, gate: Gate) -> None:
    pool = told.open(GatedOnLoad, gate.path, num_workers=2, stop_timeout=SOON)
    first, second = await gate.visit(), await gate.visit()
    first.let_on()
    await told.until(lambda: told.count("ready") == 1)
    with Watch([first.pid, second.pid]) as workers:
        pool.stop(SOON)
        assert workers.survivors(0.0) == []
    pool.stop(SOON)
    assert {event for event, _ in told.events[1:]} <= {"retired"}


async def test_stopped_pool_starts_nothing(told: Told) -> None:
    before = psutil.Process().children()
    pool = await told.ready(Echo)
    os.kill(pids_of(pool)[0], signal.SIGKILL)
    await told.until(lambda: told.count("lost") == 1)
    pool.stop(SOON)
    # The replacement would have been started by a thread, which has ended.
    assert psutil.Process().children() == before
    assert "fast_batcher-spawner-tested" not in {one.name for one in threading.enumerate()}


async def test_starter_thread_lives_as_long_as_workers(told: Told) -> None:
    """The kernel ends a worker when the thread that started it ends."""
    pool = await told.ready(Echo)
    (spawner,) = [one for one in threading.enumerate() if one.name == "fast_batcher-spawner-tested"]
    assert spawner.daemon
    assert pids_of(pool) == children_of(spawner)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "unknown exit status"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal 9 (SIGKILL)"),
        (-11, "signal 11 (SIGSEGV)"),
        (-15, "signal 15 (SIGTERM)"),
        (-63, "signal 63 (unknown)"),
    ],
)
def test_an_exit_in_words(code: int | None, text: str) -> None:
    assert describe_exit(code) == text
