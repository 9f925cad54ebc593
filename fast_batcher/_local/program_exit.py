"""Ends the decorators' threads before the interpreter finalizes. Runs in an `atexit` hook.

A daemon thread that asks for the GIL while the interpreter finalizes is cut off wherever it is. In
a C++ function, as when PyTorch frees a tensor, the C++ runtime then aborts the process. So the exit
hook ends these threads and waits for them. They are daemons all the same, because a function may
block for ever and the wait needs a limit.

The hook runs on the main thread, after all non-daemon threads have ended, which may call decorated
functions until then, and after the `atexit` hooks that were registered later than this module was
imported. `threading._register_atexit` would run before both.
"""

import atexit
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

logger = logging.getLogger("fast_batcher")

# Longest wait for all threads that still compute, seconds. Equal to the default of a `DynBatcher`'s
# `stop_timeout`, which limits the same wait for worker processes.
EXIT_TIMEOUT = 2.0

_is_exiting = False


def is_exiting() -> bool:
    """Whether the program ends and has ended the threads: they accept no calls any more."""
    return _is_exiting


class ExitJoinedThread(threading.Thread):
    """A daemon thread that the end of the program waits for.

    Args:
        target: What it runs.
        args: The target's arguments.
        name: The name of the thread.
        end: Makes the thread end soon, unless it computes. The exit hook calls it.
    """

    def __init__(
        self,
        *,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str,
        end: Callable[[], None],
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        # None after its end: what this refers to may refer to the thread.
        self._end: Callable[[], None] | None = end

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        finally:
            self._end = None

    def end(self) -> None:
        """Make it end soon. Any thread may call; harmless after its end."""
        end = self._end
        if end is not None:
            end()


def _end_threads() -> None:
    """End all threads of this kind and wait for them."""
    global _is_exiting
    _is_exiting = True
    # Not through the batchers: the thread of a batcher that was collected may still compute.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, ExitJoinedThread)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + EXIT_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
        if thread.is_alive():
            logger.warning(
                "%s: the program ends, and the thread still computes after %s seconds; the "
                "interpreter cuts it off, which can abort the process where native code runs",
                thread.name,
                EXIT_TIMEOUT,
            )


atexit.register(_end_threads)
