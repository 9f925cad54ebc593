"""Return values whose iteration does not give one output per input. In tests and in workers."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Frame:
    """A square table: its length is in rows and iteration gives columns, as of pandas and polars.

    The columns are numbers, so that a caller could take one for an output.
    """

    def __init__(self, rows: int) -> None:
        self.shape = (rows, rows)
        self.columns = list(range(rows))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self.columns)

    def __getitem__(self, column: int) -> list[int]:
        return [column] * len(self)


class Short(Sequence[int]):
    """A sequence whose iteration ends one item too early."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if index >= self._length - 1:
            raise IndexError(index)
        return index


class Long(Short):
    """A sequence whose iteration goes on after its end."""

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self) + 1)
        raise AssertionError("one item too many is enough to know")


class ShortList(list[int]):
    """A list that is one item shorter than its length."""

    def __init__(self, length: int) -> None:
        super().__init__(range(length - 1))

    def __len__(self) -> int:
        return super().__len__() + 1


class Pair(NamedTuple):
    """A named tuple, as of two outputs of a batch."""

    values: list[int]
    indices: list[int]


# By name, a function of the number of inputs, and a part of the error's text. Fields are two, so
# the number is 2 for them.
UNEVEN: dict[str, tuple[Callable[[int], Any], str]] = {
    "table": (Frame, r'to_dict\("records"\).*to_numpy\(\)'),
    "short sequence": (Short, "iteration gives 1"),
    "long sequence": (Long, "iteration gives more"),
    "short list": (ShortList, "iteration gives 1"),
    "named tuple": (lambda count: Pair([1] * count, [2] * count), "fields"),
    # As `torch.return_types.max`: a tuple with named fields that has no `_fields`.
    "struct sequence": (lambda count: os.terminal_size((count, count)), "fields"),
}
