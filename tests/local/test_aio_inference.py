"""`@aio.inference.dynamically`: what it adds to its two parents, caches and priorities of rows."""

import threading
from typing import Any

import numpy
import pytest
from models.collated import Noted
from test_aio import Memory
from waits import until

from fast_batcher.aio import inference

pytestmark = pytest.mark.anyio

Features = dict[str, Any]


async def test_rows_are_cached() -> None:
    memory = Memory()
    seen: list[int] = []

    @inference.dynamically(cache=memory)
    def answer(features: Features) -> Any:
        seen.append(len(features["x"]))
        return features["x"] * 2

    async with answer:
        await answer(x=numpy.array([[1, 2], [3, 4]]))
        await until(lambda: len(memory.known) == 2)
        result = await answer(x=numpy.array([[5, 6], [3, 4]]))
        assert result.tolist() == [[10, 12], [6, 8]]
    assert seen == [2, 1]


@pytest.mark.parametrize(("length", "is_large"), [(10, False), (2**20, True)])
async def test_thread_splits_and_joins_large_calls(length: int, is_large: bool) -> None:
    @inference.dynamically(outputs="rows")
    async def answer(features: Features) -> list[Any]:
        return [Noted(out=row) for row in features["in"]]

    here = threading.get_ident()
    batch = Noted({"in": numpy.arange(3 * length, dtype="i4").reshape(3, length)})
    async with answer:
        found = await answer(batch)
    assert {name: where != here for name, where in Noted.threads.items()} == {
        "in": is_large,
        "out": is_large,
    }
    assert numpy.array_equal(found["out"], batch["in"])
