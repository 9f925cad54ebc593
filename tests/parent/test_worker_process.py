"""The parent's half of one real worker: started, talked to, ended, and seen to be dead."""

import asyncio
import importlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from multiprocessing import spawn
from typing import Any

import pytest
from sample_models import Echo, Gated
from waits import LIMIT, Gate

from fast_batcher._parent.worker import Exit, WorkerHandle, WorkerState
from fast_batcher._parent.worker_process import WorkerProcess, describe_exit
from fast_batcher._transport import codec
from fast_batcher._transport.frames import Frame, Kind, pack_header
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model_spec import check_model
from fast_batcher.settings import Settings

pytestmark = pytest.mark.anyio

SETTINGS = Settings()


class Owner:
    """Starts workers on a thread that lives as long as they do, and remembers what they tell."""

    def __init__(self) -> None:
        self.ready: list[WorkerHandle] = []
        self.start_errors: list[WorkerStartupError] = []
        self.frames: list[tuple[Kind, Any]] = []
        self.exits: list[Exit] = []
        self._changed = asyncio.Event()
        self._workers: list[WorkerProcess] = []
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def worker_loaded(self, worker: WorkerHandle, times: list[tuple[int, float]]) -> None:
        self.ready.append(worker)
        self._changed.set()

    def start_failed(self, worker: WorkerHandle, error: WorkerStartupError) -> None:
        self.start_errors.append(error)
        self._changed.set()

    def worker_exited(self, worker: WorkerHandle, exit: Exit) -> None:
        self.exits.append(exit)
        self._changed.set()

    def _frame_arrived(self, worker_id: int, frame: Frame) -> None:
        self.frames.append((frame.kind, codec.loads(frame.body)))
        self._changed.set()

    def make(self, model: Any, *args: Any) -> WorkerProcess:
        spec = check_model(model, args, None, SETTINGS.max_frame_bytes)
        return WorkerProcess(0, 0, spec, SETTINGS, None, self, self._frame_arrived, "tested")

    async def spawn(self, model: Any, *args: Any) -> WorkerProcess:
        """Start a worker and watch it."""
        worker = self.make(model, *args)
        is_started = threading.Event()

        def work() -> None:
            worker.spawn()
            is_started.set()
            # The kernel ends the worker when this thread ends.
            self._is_over.wait()

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()
        assert is_started.wait(LIMIT)
        self._workers.append(worker)
        worker.attach(asyncio.get_running_loop())
        return worker

    async def load(self, model: Any, *args: Any) -> WorkerProcess:
        """Start a worker, and wait until it is ready."""
        worker = await self.spawn(model, *args)
        await self.until(lambda: self.ready == [worker])
        return worker

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until what was told makes this true."""
        async with asyncio.timeout(LIMIT):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def exit_of(self, worker: WorkerProcess) -> str:
        """Wait for its end; how it ended."""
        await self.until(lambda: bool(self.exits))
        assert not worker.is_alive
        assert worker.death_fd == -1
        return self.exits[-1].text

    async def close(self) -> None:
        for worker in self._workers:
            if worker.is_alive:
                worker.kill()
                await self.exit_of(worker)
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    owner = Owner()
    yield owner
    await owner.close()


async def test_a_worker_loads_answers_and_ends_when_it_is_asked_to(owner: Owner) -> None:
    worker = await owner.spawn(Echo)
    assert worker.is_alive
    states = [worker.state]
    await owner.until(lambda: owner.ready == [worker])
    assert [*states, worker.state] == [WorkerState.LOADING, WorkerState.READY]
    worker.send(Kind.INPUT_ATOMS, 1, codec.dumps(["a"]))
    worker.ask_to_end()
    assert await owner.exit_of(worker) == "exit code 0"
    # What it said before its end was told before its end.
    assert owner.frames == [(Kind.OUTPUT_ATOMS, ["a"])]
    (exit,) = owner.exits
    assert (exit.is_clean, exit.taken, exit.begun) == (True, 1, 1)


async def test_a_killed_worker_is_told_once(owner: Owner) -> None:
    worker = await owner.load(Echo)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert await owner.exit_of(worker) == "signal 9 (SIGKILL, possibly out of memory)"
    worker.kill()
    worker.signal(signal.SIGTERM)
    assert worker.reap() is None
    worker.send(Kind.INPUT_ATOMS, 1, b"to a dead worker")
    worker.fill(worker.reserve(), [(Kind.INPUT_ATOMS, 1, b"to a dead worker")])
    (exit,) = owner.exits
    assert (exit.is_ours, exit.may_be_out_of_memory) == (False, True)


async def test_a_worker_that_the_parent_kills_was_not_out_of_memory(owner: Owner) -> None:
    worker = await owner.load(Echo)
    worker.kill()
    assert (await owner.exit_of(worker)).startswith("signal 9")
    (exit,) = owner.exits
    assert (exit.is_ours, exit.may_be_out_of_memory) == (True, False)


async def test_what_an_ending_worker_says_is_dropped(owner: Owner, gate: Gate) -> None:
    worker = await owner.load(Gated, gate.path)
    worker.send(Kind.INPUT_ATOMS, 1, codec.dumps(["a"]))
    visit = await gate.visit()
    worker.ignore()
    worker.ask_to_end()
    visit.let_on()
    assert await owner.exit_of(worker) == "exit code 0"
    assert owner.frames == []


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
        (Kind.OUTPUT_ATOMS, codec.dumps([1])),
    ],
)
async def test_a_worker_that_says_something_else_than_how_its_start_went_is_killed(
    owner: Owner, caplog: pytest.LogCaptureFixture, kind: Kind, body: bytes
) -> None:
    worker = await owner.spawn(SpeaksEarly, int(kind), body)
    assert (await owner.exit_of(worker)).startswith("signal 9")
    assert owner.ready == []
    assert "tested: worker 0" in caplog.text


async def test_a_start_that_fails_leaves_nothing(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture for every test sees that no descriptor is left."""
    worker = owner.make(Echo)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(spawn, "_python_exe", b"/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        worker.spawn()
    worker.kill()
    assert worker.reap() is None
    assert not worker.is_alive
    assert worker.pid is None


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "unknown exit status"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal 9 (SIGKILL, possibly out of memory)"),
        (-11, "signal 11 (SIGSEGV)"),
        (-15, "signal 15 (SIGTERM)"),
        (-63, "signal 63 (unknown)"),
    ],
)
def test_an_exit_in_words(code: int | None, text: str) -> None:
    assert describe_exit(code) == text
