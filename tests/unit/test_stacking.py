"""`stack`: one array of many, and when it is a view."""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fast_batcher import CollationError, stack
from fast_batcher._arrays import stacking
from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.joining import join

torch = pytest.importorskip("torch")

COUNT, SHAPE = 4, (2, 3)
KINDS = ["array", "tensor"]


@pytest.fixture
def memory() -> Iterator[bytearray]:
    """Memory that is lent."""
    memory = bytearray(16 + COUNT * 6 * 4)
    view = memoryview(memory)
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) + 16
    stacking.lend([stacking.make_piece(start, view[16:])])
    yield memory
    stacking.lend(())


def rows_in(memory: bytearray, kind: str) -> list[Any]:
    """All different, and made as a worker makes them."""
    rows: list[Any] = (
        list(np.frombuffer(memory, np.float32, offset=16).reshape(COUNT, *SHAPE))
        if kind == "array"
        else [
            torch.frombuffer(memory, dtype=torch.float32, count=6, offset=offset).reshape(SHAPE)
            for offset in range(16, len(memory), 24)
        ]
    )
    for number, row in enumerate(rows):
        row[:] = number
    return rows


def know(rows: list[Any]) -> None:
    """Lend the same memory as what is made of these rows."""
    (piece,) = stacking._lent
    base = getattr(rows[0], "base", None)
    whole = None if base is None else base.reshape(-1, *SHAPE)[: len(rows)]
    stacking.lend([stacking.make_piece(piece.start, piece.memory, whole, rows)])


def address(value: Any) -> int:
    return int(np.asarray(value).__array_interface__["data"][0])


def numbers(value: Any) -> list[float]:
    """The first of each row, after a look that the others are the same."""
    array = np.asarray(value)
    assert array.dtype == np.float32
    assert array.shape[1:] == SHAPE
    for row in array:
        assert len(np.unique(row)) == 1
    return [float(row[0, 0]) for row in array]


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_in_lent_memory_stack_without_copy(memory: bytearray, kind: str) -> None:
    rows = rows_in(memory, kind)
    for begin, end in ((0, 4), (1, 3), (2, 3)):
        whole = stack(rows[begin:end])
        assert type(whole) is type(rows[0])
        assert numbers(whole) == [0.0, 1.0, 2.0, 3.0][begin:end]
        assert address(whole) == address(rows[begin])
        whole[0] += 10
        assert numbers(rows[begin][None]) == [begin + 10.0]
        whole[0] -= 10


@pytest.mark.parametrize("kind", KINDS)
def test_other_layouts_are_copied(memory: bytearray, kind: str) -> None:
    rows = rows_in(memory, kind)
    own = rows[1] + 0
    cases = [
        ([rows[1], rows[0]], [1.0, 0.0]),
        ([rows[0], rows[2]], [0.0, 2.0]),
        ([rows[0], rows[0]], [0.0, 0.0]),
        ([rows[0], own], [0.0, 1.0]),
        ([own, rows[2]], [1.0, 2.0]),
    ]
    for values, expected in cases:
        whole = stack(values)
        assert numbers(whole) == expected
        before = numbers(rows[0][None])
        whole[:] = 7
        assert numbers(rows[0][None]) == before


@pytest.mark.parametrize("kind", KINDS)
def test_known_rows_are_checked_again(memory: bytearray, kind: str) -> None:
    rows = rows_in(memory, kind)
    know(rows)
    assert address(stack(rows)) == address(rows[0])
    assert stack(rows) is not stack(rows)
    assert numbers(stack([*rows])) == [0.0, 1.0, 2.0, 3.0]
    assert numbers(stack(rows[1:])) == [1.0, 2.0, 3.0]
    changed = [rows[1], rows[0], *rows[2:]]
    assert numbers(stack(changed)) == [1.0, 0.0, 2.0, 3.0]
    assert numbers(stack([rows[0], rows[0], *rows[2:]])) == [0.0, 0.0, 2.0, 3.0]
    changed = [*rows[:3], rows[3] + 1]
    assert numbers(stack(changed)) == [0.0, 1.0, 2.0, 4.0]
    for row in rows:
        row.resize_((6,)) if kind == "tensor" else setattr(row, "shape", (6,))
    assert stack(rows).shape == (COUNT, 6)
    rows[2].resize_((3, 2)) if kind == "tensor" else setattr(rows[2], "shape", (3, 2))
    with pytest.raises((RuntimeError, ValueError), match=r"equal size|same shape"):
        stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_that_are_not_alike_are_not_rows(memory: bytearray, kind: str) -> None:
    rows = rows_in(memory, kind)
    assert stacking.find_whole([rows[0], rows[1].reshape(3, 2)]) is None
    assert stacking.find_whole([rows[0], rows[1].T]) is None
    other = rows[1].view(np.int32 if kind == "array" else torch.int32)
    assert stacking.find_whole([rows[0], other]) is None
    assert stacking.find_whole([rows[0], "text"]) is None
    assert stacking.find_whole([rows[0][:0], rows[0][:0]]) is None


def test_rows_outside_lent_memory_are_copied(memory: bytearray) -> None:
    rows = rows_in(memory, "array")
    (piece,) = stacking._lent
    for start, end in ((piece.start + 1, piece.end), (piece.start, piece.end - 1)):
        stacking.lend([piece._replace(start=start, end=end)])
        assert stacking.find_whole(rows) is None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_joined_without_a_copy(memory: bytearray, kind: str) -> None:
    rows = rows_in(memory, kind)
    whole = join(rows, Collation.stack())
    assert address(whole) == address(rows[0])
    features = join([{"x": row, "y": 1.0} for row in rows], Collation.pad(value=0))
    assert address(features["x"]) == address(rows[0])
    assert address(join(rows, Collation.stack(batch_dim=1))) != address(rows[0])


def test_stack_without_arrays_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least one array"):
        stack([])
    with pytest.raises(ValueError, match="same shape"):
        stack([np.zeros(1), np.zeros(2)])
    with pytest.raises(RuntimeError):
        stack([torch.zeros(1), torch.zeros(2)])
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(CollationError, match="takes NumPy arrays or tensors"):
        stack([1, 2])
