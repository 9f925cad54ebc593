"""Runs a callback on a signal, then the previous handler. API process, main thread."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from types import FrameType

logger = logging.getLogger("fast_batcher")


@contextmanager
def call_on_sigterm(
    loop: asyncio.AbstractEventLoop, function: Callable[[], object], name: str
) -> Iterator[None]:
    """Call a function on the loop at each SIGTERM during the block, before the previous handler.

    Outside the main thread, which alone may set handlers, only a warning is logged: test clients
    run an app's lifespan in another thread.

    Args:
        loop: The event loop on which the function is called.
        function: The function.
        name: The batcher's name, for the log.
    """
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "%s: drain_on_sigterm=True has no effect, because the lifespan runs in thread %r and "
            "signal handlers can be set in the main thread only; SIGTERM will not end readiness "
            "before the server closes the batcher. In a test that does not matter; a server that "
            "runs its event loop in another thread calls begin_drain() itself",
            name,
            threading.current_thread().name,
        )
        yield
        return
    with call_on_signal(signal.SIGTERM, loop, function):
        yield


@contextmanager
def call_on_signal(
    number: signal.Signals, loop: asyncio.AbstractEventLoop, function: Callable[[], object]
) -> Iterator[None]:
    """Call a function on the loop at each such signal during the block, then the previous handler.

    Only in the main thread.

    Args:
        number: The signal.
        loop: The event loop on which the function is called.
        function: The function.
    """
    before = signal.getsignal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, and so is the batcher
            loop.call_soon_threadsafe(function, context=Context())
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            # Nothing else would end the program.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(number, handle)
    try:
        yield
    finally:
        # A handler that was set meanwhile stays. A previous handler that was not set from Python
        # (None) cannot be restored.
        if signal.getsignal(number) is handle and before is not None:
            signal.signal(number, before)
