"""Joining of inputs to one batch, and splitting of a batch's outputs. Pure.

    join(rows)        -> one structure of arrays with a batch axis
    split_rows(batch) -> the rows of the batch
    is_much(...)      -> whether joining or splitting takes too long for an event loop
    list_outputs(...) -> the outputs of a model for a batch, one for each input

NumPy and PyTorch are used where they are loaded; no library of tables is imported. A dtype is kept
as it is: leaves that would have to be promoted are refused.
"""

import functools
import importlib
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

from fast_batcher._arrays import ragged
from fast_batcher._arrays.collation import Collation, Outputs, Padding, PadValue
from fast_batcher._arrays.kinds import find_numpy, find_torch, is_array, is_tensor
from fast_batcher._arrays.stacking import find_whole
from fast_batcher._arrays.trees import LEAF, Tree, build, children, flatten, paths, with_entry
from fast_batcher.errors import CollationError, OutputMismatchError, is_kind

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


def unstack(batch: Any, dim: int, *, to_cpu: bool, copy: bool = False) -> list[Any]:
    """Split an array or tensor along its axis `dim` into rows.

    Rows of an array are views, which are pickled without the rest. A view of a tensor would be
    pickled with its whole batch, so rows of a tensor are copies, without their gradients.
    """
    if is_joinable_tensor(batch):
        plain = batch.detach().cpu() if to_cpu else batch.detach()
        return [_copy_tensor(row) for row in plain.unbind(dim)]
    numpy = sys.modules["numpy"]
    rows = numpy.moveaxis(numpy.asarray(batch), dim, 0)
    return copy_rows(rows) if copy else list(rows)


def unjoin(batch: Any, lengths: Sequence[int], *, to_cpu: bool, copy: bool) -> list[Any]:
    """Split an array or tensor along its first axis into parts; see `unstack`."""
    if is_joinable_tensor(batch):
        plain = batch.detach().cpu() if to_cpu else batch.detach()
        return [_copy_tensor(part) for part in ragged.split_at(plain, lengths)]
    parts = ragged.split_at(batch, lengths)
    return [part.copy() for part in parts] if copy else parts


def copy_rows(batch: Any) -> list[Any]:
    """Copy the rows of an array, of whatever subclass, along its first axis."""
    if batch.ndim == 1 and batch.dtype.kind != "V":
        return list(batch)  # scalars, but for structured ones, which are views
    return [row.copy() for row in batch]


def _own(leaf: Any, *, to_cpu: bool) -> Any:
    """Return a leaf as it is, but a tensor without its gradient and without shared memory."""
    if not is_joinable_tensor(leaf) or find_tensor_fault(leaf) is not None:
        return leaf
    plain = leaf.detach().cpu() if to_cpu else leaf.detach()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else _copy_tensor(plain)


def _copy_tensor(tensor: Any) -> Any:
    return tensor.clone(memory_format=sys.modules["torch"].contiguous_format)


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
# Types of parts that contain no array.
_ATOMS: Final = frozenset({str, bytes, int, float, bool, type(None)})


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


def split(
    batch: Any,
    count: int,
    collation: Collation,
    *,
    lengths: Sequence[int] = (),
    to_cpu: bool = False,
    copy: bool = False,
) -> list[Any]:
    """Split a batch of `count` rows, the inverse of `join`; without `copy` into views of arrays.

    An array as long as `lengths` together has a part of each length instead.
    """
    axis = collation.batch_dim[1]
    is_rows = functools.partial(_is_rows, dim=axis, reading=collation.outputs)
    return _split(batch, count, axis, is_rows, lengths=lengths, to_cpu=to_cpu, copy=copy)


def _split(
    batch: Any,
    count: int,
    dim: int,
    is_rows: Callable[[Any], bool],
    *,
    lengths: Sequence[int] = (),
    to_cpu: bool = False,
    copy: bool = False,
) -> list[Any]:
    # A list of rows is a leaf.
    leaves, tree = flatten(batch, is_rows)
    columns = [
        _split_leaf(leaf, path, count, dim, lengths, to_cpu=to_cpu, copy=copy)
        for leaf, path in zip(leaves, paths(tree), strict=True)
    ]
    if tree == LEAF:
        return columns[0]
    return [build(tree, iter([column[row] for column in columns])) for row in range(count)]


