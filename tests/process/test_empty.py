"""Arrays that a batcher gives to be filled: odd shapes and dtypes, forks, memory that takes long.

What they are sent as is in `test_input_rows.py`.
"""

import asyncio
import os
from typing import Any

import numpy as np
import pytest
from desk import LARGE, SMALL, Desk, desk, opened, slabs_of
from sample_models import Digests, digest
from waits import turns

from fast_batcher._asyncio.futures import set_exception
from fast_batcher._parent.input_arena import FRESH, MOST_PER_TURN
from fast_batcher._transport.frames import Kind

__all__ = ["desk"]

BYTES = np.dtype(np.uint8)


@pytest.mark.anyio
async def test_a_shape_is_what_numpy_takes_for_one() -> None:
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
            await turns(1)  # in one turn memory is found for few
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
        # What goes wrong with one is nobody else's business.
        await turns(1)
        array = batcher.allocate_input((300, 300, 3))
        assert 0 <= memory.offset_of(array.ctypes.data) < memory.size
        array[:] = kept[:] = 7
        assert await asyncio.gather(*map(batcher.process_batched, (array, kept))) == [
            digest(array),
            digest(kept),
        ]


@pytest.mark.anyio
async def test_a_dtype_that_changes_the_shape_is_one_of_numpys_own_arrays() -> None:
    async with opened(Digests) as batcher:
        array = batcher.allocate_input((20_000,), np.dtype(("f4", (3,))))
        assert array.shape == (20_000, 3)
        assert array.base is None


@pytest.mark.parametrize("forks", [False, True])
def test_what_a_forked_child_sees_is_never_another_input(desk: Desk, forks: bool) -> None:
    array = desk.shared_inputs.rows.give(BYTES, (SMALL,))
    if forks:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    desk.send_requests([desk.arrive(array)])
    del array
    desk.read()
    desk.free()
    assert desk.slabs.count == forks


def test_no_more_memory_is_found_in_one_turn_than_takes_milliseconds(desk: Desk) -> None:
    rows = desk.shared_inputs.rows
    given: list[Any] = []
    found: list[Any] = []
    most = MOST_PER_TURN // FRESH // SMALL
    assert most > 2
    for _ in range(2):
        rows.copied = 0
        found = [rows.give(BYTES, (SMALL,)) for _ in range(most + 1)]
        given += [array for array in found if array is not None]
        assert found[most] is None
    assert len(given) == 2 * most
    # Memory that has been found costs nothing.
    given.clear()
    found.clear()
    rows.copied = 0
    assert rows.give(BYTES, (2 * SMALL,)) is not None
    assert rows.give(BYTES, (LARGE,)) is not None


def test_rows_are_given_up_where_they_are_of_no_use(desk: Desk) -> None:
    one, other = desk.arrive(np.zeros(SMALL, np.uint8)), desk.arrive({"not": "an array"})
    desk.send_requests([one, other])
    assert desk.kinds == [Kind.SHARED_INPUTS]
    assert one.staged.slab is None


def test_rows_are_given_up_with_a_refusal(desk: Desk) -> None:
    loop = asyncio.new_event_loop()
    request = desk.arrive(np.zeros(SMALL, np.uint8))
    request.caller = loop.create_future()
    assert set_exception(request, ValueError("no"))
    assert request.staged.slab is None
    assert isinstance(request.caller.exception(), ValueError)
    loop.close()
