"""Readers of streams, and the chunks that they expect."""

from typing import Any

from models.stepped import Plan

from fast_batcher import BatcherError, DynBatcher


async def read(batcher: DynBatcher[Any, list[Any]], value: Any, **options: Any) -> list[Any]:
    """Return the chunks of a stream, and behind them its error."""
    chunks: list[Any] = []
    try:
        async for chunk in await batcher.stream(value, **options):
            chunks += [chunk]
    except BatcherError as error:
        chunks += [error]
    return chunks


def whole(plan: Plan) -> list[str]:
    return [f"{plan.name}:{count}" for count in range(1, plan.length + 1)]
