"""Context variables: a callback of the session sees those of no caller, and keeps none alive."""

import asyncio
import gc
import logging
import os
import signal
import time
import weakref
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest
from models.base import Echo
from models.ordinary import Whereabouts
from waits import both_loops, call, until

from fast_batcher import DynBatcher
from fast_batcher._process import SLOW

pytestmark = [pytest.mark.anyio, pytest.mark.slow, both_loops]

caller: ContextVar[Any] = ContextVar("caller", default=None)


class Value:
    """A value of a context variable; a weak reference tells whether a context still has it."""


async def test_functions_see_context_of_their_caller(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, Any, Any]] = []

    def cost(value: Any) -> float:
        seen.append(("cost", value, caller.get()))
        if value == 7:
            time.sleep(1.5 * SLOW)  # the log names it
        return 1.0

    def group_by(value: Any) -> Any:
        seen.append(("group_by", value, caller.get()))
        return value

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            record.caller = caller.get()
        return True

    caplog.handler.addFilter(note)
    # The first caller opens it.
    batcher = DynBatcher(Whereabouts, cost=cost, group_by=group_by, auto_open=True)

    async def ask(value: int) -> int:
        caller.set(value)
        return await batcher.process_batched(value)

    def ask_in_thread(value: int) -> int:
        caller.set(value)
        return batcher.submit(value).result()

    try:
        pids = await asyncio.gather(*map(ask, range(20)))
        await asyncio.to_thread(ask_in_thread, 20)
        assert seen == [
            (name, value, value) for value in range(21) for name in ("cost", "group_by")
        ]
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: batcher.stats.restarts == 1)
    finally:
        await batcher.aclose()
    found = [
        (record.caller, record.getMessage())
        for record in caplog.records
        if hasattr(record, "caller")
    ]
    assert [one for one, _ in found] == [7, None]
    assert "took" in found[0][1]
    assert "SIGKILL" in found[1][1]


async def test_no_context_of_a_caller_outlives_its_call() -> None:
    batcher = DynBatcher(Echo, 4, max_latency=60.0)
    values: list[weakref.ref[Value]] = []

    async def ask(payload: Any) -> None:
        value = Value()
        values.append(weakref.ref(value))
        caller.set(value)
        await batcher.process_batched(payload, timeout=60.0)

    def in_own_context(payload: Any) -> "asyncio.Task[None]":
        return copy_context().run(asyncio.create_task, ask(payload))

    try:
        # The first opens the batcher; the large ones start the copier and fill the pipe.
        for payloads in (["first"], ["small"] * 9, [np.zeros(2**21)] * 6, [b"x" * 2**18] * 6):
            await asyncio.gather(*map(in_own_context, payloads))
        task = call(batcher, "traffic")
        await asyncio.sleep(0)
        gc.collect()
        assert [one() for one in values] == [None] * 22
        await task
    finally:
        await batcher.aclose()
