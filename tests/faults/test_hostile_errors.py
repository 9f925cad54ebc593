"""Exceptions of models whose own attributes raise: they fail their calls, and end no worker."""

import asyncio
from typing import Any

import pytest
from models.raising import FinishesHostile, RaisesHostile
from waits import assert_balance

from fast_batcher import DynBatcher, InferenceError

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize("model", [RaisesHostile, FinishesHostile])
async def test_hostile_errors_end_no_worker(model: Any) -> None:
    """Fault F26."""
    async with DynBatcher(model, 4) as batcher:
        values = [f"{how} {seed}" for seed in range(100) for how in ("raise", "return")]
        for value in values:
            calls = [batcher.process_batched(one) for one in ("good", value)]
            good, bad = await asyncio.gather(*calls, return_exceptions=True)
            assert issubclass(type(bad), InferenceError), (value, type(bad))
            assert good == "good", value
        assert batcher.stats.restarts == 0
        assert_balance(batcher)
