"""Copying bytes to an address while other threads run. Both sides, any thread.

Only a thread for which no event loop waits copies in this way: a thread that has released the
interpreter's lock waits for its turn to get the lock again, up to 5 ms where another computes.
"""

import ctypes

# Bytes from which on a copy lets other threads run: a shorter one is over before they notice.
RELEASING_SIZE = 64 * 1024


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`, which is equal in all versions from 3.11 on."""

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


def copy_buffer(target: int, piece: bytes | memoryview) -> None:
    """Copy contiguous bytes to this address; other threads run meanwhile.

    Raises:
        BufferError: The bytes are not contiguous.
    """
    buffer = _Buffer()
    _get_buffer(piece, buffer, _SIMPLE)
    try:
        ctypes.memmove(target, buffer.address, buffer.size)
    finally:
        _release_buffer(buffer)
