"""Memory copies that release the GIL, so that other threads run. Both sides, any thread.

The event loop's thread does not use them: a thread that has released the GIL may wait up to 5 ms to
get it again while another thread computes.
"""

import ctypes
from typing import Any

# Bytes from which on a copy releases the GIL: a shorter copy ends before another thread runs.
RELEASING_SIZE = 64 * 1024


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`, whose layout is the same in all versions from 3.11 on."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        # Sizes of items, shape and strides, which plain bytes do not need.
        ("others", ctypes.c_void_p * 7),
    )


# A library object that only this module uses: argument types are attributes of its functions, and
# every program shares those of `ctypes.pythonapi`.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None
# Contiguous bytes, which need not be writable.
_SIMPLE = 0
_makers: dict[type, Any] = {
    bytes: _python.PyBytes_FromStringAndSize,
    bytearray: _python.PyByteArray_FromStringAndSize,
}
for _make in _makers.values():
    _make.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    _make.restype = ctypes.py_object


def copy_buffer(target: int, piece: bytes | memoryview) -> None:
    """Copy contiguous bytes to this address, without the GIL.

    Raises:
        BufferError: The bytes are not contiguous.
    """
    buffer = _Buffer()
    _get_buffer(piece, buffer, _SIMPLE)
    try:
        ctypes.memmove(target, buffer.address, buffer.size)
    finally:
        _release_buffer(buffer)


def copy_releasing(kind: type[bytes] | type[bytearray], piece: memoryview) -> Any:
    """Copy bytes to a new object, without the GIL, which the type's constructor would hold."""
    copy, target = _makers[kind](None, len(piece)), _Buffer()  # uninitialized bytes
    _get_buffer(copy, target, _SIMPLE)
    try:
        copy_buffer(target.address, piece)
    finally:
        _release_buffer(target)
    return copy
