"""What a worker is doing, in memory that it shares with the parent.

When a worker has died, it cannot tell which batches it had, and a message ahead of every batch
would cost a system call. So it writes batch ids here, and the parent reads them once the worker is
dead. One number goes the other way: whether the parent wants SIGTERM to end the worker.
"""

import mmap
import os
from multiprocessing import reduction
from typing import Any

from fast_batcher._transport.memory_file import make_memory_file

# Four unsigned numbers of 8 bytes: ids of batches plus one, 0 for none, and a flag.
_SIZE = 32
_TAKEN, _BEGUN, _INHERITED, _IS_TO_END = range(4)


class WorkerProgress:
    """The batches that a worker has, as ids that outlive it; None for no batch.

    Made in the parent. Pickled while a process is being started, it becomes the same memory there.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = make_memory_file(_SIZE) if fd is None else fd
        try:
            # It keeps a descriptor of its own.
            self._memory = mmap.mmap(self._fd, _SIZE)
        except OSError:
            self.close_fd()
            raise
        self._numbers = memoryview(self._memory).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd),)

    @property
    def taken(self) -> int | None:
        """The batch that the worker read last. The worker sets it."""
        return self._read(_TAKEN)

    @taken.setter
    def taken(self, batch_id: int) -> None:
        self._numbers[_TAKEN] = batch_id + 1

    @property
    def begun(self) -> int | None:
        """The batch whose computation began last. The worker sets it."""
        return self._read(_BEGUN)

    @begun.setter
    def begun(self, batch_id: int) -> None:
        self._numbers[_BEGUN] = batch_id + 1

    @property
    def inherited(self) -> int | None:
        """The last batch of whose inputs children of the worker may have views."""
        return self._read(_INHERITED)

    def note_inherited(self, batch_id: int) -> None:
        """Set `inherited`; -1 for no batch. Worker, on any thread."""
        self._numbers[_INHERITED] = batch_id + 1

    @property
    def is_to_end(self) -> bool:
        """Whether the parent wants SIGTERM to end the worker."""
        return self._numbers[_IS_TO_END] != 0

    def let_sigterm_end(self) -> None:
        """Let the next SIGTERM end the worker: the parent is going to send it."""
        self._numbers[_IS_TO_END] = 1

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
        self._numbers.release()
        self._memory.close()

    def _read(self, index: int) -> int | None:
        number = self._numbers[index]
        return number - 1 if number else None


def _open(duplicate: Any) -> WorkerProgress:
    progress = WorkerProgress(duplicate.detach())
    progress.close_fd()
    return progress
