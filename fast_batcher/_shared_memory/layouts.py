"""What rows of shared memory hold: arrays or tensors of one dtype and shape. Both sides.

NumPy and PyTorch are used where they are loaded: the parent is given a value of theirs, and the
worker reads a dtype.
"""

import functools
import math
import operator
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fast_batcher._transport.tensors import is_plain_tensor, rebuild_tensor

# Kinds of NumPy's dtypes: truth values, whole, real and complex numbers, dates and their
# differences, text and bytes of a fixed length, and unstructured bytes.
PLAIN_KINDS = "biufcmMSUV"


class Layout(NamedTuple):
    """What is equal in all that lie in one slab of rows."""

    # Whether they are tensors, not arrays.
    is_tensor: bool
    dtype: Any
    shape: tuple[int, ...]
    # There is no other copy of them, so that the model must not write into them.
    is_read_only: bool = False


# What a `Layout` is made of. One is needed for each value, and a plain tuple is made in a tenth of
# the time.
Key = tuple[Any, ...]
# By type: what the layout of a value is made of, and its bytes. None if it has fewer than the one
# or more than the other number, and if its memory is not simply its values.
LayoutProbe = Callable[[Any, int, int], tuple[Key, int] | None]


def find_probes() -> dict[type, LayoutProbe]:
    """How to look at those that can lie in rows, of the libraries that are loaded."""
    probes: dict[type, LayoutProbe] = {}
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "ndarray"):  # else it is being imported
        probes[numpy.ndarray] = _probe_array
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "Tensor"):
        probes[torch.Tensor] = functools.partial(_probe_tensor, torch)
    return probes


def is_plain_dtype(dtype: Any) -> bool:
    """Whether values of this dtype are their bytes, and it is what it is equal to.

    Args:
        dtype: Of an array of NumPy's.
    """
    # Dtypes are equal whatever their metadata, also of a field; and with fields they are equal
    # whether or not they are aligned or records. Those of subarrays change the shape. Those of
    # other libraries, and NumPy's own for text of any length, may be pointers to the values.
    return (
        dtype.kind in PLAIN_KINDS
        and type(dtype).__module__.partition(".")[0] == "numpy"
        and not dtype.hasobject
        and dtype.metadata is None
        and dtype.names is None
        and dtype.subdtype is None
    )


def to_shape(shape: Any) -> tuple[int, ...]:
    """Whole numbers, as NumPy takes them: one, or several.

    Raises:
        TypeError: They are not.
    """
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(map(operator.index, shape))


def address_of(value: Any) -> int:
    """Where the memory of an array or tensor is that has been looked at; an array's takes 1 us."""
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return int(value.__array_interface__["data"][0])


def _probe_array(array: Any, least: int, most: int) -> tuple[Key, int] | None:
    size = array.nbytes
    dtype = array.dtype
    if (
        not least <= size <= most
        or not array.flags.c_contiguous
        or not is_plain_dtype(dtype)
        or not array.ndim
    ):
        return None
    return (False, dtype, array.shape), size


def _probe_tensor(torch: Any, tensor: Any, least: int, most: int) -> tuple[Key, int] | None:
    if not is_plain_tensor(torch, tensor) or not least <= tensor.nbytes <= most:
        return None
    return (True, tensor.dtype, tuple(tensor.shape)), tensor.nbytes


def view_rows(
    packed: bytes, memory: memoryview, start: int, count: int
) -> tuple[list[Any], memoryview, Any]:
    """So many rows that lie one behind the other from `start` on.

    Args:
        packed: The layout, pickled.
        memory: What the rows keep; they can be written, if the layout says so. PyTorch has no
            tensors that cannot be, and gets copies then.
        start: Bytes.
        count: Rows, 1 or more.

    Returns:
        They; all of their memory; and the array whose rows they are, None if they are tensors.
    """
    layout, size = _unpack(packed)
    part = memory[start : start + count * size]
    if layout.is_tensor:
        # Each by itself: a view of a tensor is pickled with all of what it is a view of.
        rows: list[Any] = [
            rebuild_tensor(part[begin : begin + size], layout.dtype, layout.shape)
            for begin in range(0, count * size, size)
        ]
        if layout.is_read_only:
            rows = [row.clone() for row in rows]
        return rows, part, None
    if layout.is_read_only:
        part = part.toreadonly()
    numpy: Any = sys.modules["numpy"]  # which made the dtype
    whole = numpy.frombuffer(part, layout.dtype).reshape(count, *layout.shape)
    return list(whole), part, whole


# A dtype takes microseconds to unpickle, and most models take inputs of few layouts.
@functools.lru_cache(maxsize=64)
def _unpack(packed: bytes) -> tuple[Layout, int]:
    """The layout, and the bytes of one row."""
    layout: Layout = pickle.loads(packed)
    return layout, math.prod(layout.shape) * layout.dtype.itemsize
