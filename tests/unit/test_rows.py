"""Conditions for joining two rows, and errors that name the difference."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fast_batcher import Collation, CollationError
from fast_batcher._arrays.joining import describe_difference, make_row

STACK = Collation.stack()


class Pair(NamedTuple):
    left: Any
    right: Any


def zeros(*shape: int, dtype: str = "f4") -> Any:
    return np.zeros(shape, dtype)


def are_alike(one: Any, other: Any, collation: Collation = STACK) -> bool:
    rows = make_row(one, collation), make_row(other, collation)
    is_alike = rows[0].signature == rows[1].signature
    assert not is_alike or hash(rows[0].signature) == hash(rows[1].signature)
    return is_alike


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (zeros(2), zeros(2) + 1),
        (zeros(2), zeros(4)[::2]),
        (np.float32(1), zeros()),
        ({"a": 1, "b": zeros(1)}, {"b": zeros(1), "a": 2}),
        (("a", None), ("b", None)),
        (torch.zeros(1), torch.ones(1, requires_grad=True)),
        (torch.zeros(1), torch.nn.Parameter(torch.ones(1))),
        ("a", np.str_("b")),
    ],
)
def test_rows_of_one_kind(one: Any, other: Any) -> None:
    assert are_alike(one, other)
    assert are_alike(one, other, Collation.pad(value=None, values={"other": 0}))


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (zeros(2), zeros(3), "shape (2,) and dtype float32 and an array of shape (3,)"),
        (
            zeros(2),
            zeros(2, dtype="f8"),
            "dtype float32 and an array of shape (2,) and dtype float64",
        ),
        (zeros(2), zeros(2, dtype=">f4"), "dtype >f4"),
        (zeros(2), torch.zeros(2), "a tensor of shape (2,) and dtype torch.float32 on cpu"),
        (zeros(), 0.0, "a Python float"),
        (True, 1, "a Python bool and a Python int"),
        ("a", b"a", "a Python str and a Python bytes"),
        ({"a": zeros(1)}, {"a": None}, "'a' cannot be joined: an array"),
        ({"a": zeros(1)}, {"b": zeros(1)}, "dict of (a) and dict of (b)"),
        ((zeros(1),), [zeros(1)], "tuple of (0) and list of (0)"),
        (zeros(1), {"a": zeros(1)}, "an array of shape (1,) and dtype float32 and dict of (a)"),
    ],
)
def test_rows_that_differ(one: Any, other: Any, text: str) -> None:
    assert not are_alike(one, other)
    difference = describe_difference(make_row(one, STACK), make_row(other, STACK))
    assert text in difference
    assert ("see Collation.pad" in difference) == ("of shape (3,)" in text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "a list of ints, which could be one array or many features"),
        ({"a": {"b": [0.5]}}, "a list of floats"),
        (["a", None], "a list of strs"),
        ({"a": [np.array([{}])]}, "'a.0' is an array or tensor of dtype object"),
        (Pair(1, {2}), "'right' is a set; send an array, a tensor"),
        (2**63, "the row is a number that does not fit into 64 bits"),
        (np.ma.masked_array([1]), "the row is a MaskedArray; send a plain array"),
    ],
)
def test_invalid_rows_are_rejected(value: Any, text: str) -> None:
    with pytest.raises(CollationError) as caught:
        make_row(value, STACK)
    assert text in str(caught.value)


def assert_padded(leaf: Any, value: Any, *, fits: bool) -> None:
    collation = Collation.pad(value=value)
    if fits:
        assert make_row({"x": leaf}, collation).specs[0].shape == (None,)
    else:
        with pytest.raises(CollationError, match=r"'x': the pad value .* does not fit dtype"):
            make_row({"x": leaf}, collation)


NUMPY_TYPES = "? u1 i1 u2 i2 u4 i4 u8 i8 >i4 f2 f4 f8 >f8 c8 c16"


@pytest.mark.parametrize("dtype", NUMPY_TYPES.split())
@pytest.mark.parametrize("value", [0, 1, True, -1, 255, 300, 70_000, 0.5, 1e300, math.nan, 1j])
def test_a_pad_value_fits_where_numpy_keeps_it(dtype: str, value: Any) -> None:
    leaf = np.zeros(1, dtype)
    fits = not isinstance(value, complex) or leaf.dtype.kind == "c"
    if fits:
        with np.errstate(all="ignore"):
            kept = complex(np.array([value]).astype(dtype)[0])
        fits = bool(np.isclose(kept, value, rtol=1e-2, atol=0, equal_nan=True))
    assert_padded(leaf, value, fits=fits)


TORCH_TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]
NOT_WHOLE = {one for one in TORCH_TYPES if one.is_floating_point or one.is_complex}


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
@pytest.mark.parametrize(
    ("value", "fits_into"),
    [
        (1, set(TORCH_TYPES)),
        (-1, set(TORCH_TYPES) - {torch.bool, torch.uint8}),
        (300, set(TORCH_TYPES) - {torch.bool, torch.uint8, torch.int8}),
        (0.5, NOT_WHOLE),
        (math.inf, NOT_WHOLE),
        (1e200, {torch.float64}),
        pytest.param(10**400, set(), id="huge"),
        (1j, {torch.complex64}),
        (1 + 0j, {torch.complex64}),
    ],
)
def test_a_pad_value_fits_where_torch_keeps_it(
    dtype: torch.dtype, value: Any, fits_into: set[torch.dtype]
) -> None:
    assert_padded(torch.zeros(1, dtype=dtype), value, fits=dtype in fits_into)


@pytest.mark.parametrize(
    ("value", "mask_of", "text"),
    [
        (zeros(2), None, "mask='mask' adds a key to every input, but this input is a ndarray"),
        (Pair(zeros(2), 1), None, "this input is a Pair; send dicts"),
        ({"a": zeros(2), "mask": zeros(2)}, None, "the input has this key already"),
        ({"a": 1}, None, "and the input has none"),
        ({"a": zeros(2)}, "b", "and the input has no padded 'b'"),
        ({"a": zeros(2), "b": zeros(3)}, None, "have the lengths [(2,), (3,)]; name the one"),
    ],
)
def test_a_mask_describes_one_feature(value: Any, mask_of: str | None, text: str) -> None:
    with pytest.raises(CollationError) as caught:
        make_row(value, Collation.pad(value=0, mask="mask", mask_of=mask_of))
    assert text in str(caught.value)
