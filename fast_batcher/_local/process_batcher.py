"""A decorated function in a worker process: a `DynBatcher` on an event loop of its own.

The loop runs in a thread, so that calls may come from any thread and any loop. Any thread may call.
"""

import asyncio
import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from fast_batcher._local.ending import EndingThread, end_threads, is_ending
from fast_batcher._local.function_model import FunctionModel
from fast_batcher._local.settings import LocalSettings, cost_of
from fast_batcher.batcher import DynBatcher
from fast_batcher.errors import BatcherClosedError, ConfigurationError
from fast_batcher.model_spec import NOT_IN_WORKER, is_main_importable
from fast_batcher.types import BatchProcessorStats

if TYPE_CHECKING:
    from concurrent.futures import Future


# All there are, for the moment after a fork.
_batchers: "weakref.WeakSet[ProcessBatcher]" = weakref.WeakSet()


class ProcessBatcher:
    """Batches the calls of one function in a worker process, which begins with the first call.

    Args:
        target: A function at the top level of a module.
        settings: Of the batches and the queue.
        form: See `FunctionModel`.

    Raises:
        ConfigurationError: The worker process could not import the function.
    """

    def __init__(self, target: Callable[..., Any], settings: LocalSettings, form: Any) -> None:
        self._name = _require_importable(target)
        self._model_args = (target.__module__, target.__qualname__, form)
        self._settings = settings
        self._begin_anew()
        _batchers.add(self)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._running: _Running | None = None
        # Stops its loop when this batcher is collected.
        self._finalizer: weakref.finalize[[], ProcessBatcher] | None = None
        # Counts of the batcher at the last `clear_stats`.
        self._cleared = BatchProcessorStats()

    def process(self, items: Sequence[Any]) -> list[Any]:
        """Wait in this thread for the outputs of so many items.

        More than there is room for are queued bit by bit, and not refused: see
        `DynBatcher.process_many`.
        """
        if not items:
            return []
        return self._send(items).result()

    async def aprocess(self, item: Any, owner: object = None) -> Any:
        """Wait for the output of one item; `owner` is kept until then."""
        return (await self.aprocess_many([item]))[0]

    async def aprocess_many(self, items: Sequence[Any]) -> list[Any]:
        """Wait for the outputs of so many items."""
        if not items:
            return []
        return await asyncio.wrap_future(self._send(items))

    def stats(self) -> BatchProcessorStats:
        """Counts since the first call or `clear_stats`; the time per batch is a median."""
        running = self._running
        if running is None:
            return BatchProcessorStats()
        stats = running.batcher.stats
        items = stats.completed + stats.failed - self._cleared.total_processed
        batches = stats.batches - self._cleared.total_batches
        return BatchProcessorStats(
            queue_size=stats.waiting,
            total_processed=items,
            total_batches=batches,
            avg_batch_size=items / batches if batches else 0.0,
            avg_processing_time=stats.infer_p50 or 0.0 if batches else 0.0,
        )

    def clear_stats(self) -> None:
        """Count from 0 again."""
        running = self._running
        if running is not None:
            stats = running.batcher.stats
            self._cleared = BatchProcessorStats(
                total_processed=stats.completed + stats.failed, total_batches=stats.batches
            )

    def start(self) -> None:
        """Take calls again after a shutdown."""
        with self._lock:
            self._is_closed = False

    def shutdown(self, *, cancel: bool = False) -> None:
        """End the worker, and wait for it."""
        running = self._close()
        if running is not None:
            running.end(cancel=cancel)

    async def ashutdown(self, *, cancel: bool = False) -> None:
        """End the worker, and wait for it."""
        running = self._close()
        if running is not None:
            await asyncio.to_thread(running.end, cancel=cancel)

    def _close(self) -> "_Running | None":
        with self._lock:
            self._is_closed = True
            running, self._running = self._running, None
            self._cleared = BatchProcessorStats()
            if self._finalizer is not None:
                # `_Running.end` stops the loop. It would be kept for as long as this batcher lives.
                self._finalizer.detach()
                self._finalizer = None
        return running

    def _send(self, items: Sequence[Any]) -> "Future[list[Any]]":
        # Before the lock is taken: a daemon thread that had it may have been cut off.
        if is_ending():
            raise BatcherClosedError(f"{self._name}: the interpreter is ending")
        with self._lock:
            if self._is_closed:
                raise BatcherClosedError(
                    f"{self._name} was shut down and takes no calls; start() opens it again"
                )
            if self._running is None:
                self._running = _Running(self._name, self._make_batcher)
                self._finalizer = weakref.finalize(self, self._running.stop_loop)
                self._finalizer.atexit = False
            running = self._running
            # Under the lock: after a shutdown its loop would take it and never run it.
            return running.run(_process(running.batcher, items, self._settings))

    def _make_batcher(self) -> DynBatcher[Any, Any]:
        settings = self._settings
        return DynBatcher(
            FunctionModel,
            max_batch_size=settings.batch_size,
            max_delay=settings.timeout_ms / 1000,
            model_args=self._model_args,
            max_queue_size=settings.max_queue_size or sys.maxsize,
            timeout=None,
            isolate_errors=settings.isolate_errors,
            name=self._name,
            cost=None if settings.max_batch_length is None else cost_of,
            max_batch_cost=settings.max_batch_length,
            cost_is_padded=False,
        )


