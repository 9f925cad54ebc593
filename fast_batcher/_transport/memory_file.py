"""Files without a name, in memory: they end with those who have them, whatever they die of."""

import ctypes
import os
import sys
import tempfile

from fast_batcher._transport.descriptors import occupy_stdio

# linux/memfd.h; `os` has it only together with the function.
_CLOSE_ON_EXEC = 0x01


def make_memory_file(size: int) -> int:
    """The descriptor of a new one, of so many bytes; elsewhere than on Linux a file on a disk.

    Raises:
        OSError: The system has no such memory, or not so much.
    """
    # Before it is mapped, too: a mapping keeps a descriptor of its own.
    occupy_stdio()
    fd = _open()
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open() -> int:
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fast_batcher")
    # A Python that was built for C libraries from before 2018 lacks the function, whatever library
    # is there: those of uv and conda did until 2026.
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "memfd_create"):
        fd: int = library.memfd_create(b"fast_batcher", _CLOSE_ON_EXEC)
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd
    # What `multiprocessing.shared_memory` is made of, without a name that could be left behind.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
