"""Part `lengths`: texts of log-normal lengths, in order of arrival and packed by cost.

They are compared with a bare loop over full batches of sorted texts. No server can form these,
because it does not know the later texts. A server can be faster where smaller batches with less
padding take less time.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.gpu.models import LONGEST, EncoderModel, is_own, make_texts
from benchmarks.gpu.part import SEED, Figures, Run
from benchmarks.simulation.loads import draw_lengths
from fast_batcher import DynBatcher

TABLE = "lengths"
MODEL = "benchmarks.gpu.models:EncoderModel"
# Model and options of the batchers that are compared. A further way to form or compute batches is a
# further entry.
BATCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "FIFO": (MODEL, {}),
    "packed": (MODEL, {"cost": len}),
}
SORTED, IN_ORDER = "bare loop, sorted", "bare loop, in order"
# Closed loops before the first repetition: a packer learns the times of about 200 batches.
WARM_UPS = 2


def measure(run: Run) -> None:
    """Open all batchers, then let the systems take turns."""
    asyncio.run(_measure(run))


async def _measure(run: Run) -> None:
    size = run.pick(32, 8)
    kwargs: dict[str, Any] = {
        "dtype": run.dtype,
        "hidden": run.pick(768, 64),
        "layers": run.pick(6, 2),
    }
    lengths = draw_lengths("log-normal", run.pick(2048, 64), LONGEST, SEED)
    texts = make_texts([int(length) for length in lengths])
    callers = 8 * size
    shape = f"{kwargs['layers']} layers of {kwargs['hidden']}, {run.dtype}"
    run.title(TABLE, f"Encoder, {shape}, batches of {size}, {callers} callers, log-normal lengths")
    EncoderModel.device = run.device
    bare = EncoderModel(**kwargs)
    in_order = [texts[at : at + size] for at in range(0, len(texts), size)]
    ordered = sorted(texts, key=len)
    loops = {
        SORTED: [ordered[at : at + size] for at in range(0, len(texts), size)],
        IN_ORDER: in_order,
    }
    async with AsyncExitStack() as stack:
        batchers = {
            name: DynBatcher[Any, Any](
                model, size, devices=run.device, model_kwargs=kwargs, name=name, **options
            )
            for name, (model, options) in BATCHERS.items()
        }
        await asyncio.gather(*map(stack.enter_async_context, batchers.values()))

        async def measure_one(name: str) -> Figures:
            if name in loops:
                return run.bare_loop(bare.infer, loops[name]) | padding_of(loops[name])
            batcher = batchers[name]

            async def ask(text: Any) -> bool:
                return is_own(text, await batcher.process_batched(text))

            figures = await run.closed_loop(ask, texts, callers)
            stats = batcher.stats
            own = {"padding": stats.padding} if "cost" in BATCHERS[name][1] else {}
            return {**figures, **own, "mean_batch": stats.mean_batch_size}

        systems = [*loops, *batchers]
        for name in [*loops, *list(batchers) * WARM_UPS]:
            await measure_one(name)
        for repetition, name in run.take_turns(systems):
            run.tell(TABLE, name, repetition, await measure_one(name))


def padding_of(batches: list[list[Any]]) -> Figures:
    """Compute the share of padding in batches that are padded to their longest text."""
    computed = sum(len(batch) * max(map(len, batch)) for batch in batches)
    return {"padding": 1 - sum(len(text) for batch in batches for text in batch) / computed}
