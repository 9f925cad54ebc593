"""Arrays and tensors that lie one behind the other in shared memory: dtype, shape, and views.

Both sides. NumPy and PyTorch are used where they are loaded: the API process is given one of their
values, and the worker unpickles a dtype.
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
    """What is equal in all inputs of one slab."""

    # Whether the inputs are tensors, not arrays.
    is_tensor: bool
    dtype: Any
    shape: tuple[int, ...]
    # The inputs lie in the app's own arrays, and there is no other copy for a retry.
    is_original: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one input."""
        size: int = math.prod(self.shape) * self.dtype.itemsize
        return size


# The fields of a `Layout`. One is made for each input, and a plain tuple takes a tenth of the time.
Key = tuple[Any, ...]
# Takes a value, and the least and the most bytes; returns the fields of its layout and its bytes.
# None if it has another number of bytes, or if its memory is not simply its values.
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
    """Whether arrays of this NumPy dtype are their bytes, and equal dtypes are interchangeable."""
    # Not interchangeable are equal dtypes with other metadata, also of a field, and with fields
    # that are aligned, or records. Dtypes of subarrays change the shape. Arrays of other libraries'
    # dtypes, and of NumPy's for text of any length, may hold pointers to the values.
    return (
        dtype.kind in PLAIN_KINDS
        and type(dtype).__module__.partition(".")[0] == "numpy"
        and not dtype.hasobject
        and dtype.metadata is None
        and dtype.names is None
        and dtype.subdtype is None
    )


def to_shape(shape: Any) -> tuple[int, ...]:
    """Make a shape of one integer or several, of any type that NumPy takes for one.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(shape, str | bytes):  # a sequence of integers, if it is bytes or empty
        raise TypeError(f"{type(shape).__name__!r} object cannot be interpreted as a shape")
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(map(operator.index, shape))


def address_of(value: Any) -> int:
    """Where the memory of an array or tensor begins; takes 1 us for an array."""
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return int(value.__array_interface__["data"][0])


def view_bytes(value: Any) -> memoryview | None:
    """The bytes of an array or tensor that a probe has accepted; None for a tensor without NumPy.

    The view keeps them, but the memory of a tensor may be freed meanwhile: see `VolatileBuffer`.
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
    """View inputs that lie one behind the other.

    Args:
        layout: Of each.
        part: The memory of all, at least one; the views keep it.

    Returns:
        The inputs, and the array whose rows they are, None if they are tensors.
    """
    if layout.is_tensor:
        size = layout.nbytes
        # Each from its bytes: a slice of one tensor would be pickled with all of that tensor.
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
