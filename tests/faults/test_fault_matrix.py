"""Every place where the user's code runs, and every way in which it can go wrong there.

Each call ends within ten seconds with the error that is meant for it, the others of its batch are
answered, and the next call works.
"""

import asyncio
from typing import Any

import psutil
import pytest
from models.crashing import HOWS, Bomb, Minefield
from openings import pids_of
from waits import LIMIT, SOON_IN_WORKER, assert_balance, call, measured, outcome

from fast_batcher import (
    BatcherError,
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    PoisonRequestError,
    UnsendableValueError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

# In the worker its process may end or hang; in this process that is the program's own affair.
IN_WORKER = list(HOWS)
HERE = ["raise", "BaseException"]
CASES = [
    *(("dump task", how) for how in HERE),
    *(("load task", how) for how in IN_WORKER),
    *(("infer", how) for how in IN_WORKER),
    *(("dump result", how) for how in IN_WORKER),
    *(("load result", how) for how in HERE),
]


# What the error of the caller says, besides "boom".
TEXTS = {
    "dump task": "send plain data instead",
    "dump result": "cannot be pickled",
    "load result": "cannot be unpickled",
}


def expected(where: str, how: str) -> type[BatcherError]:
    if how in ("crash", "exit"):
        return PoisonRequestError
    if how == "hang":
        return DeadlineExceededError
    return UnsendableValueError if where == "dump task" else InferenceError


@pytest.mark.parametrize(("where", "how"), CASES)
async def test_faulty_call_fails_alone_with_its_error(where: str, how: str) -> None:
    settings: dict[str, Any] = {"infer_timeout": SOON_IN_WORKER, "stop_timeout": 0.2}
    async with DynBatcher(Minefield, 4, **settings) as batcher:
        with measured(10.0, f"{where} x {how}"):
            calls = [call(batcher, value) for value in ("first", Bomb(where, how), "last")]
            async with asyncio.timeout(LIMIT):
                first, bomb, last = [await outcome(task) for task in calls]
            assert type(bomb) is expected(where, how) or isinstance(bomb, expected(where, how))
            if how == "hang":  # which input is to blame is unknown
                assert isinstance(first, DeadlineExceededError)
                assert isinstance(last, DeadlineExceededError)
            else:
                assert (first, last) == ("first", "last")
            if how in HERE:
                assert "boom" in f"{bomb}{bomb.__cause__}"
                assert TEXTS.get(where, "") in str(bomb)
                lone = await outcome(call(batcher, Bomb(where, how)))
                assert isinstance(lone, expected(where, how))
                assert batcher.stats.restarts == 0
            assert await batcher.process_batched("next") == "next"
        stats = assert_balance(batcher)
        assert (stats.waiting, stats.running) == (0, 0)


@pytest.mark.parametrize("how", IN_WORKER)
async def test_error_in_close_leaves_no_process(
    how: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with measured(10.0, f"close x {how}"):
        async with asyncio.timeout(LIMIT):
            settings: dict[str, Any] = {"stop_timeout": 0.2}
            async with DynBatcher(Minefield, model_args=("close", how), **settings) as batcher:
                assert await batcher.process_batched("first") == "first"
                pids = pids_of(batcher)
    assert not any(map(psutil.pid_exists, pids))
    assert how not in HERE or "boom" in caplog.text + capfd.readouterr().err
