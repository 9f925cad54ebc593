"""Doubles numbers, batched or slowly: what the load test is tried on."""

import asyncio
import os

from fastapi import FastAPI, Response

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.fastapi import status_router

# Seconds that the slow endpoint takes.
SLOWNESS = 0.05


class Doubler(InferenceModel[int, int]):
    def infer(self, inputs: list[int]) -> list[int]:
        return [2 * value for value in inputs]


batcher: DynBatcher[int, int] = DynBatcher(
    "apps.doubling:Doubler", max_batch_size=int(os.environ.get("MAX_BATCH_SIZE", "8"))
)
app = FastAPI(lifespan=batcher.lifespan)
app.include_router(status_router(batcher))
asked = 0


@app.post("/double")
async def double(body: dict[str, int]) -> int:
    return await batcher.process_batched(body["number"])


@app.post("/slow")
async def slow() -> None:
    await asyncio.sleep(SLOWNESS)


@app.post("/every-third-fails")
async def every_third_fails() -> Response:
    global asked
    asked += 1
    return Response("it is the third", status_code=200 if asked % 3 else 500)


@app.get("/nothing")
async def nothing() -> Response:
    return Response(status_code=204)
