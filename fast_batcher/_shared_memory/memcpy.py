"""Copying memory by its address. Both sides, any thread.

A copy that lets other threads run is for threads that nobody waits for: an event loop that has let
go of the interpreter's lock has to wait for its turn.
"""

import ctypes
from collections.abc import Callable


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`, which is the same in all versions from 3.11 on."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t),
        ("is_read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Functions of our own: those of `ctypes.pythonapi` are everybody's, and so are their types.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None
# Contiguous bytes, which need not be writable.
_SIMPLE = 0

# From an address to the first, that many bytes.
Move = Callable[[int, int, int], object]
# Lets no other thread run.
move_held: Move = _python.memmove
_python.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_python.memmove.restype = None
# Lets other threads run.
move: Move = ctypes.memmove


def move_piece(target: int, piece: bytes | memoryview, by: Move = move) -> None:
    """Copy contiguous bytes to this address."""
    buffer = _Buffer()
    _get_buffer(piece, buffer, _SIMPLE)
    try:
        by(target, buffer.address, buffer.size)
    finally:
        _release_buffer(buffer)
