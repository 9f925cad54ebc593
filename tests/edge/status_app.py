"""A server with three batchers and their status page below a prefix."""

from fastapi import FastAPI

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.fastapi import combine_lifespans, install_exception_handlers, status_router


class Works(InferenceModel[str, str]):
    """Echoes; raises for "raise", with words that are nobody's business."""

    def infer(self, inputs: list[str]) -> list[str]:
        return [one if one != "raise" else _fail() for one in inputs]


def _fail() -> str:
    raise ValueError("secret words")


batchers: dict[str, DynBatcher[str, str]] = {
    "first": DynBatcher(Works, name="first", num_workers=2),
    "second": DynBatcher(Works, name="second", max_batch_size=512),
    "third": DynBatcher(Works, name="third"),
}
app = FastAPI(lifespan=combine_lifespans(*[one.lifespan for one in batchers.values()]))
install_exception_handlers(app)
app.include_router(status_router(*batchers.values(), prefix="/inside"))


@app.post("/call/{name}/{value}")
async def call(name: str, value: str, count: int = 1) -> int:
    return len(await batchers[name].process_many([value] * count))
