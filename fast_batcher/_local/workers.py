"""Compute the batches of an engine, in a thread or on the event loop of the callers.

Daemon threads must end before the interpreter finalizes: one that asks for the GIL then is cut off
wherever it is. In a C++ function, as when PyTorch frees a tensor, the C++ runtime then aborts the
process. So an exit hook ends the threads and waits for them. They are daemons all the same, because
a function may block for ever and the wait needs a limit.

The hook runs on the main thread, after all non-daemon threads have ended, which may call decorated
functions until then, and after the `atexit` hooks that were registered later than this module was
imported. `threading._register_atexit` would run before both.
"""

import asyncio
import atexit
import inspect
import logging
import threading
from collections.abc import Awaitable
from contextlib import closing
from contextvars import Context
from queue import SimpleQueue
from time import monotonic
from typing import Any

from fast_batcher._core.messages import Batch
from fast_batcher._local.callers import is_cancelled
from fast_batcher._local.engine import Engine
from fast_batcher._local.nesting import RunningBatch, running_batch

logger = logging.getLogger("fast_batcher")

# Longest wait for all threads that still compute, seconds. Equal to the default of a `DynBatcher`'s
# `stop_timeout`, which limits the same wait for worker processes.
EXIT_TIMEOUT = 2.0

_is_exiting = False


class ThreadWorker(threading.Thread):
    """A thread for functions that block, and for all thread decorators; it starts at once.

    While there is no batch it sleeps in a queue, without a time-out. The end of the program waits
    for it, and while it computes for at most `EXIT_TIMEOUT`.

    Args:
        engine: Whose batches it computes.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name=f"fast_batcher {engine.function.name}", daemon=True)
        # None after the end, because the engine refers to this thread.
        self._engine: Engine | None = engine
        # A finalizer may call `stop` in the middle of anything: `put` of this queue allows that.
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self.start()

    def compute(self, batch: Batch) -> None:
        """Compute a batch, and then each one that the engine returns for the last."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread once it has no batch."""
        self._inbox.put(None)

    def run(self) -> None:
        """Compute batches until `stop` is called."""
        engine = self._engine
        assert engine is not None, "a thread runs once"
        running_batch.set(RunningBatch(engine))
        # Makes an event loop for the first awaitable.
        with closing(asyncio.Runner()) as runner:
            while (batch := self._inbox.get()) is not None:
                while batch is not None:
                    batch = _compute_batch(engine, batch, runner)
        self._engine = None
        engine.ended.set_result(None)

    def end(self) -> None:
        """End the thread soon, unless it computes; what waits fails. Harmless after its end."""
        engine = self._engine
        if engine is not None:
            engine.close(cancel=True)


def _compute_batch(engine: Engine, batch: Batch, runner: asyncio.Runner) -> Batch | None:
    """Compute one batch; returns the next one. Its frame frees the inputs before the next wait."""
    started = monotonic()
    try:
        # In this very frame, which `fail` takes out of the traceback.
        result = engine.function.call([request.value for request in batch.requests])
        if inspect.isawaitable(result):
            result = runner.run(_as_coroutine(result))
    except BaseException as error:  # noqa: BLE001  sys.exit() in a function must not end the thread
        following = engine.fail(batch, error, monotonic() - started)
        # The error holds the function's frame, and that one this: it must not hold the batch.
        del batch
        return following
    return engine.finish(batch, result, monotonic() - started)


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class TaskWorker:
    """Computes the batches of an async function, in one task at a time.

    Args:
        loop: Where the tasks run; `compute` is called on it.
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

    def compute(self, batch: Batch) -> None:
        """Compute a batch, and then each one that the engine returns for the last."""
        self._next = batch
        # In an empty context: the context variables of the caller that happens to be the first of
        # a batch are not meant for the others.
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
                # In this very frame, which `fail` takes out of the traceback.
                result = self._engine.function.call([request.value for request in batch.requests])
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
            return is_cancelled()
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
            self.compute(following)


def is_exiting() -> bool:
    """Whether the program ends and has ended the threads: they accept no calls any more."""
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
