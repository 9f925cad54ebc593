"""What a worker is doing, in memory that it shares with the parent.

When a worker has died, it cannot tell which batches it had, and a message ahead of every batch
would cost a system call. So it writes batch ids here, and the parent reads them once the worker is
dead. One number goes the other way: whether the parent wants SIGTERM to end the worker.
"""

import os
from multiprocessing import reduction
from typing import Any

from fast_batcher._transport.memory_file import make_memory_file, map_file

# Four unsigned numbers of 8 bytes: ids of batches plus one, 0 for none, and a flag.
_SIZE = 32
_IS_TO_END = 3


class _BatchId:
    """One of the numbers, as an attribute: None for no batch.

    Args:
        index: Which number.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, progress: "WorkerProgress", _: object) -> int | None:
        number = progress.numbers[self._index]
        return number - 1 if number else None

    def __set__(self, progress: "WorkerProgress", batch_id: int) -> None:
        progress.numbers[self._index] = batch_id + 1


class WorkerProgress:
    """The batches that a worker has, as ids that outlive it; None for no batch.

    Made in the parent. Pickled while a process is being started, it becomes the same memory there.
    """

    # The batch that the worker read last.
    taken = _BatchId(0)
    # The batch whose computation began last.
    begun = _BatchId(1)
    # The last batch of whose inputs children of the worker may have views; set to -1 for no batch.
    inherited = _BatchId(2)

    def __init__(self, fd: int | None = None) -> None:
        self._fd = make_memory_file(_SIZE) if fd is None else fd
        # It keeps a descriptor of its own.
        self._memory = map_file(self._fd, _SIZE)
        self.numbers = memoryview(self._memory).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd),)

    @property
    def is_to_end(self) -> bool:
        """Whether the parent wants SIGTERM to end the worker."""
        return self.numbers[_IS_TO_END] != 0

    def let_sigterm_end(self) -> None:
        """Let the next SIGTERM end the worker: the parent is going to send it."""
        self.numbers[_IS_TO_END] = 1

    def close_fd(self) -> None:
        """Close the descriptor, so that no other process gets it; may be called again.

        The memory stays mapped.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Give the memory back; may be called again."""
        self.close_fd()
        self.numbers.release()
        self._memory.close()


def _open(duplicate: Any) -> WorkerProgress:
    progress = WorkerProgress(duplicate.detach())
    progress.close_fd()
    return progress
