"""Tensors that are simply their bytes: which are, and how one is made of bytes again. Both sides.

Everything else that PyTorch calls a tensor (quantized, sparse, nested, conjugated, on a device, of
a class of its own) has more to it than its bytes, and is left to PyTorch's own pickling.
"""

import functools
import math
from typing import Any

# Types of numbers whose tensors can be made of any bytes. A list of what is known to be safe:
# PyTorch reads memory that it does not own, and ends the process, when it is given some of the
# others, for example quantized ones. A name that the installed PyTorch lacks is left out.
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
    """Whether a tensor is its dtype, its shape and its bytes in the memory of the CPU, no more.

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
    except (RuntimeError, TypeError, AttributeError):  # one of the kinds that have none of these
        return False


def rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """The tensor that lies in this buffer, which it keeps.

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
