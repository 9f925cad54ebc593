"""Arrays and tensors, recognised without an import of their libraries. Any process and thread.

NumPy and PyTorch are optional, and PyTorch takes seconds to import. A value can only be an array or
a tensor if its library is loaded.
"""

import sys
from typing import Any, Final

# Types of values that contain no array.
ATOMS: Final = frozenset({str, bytes, int, float, bool, type(None)})


def find_numpy() -> Any:
    """Return NumPy, None while it is not loaded."""
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "ndarray") else None  # another thread may be importing it


def find_torch() -> Any:
    """Return PyTorch, None while it is not loaded."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None  # another thread may be importing it


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array, of whatever subclass."""
    numpy = find_numpy()
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, of whatever subclass."""
    torch = find_torch()
    return torch is not None and issubclass(type(value), torch.Tensor)


def to_numpy(value: Any) -> Any:
    """Return a tensor as a NumPy array, and another value as it is."""
    if not is_tensor(value):
        return value
    tensor = value.detach().cpu()
    # NumPy has no bfloat16.
    return (tensor.float() if tensor.dtype is find_torch().bfloat16 else tensor).numpy()
