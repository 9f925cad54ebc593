"""The end of the program: no thread of the decorators runs while the interpreter finalizes.

A daemon thread that asks for the GIL at that time is cut off wherever it is. Where that is a C++
function, as when PyTorch frees a tensor, the C++ runtime aborts the process. So the end of the
program ends these threads and waits for them. They are daemons all the same, because the wait has
to have a bound: a function may block for ever. Runs on the main thread, in an `atexit` hook.

The hook comes after the end of all threads that are no daemons, which may call decorated functions
until then, and after the `atexit` hooks that were registered later than this file was imported.
`threading._register_atexit` would come before both.
"""

import atexit
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

logger = logging.getLogger("fast_batcher")

# Longest wait for threads that compute, for all of them together, seconds: as long as a
# `DynBatcher` gives its workers to end, by default (`stop_timeout`).
END_TIMEOUT = 2.0

_is_ending = False


def is_ending() -> bool:
    """Whether the program ends and the threads have been told so: none takes calls any more."""
    return _is_ending


class EndingThread(threading.Thread):
    """A daemon thread that the end of the program waits for.

    Args:
        target: What it runs.
        args: The arguments of that.
        name: Of the thread.
        end: Makes the thread end soon, unless it computes; the end of the program calls it.
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
        # None when it has ended: what it refers to may refer to the thread.
        self._end: Callable[[], None] | None = end

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        finally:
            self._end = None

    def end(self) -> None:
        """Make it end soon. Any thread may call; harmless if it has ended."""
        end = self._end
        if end is not None:
            end()


def end_threads() -> None:
    """End all threads of this kind, and wait for them; may be called again."""
    global _is_ending
    _is_ending = True
    # Not from the batchers: one that was collected may have a thread that is still busy.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + END_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
        if thread.is_alive():
            logger.warning(
                "%s: the program ends, and the thread still computes after %s seconds; the "
                "interpreter cuts it off, which can abort the process where native code runs",
                thread.name,
                END_TIMEOUT,
            )


atexit.register(end_threads)
