"""The shared memory of one opening and the thread that copies: how both begin and end."""

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from waits import LIMIT, turns

from fast_batcher._parent.memory_service import MemoryService
from fast_batcher._shared_memory.slabs import Slabs

pytestmark = pytest.mark.anyio

MEBI = 2**20


@pytest.fixture
async def memory() -> AsyncIterator[MemoryService]:
    memory = MemoryService(asyncio.get_running_loop(), 16 * MEBI, "tested")
    yield memory
    memory.close()


def slabs_of(memory: MemoryService) -> Slabs:
    assert isinstance(memory.slabs, Slabs)
    return memory.slabs


@contextmanager
def held(memory: MemoryService) -> Iterator[None]:
    """Nothing is done on the copier thread meanwhile."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        is_over.wait(LIMIT)

    memory.run_in_thread(hold, lambda _: None)
    assert is_held.wait(LIMIT)
    try:
        yield
    finally:
        is_over.set()


async def test_there_are_no_slabs_if_the_settings_want_none() -> None:
    memory = MemoryService(asyncio.get_running_loop(), 0, "tested")
    assert memory.slabs is None
    memory.give_back_unused()
    await memory.aclose()
    memory.close()


async def test_that_there_is_no_memory_is_an_error_that_is_kept() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBI, before[1]))
    try:
        memory = MemoryService(asyncio.get_running_loop(), 16 * MEBI, "tested")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(memory.slabs, OSError)
    assert memory.slabs.__traceback__ is None
    memory.give_back_unused()
    await memory.aclose()
    memory.close()


async def test_closing_gives_the_slabs_back_and_may_be_repeated(memory: MemoryService) -> None:
    async with asyncio.timeout(LIMIT):
        await memory.aclose()
        assert slabs_of(memory).is_closed
        await memory.aclose()
    memory.close()
    memory.close()


async def test_closing_at_once_ends_the_wait_of_another_closing(memory: MemoryService) -> None:
    """`stop` comes while `aclose` waits for the copier thread."""
    with held(memory):
        closing = asyncio.create_task(memory.aclose())
        await turns()
        assert not slabs_of(memory).is_closed
    memory.close()
    async with asyncio.timeout(LIMIT):
        await closing
    assert slabs_of(memory).is_closed


async def test_the_copier_thread_lives_until_the_memory_is_closed(memory: MemoryService) -> None:
    names: list[str] = []
    is_over = asyncio.Event()
    memory.run_in_thread(
        lambda: names.append(threading.current_thread().name), lambda _: is_over.set()
    )
    await asyncio.wait_for(is_over.wait(), LIMIT)
    assert names == ["fast_batcher-copier-tested"]
    memory.close()
    assert names[0] not in {thread.name for thread in threading.enumerate()}
