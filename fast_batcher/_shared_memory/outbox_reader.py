"""The reader's half of an outbox: memory in which one worker leaves large outputs. API process.

An outbox is one file without a name. Only its worker writes outputs, and knows which ranges are
taken. Each answer has a byte ahead of it that the worker sets and the API process clears: the
worker sees what is free when it needs room, and no message wakes it for that. An answer outlives
the worker as long as the API process has the memory.

The event loop's thread calls everything in here, except `Answer.copy`, which any thread may call.
"""

import os
from itertools import chain
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from fast_batcher._fork import at_fork
from fast_batcher._shared_memory.memcpy import RELEASING_SIZE, copy_releasing, make_unset
from fast_batcher._shared_memory.outbox_writer import FREE, HEADER_SIZE, OutboxWriter
from fast_batcher._shared_memory.ranges import lay_out
from fast_batcher._transport.memory_file import make_shared_file, map_file, open_passed
from fast_batcher._transport.pickler import load_items, view_parts
from fast_batcher.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable


class OutboxReader:
    """Finds the answers of one worker.

    Pickled while a process is being started, it becomes the `OutboxWriter` of that process.

    Args:
        size: Most bytes in all answers together that have not been copied yet.
        least: Bytes from which on a buffer is kept out of the pickle.

    Raises:
        OSError: The system does not provide such memory, or not of this size.
    """

    def __init__(self, size: int, least: int) -> None:
        self._size = size
        self._least = least
        self._fd = make_shared_file(size)
        # The memory goes when no part of this view is left.
        self._view: memoryview | None = memoryview(map_file(self._fd, size))
        # Whether an answer came: `close` takes long then.
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
            start: Where `OutboxWriter.put` has put it.
            sizes: Bytes of each of its parts.
            read_only: The numbers of its read-only buffers.
            items: Which parts belong to each output; see `Parts.items`.

        Raises:
            TransportError: No answer can lie there.
        """
        self.is_used = True
        numbers = (start, *sizes, *chain.from_iterable(items))
        if self._view is not None and all(type(one) is int and one >= 0 for one in numbers):
            _, length = lay_out(sizes)
            end = start + HEADER_SIZE + length
            in_items = [sum(column) for column in zip(*items, strict=True)]
            if sizes and end <= self._size and in_items == [sizes[0], len(sizes) - 1]:
                return Answer(self._view[start:end], sizes, {*read_only}, items)
        raise TransportError("a worker says that it has left an answer where there can be none")

    def close_fd(self) -> None:
        """Close the descriptor, so that no other process gets it; may be called again.

        The memory stays.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_open(self) -> bool:
        """Whether there is memory to be given back."""
        return self._view is not None

    def close(self) -> None:
        """Give the memory back as soon as no answer is left in it; may be called again."""
        self.close_fd()
        self._view = None


class Answer:
    """The outputs of a batch, as they lie in an outbox.

    Args:
        slab: Where they lie, and the byte ahead of them.
        sizes: The bytes of each part.
        read_only: Which parts behind the first become `bytes`.
        items: Which parts belong to each output.
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
        self._stream, self._parts = view_parts(slab[HEADER_SIZE:], sizes)
        # Bytes of all parts.
        self.size = sum(sizes)
        # Copies of the first parts. Each has memory for itself: an app that keeps one output does
        # not keep the others.
        self._copies: list[bytes | bytearray] = []

    def copy(self, *, releases_gil: bool) -> None:
        """Copy what `load` would not copy. Any thread.

        Args:
            releases_gil: Whether other threads may run meanwhile.

        Raises:
            MemoryError: There is no memory left; `load` tries again.
        """
        if not self._copies:
            _grow_heap(self.size)
        for index in range(len(self._copies), len(self._parts)):
            part = self._parts[index]
            kind = bytes if index in self._read_only else bytearray
            is_long = releases_gil and len(part) >= RELEASING_SIZE
            self._copies.append(copy_releasing(kind, part) if is_long else kind(part))

    def load(self, on_error: "Callable[[BaseException], Any]") -> list[Any]:
        """Make the outputs, and free the place in the outbox.

        Args:
            on_error: Returns what stands in the place of an output that cannot be unpickled.
        """
        try:
            self.copy(releases_gil=False)
            return load_items(self._stream, self._copies, self._items, on_error)
        finally:
            self.release()

    def release(self) -> None:
        """Free the place in the outbox; the outputs are lost unless they have been loaded."""
        self._slab[0] = FREE
        self._slab = self._stream = memoryview(b"")
        self._parts, self._copies = [], []


# The C library raises its threshold up to 32 MiB; some of a block is for the library itself.
_MOST_GROWTH = 31 * 1024 * 1024


def _grow_heap(size: int) -> None:
    """Allocate `size` bytes in one piece, unused, and free them at once.

    From then on the C library of Linux keeps blocks of that size which the program frees. Without
    this it would return each large block to the system, and get it back as pages that have not
    been used before, which takes several times as long as the copying.
    """
    make_unset(bytearray, min(size, _MOST_GROWTH))
