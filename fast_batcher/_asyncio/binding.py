"""Binding of a session to a process, an event loop and its thread. API process, any thread."""

import asyncio
import os
from collections.abc import Callable
from contextvars import Context
from threading import get_ident
from typing import Any, NoReturn

from fast_batcher._process import at_fork

# The number of no thread: a forked child has a copy of the loop, which says that it is running.
_NO_THREAD = -1


class LoopBinding:
    """Binds a session to the event loop that runs now, until it is bound to another one.

    Args:
        name: The batcher's name, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        # A call comes from this loop if the loop runs and the call is in its thread. To ask
        # `asyncio.get_running_loop` takes a system call, 0.3 us, on Python 3.11.
        self.loop = asyncio.get_running_loop()
        self.thread = get_ident()
        at_fork(self, in_child=LoopBinding._unbind)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to another event loop, which runs in this thread."""
        self.loop = loop
        self.thread = get_ident()

    def _unbind(self) -> None:
        """Let no call of a forked child take the copy of the loop for one that runs."""
        self.thread = _NO_THREAD

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the event loop runs in another thread than this call."""
        return self.loop.is_running() and self.thread != get_ident()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked copy: workers and event loop belong to another process."""
        return self._pid != os.getpid()

    def require_own_process(self) -> None:
        """Raise if this is a forked copy."""
        if self.is_forked:
            self._reject_fork()

    def _reject_fork(self) -> NoReturn:
        raise RuntimeError(
            f"{self._name}: this DynBatcher was opened in another process (pid {self._pid}) "
            "and does not survive a fork; open one in each process, for example in the lifespan"
        )

    def require_closed_loop(self, what: str) -> None:
        """Raise if the event loop is not closed, so that no other may serve the session."""
        if not self.loop.is_closed():
            raise RuntimeError(
                f"{self._name}: {what} comes from another event loop than the one that serves it, "
                "which is still alive; from other threads use submit()"
            )

    def require_own_thread(self, what: str) -> None:
        """Raise if this is another thread than the event loop's."""
        if self.runs_elsewhere:
            raise RuntimeError(
                f"{self._name}: {what} belongs to the thread of the event loop; from another one "
                "use loop.call_soon_threadsafe"
            )

    def call(self, function: Callable[..., None], *args: Any) -> bool:
        """Call a function on the loop's thread, from any thread; False if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args, context=Context())
        except RuntimeError:
            return False
        return True
