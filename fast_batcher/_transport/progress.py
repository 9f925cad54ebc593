"""What a worker is doing, in memory that it shares with the parent: three batch ids.

When a worker has died, nobody can be asked what it had in hand, and a message that says so before
every batch would cost a system call. The worker writes; the parent reads once the worker is dead.

A fourth number goes the other way: whether the parent wants SIGTERM to end the worker.
"""

import mmap
import os
from multiprocessing import reduction
from typing import Any

from fast_batcher._transport.memory_file import make_memory_file

_SIZE = 32  # four unsigned numbers of 8 bytes


class WorkerProgress:
    """Numbers that outlive the worker: ids of batches plus one, 0 for none.

    Made in the parent; pickled while a process is being started it becomes the same memory there.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = make_memory_file(_SIZE) if fd is None else fd
        try:
            # It keeps a descriptor of its own.
            self._memory = mmap.mmap(self._fd, _SIZE)
        except OSError:
            self.close_fd()
            raise
        # The worker writes these itself: `numbers[0]` when it has read a batch, `numbers[1]` when
        # it begins to compute it, `numbers[2]` when it forks. The parent writes `numbers[3]`.
        self.numbers = memoryview(self._memory).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (reduction.DupFd(self._fd),)

    @property
    def taken(self) -> int | None:
        """The id of the batch that was read last."""
        return self.numbers[0] - 1 if self.numbers[0] else None

    @property
    def begun(self) -> int | None:
        """The id of the batch whose computation began last."""
        return self.numbers[1] - 1 if self.numbers[1] else None

    @property
    def inherited(self) -> int | None:
        """The id of the last batch of whose inputs children of the worker may have views."""
        return self.numbers[2] - 1 if self.numbers[2] else None

    @property
    def is_to_end(self) -> bool:
        """Whether the parent wants SIGTERM to end the worker."""
        return self.numbers[3] != 0

    def let_sigterm_end(self) -> None:
        """Let the next SIGTERM end the worker: it is the parent that sends it."""
        self.numbers[3] = 1

    def close_fd(self) -> None:
        """The memory stays mapped, and nobody else is to get it; may be called again."""
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
