"""Nested structures as a list of leaves and the tree that held them. Pure.

A leaf is any value that is not a structure: an array, a tensor, a number, a text. Structures are
built from their parts without calling a constructor or validator of the user: a batch of a checked
value need not pass the check of one value.
"""

import dataclasses
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from fast_batcher.errors import CollationError


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """The form of a structure. Equal trees hold their leaves in the same order."""

    # The type of the structure that it builds, None for a leaf.
    kind: type | None
    # Names of its children, sorted, and the children.
    keys: tuple[Any, ...] = ()
    children: tuple["Tree", ...] = ()
    # The order of the keys of a mapping, or the names of the set fields of a pydantic model. It is
    # not compared.
    own: Any = dataclasses.field(default=None, compare=False)


LEAF: Final = Tree(None)


class _State(NamedTuple):
    """Type, keys and children of one structure, from which `flatten` makes a `Tree` node."""

    kind: type
    keys: tuple[Any, ...]
    values: list[Any]
    own: Any = None


# The attributes of a pydantic model that hold its fields, extra fields and private attributes: each
# a dict or None. They are its children, and no part of a path.
_PYDANTIC_ATTRIBUTES: Final = ("__dict__", "__pydantic_extra__", "__pydantic_private__")


def _never(_: object) -> bool:
    return False


def flatten(value: Any, is_leaf: Callable[[Any], bool] = _never) -> tuple[list[Any], Tree]:
    """Return the leaves of a structure, and its tree; `is_leaf` marks structures as leaves."""
    leaves: list[Any] = []
    try:
        return leaves, _grow(value, leaves, is_leaf)
    except RecursionError:
        raise CollationError(
            f"a {type(value).__qualname__} is nested too deeply, or contains itself"
        ) from None


def _grow(value: Any, leaves: list[Any], is_leaf: Callable[[Any], bool]) -> Tree:
    state = None if is_leaf(value) else _state_of(value)
    if state is None:
        leaves.append(value)
        return LEAF
    children = tuple([_grow(child, leaves, is_leaf) for child in state.values])
    return Tree(state.kind, state.keys, children, state.own)


def build(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Build the structure that a tree describes from the next leaves of an iterator."""
    kind = tree.kind
    if kind is None:
        return next(leaves)
    values = [build(child, leaves) for child in tree.children]
    if kind is list:
        return values
    if kind is dict or kind is OrderedDict:
        by_key = dict(zip(tree.keys, values, strict=True))
        return kind((key, by_key[key]) for key in tree.own)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    return _build_object(kind, tree, values)


def _build_object(kind: Any, tree: Tree, values: list[Any]) -> Any:
    built: Any = kind.__new__(kind)
    attributes = dict(zip(tree.keys, values, strict=True))
    if tree.own is not None:  # a pydantic model
        attributes = {
            **dict.fromkeys(_PYDANTIC_ATTRIBUTES),
            **attributes,
            "__pydantic_fields_set__": set(tree.own),
        }
    for name, value in attributes.items():
        object.__setattr__(built, name, value)
    return built


def with_entry(tree: Tree, key: str) -> Tree:
    """Return the tree of a mapping with one more leaf at its end."""
    keys, leaves = (*tree.keys, key), (*tree.children, LEAF)
    return Tree(tree.kind, keys, leaves, (*tree.own, key))


def children(value: Any) -> list[Any] | None:
    """Return the children of a structure, None for a leaf."""
    state = _state_of(value)
    return None if state is None else state.values


# Room for the structures of the inputs and outputs of a few models.
@functools.lru_cache(maxsize=64)
def paths(tree: Tree) -> tuple[str, ...]:
    """Return the names of the leaves in order: keys joined by dots, "" for a lone leaf."""
    return tuple([".".join(names) for names in _walk(tree)])


def _walk(tree: Tree) -> Iterator[tuple[str, ...]]:
    if tree.kind is None:
        yield ()
    for key, child in zip(tree.keys, tree.children, strict=True):
        names = () if key in _PYDANTIC_ATTRIBUTES else (str(key),)
        for rest in _walk(child):
            yield (*names, *rest)


def _state_of(value: Any) -> _State | None:
    """Return the type and the children of a structure, None for a leaf."""
    kind: Any = type(value)
    opener = _find_opener(kind)
    return None if opener is None else opener(value)


# Bounded because it keeps classes alive, and a program may define classes again and again.
@functools.lru_cache(maxsize=256)
def _find_opener(kind: type) -> Callable[[Any], _State] | None:
    """Return the function that opens values of a type, None if they are leaves."""
    new: Any = kind.__new__
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    if kind is list or kind is tuple:
        return _open_sequence
    # Other subclasses of tuple (torch.Size, for example) need not hold features.
    if issubclass(kind, tuple):
        return _open_named_tuple if isinstance(getattr(kind, "_fields", None), tuple) else None
    if issubclass(kind, Mapping):
        return _open_mapping
    if isinstance(base, type) and issubclass(kind, base):
        return _open_pydantic
    if dataclasses.is_dataclass(kind) and new is object.__new__:
        return _open_dataclass
    return None


def _open_sequence(value: Any) -> _State:
    return _State(type(value), tuple(range(len(value))), list(value))


def _open_named_tuple(value: Any) -> _State:
    return _State(type(value), type(value)._fields, list(value))


def _open_mapping(value: Mapping[Any, Any]) -> _State:
    # Other mappings (a tokenizer's `BatchEncoding`, for example) become a dict of their contents.
    made = OrderedDict if type(value) is OrderedDict else dict
    order = tuple(value)
    keys = tuple(sorted(order, key=_by_name))
    return _State(made, keys, [value[key] for key in keys], order)


def _by_name(key: Any) -> tuple[str, str]:
    return type(key).__qualname__, str(key)


def _open_dataclass(value: Any) -> _State:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    # An attribute that was set without being a field belongs to the value too.
    kept = vars(value) if hasattr(value, "__dict__") else {}
    names += sorted(name for name in kept if name not in names and not _is_cached(value, name))
    return _State(type(value), tuple(names), [getattr(value, name) for name in names])


def _is_cached(value: Any, name: str) -> bool:
    """Whether an attribute is a cached property, which a batch computes from the batch."""
    return isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)


def _open_pydantic(value: Any) -> _State:
    held = {name: getattr(value, name) for name in _PYDANTIC_ATTRIBUTES}
    # The `__dict__` of a model also holds cached properties, which are omitted.
    fields = type(value).model_fields
    held["__dict__"] = {name: one for name, one in vars(value).items() if name in fields}
    keys = tuple(name for name in held if held[name] is not None)
    set_fields = frozenset(value.__pydantic_fields_set__)
    return _State(type(value), keys, [held[name] for name in keys], set_fields)
