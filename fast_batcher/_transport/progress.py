"""Progress of a worker (its current batches), in memory that it shares with the parent.

Both sides of the process boundary, any thread.

The parent reads the batch ids here after the worker has died. A message before every batch would
cost a system call. The worker also notes here how many log records it could not send, and its
memory on the GPU. Some numbers go in the other direction: a flag that lets SIGTERM end the worker,
and ids of batches that it need not compute.
"""

import ctypes
import errno
import mmap
import os
import sys
import tempfile
from multiprocessing import reduction
from typing import Any

from fast_batcher._process import occupy_stdio

# linux/memfd.h; `os` defines it only if `os.memfd_create` exists.
_CLOSE_ON_EXEC = 0x01
# linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE.
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


def make_memory_file(size: int) -> int:
    """Make a file of `size` bytes and return its descriptor; on systems but Linux it is on disk."""
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
    """Make a file of `size` bytes in memory for arrays, and return its descriptor."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "memory is shared on Linux only")
    return make_memory_file(size)


def map_file(fd: int, size: int, start: int = 0) -> mmap.mmap:
    """Map a part of a file into memory; close its descriptor on failure."""
    try:
        return mmap.mmap(fd, size, offset=start)
    except OSError:
        os.close(fd)
        raise


def open_passed(kind: Any, duplicate: Any, *arguments: Any) -> Any:
    """Make an object from a memory file that another process has passed, or return the error."""
    try:
        return kind(duplicate.detach(), *arguments)
    except OSError as error:  # which the worker can report only after it has unpickled all
        return error.with_traceback(None)


def punch(fd: int, start: int, length: int) -> None:
    """Return the memory of a part of a file to the system; the part then reads as zeros."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _open_memory_file() -> int:
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    try:
        return _create_memfd()
    except OSError as error:
        # A seccomp profile refuses it, or the kernel or the C library does not have it.
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
    # The file system of `multiprocessing.shared_memory`, but without a name that may be left over.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def _create_memfd() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fast_batcher")
    # A Python built for C libraries from before 2018 lacks the function even where the library has
    # it: the builds of uv and conda did until 2026.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fd: int = library.memfd_create(b"fast_batcher", _CLOSE_ON_EXEC)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


# Unsigned numbers of 8 bytes: ids of batches plus one, 0 for none, a flag, a count, more ids, and
# bytes.
_SIZE = 80
# Positions of the ids of `taken` and `begun`, which the worker writes without a call.
TAKEN, BEGUN = 0, 1
_IS_TO_END = 3
_LOST_RECORDS = 4
_FIRST_SKIPPED = 5
# Each batch has the position of its id modulo this: a worker has at most four batches at a time.
_SKIPPED = 4
# Position of the bytes that PyTorch has reserved on the worker's GPUs, 0 without one.
GPU_BYTES = _FIRST_SKIPPED + _SKIPPED


class _BatchId:
    """Descriptor for a batch id in the shared numbers: None for no batch."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, progress: "WorkerProgress", _: object) -> int | None:
        number = progress.numbers[self._index]
        return number - 1 if number else None

    def __set__(self, progress: "WorkerProgress", batch_id: int) -> None:
        progress.numbers[self._index] = batch_id + 1


class WorkerProgress:
    """Ids of a worker's current batches, which stay readable after its death; None for no batch.

    Made in the parent. Passed to a child process as an argument, it refers to the same memory. With
    the descriptor -1 it has memory of this process alone.
    """

    # The batch that the worker read last.
    taken = _BatchId(TAKEN)
    # The batch whose computation began last.
    begun = _BatchId(BEGUN)
    # The last batch whose inputs the worker's children may still view; set to -1 for no batch.
    inherited = _BatchId(2)

    def __init__(self, fd: int | None = None) -> None:
        self._fd = make_memory_file(_SIZE) if fd is None else fd
        # The map keeps a descriptor of its own.
        self._memory = map_file(self._fd, _SIZE)
        self.numbers = memoryview(self._memory).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd),)

    @property
    def is_to_end(self) -> bool:
        """Whether SIGTERM may end the worker, because the parent sends it."""
        return self.numbers[_IS_TO_END] != 0

    def let_sigterm_end(self) -> None:
        """Let the next SIGTERM end the worker; called before the parent sends it."""
        self.numbers[_IS_TO_END] = 1

    def skip(self, batch_id: int) -> None:
        """Let the worker not compute a batch, unless it has begun."""
        self.numbers[_FIRST_SKIPPED + batch_id % _SKIPPED] = batch_id + 1

    def is_skipped(self, batch_id: int) -> bool:
        """Return whether the worker need not compute a batch."""
        return self.numbers[_FIRST_SKIPPED + batch_id % _SKIPPED] == batch_id + 1

    @property
    def lost_records(self) -> int:
        """Log records that the worker could not send."""
        return self.numbers[_LOST_RECORDS]

    @lost_records.setter
    def lost_records(self, count: int) -> None:
        self.numbers[_LOST_RECORDS] = count

    def close_fd(self) -> None:
        """Close the descriptor, so that no other process inherits it; may be called again.

        The memory stays mapped.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmap the memory; may be called again."""
        self.close_fd()
        self.numbers.release()
        self._memory.close()


def _open(duplicate: Any) -> WorkerProgress:
    progress = WorkerProgress(duplicate.detach())
    progress.close_fd()
    return progress
