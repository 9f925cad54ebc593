"""Work that takes long and waits for nothing, beside the event loop that needs its outcome.

Each piece has a thread of its own: it is rare and large, so that starting one is cheap beside it,
and the loop's own pool may be full of what waits for long, or for this very outcome. Any loop may
call.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def offload(is_long: bool, work: Callable[..., T], *args: Any) -> T:
    """What `work(*args)` returns or raises; computed in a thread if `is_long`, else here.

    Cancellation: only the wait ends; the work goes on.
    """
    if not is_long:
        return work(*args)
    loop = asyncio.get_running_loop()
    has_ended = loop.create_future()
    # Whether it has raised, and what it has returned or raised.
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((False, work(*args)))
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            outcome.append((True, error))
        with contextlib.suppress(RuntimeError):  # on a closed loop no caller is left
            loop.call_soon_threadsafe(_wake, has_ended)

    thread = threading.Thread(target=run, name="fast_batcher aside", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there can be no more threads: late is better than never
        return work(*args)
    await has_ended
    thread.join()  # it has nothing left to do
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
