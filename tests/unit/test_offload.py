"""Work beside the loop: where it runs, what becomes of it, and what is kept of it."""

import asyncio
import threading
from typing import Any

import pytest
from waits import LIMIT, outcome, until

from fast_batcher._opening.offload import offload

pytestmark = pytest.mark.anyio


async def test_loop_runs_during_offloaded_work() -> None:
    begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(LIMIT)
        has_ended.set()

    before = set(threading.enumerate())
    waiting = asyncio.create_task(offload(True, work))
    await until(begun.is_set)
    (thread,) = set(threading.enumerate()) - before
    waiting.cancel()
    assert isinstance(await outcome(waiting), asyncio.CancelledError)
    assert not has_ended.is_set()
    may_end.set()
    thread.join(LIMIT)
    assert has_ended.is_set()


async def test_offload_without_threads_runs_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert await offload(True, threading.get_ident) == threading.get_ident()
