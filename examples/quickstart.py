"""Save as `app.py`, run `uvicorn app:app`, then `curl 127.0.0.1:8000/shout/hello`."""

from fastapi import FastAPI

from fast_batcher import DynBatcher, InferenceModel


class Shouter(InferenceModel[str, str]):
    """Your model. It lives in a worker process: load the weights in `__init__`."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Compute a whole batch: one output per input, in the same order."""
        return [text.upper() + "!" for text in inputs]


batcher = DynBatcher(Shouter, max_batch_size=32)
app = FastAPI(lifespan=batcher.lifespan)


@app.get("/shout/{text}")
async def shout(text: str) -> str:
    """Answer one request; requests that are in flight at the same time share a batch."""
    return await batcher.process_batched(text)
