"""The reader's half of the memory that carries inputs to the workers. Worker process.

The worker's main thread makes the views. Any thread may drop the last view of a batch, and any
thread may fork: then a batch is free only when the child has ended, too.
"""

import ctypes
import mmap
import os
import pickle
import select
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from fast_batcher._fork import at_fork
from fast_batcher._transport.memory_file import map_file

if TYPE_CHECKING:
    from fast_batcher._transport.progress import WorkerProgress


class _Lease:
    """Lease of a batch, which is free when the last reference to its lease is dropped.

    Args:
        batch_id: The batch.
        freed: Receives `batch_id` when the last reference is dropped, on any thread.
    """

    __slots__ = ("_freed", "batch_id")

    def __init__(self, batch_id: int, freed: list[int]) -> None:
        self.batch_id = batch_id
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.batch_id)


class _Fork(NamedTuple):
    """A child of this process that may have views."""

    # Read end of a pipe that reports an end of file when the child has ended or runs another
    # program. -1 without a pipe.
    read_end: int
    # The batches of which the child may have views.
    leases: list[_Lease]


class _PrivateMap(mmap.mmap):
    """Copy-on-write map of a part of the file: writes are invisible to other processes."""

    # Shared memory of the same batch, which is kept while there is a view of this map.
    batch: memoryview


class SlabViews:
    """Makes views of batches, and finds batches that have no view left.

    The model may write into a batch: no other process reads it while there is a view, and arrays
    that the app may read again are viewed with `view_apart`.

    Args:
        fd: Descriptor of the file, owned by this object from now on.
        size: Length of the file in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._memory = map_file(fd, size)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        # In bytes.
        self.size = size
        self._type = ctypes.c_ubyte * size
        # Leases of the batches of which this process has a view, by batch id.
        self._leases: dict[int, _Lease] = {}
        # Children of this process that may have views, and had not ended at the last check.
        self.forks: list[_Fork] = []
        # The write ends of their pipes, by the thread that is forking.
        self._write_ends: dict[int, int] = {}
        # Ids of batches without a view that `take_freed` has not returned yet.
        self.freed: list[int] = []
        # Shared with the parent, which reads there the last batch that children may view.
        self._progress: WorkerProgress | None = None
        # Held while `inherited` is written: the last writer counts. A child does not write it.
        self._telling = threading.Lock()
        at_fork(
            self,
            before=SlabViews._before_fork,
            in_parent=SlabViews._after_fork_in_parent,
            in_child=SlabViews._after_fork_in_child,
        )

    def report_forks(self, progress: "WorkerProgress") -> None:
        """Keep `progress.inherited` up to date from now on."""
        self._progress = progress

    def view(self, batch_id: int) -> memoryview:
        """Return a view of the whole memory for one batch, which must use only its own slabs.

        The batch is free when no view of this view and no array on it is left.
        """
        # Each batch has its own exporter. Every view refers directly to the exporter, however it
        # was made: the exporter lives as long as any view.
        owner = self._type.from_buffer(self._memory)
        self._leases[batch_id] = _Lease(batch_id, self.freed)
        weakref.finalize(owner, self._leases.pop, batch_id, None)
        # `raw` makes a view of plain bytes; the view of a ctypes array has another format.
        return pickle.PickleBuffer(owner).raw()

    def view_apart(self, view: memoryview, start: int) -> memoryview:
        """Return a copy-on-write view of a part of a batch: writes stay in this process.

        The system copies only the pages that are written.

        Args:
            view: A view of the part, which the new view keeps.
            start: Start of the part in the memory.

        Raises:
            OSError: This process may not map that much memory.
        """
        before = start % mmap.ALLOCATIONGRANULARITY
        private = _PrivateMap(self._fd, before + len(view), mmap.MAP_PRIVATE, offset=start - before)
        private.batch = view
        return memoryview(private)[before:]

    def take_freed(self) -> list[int]:
        """Return the batches that have become free since the last call."""
        if self.forks:
            self._forget_ended_forks()
        # Another thread may append an id at any moment.
        freed = self.freed[:]
        del self.freed[: len(freed)]
        return freed

    def close(self) -> None:
        """Unmap the memory.

        Raises:
            BufferError: There are views.
        """
        self._memory.close()
        self._close_fd()

    def _before_fork(self) -> None:
        """Note the batches whose views the child will inherit.

        A pipe reports the end of the child: only the child, and processes that it forks, have its
        write end.
        """
        leases = [*self._leases.values()]
        if not leases:
            return
        try:
            read_end, self._write_ends[threading.get_ident()] = os.pipe()
        except OSError:  # no descriptor is left: the batches are never free
            read_end = -1
        self.forks.append(_Fork(read_end, leases))
        self._tell_last_viewed()

    def _after_fork_in_parent(self) -> None:
        """Close the parent's copy of the write end."""
        write_end = self._write_ends.pop(threading.get_ident(), None)
        if write_end is not None:
            os.close(write_end)

    def _after_fork_in_child(self) -> None:
        """Keep the write end of this child's pipe, and close the ends of other children's."""
        self._write_ends.pop(threading.get_ident(), None)
        for fd in (*self._write_ends.values(), *(fork.read_end for fork in self.forks)):
            if fd >= 0:
                os.close(fd)
        self._write_ends.clear()
        self.forks.clear()
        # A child of the child inherits the write end, so it needs no pipe of its own.
        self._leases.clear()

    def _forget_ended_forks(self) -> None:
        poller = select.poll()
        for fork in self.forks:
            if fork.read_end >= 0:
                # The end of a pipe is reported whatever events are asked for.
                poller.register(fork.read_end, 0)
        ended = {fd for fd, _ in poller.poll(0)}
        for fork in [fork for fork in self.forks if fork.read_end in ended]:
            self.forks.remove(fork)
            os.close(fork.read_end)
        if ended:
            self._tell_last_viewed()

    def _tell_last_viewed(self) -> None:
        if self._progress is not None:
            with self._telling:
                viewed = (lease.batch_id for fork in self.forks[:] for lease in fork.leases)
                self._progress.inherited = max(viewed, default=-1)
