"""Tensors as bytes: what pickling and shared memory do with a `torch.Tensor`. Pure.

A tensor is a view of a *storage*, which may be larger: a row of a table shares that of the table.
PyTorch pickles the whole storage. Here only the values cross.

Importing this module does not import PyTorch: a program that has a tensor has loaded it.
"""

import ctypes
import functools
import math
import pickle
import sys
from typing import Any

from fast_batcher._arrays.kinds import find_numpy

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
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


@functools.cache
def _plain_dtypes(torch: Any) -> frozenset[Any]:
    return frozenset(getattr(torch, name) for name in PLAIN_DTYPES if hasattr(torch, name))


def _has_plain_values(torch: Any, tensor: Any) -> bool:
    """Return whether dtype, shape, strides and bytes in CPU memory describe a tensor completely."""
    return (
        tensor.dtype in _plain_dtypes(torch)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        # Axes had names until PyTorch 2.12, each None without one.
        and not any(getattr(tensor, "names", ()))
        and not vars(tensor)
        # A storage may have been resized below the tensor's end: reading the tensor would read
        # other memory of this process.
        and tensor.untyped_storage().nbytes() >= _find_end(tensor)
    )


def _find_end(tensor: Any) -> int:
    """Return the bytes of the storage up to the end of a tensor."""
    last = tensor.numel() - 1
    if not tensor.is_contiguous():
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return int((tensor.storage_offset() + last + 1) * tensor.itemsize) if tensor.numel() else 0


def is_plain_tensor(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor is its bytes in memory, in order, and has some."""
    try:
        return bool(
            _has_plain_values(torch, tensor)
            and tensor.is_contiguous()
            and tensor.dim() > 0
            and not tensor.requires_grad
            # A null address means that there is no storage.
            and tensor.data_ptr() != 0
        )
    except (RuntimeError, TypeError, AttributeError):  # a kind of tensor that lacks one of these
        return False


class VolatileBuffer:
    """Array interface to the bytes of a tensor, which its owner may free at any moment."""

    def __init__(self, tensor: Any) -> None:
        # This reference keeps the memory, unless the storage is resized.
        self._tensor = tensor
        data, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


def is_volatile(piece: memoryview) -> bool:
    """Return whether the memory of this buffer may be freed while the buffer exists."""
    return isinstance(getattr(piece.obj, "base", None), VolatileBuffer)


def view_tensor(tensor: Any) -> Any:
    """Return a NumPy array of the bytes of a tensor without gaps; None without NumPy."""
    numpy = find_numpy()
    try:
        # The array has bytes, because NumPy lacks some dtypes. `tensor.numpy()` is not used: the
        # caller could never resize the tensor again. `detach` makes another tensor, which keeps
        # the storage if the caller gives the original another one.
        return numpy.asarray(VolatileBuffer(tensor.detach()))
    except (RuntimeError, TypeError, AttributeError):
        return None


def rebuild_tensor(
    buffer: Any,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    requires_grad: bool = False,
) -> Any:
    """Make a tensor that views this buffer, and keeps a reference to it."""
    torch: Any = sys.modules["torch"]  # to which the dtype belongs
    if dtype not in _plain_dtypes(torch):
        raise TypeError(f"a tensor of dtype {dtype} cannot be made of bytes")
    size = len(buffer) if type(buffer) is bytearray else memoryview(buffer).nbytes
    expected = math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"a tensor of dtype {dtype} and shape {shape} has {expected} bytes: {size}"
        )
    if not size:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(buffer, dtype=dtype)
        if strides is not None:  # PyTorch refuses strides that lead out of the buffer
            tensor = tensor.as_strided(shape, strides)
        elif len(shape) != 1:
            tensor = tensor.reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def reduce_tensor(least: int, keeps_grad: bool, tensor: Any) -> Any:
    """Reduce a tensor for a pickler to its values, without the rest of its storage.

    Args:
        least: Bytes from which the values are an out-of-band buffer of the pickler.
        keeps_grad: Whether `requires_grad` is part of the tensor.
        tensor: A `torch.Tensor`, and not of a subclass.
    """
    torch: Any = sys.modules["torch"]
    try:
        requires_grad = keeps_grad and tensor.requires_grad
        if not _has_plain_values(torch, tensor):
            return _compact(tensor, requires_grad=requires_grad).__reduce_ex__(
                pickle.HIGHEST_PROTOCOL
            )
        # Keeps the order of the axes in memory, if there are no gaps.
        values = tensor if tensor.is_contiguous() else tensor.detach().clone()
        buffer = _view_values(values, least)
        if requires_grad or not values.is_contiguous():
            strides = None if values.is_contiguous() else values.stride()
            return rebuild_tensor, (
                buffer,
                tensor.dtype,
                tuple(tensor.shape),
                strides,
                requires_grad,
            )
        return rebuild_tensor, (buffer, tensor.dtype, tuple(tensor.shape))
    except (RuntimeError, TypeError, AttributeError):  # a kind of tensor that lacks one of these
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _view_values(values: Any, least: int) -> Any:
    """Return the bytes of a tensor without gaps, as a buffer that is writable on arrival."""
    size = values.nbytes
    if size >= least and size:
        array = view_tensor(values)
        if array is not None:
            return pickle.PickleBuffer(array)
    return bytearray(ctypes.string_at(values.data_ptr(), size)) if size else bytearray()


def _compact(tensor: Any, *, requires_grad: bool) -> Any:
    """Return a tensor without the rest of its storage, for PyTorch to pickle."""
    if vars(tensor) or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    values = tensor.detach().clone()
    return values.requires_grad_() if requires_grad else values


def read_tensor(tensor: Any, of_input: bool) -> tuple[bytes, bytes] | None:
    """Return dtype, shape and device of a tensor, and its bytes; None if these are not all of it.

    The gradients of an input do not count.
    """
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    requires_grad = tensor.requires_grad and not of_input
    described = str(tensor.dtype), (*tensor.shape,), str(tensor.device), requires_grad
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    # A contiguous tensor of a single number may have any stride.
    plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return repr(described).encode(), plain.view(torch.uint8).numpy().tobytes()
