"""Structures are taken apart and built again, without a constructor or validator being run."""

import dataclasses
from collections import OrderedDict
from functools import cached_property
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel, ConfigDict, PrivateAttr, computed_field, field_validator

from fast_batcher._arrays.trees import LEAF, build, children, flatten, paths
from fast_batcher.errors import CollationError


class Pair(NamedTuple):
    left: Any
    right: Any


class CheckedPair(Pair):
    def __new__(cls, left: Any, right: Any) -> "CheckedPair":
        raise AssertionError("no constructor is run")


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0
    made: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        assert isinstance(self.x, int), "a batch is not checked as a row is"
        self._note = self.x + 1

    @cached_property
    def double(self) -> Any:
        return [self.x, self.x]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    inner: Any = None


class Checked(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    x: Any
    y: int = 1
    _secret: Any = PrivateAttr(default=5)

    @field_validator("x")
    @classmethod
    def _is_small(cls, value: Any) -> Any:
        assert value < 10, "a batch is not checked as a row is"
        return value

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own order
    @cached_property
    def square(self) -> Any:
        return self.x * self.x


class Plain(BaseModel):
    x: Any


def changed(value: Any) -> Any:
    """The same structure with every leaf in a list; nothing accepts such a leaf but us."""
    leaves, tree = flatten(value)
    return build(tree, iter([("leaf", leaf) for leaf in leaves]))


def again(value: Any) -> Any:
    leaves, tree = flatten(value)
    return build(tree, iter(leaves))


STRUCTURES = [
    1,
    "text",
    [],
    (),
    {},
    [1, [2, (3, {"a": 4})]],
    {"b": 1, "a": {"c": [2]}},
    OrderedDict(b=1, a=2),
    {1: "a", "1": "b", None: "c"},
    Pair(1, Pair(2, 3)),
    tuple.__new__(CheckedPair, (1, 2)),
    Point(1, [2]),
    Frozen(1, Frozen(2)),
    Checked.model_validate({"x": 1, "extra": [2]}),
    Plain(x=1),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_flattened_tree_is_rebuilt_with_paths(structure: Any) -> None:
    leaves, tree = flatten(structure)
    assert len(paths(tree)) == len(leaves)
    built = build(tree, iter(leaves))
    assert built == structure
    assert type(built) is type(structure)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (Pair(1, 2), (1, 2)),
        (Point(1), Frozen(1)),
        (Checked(x=1), Checked.model_validate({"x": 1, "z": 2})),
    ],
)
def test_structures_that_differ_have_trees_that_differ(one: Any, other: Any) -> None:
    assert flatten(one)[1] != flatten(other)[1]


def test_rebuilt_dataclass_keeps_its_attributes() -> None:
    point = Point(1)
    point.made = "later"
    built = changed(point)
    assert built.x == ("leaf", 1)
    assert built.made == ("leaf", "later")
    assert built._note == ("leaf", 2)


def test_rebuilt_pydantic_model_keeps_private_attributes() -> None:
    model: Any = Checked.model_validate({"x": 1, "more": 3})
    model._secret = 7
    assert model.square == 1
    built = changed(model)
    assert built.x == ("leaf", 1)
    assert built.more == ("leaf", 3)
    assert built._secret == ("leaf", 7)
    assert "square" not in vars(built)
    assert built.model_fields_set == {"x", "more"}
    assert again(model)._secret == 7


def test_value_with_a_shape_is_a_leaf() -> None:
    class Shape(tuple[int, ...]):
        __slots__ = ()

    class Words(list[str]):
        pass

    @dataclasses.dataclass
    class Fault(Exception):
        code: int

    for value in (Shape((1, 2)), Words(["a"]), Fault(1), {1, 2}, range(3), Point, Checked):
        leaves, tree = flatten(value)
        assert tree == LEAF
        assert leaves == [value]
        assert children(value) is None


def test_structures_can_be_leaves_by_choice() -> None:
    leaves, tree = flatten({"a": [1, 2], "b": (3,)}, lambda value: type(value) is list)
    assert leaves == [[1, 2], 3]
    assert build(tree, iter("xy")) == {"a": "x", "b": ("y",)}


def test_a_structure_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CollationError, match="nested too deeply, or contains itself"):
        flatten(endless)