def _is_rows(value: Any, dim: int, reading: Outputs) -> bool:
    """Whether a value is a list with an entry for each row, and not several outputs."""
    if type(value) is not list and type(value) is not tuple:
        return False
    if reading == "rows":
        return True
    if reading == "several":
        # `join` makes such a list of texts.
        return type(value) is list and bool(value) and all(map(is_plain, value))
    if any(entry is not None for entry in value) and all(
        _may_be_batch(entry, dim) for entry in value
    ):
        raise OutputMismatchError(
            f"the output is a {type(value).__name__} of {len(value)}, which could be one output "
            "for each input, or several outputs of the whole batch; say which with outputs='rows' "
            "or outputs='several', as in Collation.stack(outputs='rows')"
        )
    return True


def _may_be_batch(value: Any, dim: int) -> bool:
    """Return whether a value could have a batch axis, for some size of batch."""
    if is_array_like(value):
        return row_count(value, dim) is not None
    if value is None or type(value) in (list, tuple):
        return True
    inside = children(value)
    return inside is not None and all(_may_be_batch(child, dim) for child in inside)


def _split_leaf(
    leaf: Any,
    path: str,
    count: int,
    dim: int,
    lengths: Sequence[int],
    *,
    to_cpu: bool,
    copy: bool,
) -> list[Any]:
    if leaf is None and path:
        return [None] * count
    name = f"output {path!r}" if path else "the output"
    is_list = type(leaf) is list or type(leaf) is tuple
    if not is_list and not _has_rows(leaf):
        remedy = (
            "; return a plain array or tensor with a batch axis, a list with one output per input, "
            "or a dict of them"
        )
        fault = TABLE_FAULT if is_table(leaf) else remedy
        raise OutputMismatchError(
            f"{name} is a {type(leaf).__qualname__} for {count} inputs{fault}"
        )
    found = len(leaf) if is_list else row_count(leaf, dim)
    if found is None:
        raise OutputMismatchError(
            f"{name} has {len(leaf.shape)} axes and no axis batch_dim={dim}; return "
            "outputs with a batch axis, or set batch_dim"
        )
    if lengths and not is_list and found == sum(lengths):
        return unjoin(leaf, lengths, to_cpu=to_cpu, copy=copy)
    if found != count:
        or_each = f", or one for each of their {sum(lengths)} positions" if lengths else ""
        raise OutputMismatchError(
            f"{name} has {found} rows for {count} inputs; return one for each{or_each}"
        )
    if is_list:
        return [_own_row(row, to_cpu=to_cpu) for row in leaf]
    return unstack(leaf, dim, to_cpu=to_cpu, copy=copy)


def _has_rows(leaf: Any) -> bool:
    """Whether it is an array or tensor that can be split, if it has the axis."""
    return is_joinable_array(leaf) or (is_joinable_tensor(leaf) and not find_tensor_fault(leaf))


def _own_row(row: Any, *, to_cpu: bool) -> Any:
    if is_kind(row, BaseException):
        return row
    inside, tree = flatten(row)
    if not any(map(is_joinable_tensor, inside)):
        return row
    return build(tree, iter([_own(leaf, to_cpu=to_cpu) for leaf in inside]))


def split_rows(batch: Any, collation: Collation) -> list[Any]:
    """Split an input that is itself a batch, with its axis at `batch_dim[0]`, into its rows."""
    axis = collation.batch_dim[0]
    leaves, tree = flatten(batch, _is_list)
    counts = {
        path: _count_rows(leaf, path, axis)
        for leaf, path in zip(leaves, paths(tree), strict=True)
        if leaf is not None
    }
    found = set(counts.values())
    if len(found) != 1:
        raise CollationError(
            f"the input is not a batch: its features have different numbers of rows: {counts}"
        )
    return _split(batch, found.pop(), axis, _is_list)


def _is_list(value: Any) -> bool:
    return type(value) is list


def _count_rows(leaf: Any, path: str, dim: int) -> int:
    if type(leaf) is list:
        return len(leaf)
    found = row_count(leaf, dim) if _has_rows(leaf) else None
    if found is None:
        raise CollationError(
            f"{path!r} of the input, a {type(leaf).__qualname__}, has no batch axis {dim}; send a "
            "plain array or tensor that has one, or a list with one entry per row"
        )
    return found


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
        todo += [(inner, axis) for inner in inside or () if type(inner) not in _ATOMS]
    return False


# Values of these types are one text; iteration gives characters or numbers.
TEXTS: Final = (str, bytes, bytearray, memoryview)
# Ends the message about a table that a model has returned for a batch.
TABLE_FAULT: Final = (
    ": iteration over a table gives its columns; return a list with one output per input, as "
    'table.to_dict("records") (pandas) or table.to_dicts() (polars), or an array, as '
    "table.to_numpy()"
)


