"""Tables and other return values whose iteration does not give one output per input."""

import asyncio
from typing import Any

import pytest
from models.returning import (
    FinishesUneven,
    MethodReturnsUneven,
    PreparesUneven,
    ReturnsUneven,
    StacksUneven,
    StacksUnevenFeature,
)
from tables import UNEVEN
from waits import assert_balance

from fast_batcher import DynBatcher, OutputMismatchError

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize(
    "model",
    [
        ReturnsUneven,
        PreparesUneven,
        FinishesUneven,
        MethodReturnsUneven,
        StacksUneven,
        StacksUnevenFeature,
    ],
)
async def test_uneven_outputs_fail_their_batch_and_no_worker(model: Any) -> None:
    async with DynBatcher(model, 2) as batcher:
        is_method = model is MethodReturnsUneven
        process = batcher.methods.method.process_batched if is_method else batcher.process_batched
        collates = issubclass(model, StacksUneven)
        for name, (_, message) in UNEVEN.items():
            if collates and name == "named tuple":  # a structure of features
                continue
            calls = process(name), process(name)
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, OutputMismatchError), (name, error)
                assert not collates or name == "table" or "for 2 inputs" in str(error)
                if not collates or name == "table":
                    with pytest.raises(OutputMismatchError, match=message):
                        raise error
        answer = await process("good")
        assert answer in ("good", {"good": "good", "uneven": "good"})
        assert batcher.stats.restarts == 0
        assert_balance(batcher)
