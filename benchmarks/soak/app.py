"""The app that S7 and S9 end; it notes each request that it begins with. Server process."""

import os
from typing import Annotated

from fastapi import Body, FastAPI

from benchmarks.soak.models import Works
from fast_batcher import DynBatcher
from fast_batcher.fastapi import health_router, install_exception_handlers

batcher = DynBatcher(Works, 8)
app = FastAPI(lifespan=batcher.lifespan)
app.include_router(health_router(batcher))
install_exception_handlers(app)
journal = os.open(os.environ["SOAK_JOURNAL"], os.O_WRONLY | os.O_APPEND)


@app.post("/")
async def echo(name: Annotated[str, Body(embed=True)]) -> str:
    """Answer with the name that was sent."""
    os.write(journal, f"{name}\n".encode())
    answer: str = await batcher.process_batched(name)
    return answer
