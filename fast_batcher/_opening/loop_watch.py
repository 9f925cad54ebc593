"""Watches the event loops of batchers, and warns when one is blocked. API process, loop's thread.

A blocked loop can neither send nor read a request, which looks like a slow model.
"""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from weakref import WeakKeyDictionary, WeakMethod

from fast_batcher._core.loop_lag import TICK, WINDOW, LoopLag
from fast_batcher._core.values import Request
from fast_batcher._process import monotonic
from fast_batcher.errors import DeadlineExceededError, NotReadyError

logger = logging.getLogger("fast_batcher")

# A method of a batcher that takes the seconds for which the loop was blocked before a tick. It
# returns whether a request may have waited, or None once the batcher is closed.
NoteLag = Callable[[float], bool | None]


class LoopWatch:
    """Ticks on one event loop while batchers are open there."""

    def __init__(self) -> None:
        self.lag = LoopLag(monotonic())
        # Those of the open batchers; a program may drop a batcher that is open.
        self._methods: dict[WeakMethod[NoteLag], None] = {}

    def add(self, note_lag: NoteLag) -> None:
        """Watch the loop until this method returns None."""
        if not self._methods:
            self.lag.restart(monotonic())
            self._tick_later()
        self._methods[WeakMethod(note_lag)] = None

    def _tick_later(self) -> None:
        asyncio.get_running_loop().call_later(TICK, self._tick, context=Context())

    def _tick(self) -> None:
        now = monotonic()
        late = self.lag.tick(now)
        told = {one: note(late) for one in self._methods if (note := one()) is not None}
        self._methods = dict.fromkeys(one for one, answer in told.items() if answer is not None)
        if self._methods:
            self._tick_later()
        # While an app starts, its loop may wait: no request does.
        if any(told.values()):
            self._warn(self.lag.find_warning(now))

    def _warn(self, seconds: float) -> None:
        if seconds:
            logger.warning(
                "the event loop was blocked for %.1f of the last %.0f seconds: no request could be "
                "sent or answered, however fast the model is. An `async def` function computes, or "
                "waits without `await` (time.sleep, requests.get): run it by `await "
                "asyncio.to_thread(...)`, or in a plain `def` endpoint. Or the model's first "
                "tensor imported PyTorch: import it with the app. PYTHONASYNCIODEBUG=1 logs which "
                "it is; if it logs none, the process gets no core, or large bodies arrive faster "
                "than it reads them: use several server processes. Such a line comes once a minute",
                seconds,
                WINDOW,
            )


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = WeakKeyDictionary()


def watch_loop(note_lag: NoteLag) -> None:
    """Watch the running event loop until this method of a batcher returns None."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = LoopWatch()
    watch.add(note_lag)


def find_lag() -> LoopLag | None:
    """Return the lag of the running event loop; None without one, or if it is not watched."""
    try:
        watch = _watches.get(asyncio.get_running_loop())
    except RuntimeError:
        return None
    return None if watch is None else watch.lag


def blame_loop(error: BaseException, request: Request) -> None:
    """Add to the error of a request that has expired how long the event loop was blocked."""
    # An error of the model may derive from these.
    if type(error) not in (DeadlineExceededError, NotReadyError):
        return
    if getattr(error, "retry_after", None) is not None:  # it was rejected
        return
    lag, now = find_lag(), monotonic()
    # A request that was blocked before it could be queued arrives behind its deadline.
    seconds = 0.0 if lag is None else lag.find_delay(min(request.arrival, request.deadline), now)
    if seconds:
        text = f"{error}; the event loop was blocked for {seconds:.3g} seconds meanwhile"
        error.args = (text, *error.args[1:])
