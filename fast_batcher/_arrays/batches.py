"""Joining of rows to one batch and splitting of batches into rows, in any structure. Pure.

join(rows)   -> one structure of arrays with a batch axis
split(batch) -> the rows of the batch
is_much(...) -> whether joining or splitting takes too long for an event loop
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from fast_batcher._arrays import leaves as arrays
from fast_batcher._arrays.collation import Collation, Outputs
from fast_batcher._arrays.rows import Row, describe_difference, make_row
from fast_batcher._arrays.tables import TABLE_FAULT, is_table
from fast_batcher._arrays.trees import LEAF, build, children, flatten, paths
from fast_batcher.errors import CollationError, OutputMismatchError, is_kind

# Up to here joining and splitting takes at most two milliseconds: a MiB is copied in a tenth of a
# millisecond, and a row or a part of its structure is read in one to two microseconds.
MOST_BYTES: Final = 2**20
MOST_PARTS: Final = 1000
# Types of parts that contain no array.
_ATOMS: Final = frozenset({str, bytes, int, float, bool, type(None)})


def join(rows: Sequence[Any], collation: Collation) -> Any:
    """Join rows to one batch.

    Args:
        rows: One or more inputs.
        collation: Rules for joining; `unequal` is ignored. The batch axis is `batch_dim[0]`.

    Returns:
        A structure like that of a row. Its arrays and tensors have one axis more. They are new,
        unless the rows are adjacent in shared memory that a worker received. Numbers become
        arrays (tensors if the row has tensors and no arrays), texts lists; None, which has to be
        None in all rows, stays None. A mapping becomes a dict.

    Raises:
        CollationError: There is no row, the rows differ, or one of them cannot be joined at all.
        MemoryError: There is no memory for the batch. The error of a GPU library passes unchanged.
    """
    if not rows:
        raise CollationError("there are no rows to join: what is joined needs one or more")
    first = make_row(rows[0], collation)
    # Of the other rows only the leaves are kept: the garbage collector stops all threads while it
    # visits a hundred thousand rows with everything that describes them.
    leaves = [first.leaves]
    for value in rows[1:]:
        row = make_row(value, collation)
        if row.signature != first.signature:
            raise CollationError(describe_difference(first, row))
        leaves.append(row.leaves)
    return _join_leaves(first, leaves, collation)


def join_apart(rows: Sequence[Row], collation: Collation) -> Any:
    """Join rows that are known to be of one kind; see `join`."""
    return _join_leaves(rows[0], [row.leaves for row in rows], collation)


def _join_leaves(first: Row, leaves: Sequence[list[Any]], collation: Collation) -> Any:
    # What numbers become: tensors if the row has tensors and no arrays, else arrays.
    by_kind = {spec.kind: spec for spec in reversed(first.specs)}
    like = by_kind.get("array") or by_kind.get("tensor", arrays.NONE)
    columns = zip(*leaves, strict=True)
    features = zip(columns, first.specs, paths(first.tree), strict=True)
    stacked = [
        arrays.stack_leaves(column, spec, path, collation.batch_dim[0], collation.padding, like)
        for column, spec, path in features
    ]
    return build(first.tree, iter(stacked))


def split(
    batch: Any,
    count: int,
    collation: Collation,
    *,
    to_cpu: bool = False,
    copy: bool = False,
) -> list[Any]:
    """Split a batch into its rows, the inverse of `join`.

    Args:
        batch: An array or tensor, a list or tuple of rows, or a structure of these.
        count: Number of rows that the batch must have.
        collation: Position of the batch axis (`batch_dim[1]`) and the reading of lists (`outputs`).
        to_cpu: Move the rows of tensors to the CPU.
        copy: Copy the rows of arrays, so that later writes to the array do not change them.

    Returns:
        `count` rows. Rows of arrays are views of the batch, unless `copy` is set. Rows of tensors
        are detached copies, so that a row that is kept or sent does not carry the whole batch.
        Entries of a list are returned as they are, except for tensors that share memory.

    Raises:
        OutputMismatchError: The batch has another number of rows, holds a value without rows, or
            holds a list that can be read in two ways.
    """
    axis = collation.batch_dim[1]

    def is_rows(value: Any) -> bool:
        return _is_rows(value, axis, collation.outputs)

    return _split(batch, count, axis, is_rows, to_cpu=to_cpu, copy=copy)


def _split(
    batch: Any,
    count: int,
    dim: int,
    is_rows: Callable[[Any], bool],
    *,
    to_cpu: bool = False,
    copy: bool = False,
) -> list[Any]:
    # A list of rows is a leaf.
    leaves, tree = flatten(batch, is_rows)
    columns = [
        _split_leaf(leaf, path, count, dim, to_cpu=to_cpu, copy=copy)
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
        # As `join` makes it of texts.
        is_plain = [arrays.is_plain(entry) for entry in value]
        return type(value) is list and bool(value) and all(is_plain)
    if any(entry is not None for entry in value) and all(_may_be_batch(e, dim) for e in value):
        raise OutputMismatchError(
            f"the output is a {type(value).__name__} of {len(value)}, which could be one output "
            "for each input, or several outputs of the whole batch; say which with outputs='rows' "
            "or outputs='several', as in Collation.stack(outputs='rows')"
        )
    return True


def _may_be_batch(value: Any, dim: int) -> bool:
    """Return whether a value could have a batch axis, for some size of batch."""
    if arrays.is_array_like(value):
        return arrays.row_count(value, dim) is not None
    if value is None or type(value) in (list, tuple):
        return True
    inside = children(value)
    return inside is not None and all(_may_be_batch(one, dim) for one in inside)


def _split_leaf(
    leaf: Any, path: str, count: int, dim: int, *, to_cpu: bool, copy: bool
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
    found = len(leaf) if is_list else arrays.row_count(leaf, dim)
    if found is None:
        raise OutputMismatchError(
            f"{name} has {len(leaf.shape)} axes and no axis batch_dim={dim}; return the "
            "batch axis too, or say which it is"
        )
    if found != count:
        raise OutputMismatchError(
            f"{name} has {found} rows for {count} inputs; return one for each"
        )
    if is_list:
        return [_own_row(row, to_cpu=to_cpu) for row in leaf]
    return arrays.unstack(leaf, dim, to_cpu=to_cpu, copy=copy)


def _has_rows(leaf: Any) -> bool:
    """Whether it is an array or tensor that can be split, if it has the axis."""
    return arrays.is_array(leaf) or (arrays.is_tensor(leaf) and not arrays.find_tensor_fault(leaf))


def _own_row(row: Any, *, to_cpu: bool) -> Any:
    if is_kind(row, BaseException):
        return row
    inside, tree = flatten(row)
    if not any(map(arrays.is_tensor, inside)):
        return row
    return build(tree, iter([arrays.own(leaf, to_cpu=to_cpu) for leaf in inside]))


def split_rows(batch: Any, collation: Collation) -> list[Any]:
    """Split an input that is itself a batch into its rows.

    Args:
        batch: An array or tensor, or a structure of them. A list in it has one entry per row, as in
            `{"input_ids": [array, array]}`.
        collation: Position of the batch axis (`batch_dim[0]`).

    Returns:
        Rows as `split` makes them; an empty list if the batch has none.

    Raises:
        CollationError: The features have different numbers of rows, or one of them has no rows.
    """
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
            f"the input is no batch: its features have these numbers of rows: {counts}"
        )
    return _split(batch, found.pop(), axis, _is_list)


def _is_list(value: Any) -> bool:
    return type(value) is list


def _count_rows(leaf: Any, path: str, dim: int) -> int:
    if type(leaf) is list:
        return len(leaf)
    found = arrays.row_count(leaf, dim) if _has_rows(leaf) else None
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
    """Estimate in microseconds whether splitting, joining or copying a value takes milliseconds.

    Args:
        value: The batch, the list of rows, or the output.
        dim: Position of the batch axis, None for rows and outputs.
        most_parts: Parts of its structure above which it takes so long.
        most_bytes: The same for the bytes of its arrays.
    """
    parts = size = 0
    todo = [(value, dim)]
    while todo:
        one, axis = todo.pop()
        if type(one) is list:
            axis = None  # its entries are rows
        # A list may be long, so it is not copied.
        inside = one if type(one) in (list, tuple) else children(one)
        if inside is not None:
            parts += len(inside)
        elif arrays.is_array(one) or arrays.is_tensor(one):
            size += arrays.byte_count(one)
            parts += 0 if axis is None else arrays.row_count(one, axis) or 0
        if parts > most_parts or size > most_bytes:
            return True
        # Numbers and texts, the most parts of long lists, have been counted.
        todo += [(part, axis) for part in inside or () if type(part) not in _ATOMS]
    return False
