"""No model at all: every input is answered in the turn of the loop in which it comes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.scenarios import Load, Process

DISTRIBUTIONS: list[str] = []


async def _answer(value: object) -> tuple[object, int]:
    """As the models do that tell the size of the batch."""
    return value, 1


@asynccontextmanager
async def opened(load: Load) -> AsyncIterator[Process]:
    """Nothing to start."""
    yield _answer
