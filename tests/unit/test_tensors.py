"""Conversion of tensors to bytes and back. Every kind: `array_kinds`."""

from typing import Any

import pytest

from fast_batcher._transport.pickling import PLAIN_DTYPES, is_plain_tensor, rebuild_tensor

torch: Any = pytest.importorskip("torch")


@pytest.mark.parametrize("name", PLAIN_DTYPES)
def test_tensor_is_rebuilt_from_its_bytes(name: str) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name))
    assert is_plain_tensor(torch, tensor)
    raw = bytearray(tensor.view(torch.uint8).numpy().tobytes())
    got = rebuild_tensor(memoryview(raw), tensor.dtype, tuple(tensor.shape))
    assert got.dtype == tensor.dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32", "bits8"])
def test_unknown_dtype_is_rejected(name: str) -> None:
    """PyTorch would end the process for some of them."""
    with pytest.raises(TypeError, match=f"dtype torch.{name} cannot be made of bytes"):
        rebuild_tensor(memoryview(bytearray(8)), getattr(torch, name), (8,))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_bytes_of_another_number_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="has 32 bytes"):
        rebuild_tensor(memoryview(bytearray(length)), torch.float32, (2, 4))
