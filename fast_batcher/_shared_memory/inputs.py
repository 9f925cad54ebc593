"""Large inputs in shared memory: the parent's slabs, their layouts, and the worker's views of them.

    parent  Slabs: the event loop's thread, except `write` and `punch`, which any thread may call
    worker  SlabViews: the main thread makes the views, any thread may drop the last one of a batch

The memory is one anonymous file of its maximal length. The system provides memory for a part of the
file when it is written first. The file ends with the last process that has it open.

`Slabs` keeps account of taken ranges. A range (`Slab`) is free again once no reference to it is
left: the code that writes it holds one, and so does the lease of each batch that lies in it, as
long as its worker has a view of it. Any thread may drop the last reference. Any thread of a worker
may fork: then a batch is free only when the child has ended, too.

NumPy and PyTorch are used if they are loaded: in the API process the app passes one of their
values, and in the worker unpickling a dtype loads its library.
"""

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import operator
import os
import pickle
import select
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, NamedTuple

from fast_batcher._arrays.kinds import find_numpy, find_torch
from fast_batcher._arrays.tensors import is_plain_tensor, is_volatile, rebuild_tensor, view_tensor
from fast_batcher._process import at_fork
from fast_batcher._shared_memory.ranges import PAGE, RELEASING_SIZE, Ranges, copy_buffer, round_up
from fast_batcher._transport.progress import make_shared_file, map_file, open_passed, punch

if TYPE_CHECKING:
    from fast_batcher._transport.progress import WorkerProgress

# Kinds of NumPy's dtypes: booleans, integers, real and complex numbers, dates and time differences,
# text and bytes of a fixed length, and unstructured bytes.
PLAIN_KINDS = "biufcmMSUV"