async def _process(
    batcher: DynBatcher[Any, Any], items: Sequence[Any], settings: LocalSettings
) -> list[Any]:
    """The outputs of one call; runs on the batcher's loop."""
    if not settings.is_ranked or len(items) <= settings.small_batch_threshold:
        return await batcher.process_many(items)
    # They are queued a few batches at a time, so they go in the order in which they are wanted.
    ranks = [settings.priority(item) for item in items]
    order = sorted(range(len(items)), key=ranks.__getitem__, reverse=True)
    ranked = await batcher._process_ranked(  # noqa: SLF001  no other module uses it
        [items[at] for at in order], [ranks[at] for at in order]
    )
    outputs: list[Any] = [None] * len(items)
    for at, output in zip(order, ranked, strict=True):
        outputs[at] = output
    return outputs


class _Running:
    """A batcher, and the thread and loop that it lives on."""

    def __init__(self, name: str, make_batcher: Callable[[], DynBatcher[Any, Any]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = EndingThread(
            target=self._loop.run_forever, name=f"fast_batcher {name}", end=self.stop_loop
        )
        self._thread.start()

        async def make() -> DynBatcher[Any, Any]:
            return make_batcher()

        # On its own loop: where it is made while a loop runs, it begins to open there.
        self.batcher: DynBatcher[Any, Any] = self.run(make()).result()

    def run(self, computing: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(computing, self._loop)

    def end(self, *, cancel: bool) -> None:
        """End the worker, then the loop and its thread."""
        if is_ending():  # the loop has stopped; the pool ends the worker by itself
            return
        if cancel:
            self.batcher.stop()
        else:
            self.run(self.batcher.aclose()).result()
        self.stop_loop()
        self._thread.join()
        self._loop.close()

    def stop_loop(self) -> None:
        """Let the thread end; takes no locks."""
        self._loop.call_soon_threadsafe(self._loop.stop)


def _begin_all_anew() -> None:
    """In a forked child there are no threads, and locks are as they happened to be."""
    for batcher in list(_batchers):
        batcher._begin_anew()  # noqa: SLF001  this is its module


os.register_at_fork(after_in_child=_begin_all_anew)

# A second time: the hook of the pools was registered after the first, so it would come before that
# and take the workers away from loops that still run.
atexit.register(end_threads)


def _require_importable(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    module = getattr(target, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        raise ConfigurationError(
            f"process=True: a worker process cannot import {target!r:.200}; it has to be a "
            "function at the top level of a module, no lambda, closure, method or partial"
        )
    if module == "__main__" and not is_main_importable():
        raise ConfigurationError(f"process=True, function {name}: {NOT_IN_WORKER}")
    return name
