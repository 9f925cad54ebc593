"""Part `lengths`: texts of log-normal lengths, in order, packed by cost, and joined end to end.

They are compared with a bare loop over full batches of sorted texts. No server can form these,
because it does not know the later texts. A server can be faster where smaller batches with less
padding take less time.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from benchmarks.gpu.models import LONGEST, EncoderModel, is_own, make_texts
from benchmarks.gpu.part import SEED, Figures, Run
from benchmarks.simulation.loads import draw_lengths
from fast_batcher import DynBatcher

TABLE = "lengths"
MODEL = "benchmarks.gpu.models:EncoderModel"
RAGGED_MODEL = "benchmarks.gpu.models:RaggedEncoderModel"
RAGGED = "ragged"
# Model and options of the batchers that are compared. A further way to form or compute batches is a
# further entry.
BATCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "FIFO": (MODEL, {}),
    "packed": (MODEL, {"cost": len}),
    RAGGED: (RAGGED_MODEL, {"cost": len, "cost_is_padded": False}),
}
SORTED, IN_ORDER = "bare loop, sorted", "bare loop, in order"
# Closed loops before the first repetition: a packer learns the times of about 200 batches.
WARM_UPS = 2


class Sizes(NamedTuple):
    """Sizes of the encoder, and numbers of texts."""

    hidden: int
    layers: int
    max_batch_size: int
    texts: int


def measure(run: Run) -> None:
    """Open all batchers, then let the systems take turns."""
    compare(run, run.pick(Sizes(768, 6, 32, 2048), Sizes(64, 2, 8, 64)))


def compare(run: Run, sizes: Sizes) -> None:
    """Measure all systems with an encoder of these sizes."""
    asyncio.run(_compare(run, sizes))


async def _compare(run: Run, sizes: Sizes) -> None:
    size = sizes.max_batch_size
    kwargs: dict[str, Any] = {
        "dtype": run.dtype,
        "hidden": sizes.hidden,
        "layers": sizes.layers,
    }
    lengths = draw_lengths("log-normal", sizes.texts, LONGEST, SEED)
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
