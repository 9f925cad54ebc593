"""Computes batches of an async function on the event loop of its callers. Runs on that loop."""

import asyncio
import inspect
from contextvars import Context
from time import monotonic

from fast_batcher._core.messages import Batch
from fast_batcher._local.engine import Engine
from fast_batcher._local.nesting import RunningBatch, running_batch


class TaskWorker:
    """Computes the batches of one engine, in one task at a time.

    Args:
        loop: Where the tasks run; `start` is called on it.
        engine: Whose batches it computes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self._engine = engine
        self._loop = loop
        # An event loop holds only weak references to its tasks.
        self._task: asyncio.Task[None] | None = None
        # The batch that the task computes next. It is here, and no argument of the task: nothing
        # runs of a task that is cancelled before its first step, and the batch must not be lost.
        self._next: Batch | None = None

    def start(self, batch: Batch) -> None:
        """Compute a batch, and then each one that the engine returns for the last."""
        self._next = batch
        # In an empty context: the context variables of the caller that happens to be the first of
        # a batch are not meant for the others.
        self._task = Context().run(self._loop.create_task, self._compute_batches())
        self._task.add_done_callback(self._go_on)

    def stop(self) -> None:
        """Resolve `ended`: the task ends with its batch."""
        self._engine.ended.set_result(None)

    def join(self) -> None:
        """Return at once: nothing is left after `ended`."""

    async def _compute_batches(self) -> None:
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
                # A function that never waits must not block the loop for the whole queue.
                await asyncio.sleep(0)

    @staticmethod
    def _is_for_the_loop(error: BaseException) -> bool:
        """Whether it was raised to end the task or the program, and not by the function alone."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        return isinstance(error, KeyboardInterrupt | SystemExit)

    def _go_on(self, task: asyncio.Task[None]) -> None:
        """Start a new task if one was cancelled before it had computed all batches."""
        if not task.cancelled():
            task.exception()  # it has ended the loop, and all callers have their errors
        if task is not self._task:
            return
        following, self._next = self._next, None
        # Callers may have been cancelled together with the task.
        while following is not None and not following.open_count:
            following = self._engine.drop(following)
        if following is not None:
            self.start(following)
