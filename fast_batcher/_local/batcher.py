"""Batches the calls of one decorated function; makes engines and workers on demand.

A function that blocks, and every function of a thread decorator, has one engine and one thread for
all its callers. An async function of an `aio` decorator runs on the event loop of its callers, so
it has an engine for each loop. Any thread may call.
"""

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fast_batcher._core.values import Request
from fast_batcher._local.callers import make_requests, running_loop
from fast_batcher._local.engine import Counts, Engine
from fast_batcher._local.function import Function
from fast_batcher._local.nesting import EngineWait, compute_inline, run_inline, running_batch
from fast_batcher._local.settings import DecoratorSettings
from fast_batcher._local.workers import TaskWorker, ThreadWorker, is_exiting
from fast_batcher._process import at_fork
from fast_batcher.errors import BatcherClosedError
from fast_batcher.types import BatchProcessorStats


@dataclass
class LoopSubmitter:
    """Submits the calls of one event loop to an engine."""

    engine: Engine
    # The callers' event loop.
    loop: asyncio.AbstractEventLoop
    settings: DecoratorSettings
    # The requests of each call of this turn. While there are any, a `flush` is scheduled.
    pending: list[list[Request]] = field(default_factory=list)

    def process(self, items: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Await the outputs of one or more items; the first error ends the wait for all.

        Cancellation: safe at any time. Waiting items are removed from the queue; a running batch is
        finished, and its outputs for this caller are dropped.
        """
        future: asyncio.Future[list[Any]] = self.loop.create_future()
        return self._wait(future, make_requests(items, future, self.settings))

    def process_one(self, item: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of one item that has neither a cost nor a priority.

        This omits the `Call` object, which would cost most calls a quarter of their CPU: without
        the short cut an async function misses the target of `benchmarks/decorators.py`.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        return self._wait(future, [Request(item, future)])

    async def _wait(self, future: "asyncio.Future[Any]", requests: list[Request]) -> Any:
        if not self.pending:
            self.loop.call_soon(self.flush, context=Context())
        self.pending.append(requests)
        self.engine.keep_context(requests)
        try:
            return await future
        except BaseException:
            self._abandon(requests)
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, requests

    def flush(self) -> None:
        """Submit the calls of this turn."""
        pending, self.pending = self.pending, []
        if pending:
            self.engine.submit(pending)

    def _abandon(self, requests: list[Request]) -> None:
        if requests in self.pending:
            self.pending.remove(requests)
        else:
            self.engine.cancel(requests)


class LocalBatcher:
    """Batches the calls of one function.

    Args:
        function: Computes a batch.
        settings: The options of the function.
        is_aio: Run an async function on the event loop of its callers.
    """

    def __init__(self, function: Function, settings: DecoratorSettings, *, is_aio: bool) -> None:
        self._function = function
        self._settings = settings
        self._runs_on_loop = is_aio and function.is_async
        self._reset()
        # A forked child has one thread, and others may have held the lock.
        at_fork(self, in_child=LocalBatcher._reset)

    def _reset(self) -> None:
        # Protects everything below, and the schedulers of the engines.
        self._lock = threading.Lock()
        self._counts = Counts()
        self._is_closed = False
        # By the event loop that computes the batches, None for a thread.
        self._engines: dict[asyncio.AbstractEventLoop | None, Engine] = {}
        # By the callers' event loop. Submitters of closed loops are removed when a new loop calls.
        self._submitters: dict[asyncio.AbstractEventLoop, LoopSubmitter] = {}
        # Ends the thread, if there is one, when this batcher is collected.
        self._finalizer: weakref.finalize[[], LocalBatcher] | None = None

    def process(self, items: Sequence[Any]) -> list[Any]:
        """Block this thread until the outputs of zero or more items are computed.

        Raises:
            InferenceError: The function raised for an item; also an instance of the raised type.
            OutputMismatchError: The function did not return one output per item.
            QueueFullError: The queue has no room for all items; none was queued.
            BatcherClosedError: The batcher was shut down.
        """
        if not items:
            return []
        self._reject_at_exit()
        with self._lock:
            engine = self._engine_on(None)
        with EngineWait(engine) as can_end:
            if can_end:
                return self._wait(engine, items)
        computing = compute_inline(self._function, items, self._settings.batch_size)
        return run_inline(computing, is_async=self._function.is_async)

    def _wait(self, engine: Engine, items: Sequence[Any]) -> list[Any]:
        future: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        requests = make_requests(items, future, self._settings)
        engine.keep_context(requests)
        try:
            engine.submit([requests])
            return future.result()
        except BaseException:
            engine.cancel(requests)
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, requests

    def aprocess(self, items: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Await the outputs of the items; errors are those of `process`.

        Call it on the event loop that awaits the coroutine.

        Cancellation: safe at any time. Waiting items are removed from the queue; a running batch is
        finished, and its outputs for this caller are dropped.
        """
        submitter = self._submitter_here()
        if running_batch.get() is None:
            return submitter.process(items)
        return self._aprocess_nested(submitter, items)

    def aprocess_one(self, item: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of one item; not for nested calls. See `LoopSubmitter.process_one`."""
        return self._submitter_here().process_one(item)

    async def _aprocess_nested(self, submitter: LoopSubmitter, items: Sequence[Any]) -> list[Any]:
        with EngineWait(submitter.engine) as can_end:
            if can_end:
                return await submitter.process(items)
        computing = compute_inline(self._function, items, self._settings.batch_size)
        if self._function.is_async:
            return await computing
        return await asyncio.to_thread(run_inline, computing, is_async=False)  # not on the loop

    def stats(self) -> BatchProcessorStats:
        """Return the statistics since the first call or the last `clear_stats`."""
        with self._lock:
            waiting = sum(engine.waiting for engine in self._engines.values())
            counts = replace(self._counts)
        return BatchProcessorStats(
            queue_size=waiting,
            total_processed=counts.items,
            total_batches=counts.batches,
            avg_batch_size=counts.items / max(1, counts.batches),
            avg_processing_time=counts.seconds / max(1, counts.batches),
            late_errors=counts.late_errors.count,
        )

    def clear_stats(self) -> None:
        """Reset the counts to 0."""
        with self._lock:
            self._counts.items = self._counts.batches = 0
            self._counts.seconds = 0.0
            self._counts.late_errors.count = 0

    def start(self) -> None:
        """Accept calls again after a shutdown; the next call makes an engine."""
        with self._lock:
            self._is_closed = False

    def shutdown(self, *, cancel: bool = False) -> None:
        """Accept no more calls, and wait until all are settled and the thread has ended.

        A call from the function itself, or from a function that it waits for, returns at once. On
        an event loop, calls that were made earlier in this turn are settled, too.

        Args:
            cancel: True fails waiting items at once; False computes them.
        """
        for engine in self._close(cancel=cancel):
            with EngineWait(engine) as can_end:
                if can_end:
                    engine.ended.result()
                    engine.worker.join()

    async def ashutdown(self, *, cancel: bool = False) -> None:
        """Shut down without blocking the event loop; engines of other loops settle their calls."""
        for engine in self._close(cancel=cancel):
            with EngineWait(engine) as can_end:
                if can_end:
                    await asyncio.shield(asyncio.wrap_future(engine.ended))
                    engine.worker.join()

    def _close(self, *, cancel: bool) -> list[Engine]:
        here = running_loop()
        submitter = None if here is None else self._submitters.get(here)
        if submitter is not None:
            submitter.flush()  # calls of this turn came before the shutdown
        with self._lock:
            self._is_closed = True
            self._submitters.clear()
            engines = dict(self._engines)
            self._engines.clear()
            if self._finalizer is not None:
                # The engine ends its thread. A finalizer would keep it as long as this batcher.
                self._finalizer.detach()
                self._finalizer = None
        for loop, engine in engines.items():
            if loop is None or loop.is_running():
                engine.close(cancel=cancel)
            else:
                engine.abandon()
        return list(engines.values())

    def _reject_at_exit(self) -> None:
        # Before the lock is taken: a daemon thread may have been killed while it held the lock.
        if is_exiting():
            raise BatcherClosedError(f"{self._function.name}: the interpreter is ending")

    def _submitter_here(self) -> LoopSubmitter:
        loop = asyncio.get_running_loop()
        known = self._submitters.get(loop)
        if known is not None:
            return known
        if not self._runs_on_loop:
            self._reject_at_exit()
        with self._lock:
            closed = [one for one in self._submitters if one.is_closed()]
            for one in closed:
                del self._submitters[one]
            ended = [self._engines.pop(one) for one in closed if one in self._engines]
            engine = self._engine_on(loop if self._runs_on_loop else None)
            submitter = LoopSubmitter(engine, loop, self._settings)
            self._submitters[loop] = submitter
        for engine in ended:
            engine.abandon()
        return submitter

    def _engine_on(self, loop: asyncio.AbstractEventLoop | None) -> Engine:
        """Return the engine whose batches run on this loop, or in a thread. Call with the lock."""
        if self._is_closed:
            raise BatcherClosedError(
                f"{self._function.name} was shut down and takes no calls; start() opens it again"
            )
        engine = self._engines.get(loop)
        if engine is None:
            make_worker = ThreadWorker if loop is None else partial(TaskWorker, loop)
            engine = Engine(self._function, self._settings, self._counts, self._lock, make_worker)
            self._engines[loop] = engine
            if loop is None:
                # Neither thread nor engine refers to this batcher: it can be collected while the
                # thread waits.
                self._finalizer = weakref.finalize(self, engine.worker.stop)
                self._finalizer.atexit = False
        return engine
