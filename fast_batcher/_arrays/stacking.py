"""`stack`: join arrays or tensors, without a copy if they lie one behind the other. Pure.

Only memory that `lend` names counts: the worker lends the memory of a batch while its model
computes. Elsewhere two arrays are neighbours by chance, and their owners are unknown.
"""

import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

from fast_batcher.errors import CollationError


class Piece(NamedTuple):
    """Lent memory."""

    start: int
    end: int
    memory: memoryview
    # The whole memory as one array, if that has been made, and the rows that the model gets.
    whole: Any
    rows: Sequence[Any]


lent: list[Piece] = []


def lend(address: int, memory: memoryview, whole: Any = None, rows: Sequence[Any] = ()) -> None:
    """Let arrays and tensors that lie in this memory become one, until `lent` is cleared.

    Args:
        address: Of the memory.
        memory: A view of the memory.
        whole: The whole memory as one array, if there is one: `stack` takes less time then.
        rows: The rows of `whole` that the model gets.
    """
    lent.append(Piece(address, address + len(memory), memory, whole, rows))


def stack(inputs: Sequence[Any]) -> Any:
    """Join arrays or tensors of one shape along a new first axis.

    Large inputs of a batch usually lie one behind the other in shared memory; then the result is a
    view of them, made in microseconds, and a write to one shows in the other. Other inputs are
    copied, as by `numpy.stack` and `torch.stack`.

    Args:
        inputs: One or more NumPy arrays, or tensors.

    Raises:
        CollationError: They are neither, and NumPy, which takes numbers too, is not loaded.
        ValueError: `inputs` is empty, or NumPy arrays have different shapes.
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
    """Return the array or tensor of which the values are the rows, None without one."""
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
    describe, address_of, rebuild = library
    found = describe(values[0])
    if found is None or not found[2]:
        return None
    dtype, shape, size = found
    if any(type(value) is not kind or describe(value) != found for value in values):
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
    """Whether the values are the rows of a piece, unchanged since they were made.

    It does not compare addresses: NumPy takes longer to tell one address than all of this takes.
    """
    if len(piece.rows) != len(values) or not all(map(is_, piece.rows, values)):
        return False
    whole = piece.whole
    shape, strides, dtype, base = whole.shape[1:], whole.strides[1:], whole.dtype, whole.base
    # An array whose memory was replaced has another base.
    return all(
        value.base is base
        and value.shape == shape
        and value.strides == strides
        and value.dtype is dtype
        for value in values
    )


# Returns dtype, shape and bytes of a contiguous array or tensor, None for any other.
_Describe = Callable[[Any], tuple[Any, Any, int] | None]
_AddressOf = Callable[[Any], int]


def _library_of(kind: type) -> tuple[_Describe, _AddressOf, Callable[..., Any]] | None:
    """Return how to describe values of a type, find their address, and make one of a buffer."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return _describe_array, _address_of_array, numpy.frombuffer
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return _describe_tensor, kind.data_ptr, torch.frombuffer
    return None


def _describe_array(array: Any) -> tuple[Any, Any, int] | None:
    if not array.flags.c_contiguous or array.dtype.hasobject:
        return None
    return array.dtype, array.shape, array.nbytes


def _address_of_array(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _describe_tensor(tensor: Any) -> tuple[Any, Any, int] | None:
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
