"""Plain tensors: conversion between dense CPU tensors and their bytes.

Both sides, any thread. Other tensors (quantized, sparse, nested, conjugated, on a device, of a
derived class) are not described by dtype, shape and bytes alone, and PyTorch pickles them.
"""

import functools
import math
import sys
from typing import Any

# Dtypes whose tensors can be made from any bytes. The list has only dtypes known to be safe: with
# others, for example quantized ones, PyTorch reads memory that it does not own, and crashes. Names
# that the installed PyTorch lacks are skipped.
PLAIN_DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)


@functools.cache
def _plain_dtypes(torch: Any) -> frozenset[Any]:
    return frozenset(getattr(torch, name) for name in PLAIN_DTYPES if hasattr(torch, name))


def is_plain_tensor(torch: Any, tensor: Any) -> bool:
    """Return whether dtype, shape and bytes in CPU memory describe a tensor completely.

    Args:
        torch: The module.
        tensor: A `torch.Tensor`, not of a derived class.
    """
    try:
        return (
            tensor.dtype in _plain_dtypes(torch)
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and tensor.dim() > 0
            and not tensor.requires_grad
            and not tensor.is_conj()
            and not tensor.is_neg()
            # Axes had names until PyTorch 2.12, each None without one.
            and not any(getattr(tensor, "names", ()))
            and not vars(tensor)
            # A null address means that there is no storage. A storage may have been resized below
            # the tensor's end: reading the tensor would read other memory of this process.
            and tensor.data_ptr() != 0
            and tensor.untyped_storage().nbytes()
            >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        )
    except (RuntimeError, TypeError, AttributeError):  # a kind of tensor that lacks one of these
        return False


class VolatileBuffer:
    """Array interface to the bytes of a tensor, which its owner may free at any moment.

    Args:
        tensor: A contiguous tensor of bytes.
    """

    def __init__(self, tensor: Any) -> None:
        # This reference keeps the memory, unless the storage is resized.
        self._tensor = tensor
        data, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


def is_volatile(piece: memoryview) -> bool:
    """Return whether the memory of this buffer may be freed while the buffer exists."""
    return isinstance(getattr(piece.obj, "base", None), VolatileBuffer)


def view_tensor(torch: Any, tensor: Any) -> Any:
    """Return a NumPy array of the bytes of a plain tensor; None without NumPy."""
    numpy: Any = sys.modules.get("numpy")
    try:
        # As bytes, because NumPy lacks some dtypes. Not with `tensor.numpy()`, after which the
        # caller could never resize the tensor again.
        return numpy.asarray(VolatileBuffer(tensor.view(torch.uint8)))
    except (RuntimeError, TypeError, AttributeError):
        return None


def rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Make a tensor that views this buffer, and keeps a reference to it.

    Raises:
        TypeError: The dtype is not one of `PLAIN_DTYPES`.
        ValueError: The buffer's length does not match dtype and shape.
    """
    import torch

    if dtype not in _plain_dtypes(torch):
        raise TypeError(f"a tensor of dtype {dtype} cannot be made of bytes")
    size = memoryview(buffer).nbytes
    expected = math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"a tensor of dtype {dtype} and shape {shape} has {expected} bytes: {size}"
        )
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
