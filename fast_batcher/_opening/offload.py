"""Work in a thread of its own: long computations that would block the event loop.

Each piece of work has its own thread: it is rare and large, so starting a thread is comparatively
cheap. The loop's default executor may be full of jobs that block for long, or that wait for this
very work.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def offload(is_long: bool, work: Callable[..., T], *args: Any) -> T:
    """Call `work(*args)`, in a thread if `is_long`; return its result or raise its exception.

    Cancellation: only the wait ends; the work continues.
    """
    if not is_long:
        return work(*args)
    loop = asyncio.get_running_loop()
    has_ended = loop.create_future()
    # Whether `work` has raised, and its result or exception.
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((False, work(*args)))
        except BaseException as error:  # noqa: BLE001  raised again in the waiting task
            outcome.append((True, error))
        with contextlib.suppress(RuntimeError):  # on a closed loop no caller is left
            loop.call_soon_threadsafe(_wake, has_ended)

    thread = threading.Thread(target=run, name="fast_batcher aside", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system cannot start a thread: block the event loop
        return work(*args)
    await has_ended
    thread.join()  # returns at once: the thread has finished its work
    has_raised, value = outcome.pop()
    if has_raised:
        try:
            raise value
        finally:
            del value  # the error holds this frame
    return value  # type: ignore[no-any-return]  # see `run`


def _wake(has_ended: "asyncio.Future[None]") -> None:
    if not has_ended.done():
        has_ended.set_result(None)
