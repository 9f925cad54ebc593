"""The open streams of the status page, which end when the server is asked to end. API process.

A server waits for its open connections before it ends an app's lifespan, so that no shutdown of the
app can end them: the signals that end a server must. Another program's signal handlers are kept.
"""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

from fast_batcher._session.life import call_on_signal

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds between two events.
INTERVAL = 1.0
# Events of a stream; then the page connects again. It bounds the shutdown of a server whose signals
# do not arrive here: its event loop runs in another thread.
MOST_EVENTS = 30


class Streams:
    """The open streams of one router."""

    def __init__(self) -> None:
        self._open = 0
        self._ending = asyncio.Event()
        self._handlers = ExitStack()

    async def run(self, make_text: Callable[[], str]) -> AsyncIterator[str]:
        """Yield server-sent events, one per second, until the server is asked to end.

        Args:
            make_text: Returns the data of an event, in one line.
        """
        self._enter()
        try:
            yield "retry: 1000\n\n"
            for _ in range(MOST_EVENTS):
                if self._ending.is_set():
                    return
                yield f"data: {make_text()}\n\n"
                try:
                    await asyncio.wait_for(self._ending.wait(), INTERVAL)
                except TimeoutError:
                    continue
        finally:
            self._leave()

    def _enter(self) -> None:
        self._open += 1
        is_main = threading.current_thread() is threading.main_thread()
        if self._open == 1:
            self._ending = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in SIGNALS if is_main else ():
                self._handlers.enter_context(call_on_signal(number, loop, self._ending.set))

    def _leave(self) -> None:
        self._open -= 1
        if not self._open:
            self._handlers.close()
