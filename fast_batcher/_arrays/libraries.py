"""Array libraries: what pickling and digests do with the arrays of each. Any process and thread.

A library is used where it is loaded: see `kinds`.
"""

import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fast_batcher._arrays.tensors import read_tensor, reduce_tensor


class Library(NamedTuple):
    """Functions for the arrays of one library."""

    # Name of its module, and of the class of its arrays there.
    module: str
    kind: str
    # Reduces an array for a pickler. Takes the least bytes of an out-of-band buffer, whether the
    # array is an input, which is writable on arrival and keeps its gradients, and the array.
    reduce: Callable[[int, bool, Any], Any]
    # Whether outputs are reduced by it, too, and not by the library.
    reduces_outputs: bool
    # Takes an array, and whether it is an input; returns what describes it, and its bytes. None if
    # these are not all of it.
    read: Callable[[Any, bool], tuple[bytes, bytes] | None]


def _reduce_array(_: int, of_input: bool, array: Any) -> Any:
    """Reduce an array so that it is writable on arrival."""
    reduced = array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    # An array with a state, as if not contiguous, is always writable on arrival.
    if array.flags.writeable or len(reduced) != 2:
        return reduced
    return _make_writable, reduced


def _make_writable(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Make an array, and copy it if it is read-only."""
    array = function(*arguments)
    return array if array.flags.writeable else array.copy(order="K")


def _read_array(array: Any, of_input: bool) -> tuple[bytes, bytes] | None:
    numpy: Any = sys.modules["numpy"]
    # A subclass may have more than its bytes, as a masked array has.
    if type(array) is not numpy.ndarray or array.dtype.hasobject:
        return None
    described = numpy.lib.format.dtype_to_descr(array.dtype), array.shape
    return repr(described).encode(), array.tobytes()


LIBRARIES = (
    Library("numpy", "ndarray", _reduce_array, False, _read_array),
    Library("torch", "Tensor", reduce_tensor, True, read_tensor),
)


def find_array_type(library: Library) -> Any:
    """Return the class of the arrays of a library, None while it is not loaded."""
    # Another thread may be importing it.
    return getattr(sys.modules.get(library.module), library.kind, None)
