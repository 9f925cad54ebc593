"""`explain` with a real worker, whose model has a known time."""

import asyncio

import pytest
from models.ordinary import Timed
from waits import LIMIT

from fast_batcher import DynBatcher

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize(
    ("fixed", "each", "warm", "advice"),
    [
        (0.0, 0.1, True, "larger batches would not help"),
        (0.1, 0.0, True, "max_batch_size=8 is predicted to raise the capacity"),
        (0.0, 0.02, False, "no other size than 4 was measured"),
    ],
    ids=["linear", "fixed", "unknown"],
)
async def test_advice_is_true_for_a_real_model(
    fixed: float, each: float, warm: bool, advice: str
) -> None:
    async with DynBatcher(Timed, 4, model_args=(fixed, each), model_kwargs={"warm": warm}) as own:
        async with asyncio.timeout(LIMIT):
            # A stall of the machine looks like idleness, until it has become a small share.
            while True:
                await own.process_many([*range(24)])
                found = own.explain()
                if (found.cause, found.advice[: len(advice)]) == ("max_batch_size", advice):
                    break
