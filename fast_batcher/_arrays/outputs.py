"""Splitting of a batch's outputs, and of inputs that are batches themselves. Pure.

    split(batch)      -> the outputs of a function that takes a batch as `join` makes it
    split_rows(batch) -> the rows of an input that is a batch
    list_outputs(...) -> the outputs of a model for a batch, one for each input

NumPy and PyTorch are used where they are loaded; no library of tables is imported. An error names
the remedy.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from fast_batcher._arrays import ragged
from fast_batcher._arrays.collation import Collation, Outputs
from fast_batcher._arrays.joining import (
    find_tensor_fault,
    is_array_like,
    is_joinable_array,
    is_joinable_tensor,
    is_plain,
    row_count,
)
from fast_batcher._arrays.kinds import ATOMS, is_array, is_tensor
from fast_batcher._arrays.trees import LEAF, build, children, flatten, paths
from fast_batcher.errors import CollationError, OutputMismatchError, is_kind


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
    if ATOMS.issuperset(map(type, outputs)):
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
