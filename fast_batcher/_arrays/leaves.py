"""Operations on one feature: describe a leaf, stack leaves to one array, split it again. Pure.

NumPy and PyTorch are used where they are loaded. A dtype is kept as it is: leaves that would have
to be promoted are refused.
"""

import functools
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fast_batcher._arrays.collation import Padding, PadValue
from fast_batcher._arrays.stacking import find_whole
from fast_batcher.errors import CollationError

_NUMBERS: Final = (bool, int, float, complex)
_TEXTS: Final = (str, bytes)
_INT64: Final = range(-(2**63), 2**63)


class Spec(NamedTuple):
    """Kind, dtype, shape and device of a leaf; leaves of equal specs can be stacked."""

    # "array", "tensor", "number", "text" or "none".
    kind: str
    # The type of a number or a text.
    dtype: Any = None
    # Lengths of the axes, None for a padded one.
    shape: tuple[int | None, ...] = ()
    device: Any = None

    def __str__(self) -> str:
        if self.kind in ("number", "text"):
            return f"a Python {self.dtype.__name__}"
        if self.kind == "none":
            return "None"
        lengths = ["any" if length is None else str(length) for length in self.shape]
        shape = f"{lengths[0]}," if len(lengths) == 1 else ", ".join(lengths)
        where = "" if self.device is None else f" on {self.device}"
        article = "an" if self.kind == "array" else "a"
        return f"{article} {self.kind} of shape ({shape}) and dtype {self.dtype}{where}"


NONE: Final = Spec("none")


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array or scalar of a kind that can be joined."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (
        type(value) in (numpy.ndarray, numpy.memmap)
        or (isinstance(value, numpy.generic) and not isinstance(value, _TEXTS))
    )


def is_tensor(value: Any) -> bool:
    """Whether it is a PyTorch tensor of a kind that can be joined."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def is_array_like(value: Any) -> bool:
    """Whether it is an array or tensor of any kind, also one that cannot be joined."""
    return is_tensor(value) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text or None, which have no axes."""
    return value is None or type(value) in _NUMBERS or isinstance(value, _TEXTS)


def spec_of(leaf: Any) -> Spec | None:
    """Return the spec of a leaf, None if the leaf cannot be joined to others."""
    if is_array(leaf):
        return None if leaf.dtype.hasobject else Spec("array", leaf.dtype, leaf.shape)
    if is_tensor(leaf):
        if find_tensor_fault(leaf):  # checked first: the shape of a nested tensor raises
            return None
        return Spec("tensor", leaf.dtype, tuple(leaf.shape), leaf.device)
    kind = type(leaf)
    if kind in _NUMBERS:
        return Spec("number", kind) if kind is not int or leaf in _INT64 else None
    if leaf is None:
        return NONE
    if isinstance(leaf, _TEXTS):
        return Spec("text", bytes if isinstance(leaf, bytes) else str)
    return None


def describe_fault(leaf: Any, feature: str) -> str:
    """Say why a leaf without a spec cannot be joined, and what can be sent instead."""
    name, kind = named(feature), type(leaf).__qualname__
    if is_array(leaf):
        fault = f"dtype {leaf.dtype}"
    elif is_tensor(leaf):
        fault = find_tensor_fault(leaf) or ""
    elif is_array_like(leaf):
        return f"{name} is a {kind}; send a plain array or tensor: numpy.asarray(x), x.filled(...)"
    elif isinstance(leaf, int):
        return f"{name} is a number that does not fit into 64 bits; send a float or a text"
    else:
        return (
            f"{name} is a {kind}; send an array, a tensor, a number, or a dict, list, tuple or "
            "dataclass of them"
        )
    return (
        f"{name} is an array or tensor of {fault}, which cannot be joined with others; convert it "
        "to numbers in a dense array"
    )


def pad_spec(spec: Spec, feature: str, padding: Padding) -> Spec:
    """Return a spec without the lengths of its padded axes.

    Raises:
        CollationError: The dtype cannot keep the pad value.
    """
    axes = padding.axes_of(feature, len(spec.shape))
    if not axes or spec.kind not in ("array", "tensor"):
        return spec
    value = padding.value_of(feature)
    if not _fits(value, spec.kind, spec.dtype):
        raise CollationError(
            f"{named(feature)}: the pad value {value!r} does not fit dtype {spec.dtype}; choose "
            f"one that does, as in Collation.pad(values={{{feature!r}: ...}})"
        )
    shape = tuple([None if axis in axes else n for axis, n in enumerate(spec.shape)])
    return spec._replace(shape=shape)


