"""Workers of an engine: compute its batches in a thread or on the event loop of the callers.

Daemon threads must end before the interpreter finalizes: a thread that requests the GIL after that
is killed at once. Inside a C++ function, as when PyTorch frees a tensor, the C++ runtime then
aborts the process. So an exit hook ends the threads and waits for them. They are daemon threads
nevertheless, because a function may block for ever and the wait needs a limit.

The hook runs on the main thread. It runs after all non-daemon threads have ended, because these may
call decorated functions, and after `atexit` hooks registered later than the import of this module.
`threading._register_atexit` would run before both.
"""

import asyncio
import atexit
import inspect
import logging
import threading
from collections.abc import Awaitable
from contextlib import closing
from contextvars import Context, copy_context
from queue import SimpleQueue
from time import monotonic
from typing import Any

from fast_batcher._core.values import Batch
from fast_batcher._local.callers import is_cancelled
from fast_batcher._local.engine import Engine
from fast_batcher._local.nesting import RunningBatch, running_batch
from fast_batcher.errors import is_kind

logger = logging.getLogger("fast_batcher")

# Longest wait in seconds for threads that still compute. The default `stop_timeout` of a
# `DynBatcher`, which limits the same wait for worker processes.
EXIT_TIMEOUT = 2.0

_is_exiting = False


class ThreadWorker(threading.Thread):
    """Worker thread for blocking functions and for all thread decorators; starts at construction.

    Without a batch it blocks on its queue, without a time-out. The exit of the program waits for
    the thread, at most `EXIT_TIMEOUT` seconds if it computes.

    Args:
        engine: The engine whose batches it computes.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name=f"fast_batcher {engine.function.name}", daemon=True)
        # None after the end, to break the reference cycle with the engine.
        self._engine: Engine | None = engine
        # `SimpleQueue.put` is reentrant: a finalizer may call `stop` between any two instructions.
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self.start()

    def compute(self, batch: Batch) -> None:
        """Compute a batch, then each next batch that the engine returns."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread once it has no batch."""
        self._inbox.put(None)

    def run(self) -> None:
        """Compute batches until `stop` is called."""
        engine = self._engine
        assert engine is not None, "a thread runs once"
        running_batch.set(RunningBatch(engine))
        try:
            # Makes an event loop for the first awaitable.
            with closing(asyncio.Runner()) as runner:
                while (batch := self._inbox.get()) is not None:
                    while batch is not None:
                        batch = _compute_batch(engine, batch, runner)
        except BaseException:
            # The end of the loop cancels the tasks that the function left on it.
            logger.exception("%s: a task has raised while its event loop was closed", self.name)
        finally:
            self._engine = None
            engine.ended.set_result(None)

    def end(self) -> None:
        """Fail the waiting items, and end the thread after its current batch; may be repeated."""
        engine = self._engine
        if engine is not None:
            engine.close(cancel=True)


def _compute_batch(engine: Engine, batch: Batch, runner: asyncio.Runner) -> Batch | None:
    """Compute one batch and return the next one.

    A separate function, so that its frame releases the inputs before the next wait.
    """
    started = monotonic()
    try:
        # In this frame, which `fail` removes from the traceback.
        with engine.around(batch):
            result = engine.function.call([request.value for request in batch.requests])
            if inspect.isawaitable(result):
                # By default the runner keeps the context of its first batch.
                result, raised = runner.run(_catch(result), context=copy_context())
                if raised is not None:
                    raise raised  # noqa: TRY301  for the frames that the error refers to
    except BaseException as error:  # noqa: BLE001  sys.exit() in a function must not end the thread
        following = engine.fail(batch, error, monotonic() - started)
        # The error refers to the function's frame, and so to this one: drop the batch from it.
        del batch
        return following
    return engine.finish(batch, result, monotonic() - started)


async def _catch(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return the result of an awaitable, or its error.

    An event loop that runs until a task is done reads `__class__` of the task's error. If that
    raises, the loop never ends.
    """
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001  it is raised outside of the loop
        return None, error


class TaskWorker:
    """Computes the batches of an async function, in one task at a time.

    Args:
        loop: The event loop of the tasks; `compute` is called on it.
        engine: The engine whose batches it computes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self._engine = engine
        self._loop = loop
        # An event loop holds only weak references to its tasks.
        self._task: asyncio.Task[None] | None = None
        # The batch that the task computes next. An attribute, not an argument of the task: a task
        # that is cancelled before its first step runs no code, and the batch must not be lost.
        self._next: Batch | None = None

    def compute(self, batch: Batch) -> None:
        """Compute a batch, then each next batch that the engine returns."""
        self._next = batch
        # In an empty context: the batch must not see the context variables of its first caller.
        self._task = Context().run(self._loop.create_task, self._compute_batches())
        self._task.add_done_callback(self._go_on, context=Context())

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
                # In this frame, which `fail` removes from the traceback.
                with self._engine.around(batch):
                    result = self._engine.function.call([one.value for one in batch.requests])
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
        """Return whether an error ends the task or the program, and is not the function's own."""
        if is_kind(error, asyncio.CancelledError):
            return is_cancelled()
        return is_kind(error, KeyboardInterrupt) or is_kind(error, SystemExit)

    def _go_on(self, task: asyncio.Task[None]) -> None:
        """Start a new task if one was cancelled before it had computed all batches."""
        if not task.cancelled():
            task.exception()  # mark as retrieved: all callers have their errors
        if task is not self._task:
            return
        following, self._next = self._next, None
        # Callers may have been cancelled together with the task.
        while following is not None and not following.open_count:
            following = self._engine.drop(following)
        if following is not None:
            self.compute(following)


def is_exiting() -> bool:
    """Return whether the exit hook has run, after which threads accept no calls."""
    return _is_exiting


def _end_threads() -> None:
    """End the threads of all functions and wait for them."""
    global _is_exiting
    _is_exiting = True
    # Not through the batchers: the thread of a batcher that was collected may still compute.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, ThreadWorker)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + EXIT_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
        if thread.is_alive():
            logger.warning(
                "%s: the program ends, and the thread still computes after %s seconds; the "
                "interpreter cuts it off, which can abort the process where native code runs",
                thread.name,
                EXIT_TIMEOUT,
            )


atexit.register(_end_threads)
