"""Part `processes`: several workers on one device, without and with NVIDIA's MPS.

The model is small, so that one worker leaves the GPU idle between kernels. MPS lets kernels of
several processes run at the same time.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.part import Run
from fast_batcher import DynBatcher
from fast_batcher.errors import BatcherError

TABLE = "processes"
MODEL = "benchmarks.gpu.models:EncoderModel"
# A worker imports PyTorch and starts CUDA. A client of a broken daemon waits for ever.
START_LIMIT = 40.0
BATCH_SIZE, TOKENS, TEXTS = 8, 32, 64

Batcher = DynBatcher[Any, Any]


def measure(run: Run) -> None:
    """Open all batchers, then let them take turns."""
    asyncio.run(_measure(run))


async def _measure(run: Run) -> None:
    kwargs = {"dtype": run.dtype, "hidden": run.pick(384, 64), "layers": run.pick(12, 2)}
    counts = run.pick((1, 2, 3), (1, 2))
    callers = 4 * max(counts) * BATCH_SIZE
    shape = f"{kwargs['layers']} layers of {kwargs['hidden']}, {run.dtype}, {TOKENS} tokens"
    run.title(TABLE, f"Encoder, {shape}, batches of {BATCH_SIZE}, {callers} callers")
    texts = [np.full(TOKENS, 1 + index) for index in range(TEXTS)]
    async with AsyncExitStack() as stack:

        async def open_all(ways: Mapping[str, dict[str, Any]]) -> dict[str, Batcher]:
            batchers = {
                name: Batcher(
                    MODEL,
                    BATCH_SIZE,
                    devices=run.device,
                    model_kwargs=kwargs,
                    start_timeout=START_LIMIT,
                    # At its time limit the part has to end quickly, with its daemon.
                    drain_timeout=1.0,
                    name=name,
                    **options,
                )
                for name, options in ways.items()
            }
            entered = map(stack.enter_async_context, batchers.values())
            # All of them, so that none is still starting when the measurements begin.
            outcomes = await asyncio.gather(*entered, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            return batchers

        plain = {
            f"{count} worker{'s' * (count > 1)}": {"workers_per_device": count} for count in counts
        }
        systems = await open_all(plain)
        if run.is_gpu:
            # One worker has nobody to share the GPU with.
            shared = {f"{name}, MPS": {**plain[name], "mps": True} for name in [*plain][1:]}
            try:
                systems |= await open_all(shared)
            except BatcherError as error:
                run.note(f"processes: no rows with MPS: {error!s:.300}")
        else:
            run.note("processes: no rows with MPS: there is no GPU")
        for batcher in systems.values():
            await run.closed_loop(partial(_ask, batcher), texts, callers)
        for repetition, (name, batcher) in run.take_turns([*systems.items()]):
            figures = await run.closed_loop(partial(_ask, batcher), texts, callers)
            run.tell(TABLE, name, repetition, figures)


async def _ask(batcher: Batcher, text: NDArray[np.int64]) -> bool:
    first, tokens, _ = await batcher.process_batched(text)
    return bool((first, tokens) == (text[0], TOKENS))