def find_tensor_fault(tensor: Any) -> str | None:
    """Describe why a tensor cannot be split into rows; None if it can."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_quantized:
        return f"quantized dtype {tensor.dtype}"
    if tensor.device.type == "meta":
        return "device meta"
    return "nested tensors" if tensor.is_nested else None


def named(feature: str) -> str:
    """Return a feature's name as an error shows it."""
    return repr(feature) if feature else "the row"


# Room for the features of a few models; 1, True and 1+0j are equal, and do not fit alike.
@functools.lru_cache(maxsize=256, typed=True)
def _fits(value: PadValue, library: str, dtype: Any) -> bool:
    """Whether a pad value can be kept in this dtype without becoming another number."""
    limits: Any = sys.modules["numpy" if library == "array" else "torch"]
    kind = dtype.kind if library == "array" else _kind_of_tensors(dtype)
    if kind not in "biufc" or (isinstance(value, complex) and kind != "c"):
        return False
    # Python's numbers: compared to a NumPy number, the value would first be cast to its dtype.
    if kind in "fc":
        least, most = float(limits.finfo(dtype).min), float(limits.finfo(dtype).max)
        # Not `isfinite`, which cannot take an int of any size.
        return all(
            least <= part <= most or part != part or part in (math.inf, -math.inf)
            for part in (value.real, value.imag)
        )
    if kind == "b":
        return value in (0, 1)
    assert not isinstance(value, complex), "it is refused above"
    info = limits.iinfo(dtype)
    return int(info.min) <= value <= int(info.max) and value == int(value)


def _kind_of_tensors(dtype: Any) -> str:
    """Return NumPy's letter for a dtype of PyTorch."""
    if dtype.is_complex:
        return "c"
    if dtype.is_floating_point:
        return "f"
    return "b" if dtype is sys.modules["torch"].bool else "i"


def may_have_axis(spec: Spec, dim: int) -> bool:
    """Whether a batch of leaves with this spec can have its axis at `dim`."""
    ndim = len(spec.shape)
    return -ndim - 1 <= dim <= ndim or spec.kind in ("none", "text")


def stack_leaves(
    leaves: Sequence[Any], spec: Spec, feature: str, dim: int, padding: Padding | None, like: Spec
) -> Any:
    """Join the leaves of many rows along a new axis.

    Args:
        leaves: One or more, all of this `spec`.
        spec: What `spec_of` says of each.
        feature: Their name.
        dim: Position of the new axis, already checked with `may_have_axis`.
        padding: Rules for padded axes, None without any.
        like: The spec of an array or tensor of these rows: numbers get its library and device.

    Returns:
        An array or tensor, new unless the leaves lie in one already (see `stacking`); numbers
        become one of bool, int64, float64 or complex128, texts a list, None stays None.

    Raises:
        CollationError: The leaves are numbers, and NumPy is not installed.
    """
    if spec.kind == "none":
        return None
    if spec.kind == "text":
        return list(leaves)
    if spec.kind == "number":
        return _stack_numbers(leaves, spec, like)
    if dim == 0 and (found := find_whole(leaves)) is not None:
        return found
    is_tensor = spec.kind == "tensor"
    if is_tensor:  # no gradient is computed through a batch
        leaves = [leaf.detach() for leaf in leaves]
    if None in spec.shape:
        assert padding is not None, "the spec says so"
        return _pad_leaves(leaves, spec, feature, dim, padding)
    if is_tensor:
        return sys.modules["torch"].stack(leaves, dim)
    numpy = sys.modules["numpy"]
    # `out` makes the batch C-contiguous, whatever the memory layout of the rows.
    batch = numpy.empty(_batch_shape(spec.shape, dim, len(leaves)), spec.dtype)
    return numpy.stack(leaves, dim, out=batch)


def _batch_shape(row: Sequence[Any], dim: int, count: int) -> list[Any]:
    shape = [*row]
    shape.insert(dim % (len(row) + 1), count)
    return shape


