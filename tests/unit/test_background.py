"""The thread beside an event loop: its jobs, their order, whom it tells, and its end."""

import asyncio
import threading

import pytest
from waits import LIMIT, turns

from fast_batcher._parent.staging import JobThread, MemoryService
from fast_batcher._shared_memory.inputs import Slabs

pytestmark = pytest.mark.anyio


class Told:
    """Reports of a thread to an event loop."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self.has_come = asyncio.Event()

    def done(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self.has_come.set()


def fail() -> None:
    raise SystemExit(3)


async def test_jobs_run_in_order_and_report_errors() -> None:
    thread, told, order = JobThread(asyncio.get_running_loop(), "tested"), Told(), list[int]()
    last = Told()
    thread.run(lambda: order.append(1), told.done)
    thread.run(fail, told.done)
    thread.run(lambda: order.append(2), last.done)
    await asyncio.wait_for(last.has_come.wait(), LIMIT)
    thread.stop()
    assert order == [1, 2]
    none, error = told.errors
    assert none is None
    assert isinstance(error, SystemExit)
    # Its frames would hold what the job used.
    assert error.__traceback__ is None


def test_jobs_go_on_after_their_loop_is_closed() -> None:
    loop = asyncio.new_event_loop()
    thread, has_begun_next = JobThread(loop, "tested"), threading.Event()
    loop.close()
    told: list[BaseException | None] = []
    thread.run(lambda: None, told.append)
    thread.run(has_begun_next.set, told.append)
    assert has_begun_next.wait(LIMIT)
    thread.stop()
    assert told == []


def assert_set(event: threading.Event) -> None:
    assert event.wait(LIMIT)


async def test_immediate_close_ends_the_wait_for_memory() -> None:
    """`stop` comes while `aclose` waits for the copier thread."""
    memory = MemoryService(asyncio.get_running_loop(), 2**24, "tested")
    assert isinstance(memory.slabs, Slabs)
    is_over = threading.Event()
    memory.run_in_thread(lambda: assert_set(is_over), lambda _: None)
    closing = asyncio.create_task(memory.aclose())
    await turns()
    assert memory.slabs._fd != -1
    is_over.set()
    memory.close()
    await asyncio.wait_for(closing, LIMIT)
    assert memory.slabs._fd == -1
    await memory.aclose()
    memory.close()
