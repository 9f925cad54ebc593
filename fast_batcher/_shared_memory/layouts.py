"""Layouts of arrays and tensors in shared memory: probes, dtype and shape, and views of rows.

Both sides. NumPy and PyTorch are used if they are loaded: in the API process the app passes one of
their values, and in the worker unpickling a dtype loads its library.
"""

import functools
import math
import operator
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fast_batcher._transport.tensors import is_plain_tensor, rebuild_tensor, view_tensor

# Kinds of NumPy's dtypes: booleans, integers, real and complex numbers, dates and time differences,
# text and bytes of a fixed length, and unstructured bytes.
PLAIN_KINDS = "biufcmMSUV"


class Layout(NamedTuple):
    """Type, dtype and shape of the inputs of one slab."""

    # True for tensors, False for arrays.
    is_tensor: bool
    dtype: Any
    shape: tuple[int, ...]
    # The slab is the memory of the app's own arrays, and no other copy exists for a retry.
    is_original: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one input."""
        size: int = math.prod(self.shape) * self.dtype.itemsize
        return size


# The fields of a `Layout`, as a plain tuple, which takes a tenth of the time: one per input.
Key = tuple[Any, ...]
# Takes a value, and the least and the most bytes; returns the fields of its layout and its size.
# None if the size is outside these limits, or if its memory does not hold just its values in order.
LayoutProbe = Callable[[Any, int, int], tuple[Key, int] | None]


def find_probes() -> dict[type, LayoutProbe]:
    """Return a probe for each type of array or tensor whose library is loaded."""
    probes: dict[type, LayoutProbe] = {}
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "ndarray"):  # else it is being imported
        probes[numpy.ndarray] = _find_array_layout
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "Tensor"):
        probes[torch.Tensor] = functools.partial(_find_tensor_layout, torch)
    return probes


def is_plain_dtype(dtype: Any) -> bool:
    """Return whether bytes and an equal dtype are enough to rebuild arrays of this NumPy dtype."""
    # Equal dtypes may differ in metadata, also of a field, and in the alignment and the record type
    # of fields. Dtypes of subarrays change the shape. Arrays with dtypes of other libraries, or
    # with NumPy's dtype for text of any length, may hold pointers to the values.
    return (
        dtype.kind in PLAIN_KINDS
        and type(dtype).__module__.partition(".")[0] == "numpy"
        and not dtype.hasobject
        and dtype.metadata is None
        and dtype.names is None
        and dtype.subdtype is None
    )


def to_shape(shape: Any) -> tuple[int, ...]:
    """Make a shape from one integer or several, of any integer type.

    Raises:
        TypeError: The argument is neither an integer nor an iterable of integers.
    """
    if isinstance(shape, str | bytes):  # a sequence of integers, if it is bytes or empty
        raise TypeError(f"{type(shape).__name__!r} object cannot be interpreted as a shape")
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(map(operator.index, shape))


def address_of(value: Any) -> int:
    """Return the memory address of an array or tensor; takes 1 us for an array."""
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return int(value.__array_interface__["data"][0])


def view_bytes(value: Any) -> memoryview | None:
    """View the bytes of an array or tensor that a probe has accepted; None without NumPy.

    The view keeps an array's memory. A tensor's may be freed meanwhile: see `VolatileBuffer`.
    """
    if hasattr(value, "data_ptr"):
        array = view_tensor(sys.modules["torch"], value)
    else:
        array = value.reshape(-1).view("u1")
    return None if array is None else memoryview(array)


def _find_array_layout(array: Any, least: int, most: int) -> tuple[Key, int] | None:
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


def _find_tensor_layout(torch: Any, tensor: Any, least: int, most: int) -> tuple[Key, int] | None:
    if not is_plain_tensor(torch, tensor) or not least <= tensor.nbytes <= most:
        return None
    return (True, tensor.dtype, tuple(tensor.shape)), tensor.nbytes


def view_rows(layout: Layout, part: memoryview) -> tuple[list[Any], Any]:
    """View adjacent inputs of one layout.

    Args:
        layout: The layout of each input.
        part: The memory of one or more inputs; the views keep it.

    Returns:
        The inputs, and the array whose rows they are, None if they are tensors.
    """
    if layout.is_tensor:
        size = layout.nbytes
        # Each from its own bytes: a slice of one tensor would be pickled with the whole tensor.
        rows: list[Any] = [
            rebuild_tensor(part[begin : begin + size], layout.dtype, layout.shape)
            for begin in range(0, len(part), size)
        ]
        return rows, None
    numpy: Any = sys.modules["numpy"]  # which made the dtype
    whole = numpy.frombuffer(part, layout.dtype).reshape(-1, *layout.shape)
    return list(whole), whole


# A dtype takes microseconds to unpickle, and most models take inputs of few layouts.
@functools.lru_cache(maxsize=64)
def unpack_layout(packed: bytes) -> Layout:
    """Unpickle a layout."""
    layout: Layout = pickle.loads(packed)
    return layout
