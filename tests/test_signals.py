"""SIGTERM that ends readiness first: handlers of this very process, put back after each test."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from sample_models import Echo
from waits import LIMIT, until

from fast_batcher import ConfigurationError, DynBatcher
from fast_batcher._signals import call_on_sigterm

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


async def test_sigterm_ends_readiness_and_the_handler_before_runs_too() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    server = signal.getsignal(signal.SIGTERM)
    batcher = DynBatcher(Echo)
    async with batcher.lifespan(drain_on_sigterm=True)(None):
        was_ready = batcher.is_ready
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: not batcher.is_ready)
        assert was_ready
        assert [*seen] == [signal.SIGTERM]
        # Requests that the server has accepted may call only now.
        assert await batcher.process_batched("late") == "late"
        assert await batcher.process_many(range(100)) == [*range(100)]
    assert signal.getsignal(signal.SIGTERM) is server


async def test_a_handler_that_somebody_else_has_set_meanwhile_stays() -> None:
    other = signal.Handlers.SIG_IGN
    with call_on_sigterm(asyncio.get_running_loop(), lambda: None):
        signal.signal(signal.SIGTERM, other)
    assert signal.getsignal(signal.SIGTERM) is other


async def test_an_ignored_signal_stays_without_effect_on_the_program() -> None:
    called = asyncio.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with call_on_sigterm(asyncio.get_running_loop(), called.set):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(LIMIT):
            await called.wait()


async def test_in_another_thread_it_is_refused() -> None:
    loop = asyncio.get_running_loop()
    caught: list[BaseException] = []

    def try_it() -> None:
        try:
            with call_on_sigterm(loop, lambda: None):
                pass
        except ConfigurationError as error:
            caught.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
