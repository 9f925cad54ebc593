"""Layouts of values in rows of shared memory."""

import ctypes
from typing import Any

import numpy as np
import pytest

from fast_batcher._shared_memory.inputs import (
    Key,
    Layout,
    address_of,
    find_probes,
    unpack_layout,
    view_rows,
)
from fast_batcher._transport.pickling import dumps

torch = pytest.importorskip("torch")

COUNT = 3


def look(value: Any, least: int = 0, most: int = 2**30) -> tuple[Key, int] | None:
    return find_probes()[type(value)](value, least, most)


def copies(value: Any) -> tuple[list[Any], bytearray]:
    """Rows of copies of a value, in memory that begins with something else."""
    found = look(value)
    assert found is not None
    key, size = found
    assert size == value.nbytes
    memory = bytearray(64) + ctypes.string_at(address_of(value), size) * COUNT
    layout = unpack_layout(dumps(Layout(*key)))
    assert layout.nbytes == size
    rows, whole = view_rows(layout, memoryview(memory)[64:])
    if key[0]:
        assert whole is None
    else:
        assert whole.shape == (COUNT, *value.shape)
        assert all(row.base is whole.base for row in rows)
    return rows, memory


ARRAYS = [
    np.arange(24.0).reshape(2, 3, 4),
    np.arange(7, dtype=">i4"),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.array(["2026-11-22", "NaT"], "datetime64[D]"),
    np.array([b"ab", b"c"]),
    np.array(["ab", "é"]),
    np.arange(10)[2:5],
    np.frombuffer(b"read only", np.uint8),
]
TENSORS = [
    torch.arange(24.0).reshape(2, 3, 4),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.arange(10)[2:5],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_an_array_is_seen_as_it_was(array: Any) -> None:
    rows, _ = copies(array)
    assert len(rows) == COUNT
    for row in rows:
        assert type(row) is np.ndarray
        assert row.dtype == array.dtype
        assert row.flags.writeable
        np.testing.assert_array_equal(row, array)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tensor.dtype))
def test_a_tensor_is_seen_as_it_was(tensor: Any) -> None:
    rows, _ = copies(tensor)
    assert len(rows) == COUNT
    for row in rows:
        assert row.dtype == tensor.dtype
        assert torch.equal(row, tensor)
        # Pickled, it does not bring its neighbours.
        assert row.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("value", [np.zeros(5), torch.zeros(5)], ids=["array", "tensor"])
def test_row_writes_stay_inside_the_row(value: Any) -> None:
    rows, memory = copies(value)
    rows[1][:] = 7
    assert float(rows[0].sum()) == float(rows[2].sum()) == 0
    expected = bytes(64 + value.nbytes) + dumped(rows[1]) + bytes(value.nbytes)
    assert bytes(memory) == expected


def dumped(row: Any) -> bytes:
    return bytes(np.asarray(row).tobytes())


FIELDS = [("x", "u1"), ("y", "f8")]
WITHOUT = {
    "columns first": np.zeros((3, 4)).T,
    "every second": np.arange(10)[::2],
    "objects": np.array([{}, []], object),
    "metadata": np.zeros(3, np.dtype("f8", metadata={"unit": "m"})),
    # They are equal to others.
    "fields": np.zeros(3, FIELDS),
    "aligned fields": np.zeros(3, np.dtype(FIELDS, align=True)),
    "records": np.zeros(3, np.dtype((np.record, FIELDS))),
    "metadata of a field": np.zeros(3, [("x", np.dtype("f8", metadata={"unit": "m"}))]),
    "no axis": np.array(1.0),
    # The others: `tests/unit/test_tensors.py`.
    "a tensor that is not plain": torch.zeros(3, 4).T,
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_values_beyond_plain_bytes_have_no_layout(kind: str) -> None:
    assert look(WITHOUT[kind]) is None
