"""One feature at a time: what a leaf is, many of them as one array, and one array as many. Pure.

NumPy and PyTorch are used where they are loaded. A dtype is kept as it is: nothing is promoted,
and what would need it is refused.
"""

import functools
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fast_batcher._arrays.collation import Padding, PadValue, Side
from fast_batcher._arrays.stacking import find_whole
from fast_batcher.errors import CollationError

_NUMBERS: Final = (bool, int, float, complex)
_TEXTS: Final = (str, bytes)
_INT64: Final = range(-(2**63), 2**63)


class Spec(NamedTuple):
    """What has to be equal in two leaves, so that they can stand in one array."""

    # "array", "tensor", "number", "text" or "none".
    kind: str
    # The type of a number or a text.
    dtype: Any = None
    # Lengths of the axes, None for those that are padded.
    shape: tuple[int | None, ...] = ()
    device: Any = None

    def __str__(self) -> str:
        if self.kind in ("number", "text"):
            return f"a Python {self.dtype.__name__}"
        if self.kind == "none":
            return "None"
        shape = ", ".join("any" if length is None else str(length) for length in self.shape)
        place = "" if self.device is None else f" on {self.device}"
        article = "an" if self.kind == "array" else "a"
        return f"{article} {self.kind} of shape ({shape}) and dtype {self.dtype}{place}"


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
    """Whether it is any array or tensor at all, also one that cannot be joined."""
    return is_tensor(value) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text or None: nothing that has axes, and nothing that holds any."""
    return value is None or type(value) in _NUMBERS or isinstance(value, _TEXTS)


def spec_of(leaf: Any) -> Spec | None:
    """What the leaves of other rows have to be equal to; None if it can be joined to nothing."""
    if is_array(leaf):
        return None if leaf.dtype.hasobject else Spec("array", leaf.dtype, leaf.shape)
    if is_tensor(leaf):
        if find_tensor_fault(leaf):  # first: nested tensors raise where they are asked for a shape
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
    """Why a leaf without a spec can be joined to nothing, and what could be sent instead."""
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
    """The same without the lengths of the axes that are padded.

    Raises:
        CollationError: The dtype cannot keep the pad value.
    """
    axes = _find_axes(spec.kind, spec.dtype, len(spec.shape), feature, padding)
    if not axes:
        return spec
    shape = tuple([None if axis in axes else n for axis, n in enumerate(spec.shape)])
    return Spec(spec.kind, spec.dtype, shape, spec.device)


# As many features as the inputs of a few models have.
@functools.lru_cache(maxsize=256)
def _find_axes(kind: str, dtype: Any, ndim: int, feature: str, padding: Padding) -> frozenset[int]:
    axes = padding.axes_of(feature, ndim) if kind in ("array", "tensor") else frozenset()
    value = padding.value_of(feature)
    if axes and not _fits(value, kind, dtype):
        raise CollationError(
            f"{named(feature)}: the pad value {value!r} does not fit dtype {dtype}; choose one "
            f"that does, as in Collation.pad(values={{{feature!r}: ...}})"
        )
    return axes


def find_tensor_fault(tensor: Any) -> str | None:
    """Why a tensor has no rows in memory, None if it has."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_quantized:
        return f"quantized dtype {tensor.dtype}"
    if tensor.device.type == "meta":
        return "device meta"
    return "nested tensors" if tensor.is_nested else None


def named(feature: str) -> str:
    """A feature in an error."""
    return repr(feature) if feature else "the row"


def _fits(value: PadValue | None, library: str, dtype: Any) -> bool:
    """Whether a pad value can be kept in this dtype without becoming another number."""
    kind, limits = _limits(library, dtype)
    if value is None or limits is None:
        return False
    least, most = limits
    if kind == "c":
        parts = [value.real, value.imag]
        return all(_is_in(part, least, most) for part in parts)
    if isinstance(value, complex):
        return False
    if kind == "f":
        return _is_in(value, least, most)
    return least <= value <= most and value == int(value)


def _is_in(value: float, least: float, most: float) -> bool:
    # Not `isfinite`, which cannot take an int of any size.
    return least <= value <= most or value != value or value in (math.inf, -math.inf)


def _limits(library: str, dtype: Any) -> tuple[str, tuple[float, float] | None]:
    """The kind of a dtype in one letter, as NumPy has it, and its numbers; None if it has none."""
    info: Any
    if library == "array":
        numpy = sys.modules["numpy"]
        kind = dtype.kind
        info = numpy.iinfo if kind in "iu" else numpy.finfo
    else:
        torch = sys.modules["torch"]
        kind = "c" if dtype.is_complex else "f" if dtype.is_floating_point else "i"
        kind = "b" if dtype is torch.bool else kind
        info = torch.iinfo if kind == "i" else torch.finfo
    if kind == "b":
        return kind, (0, 1)
    if kind not in "iufc":
        return kind, None
    # As Python's own: beside one of NumPy's the value would first become one of its dtype.
    number = int if kind in "iu" else float
    return kind, (number(info(dtype).min), number(info(dtype).max))


def may_have_axis(spec: Spec, dim: int) -> bool:
    """Whether a batch of such leaves can have its axis there."""
    ndim = len(spec.shape)
    return -ndim - 1 <= dim <= ndim or spec.kind in ("none", "text")


