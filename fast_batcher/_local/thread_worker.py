"""Computes batches in a thread, for functions that block and for all thread decorators.

Everything but `start`, `stop` and `join` runs on that thread. While there is no batch it sleeps in
a queue, without a time-out. The end of the program waits for it, and while it computes for at most
`EXIT_TIMEOUT`.
"""

import asyncio
import inspect
import threading
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any

from fast_batcher._core.messages import Batch
from fast_batcher._local.engine import Engine
from fast_batcher._local.nesting import RunningBatch, running_batch
from fast_batcher._local.program_exit import ExitJoinedThread


class ThreadWorker:
    """Owns the thread that computes the batches of one engine.

    Args:
        engine: Whose batches it computes.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, engine: Engine) -> None:
        # A finalizer may call `stop` in the middle of anything: `put` of this queue allows that.
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread = ExitJoinedThread(
            target=_serve_inbox,
            args=(engine, self._inbox),
            name=f"fast_batcher {engine.function.name}",
            end=partial(engine.close, cancel=True),
        )
        self._thread.start()

    def start(self, batch: Batch) -> None:
        """Compute a batch, and then each one that the engine returns for the last."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread once it has no batch."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, unless it is this one."""
        if self._thread is not threading.current_thread():
            self._thread.join()


def _serve_inbox(engine: Engine, inbox: "SimpleQueue[Batch | None]") -> None:
    running_batch.set(RunningBatch(engine))
    with _Awaiter() as awaiter:
        while (batch := inbox.get()) is not None:
            while batch is not None:
                batch = _compute_batch(engine, batch, awaiter)
    engine.ended.set_result(None)


def _compute_batch(engine: Engine, batch: Batch, awaiter: "_Awaiter") -> Batch | None:
    """Compute one batch; returns the next one. Its frame frees the inputs before the next wait."""
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
    """Runs awaitables on an event loop of the thread, which it makes for the first one."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> "_Awaiter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def wait_for(self, awaitable: Any) -> Any:
        """Block the thread until the awaitable is done; returns or raises what it does."""
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())
