"""Conversion of tensors to bytes and back. Every kind: `array_kinds`."""

from typing import Any

import pytest

from fast_batcher._arrays.tensors import rebuild_tensor
from fast_batcher._transport.pickling import OutOfBandPickler, loads
from fast_batcher.caching import hash_input

torch: Any = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32", "bits8"])
def test_unknown_dtype_is_rejected(name: str) -> None:
    """PyTorch would end the process for some of them."""
    with pytest.raises(TypeError, match=f"dtype torch.{name} cannot be made of bytes"):
        rebuild_tensor(memoryview(bytearray(8)), getattr(torch, name), (8,))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_bytes_of_another_number_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="has 32 bytes"):
        rebuild_tensor(memoryview(bytearray(length)), torch.float32, (2, 4))


def make_views() -> dict[str, Any]:
    """Return tensors that share a storage of 4 MB, and others that are not plain bytes."""
    table = torch.arange(1_000_000.0).reshape(1000, 1000)
    weight = torch.ones(8, requires_grad=True)
    return {
        "row": table[5],
        "rows, large": table[:64],
        "block of columns": table[:10, :4],
        "column": table[:, 7],
        "transposed": table[:6, :].T,
        "channels last": table[:12, :8]
        .reshape(1, 3, 4, 8)
        .contiguous(memory_format=torch.channels_last),
        "expanded": table[:1, :3].expand(5, 3),
        "of no axis": table[3, 3],
        "empty": table[:0],
        "half": table.to(torch.bfloat16)[2],
        "float8": table[:2].to(torch.float8_e5m2)[1],
        "boolean": (table > 3)[1],
        "complex, conjugated": torch.complex(table, table)[1].conj(),
        "negative": torch.complex(table, table)[1].conj().imag,
        "leaf": weight,
        "computed": (weight * 2)[3:5],
    }


VIEWS = make_views()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"x": [value, (value,)]}])
@pytest.mark.parametrize("is_input", [True, False])
def test_pickle_has_values_of_a_view_alone(name: str, wrap: Any, is_input: bool) -> None:
    """Not the storage that the view shares, nested or not, in both directions."""
    tensor = VIEWS[name]
    pickled = OutOfBandPickler(16384, makes_writable=is_input).dumps(wrap(tensor))
    assert len(pickled) < tensor.numel() * tensor.element_size() + 1000
    got = loads(pickled)
    if isinstance(got, dict):
        (got, (again,)) = got["x"]
        assert again is got
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert repr(got.detach().clone()) == repr(tensor.detach().clone())
    assert got.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert got.requires_grad == (tensor.requires_grad and is_input)
    got.detach().resize_(0)  # its memory is its own


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors are deprecated
def test_quantized_tensor_leaves_the_rest_of_its_storage() -> None:
    """PyTorch pickles it."""
    tensor = torch.quantize_per_tensor(torch.ones(100, 1000), 1.0, 0, torch.qint32)[1]
    pickled = OutOfBandPickler(16384, makes_writable=True).dumps(tensor)
    assert len(pickled) < 4 * 1000 + 1000
    assert torch.equal(loads(pickled).dequantize(), torch.ones(1000))


def test_order_of_axes_in_memory_is_kept() -> None:
    for name in ("transposed", "channels last"):
        got = loads(OutOfBandPickler(16384).dumps(VIEWS[name]))
        assert got.stride() == VIEWS[name].clone().stride()
        assert not got.is_contiguous()


def test_shrunk_storage_is_not_read_beyond_its_end() -> None:
    """PyTorch pickles the 8 bytes that there are."""
    for tensor in (torch.zeros(1000)[10:], torch.zeros(100, 100).T):
        tensor.untyped_storage().resize_(8)
        assert len(OutOfBandPickler(16384).dumps(tensor)) < 1500


def test_equal_tensors_have_equal_keys() -> None:
    """Whatever storage they are a part of."""
    for name in ("row", "block of columns", "expanded", "of no axis", "empty", "half", "leaf"):
        tensor = VIEWS[name]
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        assert hash_input({"x": tensor}) == hash_input({"x": copy}), name
    assert hash_input(VIEWS["row"]) != hash_input(VIEWS["row"] + 1)
