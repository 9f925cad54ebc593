"""Anonymous files in memory (memfd), which end with the last process that has them open.

Both sides of the process boundary, any thread.
"""

import ctypes
import errno
import mmap
import os
import sys
import tempfile
from typing import Any

from fast_batcher._transport.descriptors import occupy_stdio

# linux/memfd.h; `os` defines it only if `os.memfd_create` exists.
_CLOSE_ON_EXEC = 0x01
# linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE.
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


def make_memory_file(size: int) -> int:
    """Make a file of `size` bytes and return its descriptor; on systems but Linux it is on disk.

    Raises:
        OSError: The system does not provide a file of this size.
    """
    # Covers the mapping, too, which duplicates the descriptor.
    occupy_stdio()
    fd = _open_memory_file()
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_shared_file(size: int) -> int:
    """Make a file of `size` bytes in memory for arrays, and return its descriptor.

    Raises:
        OSError: The system does not provide a file of this size, or is not Linux.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "memory is shared on Linux only")
    return make_memory_file(size)


def map_file(fd: int, size: int, start: int = 0) -> mmap.mmap:
    """Map a part of a file into memory; close its descriptor on failure.

    Raises:
        OSError: This process may not map that much memory.
    """
    try:
        return mmap.mmap(fd, size, offset=start)
    except OSError:
        os.close(fd)
        raise


def open_passed(kind: Any, duplicate: Any, *arguments: Any) -> Any:
    """Make an object from a memory file that another process has passed to this one.

    Args:
        kind: The object's class, which takes ownership of the descriptor.
        duplicate: The file's descriptor, as `multiprocessing` passes it.
        arguments: The other arguments of the class.

    Returns:
        The object, or an error if this process may not map that much memory. The error is returned
        because the worker can report it only after unpickling.
    """
    try:
        return kind(duplicate.detach(), *arguments)
    except OSError as error:
        return error.with_traceback(None)


def punch(fd: int, start: int, length: int) -> None:
    """Return the memory of a part of a file to the system; the part then reads as zeros.

    Raises:
        OSError: The system cannot take it back.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _open_memory_file() -> int:
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fast_batcher")
    # A Python built for C libraries from before 2018 lacks the function even where the library has
    # it: the builds of uv and conda did until 2026.
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "memfd_create"):
        fd: int = library.memfd_create(b"fast_batcher", _CLOSE_ON_EXEC)
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd
    # The file system of `multiprocessing.shared_memory`, but without a name that may be left over.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