def _pad_leaves(leaves: Sequence[Any], spec: Spec, feature: str, dim: int, padding: Padding) -> Any:
    """Join arrays or tensors after filling them up to the longest."""
    longest = [max(lengths) for lengths in zip(*[leaf.shape for leaf in leaves], strict=True)]
    library: Any = sys.modules["torch" if spec.kind == "tensor" else "numpy"]
    device = {"device": spec.device} if spec.kind == "tensor" else {}
    shape = _batch_shape(longest, dim, len(leaves))
    batch = library.full(shape, padding.value_of(feature), dtype=spec.dtype, **device)
    is_left = padding.side_of(feature) == "left"
    for row, leaf in zip(library.moveaxis(batch, dim, 0), leaves, strict=True):
        ends = longest if is_left else leaf.shape
        slices = [slice(end - size, end) for size, end in zip(leaf.shape, ends, strict=True)]
        row[tuple(slices)] = leaf
    return batch


def _stack_numbers(leaves: Sequence[Any], spec: Spec, like: Spec) -> Any:
    if like.kind == "tensor":
        torch = sys.modules["torch"]
        dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
        dtype = dtypes.get(spec.dtype, torch.complex128)
        return torch.tensor(leaves, dtype=dtype, device=like.device)
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        raise CollationError("numbers become NumPy arrays, and NumPy is not installed") from None
    names = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
    return numpy.array(leaves, names[spec.dtype])


def ones(lengths: Sequence[int], like: Spec) -> Any:
    """Make an int64 mask of ones, in the library and on the device of a feature."""
    if like.kind == "tensor":
        torch = sys.modules["torch"]
        return torch.ones(tuple(lengths), dtype=torch.int64, device=like.device)
    numpy = sys.modules["numpy"]
    return numpy.ones(tuple(lengths), "int64")


def row_count(batch: Any, dim: int) -> int | None:
    """Return the length of axis `dim` of an array or tensor, None if it has no axis `dim`."""
    if is_tensor(batch) and batch.is_nested:  # its shape raises
        return None
    ndim = len(batch.shape)
    return batch.shape[dim] if -ndim <= dim < ndim else None


def byte_count(leaf: Any) -> int:
    """Return how many bytes a copy of an array or tensor takes."""
    if is_tensor(leaf):
        return 0 if find_tensor_fault(leaf) else leaf.numel() * leaf.element_size()
    return int(leaf.nbytes)


def unstack(batch: Any, dim: int, *, to_cpu: bool, copy: bool = False) -> list[Any]:
    """Split an array or tensor along its axis `dim` into rows.

    Rows of an array are views, which are pickled without the rest. A view of a tensor would be
    pickled with its whole batch, so rows of a tensor are copies, without their gradients.

    Args:
        batch: An array or tensor with a batch axis.
        dim: Position of the batch axis.
        to_cpu: Move the rows of tensors to the CPU.
        copy: Copy the rows of arrays too.
    """
    if is_tensor(batch):
        return [own_tensor(row) for row in _plain(batch, to_cpu=to_cpu).unbind(dim)]
    numpy = sys.modules["numpy"]
    rows = numpy.moveaxis(numpy.asarray(batch), dim, 0)
    return copy_rows(rows) if copy else list(rows)


def copy_rows(batch: Any) -> list[Any]:
    """Copy the rows of an array, of whatever subclass, along its first axis."""
    if batch.ndim == 1 and batch.dtype.kind != "V":
        return list(batch)  # scalars, but for structured ones, which are views
    return [row.copy() for row in batch]


def own(leaf: Any, *, to_cpu: bool) -> Any:
    """Return a leaf as it is, but a tensor without its gradient and without shared memory."""
    if not is_tensor(leaf) or find_tensor_fault(leaf) is not None:
        return leaf
    plain = _plain(leaf, to_cpu=to_cpu)
    size = plain.numel() * plain.element_size()
    return plain if plain.untyped_storage().nbytes() == size else own_tensor(plain)


def _plain(tensor: Any, *, to_cpu: bool) -> Any:
    return tensor.detach().cpu() if to_cpu else tensor.detach()


def own_tensor(tensor: Any) -> Any:
    """Copy a tensor."""
    return tensor.clone(memory_format=sys.modules["torch"].contiguous_format)
