"""Doubles numbers, with one model for all processes of a server."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from fast_batcher import DynBatcher
from fast_batcher.fastapi import combine_lifespans, install_exception_handlers

batcher: DynBatcher[Any, Any] = DynBatcher(
    os.environ["MODEL"], model_args=(os.environ["NOTES"],), shared=True
)


@asynccontextmanager
async def announce(_: FastAPI) -> AsyncIterator[None]:
    # A warning, so that every server shows it: none of them configures this name.
    logging.getLogger("shared").warning("server %s begins", os.getpid())
    yield


app = FastAPI(lifespan=combine_lifespans(batcher.lifespan, announce))
install_exception_handlers(app)


@app.get("/double/{number}")
async def double(number: int) -> int:
    result: int = await batcher.process_batched(number)
    return result
