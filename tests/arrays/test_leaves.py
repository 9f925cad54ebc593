"""Single arrays and tensors: what each is, and what can never be joined."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fast_batcher import Collation, CollationError
from fast_batcher._arrays import leaves
from fast_batcher._arrays.leaves import Spec, describe_fault, pad_spec, spec_of

CPU = torch.device("cpu")


def padded(leaf: Any, value: Any) -> Spec:
    spec, padding = spec_of(leaf), Collation.pad(value=value).padding
    assert spec is not None
    assert padding is not None
    return pad_spec(spec, "x", padding)


@pytest.mark.parametrize(
    ("leaf", "spec"),
    [
        (np.zeros((2, 3), ">f4"), Spec("array", np.dtype(">f4"), (2, 3))),
        (np.float16(1), Spec("array", np.dtype("f2"), ())),
        (np.array("ab"), Spec("array", np.dtype("<U2"), ())),
        (torch.zeros(2, dtype=torch.bfloat16), Spec("tensor", torch.bfloat16, (2,), CPU)),
        (torch.nn.Parameter(torch.zeros(1)), Spec("tensor", torch.float32, (1,), CPU)),
        (True, Spec("number", bool)),
        (1, Spec("number", int)),
        (1.0, Spec("number", float)),
        ("a", Spec("text", str)),
        (np.str_("a"), Spec("text", str)),
        (b"a", Spec("text", bytes)),
        (None, Spec("none")),
    ],
    ids=repr,
)
def test_what_a_leaf_is(leaf: Any, spec: Spec) -> None:
    assert spec_of(leaf) == spec


def test_a_memory_map_is_an_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "map", "f4", "w+", shape=(2,))
    assert spec_of(mapped) == Spec("array", np.dtype("f4"), (2,))
    assert [type(row) for row in leaves.unstack(mapped, 0, to_cpu=True)] == [np.float32] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array([object()]),
        lambda: np.array([(1, object())], "i4,O"),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: np.matrix([[1]]),
        lambda: np.rec.fromarrays([[1]]),
        lambda: torch.zeros(2).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8),
        lambda: torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})),
        lambda: 2**63,
        lambda: object(),
        lambda: {1, 2},
        lambda: bytearray(b"ab"),
        lambda: range(3),
    ],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore:torch.quantize")
def test_what_cannot_be_joined_is_refused_by_name(make: Callable[[], Any]) -> None:
    assert spec_of(make()) is None
    assert "'some.feature' is " in describe_fault(make(), "some.feature")


NUMPY_TYPES = [
    "?",
    "u1",
    "i1",
    "u2",
    "i2",
    "u4",
    "i4",
    "u8",
    "i8",
    ">i4",
    "f2",
    "f4",
    "f8",
    ">f8",
    "c8",
    "c16",
]
TORCH_TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("value", [0, 1, True, -1, 255, 300, 70_000, 0.5, 1e300, math.nan, 1j])
def test_a_pad_value_fits_where_numpy_keeps_it(dtype: str, value: Any) -> None:
    leaf = np.zeros(1, dtype)
    is_lost = isinstance(value, complex) and leaf.dtype.kind != "c"
    if not is_lost:
        with np.errstate(all="ignore"):
            kept = complex(np.array([value]).astype(dtype)[0])
        is_lost = not np.isclose(kept, value, rtol=1e-2, atol=0, equal_nan=True)
    if is_lost:
        with pytest.raises(CollationError, match="does not fit dtype"):
            padded(leaf, value)
    else:
        assert padded(leaf, value).shape == (None,)


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
@pytest.mark.parametrize(
    ("value", "fits_into"),
    [
        (1, set(TORCH_TYPES)),
        (-1, set(TORCH_TYPES) - {torch.bool, torch.uint8}),
        (300, set(TORCH_TYPES) - {torch.bool, torch.uint8, torch.int8}),
        (0.5, {one for one in TORCH_TYPES if one.is_floating_point or one.is_complex}),
        (math.inf, {one for one in TORCH_TYPES if one.is_floating_point or one.is_complex}),
        (1e200, {torch.float64}),
        pytest.param(10**400, set(), id="huge"),
        (1j, {torch.complex64}),
    ],
)
def test_a_pad_value_fits_where_torch_keeps_it(
    dtype: torch.dtype, value: Any, fits_into: set[torch.dtype]
) -> None:
    leaf = torch.zeros(1, dtype=dtype)
    if dtype in fits_into:
        assert padded(leaf, value).shape == (None,)
    else:
        with pytest.raises(CollationError, match=r"'x': the pad value .* does not fit dtype"):
            padded(leaf, value)


@pytest.mark.parametrize("leaf", [np.zeros(1, "M8[s]"), np.array(["a"]), np.zeros(1, "i4,i4")])
def test_what_is_no_number_is_not_padded(leaf: Any) -> None:
    with pytest.raises(CollationError, match="does not fit"):
        padded(leaf, 0)
    spec = spec_of(leaf)
    assert spec is not None
    assert spec.shape == (1,)


def test_a_row_of_a_tensor_carries_nothing_else() -> None:
    batch = torch.arange(1000.0, requires_grad=True).reshape(2, 500) * 2
    for row in leaves.unstack(batch, 1, to_cpu=False):
        assert row.untyped_storage().nbytes() == 8
        assert not row.requires_grad


def test_a_tensor_of_its_own_is_not_copied() -> None:
    tensor = torch.zeros(3)
    assert leaves.own(tensor, to_cpu=True).data_ptr() == tensor.data_ptr()
    part = torch.zeros(9)[3:6]
    assert leaves.own(part, to_cpu=True).untyped_storage().nbytes() == 12
    sparse = torch.zeros(2).to_sparse()
    assert leaves.own(sparse, to_cpu=True) is sparse