def stack(
    leaves: Sequence[Any], spec: Spec, feature: str, dim: int, padding: Padding | None, like: Spec
) -> Any:
    """Join the leaves of many rows along a new axis.

    Args:
        leaves: One or more, all of this `spec`.
        spec: What `spec_of` says of each.
        feature: Their name.
        dim: Where the new axis is; `may_have_axis` has been asked.
        padding: What is padded, None for nothing.
        like: An array or tensor of the same rows: numbers come into one of its library and device.

    Returns:
        An array or tensor, new but where the leaves lie in one already (`stacking`); numbers become
        one of bool, int64, float64 or complex128, texts a list, None stays None.

    Raises:
        CollationError: There are numbers, and no library for them.
    """
    if spec.kind == "none":
        return None
    if spec.kind == "text":
        return list(leaves)
    if spec.kind == "number":
        return _stack_numbers(leaves, spec, like)
    if dim == 0 and (found := find_whole(leaves)) is not None:
        return found
    shape = tuple([max(lengths) for lengths in zip(*[leaf.shape for leaf in leaves], strict=True)])
    value = padding.value_of(feature) if None in spec.shape and padding is not None else None
    side: Side = padding.side_of(feature) if padding is not None else "right"
    whole = list(shape)
    whole.insert(dim % (len(shape) + 1), len(leaves))
    if spec.kind == "tensor":
        return _stack_tensors(leaves, spec, whole, dim, value, side)
    numpy = sys.modules["numpy"]
    batch = (
        numpy.empty(whole, spec.dtype) if value is None else numpy.full(whole, value, spec.dtype)
    )
    rows = numpy.moveaxis(batch, dim, 0)
    for position, leaf in enumerate(leaves):
        if value is None:
            rows[position] = leaf
        else:
            rows[(position, *_place(leaf.shape, shape, side))] = leaf
    return batch


def _stack_tensors(
    leaves: Sequence[Any],
    spec: Spec,
    whole: list[int],
    dim: int,
    value: PadValue | None,
    side: Side,
) -> Any:
    torch = sys.modules["torch"]
    # Nobody computes a gradient through a batch.
    leaves = [leaf.detach() for leaf in leaves]
    if value is None:
        return torch.stack(leaves, dim)
    batch = torch.full(whole, value, dtype=spec.dtype, device=leaves[0].device)
    rows = batch.movedim(dim, 0)
    for position, leaf in enumerate(leaves):
        rows[(position, *_place(leaf.shape, rows.shape[1:], side))] = leaf
    return batch


def _place(lengths: Sequence[int], most: Sequence[int], side: Side) -> tuple[slice, ...]:
    """Where a row of these lengths is in one that has the most."""
    pairs = zip(lengths, most, strict=True)
    if side == "right":
        return tuple([slice(0, length) for length, _ in pairs])
    return tuple([slice(all_ - length, all_) for length, all_ in pairs])


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
    """An int64 mask of what is there, in the library and on the device of a feature."""
    if like.kind == "tensor":
        torch = sys.modules["torch"]
        return torch.ones(tuple(lengths), dtype=torch.int64, device=like.device)
    numpy = sys.modules["numpy"]
    return numpy.ones(tuple(lengths), "int64")


def row_count(batch: Any, dim: int) -> int | None:
    """How many rows an array or tensor has, None if it has no such axis."""
    if is_tensor(batch) and batch.is_nested:  # raises where it is asked for its shape
        return None
    ndim = len(batch.shape)
    return batch.shape[dim] if -ndim <= dim < ndim else None


def size_of(leaf: Any) -> int:
    """How many bytes are copied with an array or tensor."""
    if is_tensor(leaf):
        return 0 if find_tensor_fault(leaf) else leaf.numel() * leaf.element_size()
    return int(leaf.nbytes)


def unstack(batch: Any, dim: int, *, to_cpu: bool, copy: bool = False) -> list[Any]:
    """The rows of an array or tensor that has this axis.

    Those of an array are views, which are pickled without the rest. A view of a tensor would be
    pickled with all of its batch, so those are copies, without their gradients.

    Args:
        batch: With the batch axis.
        dim: Where that is.
        to_cpu: Whether rows of tensors have to leave their device.
        copy: Whether rows of arrays have to be copies too.
    """
    if is_tensor(batch):
        return [own_tensor(row) for row in _plain(batch, to_cpu=to_cpu).unbind(dim)]
    numpy = sys.modules["numpy"]
    rows = numpy.moveaxis(numpy.asarray(batch), dim, 0)
    return own_rows(rows) if copy else list(rows)


def own_rows(batch: Any) -> list[Any]:
    """The rows of an array along its first axis, in memory of their own; of whatever subclass."""
    if batch.ndim == 1 and batch.dtype.kind != "V":
        return list(batch)  # scalars, but for structured ones, which are views
    return [row.copy() for row in batch]


def own(leaf: Any, *, to_cpu: bool) -> Any:
    """The same; a tensor without its gradient and without what else is in its memory."""
    if not is_tensor(leaf) or find_tensor_fault(leaf) is not None:
        return leaf
    plain = _plain(leaf, to_cpu=to_cpu)
    size = plain.numel() * plain.element_size()
    return plain if plain.untyped_storage().nbytes() == size else own_tensor(plain)


def _plain(tensor: Any, *, to_cpu: bool) -> Any:
    return tensor.detach().cpu() if to_cpu else tensor.detach()


def own_tensor(tensor: Any) -> Any:
    """A copy in memory of its own."""
    return tensor.clone(memory_format=sys.modules["torch"].contiguous_format)
