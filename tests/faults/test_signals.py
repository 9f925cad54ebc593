"""SIGTERM that ends readiness first: handlers of this very process, put back after each test."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from models.base import Echo
from waits import LIMIT, until

from fast_batcher import ConfigurationError, DynBatcher
from fast_batcher._opening.life import call_on_sigterm

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
async def test_sigterm_ends_readiness_and_runs_previous_handler() -> None:
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


async def test_second_signal_ends_the_delay_of_the_first() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    called: list[None] = []
    loop = asyncio.get_running_loop()
    with call_on_sigterm(loop, lambda: called.append(None), "name", delay=LIMIT):
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: len(called) == 1)
        assert seen == []
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: len(called) == 2)
        assert seen == [signal.SIGTERM]


async def test_delayed_handler_is_called() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with call_on_sigterm(asyncio.get_running_loop(), lambda: None, "name", delay=0.001):
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: seen == [signal.SIGTERM])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lame_duck": 5}, "lame_duck=5: it has no effect without drain_on_sigterm"),
        ({"lame_duck": -1, "drain_on_sigterm": True}, "lame_duck=-1: give seconds"),
    ],
)
def test_invalid_lame_duck_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DynBatcher(Echo).lifespan(**options)


async def test_foreign_signal_handler_stays() -> None:
    other = signal.Handlers.SIG_IGN
    with call_on_sigterm(asyncio.get_running_loop(), lambda: None, "name"):
        signal.signal(signal.SIGTERM, other)
    assert signal.getsignal(signal.SIGTERM) is other


async def test_callback_runs_for_previously_ignored_signal() -> None:
    called = asyncio.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with call_on_sigterm(asyncio.get_running_loop(), called.set, "name"):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(LIMIT):
            await called.wait()


@pytest.mark.slow
def test_drain_on_sigterm_works_with_test_client(caplog: pytest.LogCaptureFixture) -> None:
    """It runs the lifespan in a thread, where no signal handler can be set."""
    before = signal.getsignal(signal.SIGTERM)
    batcher = DynBatcher(Echo)
    app = FastAPI(lifespan=batcher.lifespan(drain_on_sigterm=True))

    @app.get("/")
    async def echo(value: str) -> str:
        output: str = await batcher.process_batched(value)
        return output

    with TestClient(app) as client:
        assert client.get("/", params={"value": "served"}).json() == "served"
        assert signal.getsignal(signal.SIGTERM) is before
    assert batcher.state == "closed"
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.startswith("Echo: drain_on_sigterm=True has no effect")
    assert "SIGTERM will not end readiness" in warning
