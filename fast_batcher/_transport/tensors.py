"""Plain tensors: which tensors are simply their bytes, and how to get from one to the other.

Both sides, any thread. Everything else that PyTorch calls a tensor (quantized, sparse, nested,
conjugated, on a device, of a derived class) has more to it than its bytes, and PyTorch pickles it.
"""

import functools
import math
import sys
from typing import Any

# Types of numbers whose tensors can be made of any bytes. Only types that are known to be safe:
# with some others, for example quantized ones, PyTorch reads memory that it does not own, and ends
# the process. A name that the installed PyTorch lacks is left out.
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
    """Whether a tensor is only its dtype, its shape and its bytes in the memory of the CPU.

    Args:
        torch: The module.
        tensor: A `torch.Tensor`, and not of a class derived from it.
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
            # Without an address it never had a storage. A storage may have been made shorter than
            # the tensor that lies in it: the tensor's bytes would be other memory of this process.
            and tensor.data_ptr() != 0
            and tensor.untyped_storage().nbytes()
            >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        )
    except (RuntimeError, TypeError, AttributeError):  # a kind of tensor that lacks one of these
        return False


class VolatileBuffer:
    """The bytes of a tensor, as NumPy asks for them; their owner may free them at any moment.

    Args:
        tensor: Of bytes, and contiguous.
    """

    def __init__(self, tensor: Any) -> None:
        # As long as it exists, its memory is freed only by resizing its storage.
        self._tensor = tensor
        data, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}


def is_volatile(piece: memoryview) -> bool:
    """Whether the memory of this buffer may be freed while the buffer exists."""
    return isinstance(getattr(piece.obj, "base", None), VolatileBuffer)


def view_tensor(torch: Any, tensor: Any) -> Any:
    """A NumPy array of the bytes of a plain tensor; None without NumPy."""
    numpy: Any = sys.modules.get("numpy")
    try:
        # As bytes, because NumPy lacks some of the types. Not by `tensor.numpy()`: the caller could
        # never resize the tensor again.
        return numpy.asarray(VolatileBuffer(tensor.view(torch.uint8)))
    except (RuntimeError, TypeError, AttributeError):
        return None


def rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Make the tensor that lies in this buffer; it keeps the buffer.

    Raises:
        TypeError: The dtype is not one of `PLAIN_DTYPES`.
        ValueError: The buffer has another length than such a tensor.
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
