"""Runs a callback on a signal, then the previous handler. API process, main thread."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from types import FrameType

logger = logging.getLogger("fast_batcher")


@contextmanager
def call_on_sigterm(
    loop: asyncio.AbstractEventLoop, function: Callable[[], object], name: str, delay: float = 0.0
) -> Iterator[None]:
    """Call a function on the loop at each SIGTERM during the block, before the previous handler.

    Outside the main thread, which alone may set handlers, only a warning is logged: test clients
    run an app's lifespan in another thread.

    Args:
        loop: The event loop on which the function is called.
        function: The function.
        name: The batcher's name, for the log.
        delay: As for `call_on_signal`.
    """
    if not _is_main_thread():
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
    with call_on_signal(signal.SIGTERM, loop, function, delay):
        yield


@contextmanager
def call_on_end(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> Iterator[None]:
    """Call a function on the loop at each SIGINT or SIGTERM, before the previous handler.

    Outside the main thread it does nothing.
    """
    with ExitStack() as handlers:
        for number in (signal.SIGINT, signal.SIGTERM) if _is_main_thread() else ():
            handlers.enter_context(call_on_signal(number, loop, function))
        yield


@contextmanager
def call_on_signal(
    number: signal.Signals,
    loop: asyncio.AbstractEventLoop,
    function: Callable[[], object],
    delay: float = 0.0,
) -> Iterator[None]:
    """Call a function on the loop at each such signal during the block, then the previous handler.

    Only in the main thread.

    Args:
        number: The signal.
        loop: The event loop on which the function is called.
        function: The function.
        delay: Seconds from the first signal to the call of the previous handler, which a second
            signal calls at once.
    """
    handler = _Handler(number, loop, function, delay)
    signal.signal(number, handler)
    try:
        yield
    finally:
        handler.remove()


class _Handler:
    """A signal handler that runs a function on a loop, and the previous handler."""

    def __init__(
        self,
        number: signal.Signals,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], object],
        delay: float,
    ) -> None:
        self._number = number
        self._loop = loop
        self._function = function
        # Of the next signal.
        self._delay = delay
        self._before = signal.getsignal(number)
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, _: int, frame: FrameType | None) -> None:
        delay, self._delay = self._delay, 0.0
        try:
            self._loop.call_soon_threadsafe(self._function, context=Context())
            if delay:
                self._loop.call_soon_threadsafe(self._set_timer, delay, context=Context())
                return
        except RuntimeError:  # the loop is closed, and so is the batcher
            pass
        self._call_before(frame)

    def _set_timer(self, delay: float) -> None:
        self._timer = self._loop.call_later(delay, self._call_before, None)

    def _call_before(self, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(self._number, frame)
        elif self._before is signal.SIG_DFL:
            # Nothing else would end the program.
            signal.signal(self._number, signal.SIG_DFL)
            signal.raise_signal(self._number)

    def remove(self) -> None:
        """Set the previous handler again.

        A handler that was set meanwhile stays. A previous handler that was not set from Python
        (None) cannot be restored.
        """
        if self._timer is not None:
            self._timer.cancel()
        number, before = self._number, self._before
        if before is not None and signal.getsignal(number) is self:
            signal.signal(number, before)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
