"""A server with a batcher whose model answers in steps, another batcher, and their status page."""

import time
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from fast_batcher import Done, DynBatcher, InferenceModel, SteppedModel
from fast_batcher.fastapi import combine_lifespans, install_exception_handlers, status_router


class Counts(SteppedModel[int, str]):
    """Counts down to zero, in steps of some milliseconds."""

    def join(self, inputs: list[int]) -> list[Any]:
        return [[number] for number in inputs]

    def step(self, states: list[Any]) -> list[Any]:
        time.sleep(0.004 + 0.001 * len(states))
        return [self._count(state) for state in states]

    def _count(self, state: Any) -> Any:
        state[0] -= 1
        return "tick" if state[0] else Done("end")


class Echoes(InferenceModel[int, int]):
    """Echoes."""

    def infer(self, inputs: list[int]) -> list[int]:
        return inputs


counts: DynBatcher[int, Any] = DynBatcher(Counts, name="counts", max_batch_size=4)
echoes: DynBatcher[int, int] = DynBatcher(Echoes, name="echoes")
app = FastAPI(lifespan=combine_lifespans(counts.lifespan, echoes.lifespan))
install_exception_handlers(app)
app.include_router(status_router(counts, echoes, prefix="/inside"))


@app.post("/call/{length}")
async def call(length: int, count: int = 1) -> int:
    return len(await counts.process_many([length] * count))


@app.get("/stream/{length}")
async def stream(length: int) -> StreamingResponse:
    return StreamingResponse(await counts.stream(length))
