"""A decorated function's batcher: makes engines and workers as needed. Any thread may call.

A function that blocks, and every function of a thread decorator, has one engine and one thread for
all its callers. An async function under an `aio` decorator runs on the loop of its callers, so it
has an engine for each loop.
"""

import asyncio
import os
import threading
import weakref
from asyncio import Future, get_running_loop
from collections.abc import Sequence
from typing import Any

from fast_batcher._core.messages import Request
from fast_batcher._local.callers import Call, requests_of
from fast_batcher._local.ending import is_ending
from fast_batcher._local.engine import Counts, Engine
from fast_batcher._local.function import Function
from fast_batcher._local.loop_shell import LoopShell
from fast_batcher._local.nesting import (
    RunningBatch,
    compute_here,
    drive,
    running_batch,
    waiting,
)
from fast_batcher._local.settings import LocalSettings
from fast_batcher._local.task_worker import TaskWorker
from fast_batcher._local.thread_worker import ThreadWorker
from fast_batcher.errors import BatcherClosedError
from fast_batcher.types import BatchProcessorStats

_new = object.__new__

# All there are, for the moment after a fork.
_batchers: "weakref.WeakSet[LocalBatcher]" = weakref.WeakSet()


class LocalBatcher:
    """Batches the calls of one function.

    Args:
        function: What computes a batch.
        settings: Of the batches and the queue.
        is_aio: Whether an async function runs on the loop of its callers.
    """

    def __init__(self, function: Function, settings: LocalSettings, *, is_aio: bool) -> None:
        self._function = function
        self._settings = settings
        self._runs_on_loop = is_aio and function.is_async
        self._begin_anew()
        _batchers.add(self)

    def _begin_anew(self) -> None:
        self._counts = Counts()
        # For all below.
        self._lock = threading.Lock()
        self._is_closed = False
        # By the event loop that its batches run on, None for a thread of its own.
        self._engines: dict[asyncio.AbstractEventLoop | None, Engine] = {}
        # By event loop. Those of closed loops go when a new loop comes.
        self._shells: dict[asyncio.AbstractEventLoop, LoopShell] = {}
        # The one that was used last.
        self._shell: LoopShell | None = None
        # Ends the thread, if there is one, when this batcher is collected.
        self._finalizer: weakref.finalize[[], LocalBatcher] | None = None

    # Calls.

    def process(self, items: Sequence[Any]) -> list[Any]:
        """Wait in this thread for the outputs of so many items, which may be none.

        Raises:
            InferenceError: The function raised for one of them; also an instance of what it raised.
            OutputMismatchError: It returned something other than one output per input.
            QueueFullError: There is no room for all; nothing was queued.
            BatcherClosedError: It was shut down.
        """
        if not items:
            return []
        self._refuse_at_the_end()
        with self._lock:
            engine = self._engine_on(None)
        batch = running_batch.get()
        if batch is None:
            return self._wait(engine, items)
        with waiting(batch, engine) as may_wait:
            if may_wait:
                return self._wait(engine, items)
        computing = compute_here(self._function, items, self._settings.batch_size)
        return drive(computing, is_async=self._function.is_async)

    async def aprocess(self, item: Any, owner: object = None) -> Any:
        """Wait for the output of one item; errors are those of `process`.

        Args:
            item: What to compute.
            owner: What the caller may have let go of, and is kept until then: the instance of a
                method.

        Cancellation: safe at any time. An item that waits is forgotten; one that is being computed
        is computed, and its output dropped.
        """
        loop = get_running_loop()
        shell = self._shell
        if shell is None or shell.loop is not loop:
            shell = self._shell_of(loop)
        batch = running_batch.get()
        if batch is not None:
            (output,) = await self._aprocess_nested(batch, shell, [item])
            return output
        if not shell.is_plain:
            (output,) = await shell.process_many([item])
            return output
        # As `Request(...)` does it, without the call of a Python function: every call pays for it
        # (`benchmarks/decorators.py`).
        future: Future[Any] = Future(loop=loop)
        request = _new(Request)
        request.value = item
        request.caller = future
        shell.arrivals.append(request)
        if not shell.has_pump:
            shell.has_pump = True
            loop.call_soon(shell.pump)
        try:
            return await future
        except BaseException:
            if not request.is_settled:
                shell.abandon((request,))
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, request

    async def aprocess_many(self, items: Sequence[Any]) -> list[Any]:
        """The same for so many items, which may be none; the first error ends the wait for all."""
        if not items:
            return []
        shell = self._shell_of(get_running_loop())
        batch = running_batch.get()
        if batch is None:
            return await shell.process_many(items)
        return await self._aprocess_nested(batch, shell, items)

    async def _aprocess_nested(
        self, batch: RunningBatch, shell: LoopShell, items: Sequence[Any]
    ) -> list[Any]:
        with waiting(batch, shell.engine) as may_wait:
            if may_wait:
                return await shell.process_many(items)
        computing = compute_here(self._function, items, self._settings.batch_size)
        if self._function.is_async:
            return await computing
        return await asyncio.to_thread(drive, computing, is_async=False)  # not on the loop

    def _wait(self, engine: Engine, items: Sequence[Any]) -> list[Any]:
        call = Call(len(items))
        requests = requests_of(call, items, self._settings, engine.rank_requests)
        engine.submit_together(requests)
        try:
            return call.wait()
        except BaseException:
            engine.cancel(requests)
            raise

    # What can be seen of it.

    def stats(self) -> BatchProcessorStats:
        """Counts since the first call or `clear_stats`."""
        with self._lock:
            waiting_now = sum(engine.waiting for engine in self._engines.values())
        items, batches, seconds = self._counts.read()
        return BatchProcessorStats(
            queue_size=waiting_now,
            total_processed=items,
            total_batches=batches,
            avg_batch_size=items / batches if batches else 0.0,
            avg_processing_time=seconds / batches if batches else 0.0,
        )

    def clear_stats(self) -> None:
        """Count from 0 again."""
        self._counts.clear()

    # Life.

    def start(self) -> None:
        """Take calls again after a shutdown. Else the first call does all that is needed."""
        with self._lock:
            self._is_closed = False

    def shutdown(self, *, cancel: bool = False) -> None:
        """End, and wait until everything is settled and the thread has ended.

        From within the function itself, or one that it waits for, it does not wait. On an event
        loop, calls that were made there in this turn have come before.

        Args:
            cancel: Whether what still waits is told at once that it is over; else it is computed.
        """
        for engine in self._close(cancel=cancel):
            with waiting(running_batch.get(), engine) as may_wait:
                if may_wait:
                    engine.ended.result()
                    engine.worker.join()

    async def ashutdown(self, *, cancel: bool = False) -> None:
        """The same from an event loop. What other loops have queued is settled there."""
        for engine in self._close(cancel=cancel):
            with waiting(running_batch.get(), engine) as may_wait:
                if may_wait:
                    await asyncio.shield(asyncio.wrap_future(engine.ended))
                    engine.worker.join()

    def _close(self, *, cancel: bool) -> list[Engine]:
        # Documented for those who implement event loops; `get_running_loop` would raise.
        here = asyncio._get_running_loop()  # noqa: SLF001
        shell = None if here is None else self._shells.get(here)
        if shell is not None:
            shell.pump()  # calls of this very turn have come before
        with self._lock:
            self._is_closed = True
            self._shells.clear()
            self._shell = None
            engines = dict(self._engines)
            self._engines.clear()
            if self._finalizer is not None:
                # The engine ends its thread. It would be kept for as long as this batcher lives.
                self._finalizer.detach()
                self._finalizer = None
        for loop, engine in engines.items():
            if loop is None or loop.is_running():
                engine.close(cancel=cancel)
            else:
                engine.abandon()
        return list(engines.values())

    # Engines and shells.

    def _refuse_at_the_end(self) -> None:
        """Before the lock is taken: a daemon thread that had it may have been cut off."""
        if is_ending():
            raise BatcherClosedError(f"{self._function.name}: the interpreter is ending")

    def _shell_of(self, loop: asyncio.AbstractEventLoop) -> LoopShell:
        if not self._runs_on_loop:
            self._refuse_at_the_end()
        with self._lock:
            shell = self._shells.get(loop)
            if shell is None:
                self._forget_closed_loops()
                engine = self._engine_on(loop if self._runs_on_loop else None)
                shell = self._shells[loop] = LoopShell(engine, loop, self._settings)
            self._shell = shell
            return shell

    def _engine_on(self, loop: asyncio.AbstractEventLoop | None) -> Engine:
        """The engine whose batches run there; called under the lock."""
        if self._is_closed:
            raise BatcherClosedError(
                f"{self._function.name} was shut down and takes no calls; start() opens it again"
            )
        engine = self._engines.get(loop)
        if engine is None:
            engine = Engine(self._function, self._settings, self._counts)
            if loop is None:
                engine.worker = ThreadWorker(engine)
                # The thread knows the engine, and nobody in there knows this batcher: so it can be
                # collected, and its thread with it.
                self._finalizer = weakref.finalize(self, engine.worker.stop)
                self._finalizer.atexit = False
            else:
                engine.worker = TaskWorker(engine, loop)
            self._engines[loop] = engine
        return engine

    def _forget_closed_loops(self) -> None:
        for loop in [loop for loop in self._shells if loop.is_closed()]:
            del self._shells[loop]
            engine = self._engines.pop(loop, None)
            if engine is not None:
                engine.abandon()


def _begin_all_anew() -> None:
    """In a forked child there are no threads, and locks are as they happened to be."""
    for batcher in list(_batchers):
        batcher._begin_anew()  # noqa: SLF001  this is its module


os.register_at_fork(after_in_child=_begin_all_anew)
