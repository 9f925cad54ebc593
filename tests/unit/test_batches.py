"""Rows that are joined and split again are the rows; nothing is guessed, cast or cut.

The rows of a case are described to hypothesis as a form (what structure, and which leaf of which
dtype and shape), of which many rows with other numbers are made.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from fast_batcher import Collation, CollationError
from fast_batcher._arrays.joining import join
from fast_batcher._arrays.outputs import split, split_rows
from fast_batcher._arrays.trees import flatten

Make = Callable[[np.random.Generator], Any]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any


class Checked(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    x: np.ndarray | torch.Tensor | float | str | None
    _hidden: Any = None


def make_checked(x: Any, hidden: Any) -> Checked:
    made = Checked.model_construct(x=x)
    made._hidden = hidden
    return made


NUMPY_TYPES = ["?", "u1", "i2", "i8", ">i4", "f2", "f4", "f8", ">f8", "c8", "M8[s]", "U3", "S2"]
TORCH_TYPES = [
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64),
]
# Axes of a row; a length of 0 is one too.
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def numpy_row(dtype: str, shape: tuple[int, ...], layout: str) -> Make:
    def make(random: np.random.Generator) -> Any:
        numbers = random.integers(0, 100, shape[::-1] if layout == "transposed" else shape)
        array = np.asarray(numbers).astype(dtype)
        if layout == "transposed":
            array = array.T
        elif layout == "strided" and shape:
            array = np.repeat(array, 2, axis=-1)[..., ::2]
        elif layout == "reversed" and shape:
            array = array[::-1]
        return array

    return make


def torch_row(dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> Make:
    def make(random: np.random.Generator) -> Any:
        numbers = random.integers(0, 100, shape[::-1] if layout == "transposed" else shape)
        tensor = torch.as_tensor(np.asarray(numbers)).to(dtype)
        if layout == "transposed":
            return tensor.permute(tuple(reversed(range(tensor.ndim))))
        if layout == "gradient" and dtype.is_floating_point:
            return tensor.requires_grad_()
        return tensor

    return make


def plain_row(kind: type) -> Make:
    return lambda random: kind(random.integers(0, 100))


layouts = st.sampled_from(["plain", "transposed", "strided", "reversed", "gradient"])
arrays = st.builds(numpy_row, st.sampled_from(NUMPY_TYPES), shapes, layouts)
tensors = st.builds(torch_row, st.sampled_from(TORCH_TYPES), shapes, layouts)
plain = st.sampled_from([plain_row(kind) for kind in (bool, int, float, complex, str)])
leaves = st.one_of(arrays, tensors, plain, st.just(lambda _: None))


def _structure(inner: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    def of(kind: Callable[..., Any], *parts: Make) -> Make:
        return lambda random: kind(*[part(random) for part in parts])

    def mapping(parts: dict[str, Make]) -> Make:
        return lambda random: {key: part(random) for key, part in parts.items()}

    several = st.lists(inner, max_size=3)
    return st.one_of(
        several.map(lambda parts: of(lambda *values: tuple(values), *parts)),
        # With an array in front: a list of numbers or texts alone is refused.
        st.tuples(arrays, several).map(
            lambda pair: of(lambda *values: list(values), pair[0], *pair[1])
        ),
        st.dictionaries(st.sampled_from("abc"), inner).map(mapping),
        st.tuples(inner, inner).map(lambda parts: of(Pair, *parts)),
        st.tuples(inner, inner).map(lambda parts: of(Point, *parts)),
        st.tuples(inner, inner).map(lambda parts: of(make_checked, *parts)),
    )


forms = st.recursive(leaves, _structure, max_leaves=5)


def make_rows(form: Make, count: int, seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [form(random) for _ in range(count)]


def assert_same(one: Any, other: Any) -> None:
    """Equal in structure, and leaf by leaf in value, dtype and shape."""
    (leaves_of_one, tree), (leaves_of_other, other_tree) = flatten(one), flatten(other)
    assert tree == other_tree
    for left, right in zip(leaves_of_one, leaves_of_other, strict=True):
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype
            assert torch.equal(left.detach(), right)
        elif isinstance(left, np.ndarray | np.generic):
            # A scalar of NumPy's has no byte order, and a text no room behind it.
            is_scalar = left.ndim == 0 and isinstance(right, np.generic)
            expected = np.asarray(left)[()].dtype if is_scalar else left.dtype
            assert right.dtype == expected
            assert left.shape == np.shape(right)
            assert np.array_equal(left, right)
        else:
            assert left == right
            # Numbers come back as those of the library in which they were joined.
            assert np.asarray(right).dtype.kind == np.asarray(left).dtype.kind


@given(form=forms, count=st.integers(1, 4), seed=st.integers(0, 9))
def test_split_is_the_way_back_from_join(form: Make, count: int, seed: int) -> None:
    rows = make_rows(form, count, seed)
    collation = Collation.stack(outputs="several")
    if rows[0] is None:  # says nothing about how many there are
        return
    batch = join(rows, collation)
    for row, found in zip(rows, split(batch, count, collation), strict=True):
        assert_same(row, found)


@given(
    row=st.one_of(
        st.builds(numpy_row, st.sampled_from(NUMPY_TYPES), shapes, layouts),
        st.builds(torch_row, st.sampled_from(TORCH_TYPES), shapes, layouts),
    ),
    count=st.integers(1, 4),
    dim=st.integers(-4, 3),
)
def test_the_batch_axis_is_where_it_was_wanted(row: Make, count: int, dim: int) -> None:
    rows = make_rows(row, count, 0)
    collation = Collation.stack(batch_dim=dim)
    if not -rows[0].ndim - 1 <= dim <= rows[0].ndim:
        with pytest.raises(CollationError, match=f"batch_dim={dim}"):
            join(rows, collation)
        return
    batch = join(rows, collation)
    assert batch.ndim == rows[0].ndim + 1
    assert batch.shape[dim] == count
    for one, found in zip(rows, split(batch, count, collation), strict=True):
        assert_same(one, found)


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    width=st.integers(0, 2),
    dtype=st.sampled_from(["?", "u1", ">i4", "f2", "f4", "c8", *TORCH_TYPES]),
    side=st.sampled_from(["left", "right"]),
    value=st.sampled_from([0, 1]),
    dim=st.integers(-3, 2),
)
def test_padding_leaves_the_data_as_it_was(
    lengths: list[int], width: int, dtype: Any, side: Any, value: int, dim: int
) -> None:
    random = np.random.default_rng(0)
    of = torch_row if isinstance(dtype, torch.dtype) else numpy_row
    rows = [{"x": of(dtype, (length, width), "plain")(random)} for length in lengths]
    collation = Collation.pad(value=value, side=side, batch_dim=dim, mask="mask", unequal="error")
    if not -2 <= dim <= 1:  # the mask has one axis less
        with pytest.raises(CollationError, match=f"batch_dim={dim}"):
            join(rows, collation)
        return
    batch = join(rows, collation)
    found = split(batch, len(rows), collation)
    for row, length, padded in zip(rows, lengths, found, strict=True):
        is_data = np.asarray(padded["mask"]).astype(bool)
        assert is_data.sum() == length
        assert padded["x"].dtype == row["x"].dtype
        assert_same(row["x"], padded["x"][is_data])
        filling = np.asarray(
            padded["x"][~is_data].to(torch.complex64) if of is torch_row else padded["x"][~is_data]
        )
        assert (filling == value).all()
        data_first = np.sort(is_data)[::-1] if side == "right" else np.sort(is_data)
        assert np.array_equal(is_data, data_first)


def test_rows_of_tensors_release_their_batch() -> None:
    own, part, sparse = torch.zeros(3), torch.zeros(9)[3:6], torch.zeros(2).to_sparse()
    found = split([own, part, sparse], 3, Collation.stack(outputs="rows"), to_cpu=True)
    assert found[0].data_ptr() == own.data_ptr()  # it shares no memory
    assert found[1].untyped_storage().nbytes() == 12
    assert found[2] is sparse
    computed = torch.arange(1000.0, requires_grad=True).reshape(2, 500) * 2
    assert not any(row.requires_grad for row in split(computed, 2, Collation.stack()))
    with torch.inference_mode():
        inferred = torch.zeros(2, 3)
    for row in split(inferred, 2, Collation.stack()):
        row += 1
    assert not inferred.any()


def test_numbers_become_arrays_or_tensors() -> None:
    for numbers in ([True, False], [1, 2], [0.1, 2.0], [1j, 2.0j]):
        batch = join(numbers, Collation.stack())
        assert type(batch) is np.ndarray
        assert batch.dtype == {bool: "?", int: "i8", float: "f8", complex: "c16"}[type(numbers[0])]
        assert batch.tolist() == numbers
    rows = [{"x": torch.zeros(1), "at": 0.1, "on": True, "n": 2**40} for _ in range(2)]
    batch = join(rows, Collation.stack())
    assert [batch[key].dtype for key in ("at", "on", "n")] == [
        *(torch.float64, torch.bool, torch.int64)
    ]
    assert batch["at"].tolist() == [0.1, 0.1]
    both = join([(torch.zeros(1), np.zeros(1), 1.0)] * 2, Collation.stack())
    assert type(both[2]) is np.ndarray


@pytest.mark.parametrize(
    "collation", [Collation.stack(batch_dim=1), Collation.pad(value=0, batch_dim=1)]
)
def test_batch_layout_follows_its_axes(collation: Collation) -> None:
    """Compiled models and kernels ask for the layout."""
    tensors = join([torch.nn.Parameter(torch.ones(3, 4))] * 2, collation)
    assert not tensors.requires_grad
    assert tensors.is_contiguous()
    assert join([np.zeros((3, 4))] * 2, collation).flags.c_contiguous
    assert join([np.zeros((3, 4)).T] * 2, collation).flags.c_contiguous


def test_rows_that_differ_are_not_joined() -> None:
    with pytest.raises(
        CollationError, match=r"dtype float32 and an array of shape .* dtype float64"
    ):
        join([np.zeros(2, "f4"), np.zeros(2)], Collation.stack(unequal="group"))
    with pytest.raises(CollationError, match="there are no rows to join"):
        join([], Collation.stack())


FEATURES = [
    {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(2)},
    {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(2)},
    {"a": [np.zeros(1), np.ones(2)], "b": [np.zeros(3), np.ones(3)]},
    {"a": [torch.zeros(1), torch.ones(2)], "b": torch.arange(2)},
    Pair(np.arange(2), Point({"x": np.arange(2)}, None)),
    np.arange(2),
    np.arange(12).reshape(2, 6)[:, ::-2],
    ["x", "y"],
]


@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_an_input_that_is_a_batch_has_rows(features: Any) -> None:
    rows = split_rows(features, Collation.stack())
    assert len(rows) == 2
    if isinstance(features, dict):
        for number, row in enumerate(rows):
            assert row.keys() == features.keys()
            for key, column in features.items():
                assert_same(column[number], row[key])
    elif isinstance(features, np.ndarray | list):
        assert [np.array_equal(row, one) for row, one in zip(rows, features, strict=True)] == [
            *(True, True)
        ]
    else:
        assert rows[1] == Pair(1, Point({"x": 1}, None))
