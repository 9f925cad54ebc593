"""Files in memory, as the system has them: how much they take, and one that gets no more."""

import os


def memory_of(fd: int) -> int:
    """Bytes of memory that the file has."""
    return os.fstat(fd).st_blocks * 512


def refuse_memory(fd: int) -> None:
    """From now on this descriptor gets the file none, and gives none back: it cannot be written."""
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.dup2(read_only, fd, inheritable=False)
    os.close(read_only)
