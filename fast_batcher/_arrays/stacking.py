"""`stack`: join arrays or tensors, without a copy if they are adjacent in memory. Pure.

The copy is omitted only in the memory of the batch that is being computed, which the worker lends
with `lend`. In other memory two arrays are adjacent by chance, and their owners are unknown.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from fast_batcher._arrays.kinds import find_numpy, find_torch, is_tensor
from fast_batcher.errors import CollationError


class Piece(NamedTuple):
    """Memory that is lent while a batch is computed."""

    start: int
    end: int
    memory: memoryview
    # The whole memory as one array, if that has been made, and the rows that the model gets.
    whole: Any
    rows: Sequence[Any]


# The memory of which `stack` may return views now. It belongs to the process, because the model may
# call `stack` in any function and on any thread.
_lent: Sequence[Piece] = ()


def lend(pieces: Sequence[Piece]) -> None:
    """Let `stack` return views of this memory, until the next call; none of an empty sequence."""
    global _lent
    _lent = pieces


def make_piece(
    address: int, memory: memoryview, whole: Any = None, rows: Sequence[Any] = ()
) -> Piece:
    """Describe memory for `lend`."""
    return Piece(address, address + len(memory), memory, whole, rows)


def stack(inputs: Sequence[Any]) -> Any:
    """Join arrays or tensors of one shape along a new first axis.

    Large inputs of a batch are usually adjacent in shared memory; then the result is a view of
    them, made in microseconds, and a write to the result changes the inputs. Other inputs are
    copied, as by `numpy.stack` and `torch.stack`.

    Args:
        inputs: One or more NumPy arrays, or tensors.

    Raises:
        CollationError: The inputs are neither tensors nor arrays, and NumPy is not loaded. With
            NumPy loaded, numbers are joined too.
        ValueError: `inputs` is empty, or NumPy arrays have different shapes.
        RuntimeError: Tensors have different shapes, dtypes or devices.
    """
    whole = find_whole(inputs)
    if whole is not None:
        return whole
    if inputs and is_tensor(inputs[0]):
        return find_torch().stack(list(inputs))
    numpy = find_numpy()
    if numpy is None:
        raise CollationError("stack() takes NumPy arrays or tensors")
    return numpy.stack(inputs)


def find_whole(values: Sequence[Any]) -> Any:
    """Return the array or tensor in lent memory whose rows are these values, else None."""
    if not _lent or not values:
        return None
    for piece in _lent:
        if piece.whole is not None and _are_rows(values, piece):
            return piece.whole[:]
    return _find_by_address(values)


def _find_by_address(values: Sequence[Any]) -> Any:
    found = _locate(values[0])
    if found is None:
        return None
    form, start = found
    library, dtype, shape, size = form
    for number, value in enumerate(values):
        if not size or _locate(value) != (form, start + number * size):
            return None
    end = start + len(values) * size
    for piece in _lent:
        if piece.start <= start and end <= piece.end:
            part = piece.memory[start - piece.start : end - piece.start]
            return library.frombuffer(part, dtype=dtype).reshape(len(values), *shape)
    return None


def _are_rows(values: Sequence[Any], piece: Piece) -> bool:
    """Return whether the values are the rows of a piece, unchanged since they were made.

    Addresses are not compared: NumPy takes longer to return one address than this function.
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


def _locate(value: Any) -> tuple[tuple[Any, Any, Any, int], int] | None:
    """Return the form and the address of a contiguous array or tensor, None for another value."""
    numpy = find_numpy()
    if numpy is not None and type(value) is numpy.ndarray:
        if not value.flags.c_contiguous or value.dtype.hasobject:
            return None
        form = numpy, value.dtype, value.shape, value.nbytes
        return form, value.__array_interface__["data"][0]
    torch = find_torch()
    if torch is not None and type(value) is torch.Tensor and _is_dense(torch, value):
        return (torch, value.dtype, value.shape, value.nbytes), value.data_ptr()
    return None


def _is_dense(torch: Any, tensor: Any) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
