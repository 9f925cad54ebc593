"""Requests that share objects: batching changes no result, and nobody's output is another's.

Random inputs with parts in common are computed in one batch by a model that changes what it is
given and answers with objects of its own, and compared with what each gives alone.
"""

import asyncio
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from marks import long
from models.scribbling import Scribbles, ScribblesAndDies, ScribblesOnBatch, filling, scribble
from sender_harness import opened
from waits import call, one_loop, outcome

from fast_batcher import DynBatcher, InferenceError

if TYPE_CHECKING:
    from collections.abc import Callable

# Batches of each seed, and the most requests of one.
BATCHES = 25
MOST = 8
# Of an array that goes through shared memory, where there is any.
LARGE = 8_000

anyio = pytest.mark.anyio


def make_part(choice: random.Random, depth: int = 0) -> Any:
    """Something that can be changed, in which parts may occur twice."""
    kind = choice.choice(["list", "dict", "bytes", "array", "large"])
    if kind == "bytes":
        return bytearray(choice.randbytes(choice.choice([3, 5000])))
    if kind in ("array", "large"):
        return np.full(5 if kind == "array" else LARGE, float(choice.randrange(100)))
    parts: list[Any] = ["text", b"raw", choice.randrange(100), None]
    if depth < 2:
        some = [make_part(choice, depth + 1) for _ in range(choice.randrange(1, 3))]
        parts += choice.choices(some, k=3)
    choice.shuffle(parts)
    return parts if kind == "list" else {str(number): part for number, part in enumerate(parts)}


def make_batch(choice: random.Random) -> list[Any]:
    """Inputs that have parts in common, some of them all."""
    common = [make_part(choice) for _ in range(3)]
    kinds: list[Callable[[], Any]] = [
        lambda: choice.choice(common),
        lambda: ("one of them", choice.choice(common)),
        lambda: [choice.choice(common), choice.choice(common)],
        lambda: make_part(choice),
    ]
    return [choice.choice(kinds)() for _ in range(choice.randrange(2, MOST + 1))]


def canonical(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Comparable form of a value and of the identity of its parts."""
    seen = {} if seen is None else seen
    if not isinstance(value, list | tuple | dict | bytearray | np.ndarray):
        return value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, bytearray):
        return "bytearray", bytes(value)
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value).__name__, [(key, canonical(part, seen)) for key, part in parts]


def alone(value: Any) -> Any:
    """The output for one input that is computed alone."""
    (output,) = Scribbles().infer([pickle.loads(pickle.dumps(value))])
    return pickle.loads(pickle.dumps(output))


def assert_nobody_shares(outputs: list[Any]) -> None:
    """Whatever one caller does with its output, the others keep theirs."""
    before = [canonical(output) for output in outputs]
    for number, output in enumerate(outputs):
        scribble(output)
        assert [canonical(other) for other in outputs[number + 1 :]] == before[number + 1 :]


WAYS: dict[str, dict[str, Any]] = {
    "pipe": {"max_shared_bytes": 0},
    "shared": {},
    "little shared": {"max_shared_bytes": 2**20},
    "small frames": {"max_shared_bytes": 0, "max_frame_bytes": 2**20},
}


@pytest.mark.slow
@anyio
@one_loop
@pytest.mark.parametrize("seed", [1, *long(2)])
@pytest.mark.parametrize("way", WAYS)
async def test_batching_changes_no_result(way: str, seed: int) -> None:
    choice = random.Random(seed)
    async with opened(Scribbles, max_batch_size=MOST, stages=True, **WAYS[way]) as batcher:
        for _ in range(BATCHES):
            batch = make_batch(choice)
            sent = [canonical(value) for value in batch]
            wanted = [canonical(alone(value)) for value in batch]
            outputs = await asyncio.gather(*[batcher.process_batched(one) for one in batch])
            assert [canonical(output) for output in outputs] == wanted
            # The callers' own inputs are as they were.
            assert [canonical(value) for value in batch] == sent
            assert_nobody_shares(outputs)
        assert max(batcher.stats.batch_sizes) > 1


@pytest.mark.slow
@anyio
@one_loop
@pytest.mark.parametrize("seed", [1, *long(2)])
@pytest.mark.parametrize("way", ["pipe", "shared"])
@pytest.mark.parametrize("trouble", ["raises", "dies"])
async def test_a_second_try_changes_no_result(
    trouble: str, way: str, seed: int, tmp_path: Path
) -> None:
    """The first try has changed its inputs before it fails."""
    choice = random.Random(seed)
    settings = {"max_restarts": None, "restart_backoff": 0.01, "num_workers": 2}
    batches = 3 if trouble == "dies" else BATCHES
    async with opened(
        Scribbles, max_batch_size=MOST, stages=True, **settings, **WAYS[way]
    ) as batcher:
        for number in range(batches):
            batch = make_batch(choice)
            wanted = [canonical(alone(value)) for value in batch]
            # It fails wherever it is in a batch; or the worker that has it dies, once.
            bad = f"{trouble} {tmp_path / str(number)}"
            tasks = [call(batcher, value) for value in [bad, *batch]]
            guilty, *outputs = [await outcome(task) for task in tasks]
            assert isinstance(guilty, InferenceError) == (trouble == "raises")
            assert [canonical(output) for output in outputs] == wanted
            assert_nobody_shares(outputs)


@pytest.mark.slow
@anyio
@one_loop
@pytest.mark.parametrize("size", [3, LARGE])
async def test_the_inputs_of_a_warm_up_share_nothing(size: int) -> None:
    """It repeats them to fill a batch, and a model that changes them must not see that."""
    async with opened(Scribbles, size, max_batch_size=MOST) as batcher:
        assert await batcher.process_batched("warm") == [1.0]


def own_array(_: DynBatcher[Any, Any], size: int, number: int) -> Any:
    return np.full(size, number, np.uint8)


def read_only_array(_: DynBatcher[Any, Any], size: int, number: int) -> Any:
    return np.frombuffer(bytes([number]) * size, np.uint8)


def nested_array(_: DynBatcher[Any, Any], size: int, number: int) -> Any:
    return {"array": np.frombuffer(bytes([number]) * size, np.uint8)}


def allocated_array(batcher: DynBatcher[Any, Any], size: int, number: int) -> Any:
    array = batcher.allocate_input(size)
    array[:] = number
    return array


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "make"),
    [
        (ScribblesAndDies, own_array),
        pytest.param(ScribblesAndDies, read_only_array, marks=pytest.mark.long),
        pytest.param(ScribblesAndDies, nested_array, marks=pytest.mark.long),
        (ScribblesAndDies, allocated_array),
        pytest.param(ScribblesOnBatch, allocated_array, marks=pytest.mark.long),
        (ScribblesOnBatch, read_only_array),
    ],
)
@anyio
@one_loop
async def test_retry_sees_original_arrays(
    tmp_path: Path, model: Any, make: "Callable[..., Any]"
) -> None:
    """Whatever its size, how many come at once, and whose array it is."""
    mark = tmp_path / "mark"
    settings: Any = {"max_restarts": None, "restart_backoff": 0.01}
    async with DynBatcher(model, 8, model_args=(mark,), **settings) as batcher:
        for size in (1_000, 100_000, 1_000_000, 5_000_000):
            for count in (1, 8):
                values = [make(batcher, size, number) for number in range(count)]
                mark.touch()
                outputs = await asyncio.gather(*map(batcher.process_batched, values))
                assert not mark.exists()
                assert outputs == [number + 1 for number in range(count)], (size, count)
                assert [filling(value) for value in values] == list(range(count))
