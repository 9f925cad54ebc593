"""A thread that computes batches, for functions that block.

All but `start`, `stop` and `join` runs on that thread. It sleeps in a queue, without a time-out,
while there is nothing to do. A program that ends waits for it, and for no longer than `END_TIMEOUT`
while a batch is being computed.
"""

import asyncio
import inspect
import threading
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any

from fast_batcher._core.messages import Batch
from fast_batcher._local.ending import EndingThread
from fast_batcher._local.engine import Engine
from fast_batcher._local.nesting import RunningBatch, running_batch


class ThreadWorker:
    """The thread of one engine.

    Args:
        engine: Whose batches it computes.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, engine: Engine) -> None:
        # A queue whose `put` may be called by a finalizer, which may run in the middle of anything.
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread = EndingThread(
            target=_serve,
            args=(engine, self._inbox),
            name=f"fast_batcher {engine.function.name}",
            end=partial(engine.close, cancel=True),
        )
        self._thread.start()

    def start(self, batch: Batch) -> None:
        """Compute a batch, and then those that follow from it."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread when it has nothing to do."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, unless it is this one."""
        if self._thread is not threading.current_thread():
            self._thread.join()


def _serve(engine: Engine, inbox: "SimpleQueue[Batch | None]") -> None:
    running_batch.set(RunningBatch(engine))
    with _Awaiter() as awaiter:
        while (batch := inbox.get()) is not None:
            while batch is not None:
                batch = _compute(engine, batch, awaiter)
    engine.ended.set_result(None)


def _compute(engine: Engine, batch: Batch, awaiter: "_Awaiter") -> Batch | None:
    """Compute one batch. What it has in hand is let go of when it returns, before the next wait."""
    started = monotonic()
    try:
        # In this very frame, which `fail` takes out of the traceback.
        result = engine.function.call([request.value for request in batch.requests])
        if inspect.isawaitable(result):
            result = awaiter.wait_for(result)
    except BaseException as error:  # noqa: BLE001  sys.exit() in a function must not end the thread
        following = engine.fail(batch, error, monotonic() - started)
        # The error holds the function's frame, and that one this: it must not hold the batch.
        del batch
        return following
    return engine.finish(batch, result, monotonic() - started)


class _Awaiter:
    """An event loop of the thread's own, made when the function turns out to need one."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> "_Awaiter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def wait_for(self, awaitable: Any) -> Any:
        """What awaiting it gives."""
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())
