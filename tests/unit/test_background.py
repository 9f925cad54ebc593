"""The thread beside an event loop: its jobs, their order, whom it tells, and its end."""

import asyncio
import threading

import pytest
from waits import LIMIT, turns

from fast_batcher._parent.staging import MemoryService
from fast_batcher._shared_memory.inputs import Slabs

pytestmark = pytest.mark.anyio


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
