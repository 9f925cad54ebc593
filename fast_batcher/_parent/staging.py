"""Staging: copies of large inputs in shared memory, made on arrival. Parent, event loop's thread.

    InputArena     copies inputs behind each other, on arrival
    MemoryService  the shared memory of an opening, and the thread that copies large values
    JobThread      a thread that runs blocking jobs, one after the other

An array or tensor is copied behind earlier inputs of the same layout, so that a batch is contiguous
when it is formed, and its frame carries only the location. The caller's value is kept, too: the
model may write into a staged input, so a retry sends the value. An array that the app has allocated
with `allocate` is not copied: the worker maps it with copy on write.
"""

import asyncio
import contextlib
import functools
import math
import pickle
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fast_batcher._process import at_fork, monotonic
from fast_batcher._shared_memory.inputs import (
    Key,
    Layout,
    LayoutProbe,
    Section,
    Slab,
    Slabs,
    address_of,
    find_probes,
    is_plain_dtype,
    view_bytes,
)
from fast_batcher._shared_memory.ranges import keep_freed_memory
from fast_batcher.settings import Settings

Job = Callable[[], None]
# Called with the error of the job, or None.
Done = Callable[[BaseException | None], None]


class JobThread:
    """Runs jobs on another thread, and tells the event loop when they are done.

    The thread is started with the first job, and lives until `stop`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        # Outcomes that the loop has not taken yet; `stop` drops them.
        self._outcomes: deque[tuple[Done, BaseException | None]] = deque()
        self._thread: threading.Thread | None = None
        # Held while a job runs.
        self._lock = threading.Lock()
        self._is_held = False

    def run(self, job: Job, done: Done) -> None:
        """Call `job` on the thread, and then `done` on the event loop with its error or None.

        Jobs run one after the other. If the system cannot start a thread, the job runs now.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                Context().run(thread.start)  # a free-threaded Python copies the context to it
            except RuntimeError:  # the system cannot start a thread
                self._do(job, done)
                return
            self._thread = thread
        self._jobs.put((job, done))

    def take_outcomes(self) -> None:
        """Call `done` of the finished jobs. Event loop's thread."""
        while self._outcomes:
            done, error = self._outcomes.popleft()
            done(error)

    def hold(self) -> None:
        """Start no further job, and wait for the end of the current one."""
        # This is set before the lock is taken: the thread may take it again for its next job.
        self._is_held = True
        with self._lock:
            pass

    def stop(self) -> None:
        """End the thread after the current job, and drop all other jobs and outcomes."""
        self.hold()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._outcomes.clear()

    def _work(self) -> None:
        for job, done in iter(self._jobs.get, None):
            with self._lock:
                if not self._is_held:
                    self._do(job, done)
            del job, done  # else they would live until the next job

    def _do(self, job: Job, done: Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:  # noqa: BLE001  `done` gets any error
            # Its frames would hold the pipes of a failed start, for example.
            error = raised.with_traceback(None)
        self._outcomes.append((done, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.take_outcomes, context=Context())


# Seconds after which shared memory that no batch has used is returned to the system. Getting it
# again costs some milliseconds per batch of images, which is little once a minute.
REST = 60.0


@dataclass(slots=True)
class OpenSlab:
    """A slab that takes more inputs of one layout."""

    key: Key
    # The layout, pickled.
    packed: bytes
    # The part that is left, and the number of inputs that it takes; None and 0 once it is closed.
    rest: Slab | None
    count: int


class MemoryService:
    """Owner of the slabs for large inputs and of the copier thread.

    `InputArena` and `BatchSender` use both, the opening the thread; the pool returns unused memory
    to the system with its heartbeat.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_shared_bytes: int, name: str) -> None:
        # Memory for large inputs, or the error that prevented it; None if the settings turn it off.
        self.slabs: Slabs | OSError | None = None
        if max_shared_bytes:
            try:
                self.slabs = Slabs(max_shared_bytes)
            except OSError as error:
                # Its frames would hold this object.
                self.slabs = error.with_traceback(None)
        # The slabs that take more inputs, by layout, least recently used first.
        self.open_slabs: dict[Key, OpenSlab] = {}
        self._copier = JobThread(loop, f"fast_batcher-copier-{name}")
        # The moment from which on unused memory is returned.
        self.rests_at = monotonic() + REST
        # Every running `aclose` waits for this.
        self._slabs_closed: asyncio.Future[None] | None = None

    def run_in_thread(self, job: Job, done: Done) -> None:
        """Run a job on the copier thread, then call `done` on the loop with its error or None.

        After `close` no job begins, and no `done` is called.
        """
        self._copier.run(job, done)

    def close_slab(self, opened: OpenSlab) -> None:
        """Put no more inputs into this slab; may be called again."""
        opened.rest, opened.count = None, 0
        if self.open_slabs.get(opened.key) is opened:
            del self.open_slabs[opened.key]

    def close_slabs(self) -> None:
        """Put no more inputs into any of the open slabs."""
        for opened in list(self.open_slabs.values()):
            self.close_slab(opened)

    def give_back_unused(self) -> None:
        """Start to return memory that was not used for a minute; called every few seconds."""
        slabs, now = self.slabs, monotonic()
        if not isinstance(slabs, Slabs) or now < self.rests_at:
            return
        self.rests_at = now + REST
        self.close_slabs()
        unused = slabs.take_unused()
        if unused is not None:
            self.run_in_thread(functools.partial(slabs.punch, unused), lambda _: None)

    async def aclose(self) -> None:
        """Close the slabs on the copier thread, which takes 80 ms per 200 MiB that were used."""
        slabs = self.slabs
        if self._slabs_closed is None and isinstance(slabs, Slabs) and not slabs.is_closed:
            self._slabs_closed = asyncio.get_running_loop().create_future()
            self.run_in_thread(slabs.close, self._wake)
        if self._slabs_closed is not None:
            # `close` sets it too: after that the copier thread runs no job.
            await asyncio.wait([self._slabs_closed])

    def close(self) -> None:
        """End the copier thread and close the slabs; may be called again."""
        self._copier.stop()
        if isinstance(self.slabs, Slabs):
            self.slabs.close()
        if self._slabs_closed is not None and not self._slabs_closed.get_loop().is_closed():
            self._wake(None)

    def _wake(self, _: BaseException | None) -> None:
        assert self._slabs_closed is not None, "made before the job"
        if not self._slabs_closed.done():
            self._slabs_closed.set_result(None)


# Bytes from which on an input is staged. A smaller lone request is sent 10 to 20 us faster through
# the pipe; from 64 KiB on, where the pipe takes it in two pieces, staging is 15 us faster. Two or
# more at a time are faster when staged from 40 KiB on.
LEAST_STAGED = 56 * 1024
# Upper bound of the bytes of a pickled array besides its data: an input is staged only if it could
# also go through the pipe.
LARGEST_HEAD = 4096
# Bytes of the largest copy on the event loop: 0.1 ms, or 1 ms where the system has to provide the
# memory first.
LARGEST_COPY_ON_LOOP = 1024 * 1024
# Bytes that the loop copies in one of its turns, in two to four milliseconds: a batch of 32 images
# goes as a whole, because waiting for the thread takes longer than the copies. Bytes for which the
# system has to provide memory count `FRESH_COST` times, because they take that much longer.
MOST_COPIED_IN_TURN = 32 * 1024 * 1024
FRESH_COST = 10
# Most slabs that are open for more inputs at a time. Each holds memory for a batch.
MOST_OPEN_SLABS = 4
# Largest share of all shared memory for one open slab, and for all taken slabs when another is
# opened: inputs that are not staged need room too.
LARGEST_SHARE_OF_SLAB = 1 / 4
LARGEST_SHARE_OF_SLABS = 1 / 2


class CopyState(Enum):
    """State of the copy of a staged input."""

    COPYING = 0  # the copier thread is copying, or will
    COPIED = 1
    FAILED = 2  # the system had no memory for it
    CROWDED = 3  # other inputs take the memory; it was not begun


@dataclass(slots=True, eq=False)
class StagedInput:
    """The copy of one input in shared memory."""

    # None after `release`.
    slab: Slab | None
    # Its place in bytes from the beginning of the memory.
    start: int
    end: int
    # Pickled; one object for all inputs of a slab.
    layout: bytes
    state: CopyState = CopyState.COPYING
    # The slab from which its own was cut; None in a host.
    opened: OpenSlab | None = None
    # Set while a batch waits for the copy; called when the copy is made or has failed.
    when_copied: Callable[[], None] | None = None

    def release(self) -> None:
        """Give up the memory: the input has been sent, or has left; may be called again."""
        self.slab = None

    @property
    def is_wanted(self) -> bool:
        """Whether the input may be sent, or a batch that was sent waits for the copy."""
        return self.slab is not None or self.when_copied is not None

    def finish(self, state: CopyState) -> None:
        """Set the final state of the copy, and notify the batch that waits for it."""
        self.state = state
        if state is CopyState.FAILED:
            self.release()
        callback, self.when_copied = self.when_copied, None
        if callback is not None:
            callback()


class InputArena:
    """Copies inputs into shared memory."""

    def __init__(
        self,
        memory: MemoryService,
        settings: Settings,
        warn: Callable[[BaseException], None],
        most_of_all: float = LARGEST_SHARE_OF_SLABS,
    ) -> None:
        self._memory = memory
        self._warn = warn
        # Largest share of the memory for all slabs.
        self._most_of_all = most_of_all
        # Bytes from which on, and up to which, an input is staged.
        self._least = max(settings.shared_memory_threshold, LEAST_STAGED)
        self._most = settings.max_frame_bytes - LARGEST_HEAD
        # Slabs are opened for batches of this size.
        self.batch_size = settings.batch_limit
        # Bytes that the loop has copied in this turn, as they count for `MOST_COPIED_IN_TURN`.
        self._copied = 0
        # The probes, by type of value. Empty until `enable`, so that apps with small inputs skip
        # the probe.
        self.probes: dict[type, LayoutProbe] = {}
        # The memory of the arrays of `allocate` by start. The callback of the reference removes the
        # entry when the last view of the array is gone.
        self._allocated: dict[int, tuple[StagedInput, weakref.ref[Any]]] = {}
        at_fork(self, before=InputArena.pin_for_fork)

    def enable(self) -> None:
        """Start to probe inputs; called when the first large input was sent."""
        if not self.probes:
            keep_freed_memory()
        self.probes.update(find_probes())

    def end_turn(self) -> None:
        """Note the end of a turn: the next one may copy `MOST_COPIED_IN_TURN` bytes again."""
        self._copied = 0

    def stage(self, value: Any, *, takes_room: bool = True) -> StagedInput | None:
        """Copy a value into shared memory, now or on the copier thread; None if not staged.

        If other inputs take the memory, or without `takes_room`, the state is `CROWDED`.
        """
        found = self.probes[type(value)](value, self._least, self._most)
        slabs = self._memory.slabs
        if found is None or not isinstance(slabs, Slabs):
            return None
        key, size = found
        if self._allocated:
            start = slabs.offset_of(address_of(value))
            original, _ = self._allocated.get(start, (None, None))
            if original is not None and original.end - start == size:
                layout = _pack(Layout(*key)._replace(is_original=True))
                place = original.slab, original.start, original.end
                return StagedInput(*place, layout, CopyState.COPIED, original.opened)
        view = view_bytes(value)
        # Another thread may have resized it since it was probed.
        if view is None or view.nbytes != size:
            return None
        found_room = self._find_room(slabs, key, size) if takes_room else None
        if found_room is None:
            fits = size <= slabs.size * self._most_of_all
            return StagedInput(None, 0, 0, b"", CopyState.CROWDED) if fits else None
        section, staged = found_room
        cost = size + slabs.count_fresh(section) * (FRESH_COST - 1)
        if size > LARGEST_COPY_ON_LOOP or self._copied + cost > MOST_COPIED_IN_TURN:
            # The section keeps the slab, even if the request leaves.
            copy = functools.partial(_copy_staged, slabs, section, view, staged)
            self._memory.run_in_thread(copy, functools.partial(self._finish, slabs, staged))
            return staged
        self._copied += cost
        try:
            slabs.write(section, ((0, view),), releases_gil=False)
        except OSError as error:
            self._warn(error)
            return None
        staged.state = CopyState.COPIED
        return staged

    def allocate(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory, which the app fills; None if it would not be staged."""
        numpy: Any = sys.modules["numpy"]
        slabs = self._memory.slabs
        size = math.prod(shape) * dtype.itemsize
        is_fit = self._least <= size <= self._most and shape and is_plain_dtype(dtype)
        if not is_fit or not isinstance(slabs, Slabs):
            return None
        found_room = self._find_room(slabs, (False, dtype, shape, True), size)
        if found_room is None:
            return None
        section, original = found_room
        cost = slabs.count_fresh(section) * FRESH_COST
        if self._copied + cost > MOST_COPIED_IN_TURN:
            # The system provides it for later arrays.
            provide = functools.partial(slabs.write, section, (), releases_gil=True)
            self._memory.run_in_thread(provide, lambda _: None)
            return None
        self._copied += cost
        try:
            view = slabs.lend(section)
        except OSError as error:
            self._warn(error)
            return None
        entries, start = self._allocated, section.start
        entries[start] = original, weakref.ref(view.obj, lambda _: entries.pop(start, None))
        return numpy.frombuffer(view, dtype).reshape(shape)

    def pin_for_fork(self) -> None:
        """Never free the memory of allocated arrays: a forked child may write them, too."""
        for original, _ in list(self._allocated.values()):
            if original.slab is not None:
                original.slab.leak()

    def _find_room(self, slabs: Slabs, key: Key, size: int) -> tuple[Section, StagedInput] | None:
        """Find room for one more input, in an open slab or a new one."""
        open_slabs = self._memory.open_slabs
        opened = open_slabs.get(key) or self._open_slab(slabs, key, size)
        if opened is None or opened.rest is None:
            return None
        slab = slabs.cut(opened.rest, size) if opened.count > 1 else opened.rest
        opened.count -= 1
        if not opened.count:
            self._memory.close_slab(opened)
        elif len(open_slabs) > 1:
            open_slabs[key] = open_slabs.pop(key)
        start = slab.start
        staged = StagedInput(slab, start, start + size, opened.packed, opened=opened)
        return Section(slab, start, size), staged

    def _open_slab(self, slabs: Slabs, key: Key, size: int) -> OpenSlab | None:
        count = max(1, min(self.batch_size, int(slabs.size * LARGEST_SHARE_OF_SLAB) // size))
        most = int(slabs.size * self._most_of_all)
        # The open slabs may be of layouts that never come again.
        open_slabs = self._memory.open_slabs
        while open_slabs and (
            len(open_slabs) == MOST_OPEN_SLABS or slabs.taken_bytes + count * size > most
        ):
            self._memory.close_slab(next(iter(open_slabs.values())))
        count = min(count, (most - slabs.taken_bytes) // size)
        slab = None
        while count > 0 and (slab := slabs.reserve(count * size)) is None:
            count //= 2
        if slab is None:
            return None
        open_slabs[key] = opened = OpenSlab(key, _pack(Layout(*key)), slab, count)
        return opened

    def _finish(self, slabs: Slabs, staged: StagedInput, error: BaseException | None) -> None:
        """Record the outcome of a copy on the copier thread. Loop's thread."""
        if error is not None and staged.is_wanted and not slabs.is_closed:
            self._warn(error)
        staged.finish(CopyState.COPIED if error is None else CopyState.FAILED)


# A dtype takes microseconds to pickle.
@functools.lru_cache(maxsize=64)
def _pack(layout: Layout) -> bytes:
    return pickle.dumps(layout, pickle.HIGHEST_PROTOCOL)


def _copy_staged(slabs: Slabs, section: Section, view: memoryview, staged: StagedInput) -> None:
    """Copy an input on the copier thread."""
    if not staged.is_wanted:
        raise OSError("the request has left")
    slabs.write(section, ((0, view),), releases_gil=True)
