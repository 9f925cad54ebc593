"""An app with two batchers, as a user of the test kit has it."""

import asyncio
from typing import Annotated

from fastapi import Depends, FastAPI

from fast_batcher import DynBatcher, InferenceModel, batchable
from fast_batcher.caching import LRUCache
from fast_batcher.fastapi import (
    combine_lifespans,
    dependency,
    health_router,
    install_exception_handlers,
)


class Shouter(InferenceModel[str, str]):
    """Shouts texts; refuses empty ones."""

    def infer(self, inputs: list[str]) -> list[str]:
        if "" in inputs:
            raise ValueError("there is nothing to shout")
        return [text.upper() for text in inputs]

    @batchable
    def whisper(self, inputs: list[str]) -> list[str]:
        """Whisper instead."""
        return [text.lower() for text in inputs]


class Counter(InferenceModel[str, int]):
    """Counts letters; knows some texts already."""

    def __init__(self, known: int) -> None:
        self._known = known

    def infer(self, inputs: list[str]) -> list[int]:
        return [len(text) + self._known for text in inputs]


shouter = DynBatcher(Shouter, max_batch_size=8, name="shouter")
cache = LRUCache(9)
counter = DynBatcher(Counter, model_args=(0,), name="counter", shared=True, cache=cache)
app = FastAPI(lifespan=combine_lifespans(shouter.lifespan, counter.lifespan))
app.include_router(health_router(shouter, counter))
install_exception_handlers(app)
Shouting = Annotated[DynBatcher[str, str], Depends(dependency(shouter))]
Counting = Annotated[DynBatcher[str, int], Depends(dependency(counter))]


@app.get("/shout")
async def shout(text: str, batcher: Shouting, timeout: float | None = None) -> str:
    return await batcher.process_batched(text, timeout=timeout)


@app.get("/whisper")
async def whisper(text: str, batcher: Shouting) -> str:
    return await batcher.methods.find(Shouter.whisper).process_batched(text)


@app.get("/shout-all")
async def shout_all(texts: str, batcher: Shouting) -> list[str]:
    return await batcher.process_many(texts.split(","))


@app.get("/shout-in-thread")
def shout_in_thread(text: str, batcher: Shouting) -> str:
    return batcher.submit(text).result()


@app.get("/count")
async def count(text: str, batcher: Counting) -> int:
    return await batcher.process_batched(text)


@app.get("/both")
async def both(text: str, shouting: Shouting, counting: Counting) -> tuple[str, int]:
    loud, letters = await asyncio.gather(
        shouting.process_batched(text), counting.process_batched(text)
    )
    return loud, letters
