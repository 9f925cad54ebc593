"""The reader's half of an outbox: memory in which one worker leaves large outputs. API process.

An outbox is one anonymous file. Only its worker writes outputs and allocates ranges. A byte before
each answer is set by the worker and cleared by the API process: the worker reads it when it needs
room, so no message has to wake it. An answer outlives the worker as long as the API process has the
memory mapped.

All methods run on the event loop's thread, except `Answer.copy`, which any thread may call.
"""

import os
from itertools import chain
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from fast_batcher._fork import at_fork
from fast_batcher._shared_memory.heap import keep_freed_memory
from fast_batcher._shared_memory.memcpy import RELEASING_SIZE, copy_releasing
from fast_batcher._shared_memory.outbox_writer import FREE, HEADER_SIZE, OutboxWriter
from fast_batcher._shared_memory.ranges import lay_out
from fast_batcher._transport.memory_file import make_shared_file, map_file, open_passed
from fast_batcher._transport.pickler import load_items, view_pickle
from fast_batcher.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable


class OutboxReader:
    """Finds the answers of one worker in its outbox.

    Passed to a child process as an argument, it becomes the `OutboxWriter` of that process.

    Args:
        size: Most bytes of all answers that have not been copied yet.
        least: Bytes from which on a buffer is kept out of the pickle.

    Raises:
        OSError: The system does not provide such memory, or not of this size.
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
        """Find an answer that the worker has left.

        Args:
            start: Start of the answer, as `OutboxWriter.put` returned it.
            sizes: Bytes of its stream, and of each buffer.
            read_only: The numbers of its read-only buffers.
            items: The bytes and buffers of each output; see `OutOfBandPickle.items`.

        Raises:
            TransportError: The numbers do not describe an answer in this memory.
        """
        if not self.is_used:
            self.is_used = True
            keep_freed_memory()
        numbers = (start, *sizes, *chain.from_iterable(items))
        if self._view is not None and all(type(one) is int and one >= 0 for one in numbers):
            _, length = lay_out(sizes)
            end = start + HEADER_SIZE + length
            in_items = [sum(column) for column in zip(*items, strict=True)]
            if sizes and end <= self._size and in_items == [sizes[0], len(sizes) - 1]:
                return Answer(self._view[start:end], sizes, {*read_only}, items)
        raise TransportError("a worker says that it has left an answer where there can be none")

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
    """Outputs of a batch in an outbox.

    Args:
        slab: The memory of the outputs, with the header before them.
        sizes: Bytes of their stream, and of each buffer.
        read_only: Numbers of the buffers that become `bytes`; the others become `bytearray`.
        items: The bytes and buffers of each output; see `OutOfBandPickle.items`.
    """

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
        """Copy the buffers out of the outbox, ahead of `load`. Any thread.

        Args:
            releases_gil: Release the GIL during large copies.

        Raises:
            MemoryError: There is no memory left; `load` tries again.
        """
        for index in range(len(self._copies), len(self._buffers)):
            buffer = self._buffers[index]
            kind = bytes if index in self._read_only else bytearray
            is_long = releases_gil and len(buffer) >= RELEASING_SIZE
            self._copies.append(copy_releasing(kind, buffer) if is_long else kind(buffer))

    def load(self, on_error: "Callable[[BaseException], Any]") -> list[Any]:
        """Unpickle the outputs, and free their memory in the outbox.

        Args:
            on_error: Returns the substitute for an output that cannot be unpickled.
        """
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
