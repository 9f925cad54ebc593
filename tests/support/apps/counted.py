"""Doubles numbers, and tells at its end how many requests it has begun with and answered."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from fast_batcher import DynBatcher
from fast_batcher.fastapi import combine_lifespans, install_exception_handlers

batcher: DynBatcher[int, int] = DynBatcher("apps.models:SlowDoubler")
begun = answered = 0


@asynccontextmanager
async def count(_: FastAPI) -> AsyncIterator[None]:
    # Warnings, so that every server shows them: none of them configures this name.
    logger = logging.getLogger("counted")
    logger.warning("server %s begins", os.getpid())
    yield
    logger.warning("server %s has answered %s of %s", os.getpid(), answered, begun)


# The batcher first: a process that is ended while it loads has not begun, and owes no count.
app = FastAPI(lifespan=combine_lifespans(batcher.lifespan, count))
install_exception_handlers(app)


@app.get("/double/{number}")
async def double(number: int) -> int:
    global begun, answered
    begun += 1
    result = await batcher.process_batched(number)
    answered += 1
    return result
