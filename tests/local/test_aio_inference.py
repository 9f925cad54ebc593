"""`@aio.inference.dynamically`: what it adds to its two parents, caches and priorities of rows."""

import asyncio
import threading
from typing import Any

import numpy
import pytest
import torch
from gated_functions import HeldTask
from models.collated import Noted
from test_aio import Memory
from waits import until

from fast_batcher.aio import inference
from fast_batcher.types import PriorityStrategy

pytestmark = pytest.mark.anyio

Features = dict[str, Any]


async def double_async(features: Features) -> Any:
    await asyncio.sleep(0)
    return 2 * features["x"]


def double(features: Features) -> Any:
    return 2 * features["x"]


both = pytest.mark.parametrize("func", [double, double_async], ids=["thread", "task"])


@both
@pytest.mark.parametrize("make", [numpy.asarray, torch.as_tensor], ids=["numpy", "torch"])
async def test_calls_share_a_padded_batch(func: Any, make: Any) -> None:
    async with inference.dynamically(func) as function:
        results = await asyncio.gather(
            function({"x": make([[1, 2], [3, 4]])}), function(x=[make([5]), make([6, 7])])
        )
        assert [result.tolist()[0][0] for result in results] == [2, 10]
        assert results[1].tolist() == [[10, 0], [12, 14]]
        assert function.stats.total_processed == 4


async def test_rows_are_cached() -> None:
    class RowMemory(Memory):
        async def get(self, key: Any) -> Any:
            return await super().get(tuple(key["x"].tolist()))

        async def set(self, key: Any, value: Any) -> None:
            await super().set(tuple(key["x"].tolist()), value)

    memory = RowMemory()
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
async def test_large_calls_are_split_and_joined_beside_the_loop(
    length: int, is_large: bool
) -> None:
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


async def test_short_rows_first() -> None:
    held = HeldTask()

    @inference.dynamically(
        priority_strategy=PriorityStrategy.LENGTH, small_batch_threshold=0, batch_size=2
    )
    async def answer(features: Features) -> Any:
        return numpy.array(await held(features["x"].sum(1).tolist()))

    async with answer:
        first = asyncio.create_task(answer(x=numpy.array([[0]])))
        await until(lambda: bool(held.batches))
        rows = [numpy.ones(length, int) for length in (5, 1, 3, 2)]
        second = asyncio.create_task(answer(x=rows))
        await until(lambda: answer.stats.queue_size == 4)
        held.let_on(3)
        await asyncio.gather(first, second)
        assert second.result().tolist() == [10, 2, 6, 4]
    assert held.batches == [[0], [1, 2], [3, 5]]


async def test_spread_left_and_limited_in_length() -> None:
    batches: list[Any] = []

    @inference.dynamically(
        spread_kwargs=True, padding_side="left", max_batch_length=4, pad_tokens={"x": -1}
    )
    async def answer(x: Any) -> Any:
        batches.append(x.tolist())
        return x.sum(1)

    async with answer:
        await answer(x=[numpy.ones(length, int) for length in (1, 3, 2)])
    assert batches == [[[-1, -1, 1], [1, 1, 1]], [[1, 1]]]
