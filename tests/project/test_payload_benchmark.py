"""The benchmark of large arrays: measurements and bars."""

import asyncio
import time
from typing import Any

import pytest

from benchmarks.arrays import last_arrival
from benchmarks.models import ArrayStacked
from benchmarks.scenarios import Load


def load(callers: int) -> Load:
    return Load("ArrayStacked", callers, callers, 0.05, array_shape=(100,))


def test_only_the_last_arrival_is_timed() -> None:
    waiting: list[tuple[Any, asyncio.Future[Any]]] = []
    # Two moments on one clock: they cannot be closer than what lies between them.
    took = 0.01

    async def process(value: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        waiting.append((value, future))
        if len(waiting) == 3:
            time.sleep(took)
            inputs = [value for value, _ in waiting]
            for (_, one), answer in zip(waiting, ArrayStacked().infer(inputs), strict=True):
                one.set_result(answer)
            waiting.clear()
        return await future

    figures = asyncio.run(last_arrival(process, load(3)))
    assert figures["stacked_ms"] >= 1e3 * took
    assert figures["whole"] == 1.0


def test_incomplete_batches_and_mixed_answers_are_reported() -> None:
    async def alone(value: Any) -> Any:
        return ArrayStacked().infer([value])[0]

    async def mixed_up(_: Any) -> Any:
        return 1.0, 5.0

    assert asyncio.run(last_arrival(alone, load(2)))["whole"] == 0.0
    with pytest.raises(RuntimeError, match="mixed up"):
        asyncio.run(last_arrival(mixed_up, load(2)))
