"""Deadlines and what is learned survive a clock that a test tool freezes and sets back."""

import time

import freezegun
import pytest
from models.ordinary import Gated
from waits import SOON, Gate, assert_balance, call, outcome

from fast_batcher import DeadlineExceededError, DynBatcher
from fast_batcher._process import monotonic

# It would look at every name of every module that other tests have loaded, for 20 seconds.
freezegun.configure(extend_ignore_list=["torch", "transformers", "sympy", "scipy", "sklearn"])

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def test_clock_is_not_frozen_by_test_tools() -> None:
    before = time.monotonic()
    now = monotonic()
    assert before <= now <= time.monotonic()
    with freezegun.freeze_time("2030-01-01"):
        assert time.monotonic() > 1e9
        assert now <= monotonic() < 1e9
    assert now <= monotonic() < 1e9


async def test_a_deadline_passes_while_a_test_freezes_time(gate: Gate) -> None:
    """But not the clock of the loop, on which the test itself would hang."""
    async with DynBatcher(Gated, model_args=(gate.path,)) as batcher:
        with freezegun.freeze_time("2030-01-01", real_asyncio=True):
            running = call(batcher, "running", timeout=SOON)
            visit = await gate.visit()
            with pytest.raises(DeadlineExceededError):
                await batcher.process_batched("waiting", timeout=SOON)
            assert isinstance(await outcome(running), DeadlineExceededError)
        visit.let_on()
        gate.close()
        assert await batcher.process_batched("next") == "next"
        assert_balance(batcher)
