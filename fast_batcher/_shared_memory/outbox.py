"""Large outputs in shared memory: an outbox, written by one worker and read by its parent.

    worker  OutboxWriter: the main thread
    parent  OutboxReader: the event loop's thread, except `Answer.copy`, which any thread may call

An outbox is one anonymous file. Only its worker writes outputs and allocates ranges. A byte before
each answer is set by the worker and cleared by the parent: the worker reads it when it needs room,
so no message has to wake it. An answer outlives the worker as long as the parent has the memory
mapped.
"""

import contextlib
import ctypes
import os
from itertools import chain
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from fast_batcher._process import at_fork
from fast_batcher._shared_memory.ranges import (
    ALIGNMENT,
    PAGE,
    RELEASING_SIZE,
    Ranges,
    copy_buffer,
    copy_releasing,
    keep_freed_memory,
    lay_out,
)
from fast_batcher._transport.pickling import load_items, view_pickle
from fast_batcher._transport.progress import make_shared_file, map_file, open_passed, punch
from fast_batcher.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fast_batcher._transport.pickling import OutOfBandPickle

# Values of the byte before an answer, and the size of the header that holds it, which keeps the
# answer aligned.
TAKEN, FREE = 1, 0
HEADER_SIZE = ALIGNMENT
# Bytes from which on a copy releases the GIL for threads of the model, which costs 1.4 us. More
# than in the parent: a shorter copy takes some tens of microseconds, and no event loop waits
# for it.
LEAST_RELEASING = 256 * 1024
# Pings after which memory that no answer has used is returned to the system. An idle worker gets
# one every five seconds, so this is a minute, as for inputs.
RESTS_TO_KEEP_MEMORY = 12


class OutboxWriter:
    """Puts answers into the outbox of this worker."""

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
        """Write an answer; return its start, or None if there is no room for it."""
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
        """Free the answers that the parent has copied."""
        left = []
        for start in self._starts:
            # Read once: the parent may clear it at any moment.
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


class OutboxReader:
    """Finds the answers of one worker in its outbox.

    Passed to a child process as an argument, it becomes the `OutboxWriter` of that process.
    """

    def __init__(self, size: int, least: int) -> None:
        self._size = size
        self._least = least
        self._fd = make_shared_file(size)
        # The memory is unmapped when no part of this view is left.
        self._view: memoryview | None = memoryview(map_file(self._fd, size))
        # Whether an answer was found here: then `close` takes long.
        self.is_used = False
        at_fork(self, in_child=OutboxReader.close)

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = reduction.DupFd(self._fd), self._size, self._least
        return open_passed, (OutboxWriter, *arguments)

    def find(
        self, start: int, sizes: list[int], read_only: list[int], items: list[tuple[int, int]]
    ) -> "Answer":
        """Find an answer that the worker has left."""
        if not self.is_used:
            self.is_used = True
            keep_freed_memory()
        numbers = (start, *sizes, *chain.from_iterable(items))
        if self._view is not None and all(
            type(number) is int and number >= 0 for number in numbers
        ):
            _, length = lay_out(sizes)
            end = start + HEADER_SIZE + length
            in_items = [sum(column) for column in zip(*items, strict=True)]
            if sizes and end <= self._size and in_items == [sizes[0], len(sizes) - 1]:
                return Answer(self._view[start:end], sizes, {*read_only}, items)
        raise TransportError("a worker announced an answer at an invalid place in shared memory")

    def close_fd(self) -> None:
        """Close the descriptor, so that no other process inherits it; may be called again.

        The memory stays mapped.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_open(self) -> bool:
        """Whether the memory is still mapped."""
        return self._view is not None

    def close(self) -> None:
        """Unmap the memory as soon as no answer is left in it; may be called again."""
        self.close_fd()
        self._view = None


class Answer:
    """Outputs of a batch in an outbox."""

    def __init__(
        self,
        slab: memoryview,
        sizes: list[int],
        read_only: set[int],
        items: list[tuple[int, int]],
    ) -> None:
        self._slab = slab
        self._read_only = read_only
        self._items = items
        self._stream, self._buffers = view_pickle(slab[HEADER_SIZE:], sizes)
        # Bytes of the stream and all buffers.
        self.size = sum(sizes)
        # Copies of the first buffers. Each has its own memory: an app that keeps one output does
        # not keep the others.
        self._copies: list[bytes | bytearray] = []

    def copy(self, *, releases_gil: bool) -> None:
        """Copy the buffers out of the outbox, ahead of `load`. Any thread."""
        for index in range(len(self._copies), len(self._buffers)):
            buffer = self._buffers[index]
            kind = bytes if index in self._read_only else bytearray
            is_long = releases_gil and len(buffer) >= RELEASING_SIZE
            self._copies.append(copy_releasing(kind, buffer) if is_long else kind(buffer))

    def load(self, on_error: "Callable[[BaseException], Any]") -> list[Any]:
        """Unpickle the outputs, and free their memory in the outbox."""
        try:
            self.copy(releases_gil=False)
            return load_items(self._stream, self._copies, self._items, on_error)
        finally:
            self.release()

    def release(self) -> None:
        """Free the memory in the outbox; the outputs are lost unless they have been loaded."""
        self._slab[0] = FREE
        self._slab = self._stream = memoryview(b"")
        self._buffers, self._copies = [], []