class Layout(NamedTuple):
    """Type, dtype and shape of the inputs of one slab."""

    # True for tensors, False for arrays.
    is_tensor: bool
    dtype: Any
    shape: tuple[int, ...]
    # The slab is the memory of the app's own arrays, and no other copy exists for a retry.
    is_original: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one input."""
        size: int = math.prod(self.shape) * self.dtype.itemsize
        return size


# The fields of a `Layout`, as a plain tuple, which takes a tenth of the time: one per input.
Key = tuple[Any, ...]
# Takes a value, and the least and the most bytes; returns the fields of its layout and its size.
# None if the size is outside these limits, or if its memory does not hold just its values in order.
LayoutProbe = Callable[[Any, int, int], tuple[Key, int] | None]


def find_probes() -> dict[type, LayoutProbe]:
    """Return a probe for each type of array or tensor whose library is loaded."""
    probes: dict[type, LayoutProbe] = {}
    numpy, torch = find_numpy(), find_torch()
    if numpy is not None:
        probes[numpy.ndarray] = _find_array_layout
    if torch is not None:
        probes[torch.Tensor] = functools.partial(_find_tensor_layout, torch)
    return probes


def is_plain_dtype(dtype: Any) -> bool:
    """Return whether bytes and an equal dtype are enough to rebuild arrays of this NumPy dtype."""
    # Equal dtypes may differ in metadata, also of a field, and in the alignment and the record type
    # of fields. Dtypes of subarrays change the shape. Arrays with dtypes of other libraries, or
    # with NumPy's dtype for text of any length, may hold pointers to the values.
    return (
        dtype.kind in PLAIN_KINDS
        and type(dtype).__module__.partition(".")[0] == "numpy"
        and not dtype.hasobject
        and dtype.metadata is None
        and dtype.names is None
        and dtype.subdtype is None
    )


def to_shape(shape: Any) -> tuple[int, ...]:
    """Make a shape from one integer or several, of any integer type."""
    if isinstance(shape, str | bytes):  # a sequence of integers, if it is bytes or empty
        raise TypeError(f"{type(shape).__name__!r} object cannot be interpreted as a shape")
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(map(operator.index, shape))


def address_of(value: Any) -> int:
    """Return the memory address of an array or tensor; takes 1 us for an array."""
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return int(value.__array_interface__["data"][0])


def view_bytes(value: Any) -> memoryview | None:
    """View the bytes of an array or tensor that a probe has accepted; None without NumPy.

    The view keeps an array's memory. A tensor's may be freed meanwhile: see `VolatileBuffer`.
    """
    array = view_tensor(value) if hasattr(value, "data_ptr") else value.reshape(-1).view("u1")
    return None if array is None else memoryview(array)


def _find_array_layout(array: Any, least: int, most: int) -> tuple[Key, int] | None:
    size = array.nbytes
    dtype = array.dtype
    if (
        not least <= size <= most
        or not array.flags.c_contiguous
        or not is_plain_dtype(dtype)
        or not array.ndim
    ):
        return None
    return (False, dtype, array.shape), size


def _find_tensor_layout(torch: Any, tensor: Any, least: int, most: int) -> tuple[Key, int] | None:
    if not is_plain_tensor(torch, tensor) or not least <= tensor.nbytes <= most:
        return None
    return (True, tensor.dtype, tuple(tensor.shape)), tensor.nbytes


def view_rows(layout: Layout, part: memoryview) -> tuple[list[Any], Any]:
    """View adjacent inputs of one layout; with the array whose rows they are, None for tensors."""
    if layout.is_tensor:
        size = layout.nbytes
        # Each from its own bytes: a slice of one tensor would be pickled with the whole tensor.
        rows: list[Any] = [
            rebuild_tensor(part[begin : begin + size], layout.dtype, layout.shape)
            for begin in range(0, len(part), size)
        ]
        return rows, None
    numpy: Any = sys.modules["numpy"]  # which made the dtype
    whole = numpy.frombuffer(part, layout.dtype).reshape(-1, *layout.shape)
    return list(whole), whole


# A dtype takes microseconds to unpickle, and most models take inputs of few layouts.
@functools.lru_cache(maxsize=64)
def unpack_layout(packed: bytes) -> Layout:
    layout: Layout = pickle.loads(packed)
    return layout


class Slab:
    """A range of the memory, which is taken as long as this object exists."""

    __slots__ = ("_ended", "start")

    def __init__(self, start: int, ended: deque[int]) -> None:
        self.start = start
        self._ended: deque[int] | None = ended

    def leak(self) -> None:
        """Never free the range: a process unknown to this one may read it."""
        self._ended = None

    # The garbage collector may run this in the middle of any statement. In a reference cycle other
    # objects may still refer to this one; none of them uses the slab.
    def __del__(self) -> None:
        if self._ended is not None:
            self._ended.append(self.start)


class Section(NamedTuple):
    """Section of a slab, or a whole slab, to be written."""

    slab: Slab
    # Offset from the beginning of the memory, in bytes.
    start: int
    length: int

    @property
    def pages(self) -> tuple[int, int]:
        """The first page, and the page after the last one."""
        return self.start // PAGE, -(-(self.start + self.length) // PAGE)


class Slabs:
    """Allocator and writer of slabs.

    Passed to a child process as an argument, it becomes the `SlabViews` of that process.
    """

    def __init__(self, size: int, fd: int = -1, base: int = 0) -> None:
        # Most bytes in all slabs together.
        self.size = size
        self.base = base
        self._ranges = Ranges(size)
        # Starts of slabs without a reference: added by any thread, freed by the loop's.
        self._ended: deque[int] = deque()
        # A byte per page: 1 once the system has provided its memory.
        self._provided = bytearray(size // PAGE + 1)
        self._fd = make_shared_file(size) if fd < 0 else fd
        self._memory = map_file(self._fd, size, base)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        # Protects the next two attributes. Held for moments only.
        self._lock = threading.Lock()
        self.is_closed = False
        # Calls of `write`, `lend` and `punch` that are running: the memory stays until they end.
        self._users = 0
        at_fork(self, in_child=Slabs.close_in_child)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_passed, (SlabViews, reduction.DupFd(self._fd), self.size)

    def duplicate_fd(self) -> int:
        """Return a descriptor of the file for another process."""
        with self._in_use():
            return os.dup(self._fd)

    @property
    def count(self) -> int:
        """Number of taken slabs."""
        self._free_ended()
        return self._ranges.count

    @property
    def taken_bytes(self) -> int:
        """Total bytes of the taken slabs."""
        self._free_ended()
        return self._ranges.taken_bytes

    def take(self, length: int) -> Section | None:
        """Take a slab of at least `length` bytes, to be written whole; None if there is no room."""
        slab = self.reserve(length)
        return None if slab is None else Section(slab, slab.start, round_up(length))

    def reserve(self, length: int) -> Slab | None:
        """Take a slab, to be cut into the slabs of single inputs; None if there is no room."""
        self._free_ended()
        start = None if self.is_closed else self._ranges.take(length)
        return None if start is None else Slab(start, self._ended)

    def count_fresh(self, section: Section) -> int:
        """Return the bytes of a section for which the system has not provided memory yet."""
        return self._provided.count(0, *section.pages) * PAGE

    def cut(self, slab: Slab, length: int) -> Slab:
        """Make a slab of the first bytes of another one, which has more."""
        first = Slab(slab.start, self._ended)
        slab.start = self._ranges.divide(slab.start, length)
        return first

    def write(
        self,
        section: Section,
        pieces: Iterable[tuple[int, bytes | memoryview]],
        *,
        releases_gil: bool,
    ) -> None:
        """Copy buffers into a section of a slab. Any thread."""
        with self._in_use():
            self._get_memory(section)
            for offset, piece in pieces:
                self._write_piece(section.start + offset, piece, releases_gil=releases_gil)

    def lend(self, section: Section) -> memoryview:
        """Return a view of a section of a slab for the app to write; it does not keep the slab.

        The view's `obj` lives as long as any view that was made from it.
        """
        with self._in_use():
            self._get_memory(section)
            owner = (ctypes.c_ubyte * section.length).from_buffer(self._memory, section.start)
            return pickle.PickleBuffer(owner).raw()

    def read(self, start: int, length: int) -> memoryview:
        """View bytes that were written; the caller must keep their slab meanwhile."""
        with self._in_use():
            return memoryview(self._memory)[start : start + length]

    def offset_of(self, address: int) -> int:
        """Return an address as an offset in the memory; outside of 0 to `size` if elsewhere."""
        return address - self._address

    def take_unused(self) -> Section | None:
        """Take the memory at the end that was not used since the last call, None without any.

        The caller must pass the section to `punch`.
        """
        self._free_ended()
        begin = -(-self._ranges.forget_peak() // PAGE) * PAGE
        end = (self._provided.rfind(1) + 1) * PAGE
        if self.is_closed or begin >= end:
            return None
        self._ranges.take_part(begin, end)
        self._provided[begin // PAGE :] = bytes(len(self._provided) - begin // PAGE)
        return Section(Slab(begin, self._ended), begin, end - begin)

    def punch(self, section: Section) -> None:
        """Return the memory of a section of a slab to the system. Any thread."""
        with self._in_use():
            punch(self._fd, self.base + section.start, section.length)

    def when_unmapped(self, done: Callable[[], None]) -> None:
        """Call `done` once the memory is unmapped: at `close`, or when the last lent view is gone.

        A forked child calls it, too, for its copy of the map. A process that ends does not.
        """
        weakref.finalize(self._memory, done).atexit = False

    def close(self) -> None:
        """Unmap all memory as soon as no thread writes it; may be called again.

        Takes 80 ms per 200 MiB that were used.
        """
        with self._lock:
            self.is_closed = True
            self._close_unused()

    def close_in_child(self) -> None:
        """Unmap the memory in a forked child, where no thread writes any more."""
        self._lock, self._users = threading.Lock(), 0
        self.close()

    def _free_ended(self) -> None:
        while self._ended:
            self._ranges.give_back(self._ended.popleft())

    def _get_memory(self, section: Section) -> None:
        """Let the system provide memory for a section: writing without it is a fatal signal."""
        first, end = section.pages
        fresh = self._provided.find(0, first, end)
        if fresh >= 0:
            count = end - fresh
            os.posix_fallocate(self._fd, self.base + fresh * PAGE, count * PAGE)
            self._provided[fresh:end] = b"\1" * count

    def _write_piece(self, start: int, piece: bytes | memoryview, *, releases_gil: bool) -> None:
        if releases_gil and isinstance(piece, memoryview) and is_volatile(piece):
            self._write_volatile(start, piece)
        elif releases_gil and len(piece) >= RELEASING_SIZE:
            copy_buffer(self._address + start, piece)
        else:
            self._memory[start : start + len(piece)] = piece

    def _write_volatile(self, start: int, piece: memoryview) -> None:
        """Copy bytes that another thread may free meanwhile, without the GIL.

        Reading freed memory is a fatal signal in this process, but only an error in a system call.
        """
        while piece:
            try:
                written = os.pwrite(self._fd, piece, self.base + start)
            except OSError as error:
                if error.errno == errno.EFAULT:
                    error.strerror = "an input was resized while it was copied"
                raise
            start += written
            piece = piece[written:]

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the memory mapped during a `with` block."""
        with self._lock:
            if self.is_closed:
                raise OSError(errno.EBADF, "the shared memory is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if self.is_closed and not self._users and self._fd >= 0:
            with contextlib.suppress(BufferError):
                self._memory.close()
            # A view that was lent keeps the map until the app drops it.
            del self._memory
            os.close(self._fd)
            self._fd = -1


class _Lease:
    """Lease of a batch, which is free when the last reference to its lease is dropped."""

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


def lend_memory(memory: mmap.mmap, done: Callable[..., Any], *arguments: Any) -> memoryview:
    """Return a view of memory, and call `done` when no view of it and no array on it is left."""
    # Each view has its own exporter. Every view of the view refers directly to the exporter,
    # however it was made: the exporter lives as long as any of them.
    owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    weakref.finalize(owner, done, *arguments)
    # `raw` makes a view of plain bytes; the view of a ctypes array has another format.
    return pickle.PickleBuffer(owner).raw()


class SpareMemory:
    """Memory of this process for batches, which is used again: it costs no page faults then."""

    def __init__(self) -> None:
        # Any thread may append.
        self._free: list[mmap.mmap] = []
        # The smallest length of the list since the last `rest`.
        self._unused = 0

    def gather(self, views: list[memoryview]) -> memoryview:
        """Copy bytes behind each other; the memory is taken until no view of it is left."""
        size = sum(map(len, views))
        memory = next((memory for memory in self._free if len(memory) >= size), None)
        if memory is None:
            self._free.clear()  # they are too small
            # Up to twice the size: the system provides only the pages that are written.
            memory = mmap.mmap(-1, 1 << size.bit_length(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._free.remove(memory)
        self._unused = min(self._unused, len(self._free))
        target = lend_memory(memory, self._free.append, memory)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(target))
        for view in views:
            copy_buffer(address, view)
            address += len(view)
        return target[:size]

    def rest(self) -> None:
        """Return to the system the memory that was not used since the last call."""
        del self._free[: self._unused]
        self._unused = len(self._free)


class SlabViews:
    """Makes views of batches, and finds batches that have no view left.

    The model may write into a batch: no other process reads it while there is a view.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._memory = map_file(fd, size)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        # Size of the memory, in bytes.
        self.size = size
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
        self._leases[batch_id] = _Lease(batch_id, self.freed)
        return lend_memory(self._memory, self._leases.pop, batch_id, None)

    def take_freed(self) -> list[int]:
        """Return the batches that have become free since the last call."""
        if self.forks:
            self._forget_ended_forks()
        # Another thread may append an id at any moment.
        freed = self.freed[:]
        del self.freed[: len(freed)]
        return freed

    def close(self) -> None:
        """Unmap the memory."""
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
