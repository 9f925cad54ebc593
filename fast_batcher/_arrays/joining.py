"""Joining of inputs to one batch; `outputs` splits it again. Pure.

    join(rows)   -> one structure of arrays with a batch axis
    is_much(...) -> whether joining or splitting takes too long for an event loop

NumPy and PyTorch are used where they are loaded. A dtype is kept as it is: leaves that would have
to be promoted are refused.
"""

import functools
import importlib
import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from fast_batcher._arrays import ragged
from fast_batcher._arrays.collation import Collation, Padding, PadValue
from fast_batcher._arrays.kinds import ATOMS, find_numpy, find_torch
from fast_batcher._arrays.stacking import find_whole
from fast_batcher._arrays.trees import Tree, build, children, flatten, paths, with_entry
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


def is_joinable_array(value: Any) -> bool:
    """Whether it is a NumPy array or scalar of a kind that can be joined."""
    numpy = find_numpy()
    return numpy is not None and (
        type(value) in (numpy.ndarray, numpy.memmap)
        or (isinstance(value, numpy.generic) and not isinstance(value, _TEXTS))
    )


def is_joinable_tensor(value: Any) -> bool:
    """Whether it is a PyTorch tensor of a kind that can be joined."""
    torch = find_torch()
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def is_array_like(value: Any) -> bool:
    """Whether it is an array or tensor of any kind, also one that cannot be joined."""
    return is_joinable_tensor(value) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text or None, which have no axes."""
    return value is None or type(value) in _NUMBERS or isinstance(value, _TEXTS)


def spec_of(leaf: Any) -> Spec | None:
    """Return the spec of a leaf, None if the leaf cannot be joined to others."""
    if is_joinable_array(leaf):
        return None if leaf.dtype.hasobject else Spec("array", leaf.dtype, leaf.shape)
    if is_joinable_tensor(leaf):
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
    if is_joinable_array(leaf):
        fault = f"dtype {leaf.dtype}"
    elif is_joinable_tensor(leaf):
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
    """Return a spec without the lengths of its padded axes."""
    axes = padding.axes_of(feature, len(spec.shape))
    if not axes or spec.kind not in ("array", "tensor"):
        return spec
    value = padding.value_of(feature)
    if not _fits(value, spec.kind, spec.dtype):
        raise CollationError(
            f"{named(feature)}: the pad value {value!r} does not fit dtype {spec.dtype}; choose "
            f"a value that fits, as in Collation.pad(values={{{feature!r}: ...}})"
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
        # The comparison takes an int of any size, `isfinite` does not.
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
    """Join leaves of one spec along a new axis; numbers get the library of the spec `like`."""
    if spec.kind == "none":
        return None
    if spec.kind == "text":
        return list(leaves)
    if spec.kind == "number":
        return _stack_numbers(leaves, spec, like)
    is_padded = None in spec.shape
    # The shape of the batch is then not that of the rows.
    is_other = is_padded and (padding is None or bool(padding.lengths))
    if dim == 0 and not is_other and (found := find_whole(leaves)) is not None:
        return found
    is_tensor = spec.kind == "tensor"
    if is_tensor:  # no gradient is computed through a batch
        leaves = [leaf.detach() for leaf in leaves]
    if is_padded:
        return _join_unequal(leaves, spec, feature, dim, padding)
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


def _join_unequal(
    leaves: Sequence[Any], spec: Spec, feature: str, dim: int, padding: Padding | None
) -> Any:
    """Join arrays or tensors end to end, or filled up to the longest or an allowed length."""
    if padding is None:
        return ragged.concatenate(leaves, are_tensors=spec.kind == "tensor")
    longest = [max(lengths) for lengths in zip(*[leaf.shape for leaf in leaves], strict=True)]
    for axis in padding.axes_of(feature, len(longest)):
        longest[axis] = padding.fit(longest[axis], axis, axis - len(longest))
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


_DTYPES: Final = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


def _stack_numbers(leaves: Sequence[Any], spec: Spec, like: Spec) -> Any:
    dtype = _DTYPES[spec.dtype]
    if like.kind == "tensor":
        torch = sys.modules["torch"]
        return torch.tensor(leaves, dtype=getattr(torch, dtype), device=like.device)
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        raise CollationError("numbers become NumPy arrays, and NumPy is not installed") from None
    return numpy.array(leaves, dtype)


def row_count(batch: Any, dim: int) -> int | None:
    """Return the length of axis `dim` of an array or tensor, None if it has no axis `dim`."""
    if is_joinable_tensor(batch) and batch.is_nested:  # its shape raises
        return None
    ndim = len(batch.shape)
    return batch.shape[dim] if -ndim <= dim < ndim else None


class Row(NamedTuple):
    """The leaves of an input, the tree that held them, and the spec of each leaf."""

    leaves: list[Any]
    tree: Tree
    specs: tuple[Spec, ...]

    @property
    def joined(self) -> int:
        """The position of the first leaf that is joined along its first axis."""
        return next(at for at, spec in enumerate(self.specs) if None in spec.shape)

    @property
    def length(self) -> int:
        """The length of the leaves that are joined along their first axis."""
        return int(self.leaves[self.joined].shape[0])

    @property
    def signature(self) -> tuple[Tree, tuple[Spec, ...]]:
        """Tree and specs; rows with equal signatures can be joined. Hashable."""
        return self.tree, self.specs


def make_row(value: Any, collation: Collation) -> Row:
    """Flatten and describe one input; CollationError if it cannot be joined to any other."""
    padding = collation.padding
    row = _flatten_row(value, collation)
    if collation.lengths is not None:
        _check_lengths(value, row, collation.lengths)
    if padding is not None and padding.mask is not None:
        _check_mask(value, padding.mask)
        mask, spec = _make_mask(row, padding.mask, padding.mask_of)
        tree = with_entry(row.tree, padding.mask)
        row = Row([*row.leaves, mask], tree, (*row.specs, spec))
    axis = collation.batch_dim[0]
    for position, spec in enumerate(row.specs):
        if not may_have_axis(spec, axis):
            ndim, name = len(spec.shape), named(paths(row.tree)[position])
            raise CollationError(
                f"batch_dim={axis}: {name} has {ndim} axes, so that its batch has {ndim + 1}; "
                f"choose one from {-ndim - 1} to {ndim}"
            )
    return row


def _flatten_row(value: Any, collation: Collation) -> Row:
    leaves, tree = flatten(value, _refuse_plain_list)
    specs: list[Spec] = []
    for leaf, path in zip(leaves, paths(tree), strict=True):
        spec = spec_of(leaf)
        if spec is None:
            raise CollationError(describe_fault(leaf, path))
        if collation.padding is not None:
            spec = pad_spec(spec, path, collation.padding)
        elif collation.lengths is not None and spec.shape:
            spec = spec._replace(shape=(None, *spec.shape[1:]))
        specs.append(spec)
    return Row(leaves, tree, tuple(specs))


def _refuse_plain_list(value: Any) -> bool:
    if type(value) is list and value and all(map(is_plain, value)):
        raise CollationError(
            f"the input has a list of {type(value[0]).__name__}s, which could be one array or many "
            "features; send numpy.asarray(x), or a tuple"
        )
    return False


def _check_lengths(value: Any, row: Row, name: str) -> None:
    named_leaves = zip(row.leaves, paths(row.tree), row.specs, strict=True)
    found = {named(path): leaf.shape[0] for leaf, path, spec in named_leaves if spec.shape}
    if len(set(found.values())) > 1:
        lengths = ", ".join(f"{path} {length}" for path, length in found.items())
        raise CollationError(
            f"the arrays of an input are joined along their first axis, where their lengths "
            f"differ: {lengths:.200}"
        )
    if not found:
        raise CollationError(
            "inputs are joined along the first axis of their arrays, and this input has no array "
            "with an axis"
        )
    if isinstance(value, Mapping) and name in value:
        raise CollationError(
            f"lengths={name!r}: the input has this key already; choose another name for the offsets"
        )


def _check_mask(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise CollationError(
            f"mask={name!r} adds a key to every input, but this input is a "
            f"{type(value).__qualname__}; send dicts"
        )
    if name in value:
        raise CollationError(
            f"mask={name!r}: the input has this key already; remove the key, or omit mask="
        )


def _make_mask(row: Row, name: str, mask_of: str | None) -> tuple[Any, Spec]:
    sizes: dict[tuple[int, ...], Spec] = {}
    for leaf, path, spec in zip(row.leaves, paths(row.tree), row.specs, strict=True):
        if None in spec.shape and mask_of in (None, path):
            padded = zip(leaf.shape, spec.shape, strict=True)
            sizes[tuple([length for length, fixed in padded if fixed is None])] = spec
    if len(sizes) == 1:
        ((lengths, spec),) = sizes.items()
        if spec.kind == "tensor":
            torch = sys.modules["torch"]
            mask = torch.ones(lengths, dtype=torch.int64, device=spec.device)
        else:
            mask = sys.modules["numpy"].ones(lengths, "int64")
        return mask, spec._replace(dtype=mask.dtype, shape=(None,) * len(lengths))
    if sizes:
        raise CollationError(
            f"mask={name!r}: the padded features of the input have the lengths {sorted(sizes)}; "
            "name the one that the mask describes with mask_of"
        )
    missing = "none" if mask_of is None else f"no padded {mask_of!r}"
    raise CollationError(f"mask={name!r} describes a padded feature, and the input has {missing}")


def describe_difference(row: Row, other: Row) -> str:
    """Say why two rows of different signatures cannot be in one batch."""
    if row.tree != other.tree:
        return (
            f"rows of different structures cannot be joined: {_list_features(row)} and "
            f"{_list_features(other)}"
        )
    features = zip(paths(row.tree), row.specs, other.specs, strict=True)
    path, spec, second = next(pair for pair in features if pair[1] != pair[2])
    is_length = spec._replace(shape=()) == second._replace(shape=())
    remedy = "; axes of unequal lengths can be padded, see Collation.pad" if is_length else ""
    return f"{named(path)} cannot be joined: {spec} and {second}{remedy}"


def _list_features(row: Row) -> str:
    kind = row.tree.kind
    names = ", ".join(path for path in paths(row.tree) if path)
    return f"{kind.__name__} of ({names:.200})" if kind is not None else str(row.specs[0])


# Up to here joining and splitting takes at most two milliseconds: a MiB is copied in a tenth of a
# millisecond, and a row or a part of its structure is read in one to two microseconds.
MOST_BYTES: Final = 2**20
MOST_PARTS: Final = 1000


def join(rows: Sequence[Any], collation: Collation) -> Any:
    """Join one or more rows to one structure whose arrays have one axis more, at `batch_dim[0]`."""
    if not rows:
        raise CollationError("there are no rows to join; give one or more")
    first = make_row(rows[0], collation)
    # Only the leaves of the other rows are kept: the garbage collector stops all threads while it
    # visits a hundred thousand complete rows.
    leaves = [first.leaves]
    for value in rows[1:]:
        row = make_row(value, collation)
        if row.signature != first.signature:
            raise CollationError(describe_difference(first, row))
        leaves.append(row.leaves)
    return join_leaves(first, leaves, collation)


def count_elements(leaves: Iterable[Any]) -> int:
    """Count the elements of arrays and tensors; a number or a text is one."""
    return sum([math.prod(getattr(leaf, "shape", ())) for leaf in leaves if leaf is not None])


def join_leaves(first: Row, leaves: Sequence[list[Any]], collation: Collation) -> Any:
    """Join the leaves of rows that are known to be of the kind of the first; see `join`."""
    # Kind of joined numbers: tensors if the row has tensors and no arrays, else arrays.
    by_kind = {spec.kind: spec for spec in reversed(first.specs)}
    like = by_kind.get("array") or by_kind.get("tensor", NONE)
    columns = zip(*leaves, strict=True)
    features = zip(columns, first.specs, paths(first.tree), strict=True)
    stacked = [
        stack_leaves(column, spec, path, collation.batch_dim[0], collation.padding, like)
        for column, spec, path in features
    ]
    if collation.lengths is None:
        return build(first.tree, iter(stacked))
    at = first.joined
    is_tensor = first.specs[at].kind == "tensor"
    lengths = [leaf[at].shape[0] for leaf in leaves]
    offsets = ragged.make_offsets(lengths, stacked[at], are_tensors=is_tensor)
    if first.tree.kind in (dict, OrderedDict):
        return build(with_entry(first.tree, collation.lengths), iter([*stacked, offsets]))
    return build(first.tree, iter(stacked)), offsets


def make_filler(rows: Sequence[Row]) -> Row:
    """Return a row for a batch whose positions are as many as its rows; see `concatenate`."""
    row = max(rows, key=attrgetter("length"))
    leaves = [
        leaf if None not in spec.shape else ragged.double(leaf, are_tensors=spec.kind == "tensor")
        for leaf, spec in zip(row.leaves, row.specs, strict=True)
    ]
    return row._replace(leaves=leaves)


def is_much(
    value: Any,
    *,
    dim: int | None = None,
    most_parts: int = MOST_PARTS,
    most_bytes: int = MOST_BYTES,
) -> bool:
    """Estimate in microseconds whether splitting, joining or copying a value takes milliseconds."""
    parts = size = 0
    todo = [(value, dim)]
    while todo:
        part, axis = todo.pop()
        if type(part) is list:
            axis = None  # its entries are rows
        # A list may be long, so it is not copied.
        inside = part if type(part) in (list, tuple) else children(part)
        if inside is not None:
            parts += len(inside)
        elif is_joinable_array(part) or is_joinable_tensor(part):
            is_opaque = is_joinable_tensor(part) and find_tensor_fault(part)
            size += 0 if is_opaque else int(part.nbytes)
            parts += 0 if axis is None else row_count(part, axis) or 0
        if parts > most_parts or size > most_bytes:
            return True
        # Numbers and texts, the most parts of long lists, have been counted.
        todo += [(inner, axis) for inner in inside or () if type(inner) not in ATOMS]
    return False
