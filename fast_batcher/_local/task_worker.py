"""Computes batches of an async function on the event loop of its callers. Runs on that loop."""

import asyncio
import inspect
from contextvars import Context
from time import monotonic

from fast_batcher._core.messages import Batch
from fast_batcher._local.engine import Engine
from fast_batcher._local.nesting import RunningBatch, running_batch


class TaskWorker:
    """One task at a time, on one loop.

    Args:
        engine: Whose batches it computes.
        loop: Where; `start` is called on it.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        # The loop itself keeps no hold of its tasks.
        self._task: asyncio.Task[None] | None = None
        # What the task computes next. A task may be cancelled before it has begun, and then nothing
        # of it ever runs.
        self._next: Batch | None = None

    def start(self, batch: Batch) -> None:
        """Compute a batch, and then those that follow from it."""
        # In a context of its own: whichever caller happens to be the first of a batch, what is in
        # its context variables is not meant for the others.
        self._next = batch
        self._task = Context().run(self._loop.create_task, self._serve())
        self._task.add_done_callback(self._go_on)

    def stop(self) -> None:
        """The task ends with its batch, so there is nothing to end."""
        self._engine.ended.set_result(None)

    def join(self) -> None:
        """Nothing to wait for."""

    async def _serve(self) -> None:
        while (batch := self._next) is not None:
            self._next = None
            running = RunningBatch(self._engine)
            running_batch.set(running)
            started = monotonic()
            try:
                # In this very frame, which `fail` takes out of the traceback.
                function = self._engine.function
                result = function.call([request.value for request in batch.requests])
                if inspect.isawaitable(result):
                    result = await result
            except BaseException as error:
                running.has_ended = True
                self._next = self._engine.fail(batch, error, monotonic() - started)
                if self._is_for_the_loop(error):
                    raise
            else:
                running.has_ended = True
                self._next = self._engine.finish(batch, result, monotonic() - started)
            if self._next is not None:
                # A function that never waits must not keep the loop for all that is queued.
                await asyncio.sleep(0)

    @staticmethod
    def _is_for_the_loop(error: BaseException) -> bool:
        """Whether it was raised to end the task or the program, and not by the function alone."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        return isinstance(error, KeyboardInterrupt | SystemExit)

    def _go_on(self, task: asyncio.Task[None]) -> None:
        """Go on where a task was cancelled. Those who wait may be too: they have had their turn."""
        if not task.cancelled():
            task.exception()  # it has ended the loop, and everybody has been told
        if task is not self._task:
            return
        following, self._next = self._next, None
        while following is not None and not following.open_count:
            following = self._engine.drop(following)
        if following is not None:
            self.start(following)
