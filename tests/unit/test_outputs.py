"""Valid outputs of a model for a batch."""

import array
from collections import UserList, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from tables import UNEVEN, Frame

from fast_batcher import OutputMismatchError
from fast_batcher._arrays.joining import list_outputs

as_list = partial(list_outputs, returned="infer returned", copies=False)


def count_up(count: int) -> Iterator[int]:
    yield from range(count)


GOOD: dict[str, Any] = {
    "list": ["a", "b", "c"],
    "tuple": ("a", "b", "c"),
    "range": range(3),
    "deque": deque("abc"),
    "user list": UserList("abc"),
    "array": array.array("i", [1, 2, 3]),
    "vector": np.arange(3),
    "matrix": np.arange(6).reshape(3, 2),
    "list of None": [None, None, None],
}


@pytest.mark.parametrize("name", GOOD)
def test_sequence_of_right_length_is_split(name: str) -> None:
    outputs = as_list(GOOD[name], 3)
    assert isinstance(outputs, list)
    for output, expected in zip(outputs, GOOD[name], strict=True):
        assert np.array_equal(output, expected)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("count", [2, 4])
def test_wrong_length_error_names_both_counts(name: str, count: int) -> None:
    with pytest.raises(OutputMismatchError, match=f"3 outputs for {count} inputs"):
        as_list(GOOD[name], count)


BAD: dict[str, Any] = {
    "None": None,
    "generator": count_up(3),
    "dict": {1: "a", 2: "b", 3: "c"},
    "set": {1, 2, 3},
    "str": "abc",
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "int": 3,
    "map": map(str, range(3)),
    "dict values": {1: 1, 2: 2, 3: 3}.values(),
    "scalar": np.float32(3),
    "array without axes": np.array(3),
}


@pytest.mark.parametrize("name", BAD)
def test_other_types_are_rejected_by_name(name: str) -> None:
    with pytest.raises(OutputMismatchError, match=f"{type(BAD[name]).__name__} for 3 inputs"):
        as_list(BAD[name], 3)


def test_copies_share_no_memory_with_outputs() -> None:
    matrix = np.zeros((2, 3))
    assert np.shares_memory(as_list(matrix, 2)[0], matrix)
    rows = list_outputs(matrix, 2, "the function returned", copies=True)
    assert not any(np.shares_memory(row, matrix) for row in rows)
    with pytest.raises(OutputMismatchError, match="the function returned 2 outputs for 3"):
        list_outputs(matrix, 3, "the function returned", copies=True)


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("copies", [False, True])
def test_misleading_iterables_are_rejected(name: str, *, copies: bool) -> None:
    make, message = UNEVEN[name]
    with pytest.raises(OutputMismatchError, match=message):
        list_outputs(make(2), 2, "infer returned", copies=copies)


def test_table_of_wrong_length_is_rejected() -> None:
    with pytest.raises(OutputMismatchError, match="to_dict"):
        as_list(Frame(3), 2)


def test_attributes_named_columns_make_no_table() -> None:
    """Neither those of sequences, nor labels that `__getattr__` finds, nor methods."""

    class Rows(UserList[int]):
        columns = ("a",)

    class Labelled:
        shape = (2,)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            return (5, 6)[index]

        def __getattr__(self, name: str) -> Any:
            if name == "columns":
                return 5
            raise AttributeError(name)

    class Queried(Labelled):
        def columns(self) -> None:
            """Choose columns, as of a query's result."""

    assert as_list(Rows([5, 6]), 2) == [5, 6]
    assert as_list(Labelled(), 2) == [5, 6]
    assert as_list(Queried(), 2) == [5, 6]
    records = np.rec.array([(1, 3), (2, 4)], dtype=[("columns", "i4"), ("b", "i4")])
    assert [tuple(row) for row in as_list(records, 2)] == [(1, 3), (2, 4)]
