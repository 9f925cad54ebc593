"""Release of memory after an out-of-memory error."""

import weakref
from typing import Any, NoReturn

import pytest

from fast_batcher._worker.model import free_memory
from fast_batcher.errors import is_out_of_memory


def test_clearing_frames_frees_the_batch() -> None:
    class Batch:
        pass

    batches: list[Any] = []

    def fail() -> NoReturn:
        batch = Batch()
        batches.append(weakref.ref(batch))
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        fail()
    assert is_out_of_memory(caught.value)
    assert batches[0]() is not None
    free_memory(caught.value)
    assert batches[0]() is None
