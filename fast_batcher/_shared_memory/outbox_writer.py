"""The writer's half of an outbox, in which a worker leaves large outputs. Main thread of a worker.

`outbox_reader` explains what an outbox is.
"""

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

from fast_batcher._fork import at_fork
from fast_batcher._shared_memory.memcpy import copy_buffer
from fast_batcher._shared_memory.ranges import ALIGNMENT, PAGE, Ranges
from fast_batcher._transport.memory_file import map_file, punch

if TYPE_CHECKING:
    from fast_batcher._transport.pickler import OutOfBandPickle

# Values of the byte before an answer, and the size of the header that holds it, which keeps the
# answer aligned.
TAKEN, FREE = 1, 0
HEADER_SIZE = ALIGNMENT
# Bytes from which on a copy releases the GIL for threads of the model, which costs 1.4 us. More
# than in the API process: a shorter copy takes some tens of microseconds, and no event loop waits
# for it.
LEAST_RELEASING = 256 * 1024
# Pings after which memory that no answer has used is returned to the system. An idle worker gets
# one every five seconds, so this is a minute, as for inputs.
RESTS_TO_KEEP_MEMORY = 12


class OutboxWriter:
    """Puts answers into the outbox of this worker.

    Args:
        fd: Descriptor of the file, owned by this object from now on.
        size: Length of the file in bytes.
        least: Bytes from which on a buffer is kept out of the pickle.

    Raises:
        OSError: This process may not map that much memory.
    """

    def __init__(self, fd: int, size: int, least: int) -> None:
        self.least = least
        self._size = size
        self._fd = fd
        # A program that the model starts must not inherit it: it would keep the memory.
        os.set_inheritable(fd, False)
        self._memory = map_file(fd, size)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self._ranges = Ranges(size)
        # Starts of the answers that had not been copied at the last check.
        self._starts: list[int] = []
        # The system has provided all memory up to here.
        self._committed_end = 0
        self._rests = 0
        # Otherwise a child that the model forks would keep the memory as long as it lives.
        at_fork(self, in_child=OutboxWriter.close)

    def put(self, pickled: "OutOfBandPickle") -> int | None:
        """Write an answer; return its start, or None if there is no room for it.

        Raises:
            OSError: There is no memory left.
        """
        self._free_copied()
        start = self._ranges.take(HEADER_SIZE + pickled.size)
        if start is None:
            return None
        try:
            self._get_memory(start + HEADER_SIZE + pickled.size)
        except OSError:
            self._ranges.give_back(start)
            raise
        for offset, piece in pickled:
            self._write_piece(start + HEADER_SIZE + offset, piece)
        self._memory[start] = TAKEN
        self._starts.append(start)
        return start

    def rest(self) -> None:
        """Return memory that was not used for a minute to the system; called once per ping."""
        self._free_copied()
        self._rests += 1
        if self._rests % RESTS_TO_KEEP_MEMORY:
            return
        before = self._committed_end
        self._committed_end = min(before, self._ranges.forget_peak())
        if self._committed_end < before:
            with contextlib.suppress(OSError):
                punch(self._fd, self._committed_end, before - self._committed_end)

    def describe_room(self) -> str:
        """Describe the taken and the total bytes of the outbox, for log messages."""
        return f"{self._ranges.taken_bytes} of max_shared_bytes={self._size} are taken"

    def close(self) -> None:
        """Unmap the memory; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._memory.close()

    def _free_copied(self) -> None:
        """Free the answers that the API process has copied."""
        left = []
        for start in self._starts:
            # Read once: the API process may clear it at any moment.
            if self._memory[start] == FREE:
                self._ranges.give_back(start)
            else:
                left.append(start)
        self._starts = left

    def _get_memory(self, end: int) -> None:
        """Let the system provide all memory up to `end`: writing without it is a fatal signal."""
        end = -(-end // PAGE) * PAGE  # the system takes back whole pages only
        if self._committed_end < end:
            os.posix_fallocate(self._fd, self._committed_end, end - self._committed_end)
            self._committed_end = end

    def _write_piece(self, start: int, piece: bytes | memoryview) -> None:
        if len(piece) >= LEAST_RELEASING:
            copy_buffer(self._address + start, piece)
        else:
            self._memory[start : start + len(piece)] = piece
