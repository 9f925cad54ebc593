"""Valid outputs of a model for a batch."""

from collections import UserList
from functools import partial
from typing import Any

import numpy as np
import pytest

from fast_batcher import OutputMismatchError
from fast_batcher._arrays.outputs import list_outputs

as_list = partial(list_outputs, returned="infer returned", copies=False)


def test_copies_share_no_memory_with_outputs() -> None:
    matrix = np.zeros((2, 3))
    assert np.shares_memory(as_list(matrix, 2)[0], matrix)
    rows = list_outputs(matrix, 2, "the function returned", copies=True)
    assert not any(np.shares_memory(row, matrix) for row in rows)
    with pytest.raises(OutputMismatchError, match="the function returned 2 outputs for 3"):
        list_outputs(matrix, 3, "the function returned", copies=True)


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
