"""`Row`: one input as leaves and specs, from which follows whether inputs can be joined. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fast_batcher._arrays import leaves as arrays
from fast_batcher._arrays.collation import Collation, Padding
from fast_batcher._arrays.leaves import Spec
from fast_batcher._arrays.trees import Tree, flatten, paths, with_entry
from fast_batcher.errors import CollationError


class Row(NamedTuple):
    """The leaves of an input, the tree that held them, and the spec of each leaf."""

    leaves: list[Any]
    tree: Tree
    specs: tuple[Spec, ...]

    @property
    def signature(self) -> tuple[Tree, tuple[Spec, ...]]:
        """Tree and specs; rows with equal signatures can be joined. Hashable."""
        return self.tree, self.specs


def make_row(value: Any, collation: Collation) -> Row:
    """Flatten one input and describe its leaves.

    Args:
        value: The input.
        collation: Rules by which inputs are joined.

    Raises:
        CollationError: The input cannot be joined to any other: it is or holds a value that is no
            array, its dtype cannot keep its pad value, or it has too few axes.
    """
    padding = collation.padding
    row = _flatten_row(value, padding)
    if padding is not None and padding.mask is not None:
        _check_mask(value, padding.mask)
        mask, spec = _make_mask(row, padding.mask, padding.mask_of)
        tree = with_entry(row.tree, padding.mask)
        row = Row([*row.leaves, mask], tree, (*row.specs, spec))
    axis = collation.batch_dim[0]
    for position, spec in enumerate(row.specs):
        if not arrays.may_have_axis(spec, axis):
            ndim, name = len(spec.shape), arrays.named(paths(row.tree)[position])
            raise CollationError(
                f"batch_dim={axis}: {name} has {ndim} axes, so that its batch has {ndim + 1}; "
                f"choose one from {-ndim - 1} to {ndim}"
            )
    return row


def _flatten_row(value: Any, padding: Padding | None) -> Row:
    leaves, tree = flatten(value, _refuse_plain_list)
    specs: list[Spec] = []
    for leaf, path in zip(leaves, paths(tree), strict=True):
        spec = arrays.spec_of(leaf)
        if spec is None:
            raise CollationError(arrays.describe_fault(leaf, path))
        specs.append(spec if padding is None else arrays.pad_spec(spec, path, padding))
    return Row(leaves, tree, tuple(specs))


def _refuse_plain_list(value: Any) -> bool:
    if type(value) is list and value and all(map(arrays.is_plain, value)):
        raise CollationError(
            f"the input has a list of {type(value[0]).__name__}s, which could be one array or many "
            "features; send numpy.asarray(x), or a tuple"
        )
    return False


def _check_mask(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise CollationError(
            f"mask={name!r} becomes a key of every input, and this one is a "
            f"{type(value).__qualname__}; send dicts"
        )
    if name in value:
        raise CollationError(
            f"mask={name!r}: the input has this key already; leave it out, or the mask"
        )


def _make_mask(row: Row, name: str, mask_of: str | None) -> tuple[Any, Spec]:
    sizes: dict[tuple[int, ...], Spec] = {}
    for leaf, path, spec in zip(row.leaves, paths(row.tree), row.specs, strict=True):
        if None in spec.shape and mask_of in (None, path):
            padded = zip(leaf.shape, spec.shape, strict=True)
            sizes[tuple([length for length, fixed in padded if fixed is None])] = spec
    if len(sizes) == 1:
        ((lengths, spec),) = sizes.items()
        mask = arrays.ones(lengths, spec)
        return mask, spec._replace(dtype=mask.dtype, shape=(None,) * len(lengths))
    if sizes:
        raise CollationError(
            f"mask={name!r}: the padded features of the input have the lengths {sorted(sizes)}; "
            "name the one that the mask describes with mask_of"
        )
    described = "none at all" if mask_of is None else f"no {mask_of!r}"
    raise CollationError(
        f"mask={name!r} describes a padded feature, and of those the input has {described}"
    )


def describe_difference(one: Row, other: Row) -> str:
    """Say why two rows of different signatures cannot be in one batch."""
    if one.tree != other.tree:
        return (
            f"rows of different structures cannot be joined: {_list_features(one)} and "
            f"{_list_features(other)}"
        )
    features = zip(paths(one.tree), one.specs, other.specs, strict=True)
    path, spec, second = next(one for one in features if one[1] != one[2])
    is_length = spec._replace(shape=()) == second._replace(shape=())
    remedy = "; axes of unequal lengths can be padded, see Collation.pad" if is_length else ""
    return f"{arrays.named(path)} cannot be joined: {spec} and {second}{remedy}"


def _list_features(row: Row) -> str:
    kind = row.tree.kind
    names = ", ".join(path for path in paths(row.tree) if path)
    return f"{kind.__name__} of ({names:.200})" if kind is not None else str(row.specs[0])
