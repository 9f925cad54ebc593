"""The reader's half of the memory that carries inputs to the workers. Worker process.

The worker's main thread makes the views. Any thread may drop the last view of a batch, and any may
fork: then a batch is free when the child has ended, too.
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
    """A batch is free when nothing refers to this any more.

    Args:
        batch_id: The batch.
        freed: Gets `batch_id` when the last reference is dropped, on any thread.
    """

    __slots__ = ("_freed", "batch_id")

    def __init__(self, batch_id: int, freed: list[int]) -> None:
        self.batch_id = batch_id
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.batch_id)


class _Fork(NamedTuple):
    """A child of this process that may have views."""

    # Of a pipe; at its end when the child has ended or runs another program. -1 without a pipe.
    read_end: int
    # The batches of which the child may have views.
    leases: list[_Lease]


class _PrivateMap(mmap.mmap):
    """A part of the file in which what this process writes is seen by no other (copy on write)."""

    # Shared memory of the same batch: it is not free while there is a view of this map.
    batch: memoryview


class SlabViews:
    """Makes views of batches, and knows which batches have no view left.

    The model may write into a batch: no other process reads it as long as there is a view, and what
    the app reads again is viewed apart.

    Args:
        fd: Of the file, which is taken over.
        size: Its length in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._memory = map_file(fd, size)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        # In bytes.
        self.size = size
        self._type = ctypes.c_ubyte * size
        # By batch, as long as this process has a view of it.
        self._leases: dict[int, _Lease] = {}
        # Children of this process that may have views and had not ended at the last look.
        self.forks: list[_Fork] = []
        # The other ends of their pipes, by the thread that is forking.
        self._write_ends: dict[int, int] = {}
        # Ids of batches without a view of which `take_freed` has not told the writer yet.
        self.freed: list[int] = []
        # Where the parent reads which batches children may view.
        self._progress: WorkerProgress | None = None
        # Held while that is written: the last writer counts. A child writes nothing.
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
        """The whole memory, for one batch, which reads and writes only its own slabs.

        The batch is free when no view of this view and no array on it is left.
        """
        # Each batch has an exporter for itself. All views refer to the exporter, however they were
        # made, and not to the views in between: only its life tells whether one is left.
        owner = self._type.from_buffer(self._memory)
        self._leases[batch_id] = _Lease(batch_id, self.freed)
        weakref.finalize(owner, self._leases.pop, batch_id, None)
        # A view of plain bytes; that of a ctypes array has another format.
        return pickle.PickleBuffer(owner).raw()

    def view_apart(self, view: memoryview, start: int) -> memoryview:
        """View a part of a batch again, such that writes change nothing for other processes.

        The system copies the pages that are written, and no others.

        Args:
            view: A view of that part, which the new view keeps.
            start: Where it begins in the memory.

        Raises:
            OSError: This process may not map that much memory.
        """
        before = start % mmap.ALLOCATIONGRANULARITY
        private = _PrivateMap(self._fd, before + len(view), mmap.MAP_PRIVATE, offset=start - before)
        private.batch = view
        return memoryview(private)[before:]

    def take_freed(self) -> list[int]:
        """The batches that have become free since the last call."""
        if self.forks:
            self._forget_ended_forks()
        # Another thread may add one at any moment.
        freed = self.freed[:]
        del self.freed[: len(freed)]
        return freed

    def close(self) -> None:
        """Give the memory back.

        Raises:
            BufferError: There are views.
        """
        self._memory.close()
        self._close_fd()

    def _before_fork(self) -> None:
        """Note the batches of which the child will have copies of views.

        A pipe tells when the child has ended: only the child, and processes that it forks, have
        its other end.
        """
        leases = [*self._leases.values()]
        if not leases:
            return
        try:
            read_end, self._write_ends[threading.get_ident()] = os.pipe()
        except OSError:  # there is no descriptor left: the batches are never free
            read_end = -1
        self.forks.append(_Fork(read_end, leases))
        self._tell_last_viewed()

    def _after_fork_in_parent(self) -> None:
        """Leave the other end of the pipe to the child."""
        write_end = self._write_ends.pop(threading.get_ident(), None)
        if write_end is not None:
            os.close(write_end)

    def _after_fork_in_child(self) -> None:
        """Keep the end that tells of this child, and close the ends that tell of others."""
        self._write_ends.pop(threading.get_ident(), None)
        for fd in (*self._write_ends.values(), *(fork.read_end for fork in self.forks)):
            if fd >= 0:
                os.close(fd)
        self._write_ends.clear()
        self.forks.clear()
        # A child of the child keeps that end, too, so it needs no pipe.
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
