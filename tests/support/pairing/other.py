"""A further API process of a shared batcher, which comes and goes during a run.

It writes "begun" once its batcher is open, and WRONG for an answer that is not its caller's. What
its calls get besides answers is judged in the first process alone.
"""

# A program: it prints.
# ruff: noqa: T201

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
from models import paired

from fast_batcher import DynBatcher
from fast_batcher.errors import BatcherError
from pairing.dimensions import ARRAYS, Case, make_options, model_of

# Numbers of its calls, which no call of the first process has.
FIRST = 5_000_000


def main(case: Case, seed: int, arguments: dict[str, Any]) -> None:
    """Make some calls, and close the batcher."""
    batcher: DynBatcher[Any, Any] = DynBatcher(
        model_of(case), model_kwargs=arguments, **make_options(case, seed)
    )
    # The first process may end or break the batcher meanwhile.
    with suppress(BatcherError, OSError):
        asyncio.run(use(batcher, case))


async def use(batcher: DynBatcher[Any, Any], case: Case) -> None:
    async with batcher:
        print("begun", flush=True)
        await asyncio.gather(*[call(batcher, case, FIRST + 100 * at) for at in range(4)])


async def call(batcher: DynBatcher[Any, Any], case: Case, first: int) -> None:
    for number in range(first, first + 20):
        value: Any = paired.Ticket((number, paired.PLAIN, 2))
        if case["model"] in ARRAYS:
            value = np.array([number, paired.PLAIN, 0], "int64")
        with suppress(BatcherError):
            output = await batcher.process_batched(value)
            last = output[-1] if type(output) is list else output
            told = paired.read(last)
            if told.number != number:
                print(f"WRONG {told}, expected number {number}", flush=True)
