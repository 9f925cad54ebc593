"""Shared memory of a session, and the thread that copies large values into and out of it.

Parent process. All methods run on the event loop's thread; `close` may run on any thread once the
loop is closed.
"""

import asyncio
import functools

from fast_batcher._parent.background import Done, Job, JobThread
from fast_batcher._shared_memory.inputs import Slabs


class MemoryService:
    """Owner of the slabs for large inputs and of the copier thread.

    `SharedInputSender` uses both, `Answers` the thread; the pool returns unused memory to the
    system with its heartbeat.

    Args:
        loop: The event loop, which is running.
        max_shared_bytes: Most bytes of large inputs together; 0 for no shared memory, or for
            memory that `slabs` is set to later.
        name: The batcher's name, for the thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_shared_bytes: int, name: str) -> None:
        # Memory for large inputs, or the error that prevented it; None if the settings turn it off.
        self.slabs: Slabs | OSError | None = None
        if max_shared_bytes:
            try:
                self.slabs = Slabs(max_shared_bytes)
            except OSError as error:
                # Without its frames, which hold this object.
                self.slabs = error.with_traceback(None)
        self._copier = JobThread(loop, f"fast_batcher-copier-{name}")
        # Every running `aclose` waits for this.
        self._slabs_closed: asyncio.Future[None] | None = None

    def run_in_thread(self, job: Job, done: Done) -> None:
        """Run a job on the copier thread, then call `done` on the loop with its error or None.

        After `close` no job begins, and no `done` is called.
        """
        self._copier.run(job, done)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `done` on another event loop from now on; the previous loop is closed."""
        self._copier.rebind(loop)

    def give_back_unused(self) -> None:
        """Start to return to the system the memory that was not used since the last call."""
        slabs = self.slabs
        if not isinstance(slabs, Slabs):
            return
        unused = slabs.take_unused()
        if unused is not None:
            punch = functools.partial(slabs.punch, unused)
            self.run_in_thread(punch, lambda _: slabs.mark_uncommitted(unused))

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
