"""`stack`: many arrays or tensors as one, without a copy where they already lie in one. Pure.

Only memory that somebody has lent is looked at: what a worker was sent lies there while its model
computes. That two arrays are neighbours elsewhere is chance, and who keeps them is not known.
"""

import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

from fast_batcher.errors import CollationError


class Piece(NamedTuple):
    """Memory that is lent."""

    start: int
    end: int
    memory: memoryview
    # All of it as one array, if that has been made, and its rows that the model gets.
    whole: Any
    rows: Sequence[Any]


lent: list[Piece] = []


def lend(address: int, memory: memoryview, whole: Any = None, rows: Sequence[Any] = ()) -> None:
    """Let arrays and tensors that lie in this memory become one, until `lent` is cleared.

    Args:
        address: Of the memory.
        memory: A view of it.
        whole: All of it as one array, if there is one: `stack` takes less time then.
        rows: Its rows that the model gets.
    """
    lent.append(Piece(address, address + len(memory), memory, whole, rows))


def stack(inputs: Sequence[Any]) -> Any:
    """Arrays or tensors of one shape as one, with a new first axis.

    Large inputs of a batch usually lie one behind the other in the memory in which they have come;
    then this is a view of them, made in microseconds, and to write into one is to write into the
    other. Anything else is copied, as by `numpy.stack` and `torch.stack`.

    Args:
        inputs: One or more NumPy arrays, or tensors.

    Raises:
        CollationError: They are neither, and NumPy, which takes numbers too, is not loaded.
        ValueError: There are none, or NumPy arrays have different shapes.
        RuntimeError: Tensors have different shapes, dtypes or devices.
    """
    whole = find_whole(inputs)
    if whole is not None:
        return whole
    torch: Any = sys.modules.get("torch")
    if inputs and torch is not None and isinstance(inputs[0], torch.Tensor):
        return torch.stack(list(inputs))
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        raise CollationError("stack() takes NumPy arrays or tensors")
    return numpy.stack(inputs)


def find_whole(values: Sequence[Any]) -> Any:
    """The array or tensor of which these are the rows, None if there is none."""
    if not lent or not values:
        return None
    for piece in lent:
        if piece.whole is not None and _are_rows(values, piece):
            return piece.whole[:]
    return _find_by_address(values)


def _find_by_address(values: Sequence[Any]) -> Any:
    kind = type(values[0])
    library = _library_of(kind)
    if library is None:
        return None
    look, address_of, rebuild = library
    found = look(values[0])
    if found is None or not found[2]:
        return None
    dtype, shape, size = found
    if any(type(value) is not kind or look(value) != found for value in values):
        return None
    start = address_of(values[0])
    end = start + len(values) * size
    if [*map(address_of, values)] != [*range(start, end, size)]:
        return None
    for piece in lent:
        if piece.start <= start and end <= piece.end:
            part = piece.memory[start - piece.start : end - piece.start]
            return rebuild(part, dtype=dtype).reshape(len(values), *shape)
    return None


def _are_rows(values: Sequence[Any], piece: Piece) -> bool:
    """Whether these are the rows of the piece, and as they were made.

    Nothing is asked for its address: NumPy takes longer to tell one than all of this does.
    """
    if len(piece.rows) != len(values) or not all(map(is_, piece.rows, values)):
        return False
    whole = piece.whole
    shape, strides, dtype, base = whole.shape[1:], whole.strides[1:], whole.dtype, whole.base
    # An array that was given other memory has another base.
    return all(
        value.base is base
        and value.shape == shape
        and value.strides == strides
        and value.dtype is dtype
        for value in values
    )


# Dtype, shape and bytes of what is in memory as in a new array or tensor; None of another.
_Look = Callable[[Any], tuple[Any, Any, int] | None]
_AddressOf = Callable[[Any], int]


def _library_of(kind: type) -> tuple[_Look, _AddressOf, Callable[..., Any]] | None:
    """How to look at values of this type, and how to make one of a buffer."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return _probe_array, _address_of_array, numpy.frombuffer
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return _probe_tensor, kind.data_ptr, torch.frombuffer
    return None


def _probe_array(array: Any) -> tuple[Any, Any, int] | None:
    if not array.flags.c_contiguous or array.dtype.hasobject:
        return None
    return array.dtype, array.shape, array.nbytes


def _address_of_array(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _probe_tensor(tensor: Any) -> tuple[Any, Any, int] | None:
    if (
        tensor.device.type != "cpu"
        or tensor.layout is not sys.modules["torch"].strided
        or tensor.requires_grad
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    return tensor.dtype, tensor.shape, tensor.nbytes
