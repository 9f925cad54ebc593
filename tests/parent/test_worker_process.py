"""The parent's half of one real worker: started, talked to, ended, and seen to be dead."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sample_models import Closes, Echo, ExitsOnLoad, Forks, Gated, TalksNonsense
from waits import LIMIT, Gate, Watch

from fast_batcher._parent.worker_process import WorkerProcess, describe_exit
from fast_batcher._transport import codec
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.model_spec import check_model
from fast_batcher.settings import Settings

pytestmark = pytest.mark.anyio

SETTINGS = Settings()


class Owner:
    """Starts workers on a thread that lives as long as they do, and remembers what they say."""

    def __init__(self) -> None:
        self.frames: list[tuple[Kind, Any]] = []
        self.exits: list[WorkerProcess] = []
        self._changed = asyncio.Event()
        self._handles: list[WorkerProcess] = []
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def frame_arrived(self, handle: WorkerProcess, frame: Frame) -> None:
        self.frames.append((frame.kind, codec.loads(frame.body) if len(frame.body) else None))
        self._changed.set()

    def worker_exited(self, handle: WorkerProcess) -> None:
        self.exits.append(handle)
        self._changed.set()

    async def spawn(self, model: Any, *args: Any) -> WorkerProcess:
        """Start a worker and watch it."""
        spec = check_model(model, args, None, SETTINGS.max_frame_bytes)
        handle = WorkerProcess(0, 0, spec, SETTINGS, None, self)
        is_started = threading.Event()

        def work() -> None:
            handle.spawn()
            is_started.set()
            # The kernel ends the worker when this thread ends.
            self._is_over.wait()

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()
        assert is_started.wait(LIMIT)
        self._handles.append(handle)
        handle.attach(asyncio.get_running_loop())
        return handle

    async def ready(self, model: Any, *args: Any) -> WorkerProcess:
        """The same, and wait until it is ready."""
        handle = await self.spawn(model, *args)
        await self.until(lambda: (Kind.READY, None) in self.frames)
        self.frames.clear()
        return handle

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until what was told makes this true."""
        async with asyncio.timeout(LIMIT):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def exit_of(self, handle: WorkerProcess) -> str:
        """Wait for its end; how it ended."""
        await self.until(lambda: handle in self.exits)
        assert not handle.is_alive
        assert handle.death_fd == -1
        return handle.exit_text

    async def close(self) -> None:
        for handle in self._handles:
            if handle.is_alive:
                handle.kill()
                await self.exit_of(handle)
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    owner = Owner()
    yield owner
    await owner.close()


async def test_a_worker_loads_answers_and_ends_when_it_is_asked_to(owner: Owner) -> None:
    handle = await owner.spawn(Echo)
    assert handle.is_alive
    assert handle.is_attached
    await owner.until(lambda: owner.frames == [(Kind.READY, None)])
    handle.send(Kind.INPUT_ATOMS, 1, codec.dumps(["a"]))
    handle.ask_to_end()
    assert await owner.exit_of(handle) == "exit code 0"
    # What it said before its end has all been told before its end was.
    assert owner.frames[1:] == [(Kind.OUTPUT_ATOMS, ["a"])]
    assert owner.exits == [handle]


async def test_a_killed_worker_is_told_once(owner: Owner) -> None:
    handle = await owner.ready(Echo)
    assert handle.pid is not None
    os.kill(handle.pid, signal.SIGKILL)
    assert await owner.exit_of(handle) == "signal 9 (SIGKILL, possibly out of memory)"
    handle.kill()
    handle.signal(signal.SIGTERM)
    handle.reap()
    handle.send(Kind.INPUT_ATOMS, 1, b"to nobody")
    assert owner.exits == [handle]


async def test_frames_may_be_delivered_to_somebody_else(owner: Owner) -> None:
    handle = await owner.ready(Echo)
    delivered: list[Any] = []

    def take(frame: Frame) -> None:
        delivered.append(codec.loads(frame.body))
        handle.kill()

    handle.deliver_to(take)
    handle.send(Kind.INPUT_ATOMS, 1, codec.dumps(["a"]))
    await owner.exit_of(handle)
    assert delivered == [["a"]]
    assert owner.frames == []


async def test_what_an_ignored_worker_says_is_dropped(owner: Owner, gate: Gate) -> None:
    handle = await owner.ready(Gated, gate.path)
    handle.send(Kind.INPUT_ATOMS, 1, codec.dumps(["a"]))
    visit = await gate.visit()
    handle.ignore()
    handle.ask_to_end()
    visit.let_on()
    assert await owner.exit_of(handle) == "exit code 0"
    assert owner.frames == []


async def test_a_disconnected_worker_finishes_its_batch_and_ends(
    owner: Owner, gate: Gate, tmp_path: Any
) -> None:
    path = tmp_path / "log"
    handle = await owner.ready(Closes, str(path))
    handle.disconnect()
    assert await owner.exit_of(handle) == "exit code 0"
    assert path.read_text() == "closed\n"


async def test_a_worker_that_talks_nonsense_is_killed(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await owner.ready(TalksNonsense)
    handle.send(Kind.INPUT_ATOMS, 1, codec.dumps([b"nonsense" * 10]))
    assert (await owner.exit_of(handle)).startswith("signal 9")
    assert "worker 0" in caplog.text
    assert "not a message of ours" in caplog.text


async def test_a_worker_that_exits_while_it_loads(owner: Owner) -> None:
    handle = await owner.spawn(ExitsOnLoad, "exit 3")
    assert await owner.exit_of(handle) == "exit code 3"
    assert owner.frames == []


async def test_a_death_is_noticed_though_a_child_holds_the_pipe_open(
    owner: Owner, gate: Gate
) -> None:
    handle = await owner.ready(Forks, gate.path)
    handle.send(Kind.INPUT_ATOMS, 1, codec.dumps([None]))
    visit = await gate.visit()
    with Watch([visit.note]) as child:
        os.kill(visit.pid, signal.SIGKILL)
        assert (await owner.exit_of(handle)).startswith("signal 9")
        assert child.survivors(0.0) == [visit.note]
        os.kill(visit.note, signal.SIGKILL)


async def test_a_spawn_that_fails_leaves_nothing(owner: Owner) -> None:
    spec = check_model(Echo, (), None, SETTINGS.max_frame_bytes)
    handle = WorkerProcess(0, 0, spec, SETTINGS, None, owner)
    handle.kill()
    handle.reap()
    assert not handle.is_alive
    assert handle.pid is None


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
