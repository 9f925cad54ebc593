"""What counts as out of memory, and what is given back then."""

import weakref
from typing import Any, NoReturn

import pytest

from fast_batcher._process.out_of_memory import cuda_message, is_out_of_memory, let_go


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


class Unshowable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (OutOfMemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        # Inputs may say anything.
        (RuntimeError("cannot read 'CUDA out of memory'"), False),
        (ValueError("CUDA out of memory"), False),
        (Unshowable(), False),
    ],
)
def test_what_counts(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_what_cuda_says_begins_with_its_name() -> None:
    assert cuda_message(RuntimeError("CUDA error: no device")) == "CUDA error: no device"
    assert cuda_message(RuntimeError("an input says CUDA")) == ""
    assert cuda_message(Unshowable()) == ""


def test_to_ask_changes_nothing_and_letting_go_frees_the_batch() -> None:
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
    let_go(caught.value)
    assert batches[0]() is None
