"""Arrays that a batcher allocates for the app to fill: odd shapes and dtypes.

`test_input_arena.py` shows how they are sent.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
from models.large import Digests, digest
from sender_harness import opened, slabs_of
from waits import turns

pytestmark = pytest.mark.slow


@pytest.mark.anyio
async def test_shapes_follow_numpy() -> None:
    async with opened(Digests) as batcher:
        memory = slabs_of(batcher)
        kept = batcher.allocate_input((300, 300, 3))
        shapes: list[tuple[Any, tuple[int, ...]]] = [
            ((np.int64(300), 300, np.uint8(3)), (300, 300, 3)),
            (np.array([300, 300, 3]), (300, 300, 3)),
            (np.int64(270_000), (270_000,)),
            (270_000, (270_000,)),
        ]
        for shape, expected in shapes:
            await turns(1)  # a turn has the system provide little memory
            array = batcher.allocate_input(shape)
            assert array.shape == expected
            assert 0 <= memory.offset_of(array.ctypes.data) < memory.size
        wrong: Any
        for wrong in (300.0, (300.0, 300, 3), "300", None):
            await turns(1)
            with pytest.raises(TypeError):
                batcher.allocate_input(wrong)
        with pytest.raises(ValueError, match="negative"):
            batcher.allocate_input((300, -300, 3))
        # An error changes nothing for the next call.
        await turns(1)
        array = batcher.allocate_input((300, 300, 3))
        assert 0 <= memory.offset_of(array.ctypes.data) < memory.size
        array[:] = kept[:] = 7
        assert await asyncio.gather(*map(batcher.process_batched, (array, kept))) == [
            digest(array),
            digest(kept),
        ]


@pytest.mark.anyio
async def test_subarray_dtype_gives_an_ordinary_array() -> None:
    async with opened(Digests) as batcher:
        array = batcher.allocate_input((20_000,), np.dtype(("f4", (3,))))
        assert array.shape == (20_000, 3)
        assert array.base is None
