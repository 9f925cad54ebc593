"""The shared memory of one opening, and the thread that copies in and out of it. Parent process.

Everything here is called on the event loop's thread; `close` may be called on any thread once the
loop is closed.
"""

import asyncio
import functools

from fast_batcher._parent.background import Done, Job, JobThread
from fast_batcher._shared_memory.slabs import Slabs


class MemoryService:
    """Owns the slabs for large inputs and the copier thread.

    Senders use both, answers use the thread, and the pool gives unused memory back with its
    heartbeat.

    Args:
        loop: The event loop, which is running.
        max_shared_bytes: Most bytes of large inputs together; 0 for no shared memory.
        name: The batcher's name, for the thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_shared_bytes: int, name: str) -> None:
        # Memory in which large inputs reach the workers, or why it could not be made; None if the
        # settings want none.
        self.slabs: Slabs | OSError | None = None
        if max_shared_bytes:
            try:
                self.slabs = Slabs(max_shared_bytes)
            except OSError as error:
                # Without its frames, which hold this object.
                self.slabs = error.with_traceback(None)
        self._copier = JobThread(loop, f"fast_batcher-copier-{name}")
        # Waited for by every `aclose` under way.
        self._slabs_closed: asyncio.Future[None] | None = None

    def run_in_thread(self, job: Job, done: Done) -> None:
        """Do a job on the copier thread, then call `done` on the loop with its error or None.

        After `close` no job begins, and no `done` is called.
        """
        self._copier.run(job, done)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `done` on another event loop; the one before is closed."""
        self._copier.rebind(loop)

    def give_back_unused(self) -> None:
        """Begin to give the system the memory that was not used since the last call of this."""
        slabs = self.slabs
        if not isinstance(slabs, Slabs):
            return
        unused = slabs.take_unused()
        if unused is not None:
            punch = functools.partial(slabs.punch, unused)
            self.run_in_thread(punch, lambda _: slabs.mark_uncommitted(unused))

    async def aclose(self) -> None:
        """Give the slabs back on the copier thread: that takes 80 ms per 200 MiB that were used."""
        slabs = self.slabs
        if self._slabs_closed is None and isinstance(slabs, Slabs) and not slabs.is_closed:
            self._slabs_closed = asyncio.get_running_loop().create_future()
            self.run_in_thread(slabs.close, self._wake)
        if self._slabs_closed is not None:
            # `close` wakes it too: after that the copier thread does nothing.
            await asyncio.wait([self._slabs_closed])

    def close(self) -> None:
        """End the copier thread and give the slabs back; may be called again."""
        self._copier.stop()
        if isinstance(self.slabs, Slabs):
            self.slabs.close()
        if self._slabs_closed is not None and not self._slabs_closed.get_loop().is_closed():
            self._wake(None)

    def _wake(self, _: BaseException | None) -> None:
        assert self._slabs_closed is not None, "made before the job"
        if not self._slabs_closed.done():
            self._slabs_closed.set_result(None)