def is_table(value: Any) -> bool:
    """Return whether a value is a table, as of pandas, polars or PyArrow.

    Tables have an attribute `columns`, and are no sequences. The attribute is looked up without
    `__getattr__`, by which a pandas series finds its labels. A method `columns` makes no table: it
    chooses columns of a query's result, which iterates over rows.
    """
    if isinstance(value, Sequence):
        return False
    columns = inspect.getattr_static(value, "columns", None)
    return columns is not None and not callable(columns)


def has_field_names(value: Any) -> bool:
    """Return whether a value is a named tuple, or a struct sequence as `torch.max` returns."""
    kind = type(value)
    is_named = hasattr(kind, "_fields") or hasattr(kind, "n_fields")
    return issubclass(kind, tuple) and is_named


def is_one_value(value: Any) -> bool:
    """Return whether iteration over a value gives its parts: keys, columns, fields, characters."""
    model: Any = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    # A model of the user may have its own `__iter__`, over many values.
    is_model = model is not None and getattr(type(value), "__iter__", None) is model.__iter__
    is_plain = isinstance(value, (*TEXTS, Mapping))
    return is_plain or is_model or has_field_names(value) or is_table(value)


_NO_SEQUENCE: Final = (
    "; return a list with one output per input, or an array whose first axis is the batch"
)


def list_outputs(
    outputs: Any, count: int, returned: str, *, copies: bool, to_cpu: bool = True
) -> list[Any]:
    """Return the outputs of a batch as a list: an array or tensor is split along its first axis."""
    # A view of a row keeps the whole batch in memory, and changes when the model fills the array
    # again: so rows of tensors are copied, and with `copies` those of arrays, and the views in a
    # list. `returned` is the subject and verb of error messages.
    # A subclass of list may iterate over something else than its items.
    if type(outputs) is list and len(outputs) == count:
        return _copy_views(outputs) if copies else outputs
    return _list_rows(outputs, count, returned, copies=copies, to_cpu=to_cpu)


def _list_rows(outputs: Any, count: int, returned: str, *, copies: bool, to_cpu: bool) -> list[Any]:
    """Return the outputs of a batch that are no list, or refuse them."""
    fault = _describe_fault(outputs)
    if fault is not None:
        raise OutputMismatchError(f"{returned} {type(outputs).__name__} for {count} inputs{fault}")
    if len(outputs) != count:
        raise OutputMismatchError(
            f"{returned} {len(outputs)} outputs for {count} inputs; return one per input"
        )
    if is_tensor(outputs):
        rows = [row.clone() for row in (outputs.detach().cpu() if to_cpu else outputs)]
    elif copies and is_array(outputs):
        rows = copy_rows(outputs)
    else:
        rows = list(islice(outputs, count + 1))  # of a longer one, one more than `count`
        if copies:
            rows = _copy_views(rows)
    if len(rows) != count:
        found = "more" if len(rows) > count else len(rows)
        raise OutputMismatchError(
            f"{returned} {type(outputs).__name__} for {count} inputs: its length is {count}, and "
            f"iteration gives {found}; return a list with one output per input"
        )
    return rows


def _copy_views(outputs: list[Any]) -> list[Any]:
    """Copy the arrays and tensors that are parts of others."""
    if _ATOMS.issuperset(map(type, outputs)):
        return outputs
    return [_copy_view(output) for output in outputs]


def _copy_view(output: Any) -> Any:
    if is_array(output):
        return output if output.base is None else output.copy()
    if is_joinable_tensor(output) and output.untyped_storage().nbytes() != output.nbytes:
        return _copy_tensor(output)
    return output


def _describe_fault(outputs: Any) -> str | None:
    """Describe why a value cannot be one output per input, and the remedy; None if it can."""
    if is_array(outputs) or is_tensor(outputs):
        # An array without axes has a shape, and no length.
        return None if outputs.shape else _NO_SEQUENCE
    if is_table(outputs):
        return TABLE_FAULT
    if has_field_names(outputs):
        return (
            ": its entries are the fields of one value; return a list with one output per input, "
            "as list(zip(values, indices)) of two fields"
        )
    is_array_like = bool(getattr(outputs, "shape", ())) and hasattr(outputs, "__getitem__")
    is_sequence = is_array_like or isinstance(outputs, Sequence)
    return None if is_sequence and not isinstance(outputs, TEXTS) else _NO_SEQUENCE
