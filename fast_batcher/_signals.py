"""SIGTERM that tells us before it does what it did before. API process, main thread."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fast_batcher.errors import ConfigurationError


@contextmanager
def call_on_sigterm(
    loop: asyncio.AbstractEventLoop, function: Callable[[], object]
) -> Iterator[None]:
    """During the block, SIGTERM has this called on the loop, besides the handler that is there.

    Raises:
        ConfigurationError: This is not the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "drain_on_sigterm=True: signal handlers can be set in the main thread only; call "
            "begin_drain() yourself"
        )
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: there is nothing left to be told
            loop.call_soon_threadsafe(function)
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            # Nobody else would end the program.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        # Somebody may have set another meanwhile, who is not to lose it.
        # Nor can a handler be put back that was not set from Python.
        if signal.getsignal(signal.SIGTERM) is handle and before is not None:
            signal.signal(signal.SIGTERM, before)
