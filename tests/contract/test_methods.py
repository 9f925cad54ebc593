"""Several methods of one model: `batchable` and `batcher.methods`."""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest
from models.methods import Both, Holds, MarkedInfer, OnlyMethods
from openings import Make, make, own_directory
from waits import Gate, assert_balance

from fast_batcher import (
    Collation,
    ConfigurationError,
    DynBatcher,
    InferenceModel,
    OutputMismatchError,
    batchable,
)
from fast_batcher.caching import LRUCache
from fast_batcher.model import MethodOptions, find_methods

__all__ = ["make", "own_directory"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_each_method_has_its_batches_and_its_size(make: Make) -> None:
    async with make(Both, 4, model_args=(0.01,)) as batcher:
        calls = {
            "infer": batcher.process_batched,
            "text": batcher.methods.text.process_batched,
            "image": batcher.methods.image.process_batched,
        }
        names = [name for _ in range(20) for name in calls]
        answers = await asyncio.gather(*(calls[name](at) for at, name in enumerate(names)))
        assert [(name, at) for name, _, at in answers] == [
            (name, at) for at, name in enumerate(names)
        ]
        largest = {name: max(n for method, n, _ in answers if method == name) for name in calls}
        assert largest == {"infer": 4, "text": 2, "image": 4}
        assert_balance(batcher)
        batcher.reconfigure(max_batch_size=6)
        answers = await batcher.methods.image.process_many(range(30))
        assert max(size for _, size, _ in answers) == 6
        answers = await batcher.methods.find(Both.text).process_many(range(10))
        assert [one[2] for one in answers] == [*range(10)]
        assert max(size for _, size, _ in answers) == 2


async def test_rarely_called_method_does_not_starve(make: Make) -> None:
    async with make(Both, 2, model_args=(0.002,)) as batcher:
        counts: Counter[str] = Counter()

        async def flood() -> None:
            while not counts["text"]:
                await batcher.methods.image.process_batched(1)
                counts["image"] += 1

        async def ask() -> None:
            await batcher.methods.text.process_batched(1)
            counts["text"] += 1

        floods = [asyncio.create_task(flood()) for _ in range(20)]
        while counts["image"] < 20:
            await asyncio.sleep(0)
        before = counts["image"]
        await ask()
        # The twenty that were before it, in batches of two, and those that came meanwhile.
        assert counts["image"] - before <= 2 * 20
        await asyncio.gather(*floods)


async def test_methods_have_groups_errors_and_cancellation(make: Make) -> None:
    async with make(Both, 8, group_by=lambda value: str(value)[0]) as batcher:
        image = batcher.methods.image.process_batched
        answers = await asyncio.gather(
            *(image(one) for one in (11, 21, 12, 22, "bad")), return_exceptions=True
        )
        wrong = answers.pop()
        assert [size for _, size, _ in answers] == [2, 2, 2, 2]  # type: ignore[misc]
        assert isinstance(wrong, ValueError)
        task = asyncio.create_task(image(1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    stats = assert_balance(batcher)
    assert stats.failed == 1
    # The host may have answered before it read that the caller had left.
    assert (stats.completed, stats.cancelled) in ((4, 1), (5, 0))


async def test_marked_infer_keeps_its_options(make: Make) -> None:
    async with make(MarkedInfer, 8) as batcher:
        assert dir(batcher.methods) == ["miscounts"]
        answers = await asyncio.gather(*map(batcher.process_batched, range(4)))
    # The warm-up computes one input twice, and a full batch twice.
    assert answers == ["1 1 2 2 2"] * 2 + ["1 1 2 2 2 2"] * 2


async def test_errors_name_the_method(make: Make) -> None:
    async with make(MarkedInfer) as batcher:
        with pytest.raises(OutputMismatchError, match="miscounts returned 0 outputs for 1"):
            await batcher.methods.miscounts.process_batched(1)
        with pytest.raises(ConfigurationError, match=r"methods\.miscounts\.process_many: values"):
            await batcher.methods.miscounts.process_many("text")
        with pytest.raises(ConfigurationError, match=r"^process_many: values"):
            await batcher.process_many("text")


async def test_a_model_without_infer_names_its_methods(make: Make) -> None:
    async with make(OnlyMethods, 8) as batcher:
        with pytest.raises(ConfigurationError, match=r"no infer; call .* methods\.double"):
            await batcher.process_batched(1)
        doubled = await batcher.methods.double.process_batched(np.arange(3))
        assert doubled.tolist() == [0, 2, 4]
        assert await batcher.methods.name.process_batched("x") == "str"
        with pytest.raises(AttributeError, match=r"no batchable method 'embed'; .* double, name"):
            batcher.methods.embed  # noqa: B018
        with pytest.raises(ConfigurationError, match="one of double, name"):
            batcher.methods.find(Both.text)
        assert dir(batcher.methods) == ["double", "name"]


async def test_method_is_retried_after_worker_death(make: Make, gate: Gate) -> None:
    async with make(Holds, 4, model_args=(gate.path,), restart_backoff=0.01) as batcher:
        # The second large input lies in shared memory, which the dead worker may have changed.
        for value in (np.zeros(1), np.ones(20_000), np.full(20_000, 2.0)):
            task = asyncio.create_task(batcher.methods.hold.process_batched(value))
            os.kill((await gate.visit()).pid, signal.SIGKILL)
            (await gate.visit()).let_on()
            (output,) = await task
            assert np.array_equal(output, value)


async def test_each_method_has_its_own_cached_outputs(make: Make) -> None:
    async with make(Both, 4, cache=LRUCache(99)) as batcher:
        for _ in range(2):
            assert (await batcher.process_batched(1))[0] == "infer"
            assert (await batcher.methods.text.process_batched(1))[0] == "text"
        assert batcher.stats.cache_hits == 2


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8", 2**21])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_batch_size="):
        batchable(max_batch_size=size)


def test_a_wrong_collation_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="collation=5"):
        batchable(collation=5)  # type: ignore[call-overload]
    assert batchable(collation=Collation.stack()) is not None


def test_only_methods_can_be_marked_batchable() -> None:
    class Plain(InferenceModel[int, int]):
        @batchable
        def double(self, inputs: list[int]) -> list[int]:
            return [2 * value for value in inputs]

    assert find_methods(Plain) == {"double": MethodOptions()}
    with pytest.raises(ConfigurationError, match="batchable: 5 is not a function; write"):
        batchable(5)  # type: ignore[call-overload]


def test_a_class_without_infer_and_methods_is_abstract() -> None:
    class Nothing(InferenceModel[int, int]):
        """Has neither."""

    with pytest.raises(ConfigurationError, match="does not implement infer"):
        DynBatcher(Nothing)
