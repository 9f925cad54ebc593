"""`BatchSession`, the calls of one caller to a model that remembers. Event loop's thread."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Self, cast

from fast_batcher._core.values import Request, SessionPlace
from fast_batcher._opening.calls import set_options, wait_for_answer
from fast_batcher._opening.life import RUN_THREADSAFE
from fast_batcher._process import monotonic
from fast_batcher.errors import DeadlineExceededError, SessionLostError
from fast_batcher.model import InputT, OutputT

if TYPE_CHECKING:
    from fast_batcher._opening.opening import Opening


class BatchSession(Generic[InputT, OutputT]):
    """The calls of one session, in order: see `DynBatcher.session`. An async context manager."""

    def __init__(
        self,
        idle_timeout: float,
        find_opening: Callable[[], "Opening"],
        is_present: Callable[["Opening"], bool],
        find_timeout: Callable[[], float | None],
    ) -> None:
        self._find_opening = find_opening
        self._is_present = is_present
        self._find_timeout = find_timeout
        self._place = SessionPlace(idle_timeout)
        # The opening of the batcher in which it lives, from its first call on.
        self._opening: Opening | None = None
        # One call at a time, in order.
        self._turn = asyncio.Lock()
        self._is_over = False
        self._has_block = False

    async def process_batched(self, value: InputT, *, timeout: float | None = None) -> OutputT:
        """Wait for the model's output for the next input of the session.

        Calls that are made at the same time are computed one after the other, in their order. The
        first call gives the session its place in a worker.

        Args:
            value: As for `DynBatcher.process_batched`.
            timeout: Seconds until the call fails, the wait for earlier calls included. Default the
                batcher's.

        Raises:
            SessionLostError: The session has ended: its worker died, was replaced, or is not needed
                any more; a call of the same batch has failed; it was idle for its timeout; or it
                was closed. It does not begin again: its state is lost.
            QueueFullError: In the first call: no worker has a place for a session. `retry_after`
                is the predicted time until one has.
            BatcherError: The errors of `DynBatcher.process_batched`.

        Cancellation: safe at any time. A call that waits is as if it had not been made. One that
        runs may be computed: the session goes on behind it.
        """
        default = self._find_timeout()
        request = Request(value, None)
        set_options(request, timeout, 0, None, default)
        request.session = self._place
        try:
            async with asyncio.timeout(request.deadline - monotonic()):
                await self._turn.acquire()
        except TimeoutError:
            limit = default if timeout is None else timeout
            raise DeadlineExceededError(
                f"earlier calls of the session were not answered within timeout={limit} seconds"
            ) from None
        try:
            return cast("OutputT", await wait_for_answer(self._require_opening(), request))
        finally:
            self._turn.release()
            del request

    def _require_opening(self) -> "Opening":
        """Return the opening of the batcher in which the session lives; begin it with the first."""
        if self._is_over:
            raise SessionLostError("the session has ended: it was closed")
        opening = self._opening
        if opening is None:
            opening = self._opening = self._find_opening()
            opening.begin_session()
        elif not self._is_present(opening):
            raise SessionLostError("the session has ended: the batcher was closed")
        opening.binding.require_own_process()
        opening.binding.require_own_thread("a call of a session", RUN_THREADSAFE)
        return opening

    async def aclose(self) -> None:
        """End the session: its place is free, and its worker releases the state.

        A call that waits fails with `SessionLostError`; one that runs is answered. May be repeated.
        """
        opening, self._is_over = self._opening, True
        if opening is not None and self._is_present(opening):
            opening.binding.require_own_thread("aclose() of a session", RUN_THREADSAFE)
            opening.end_session(self._place)

    @property
    def is_loose(self) -> bool:
        """Whether it lives, and no `async with` block will end it."""
        return not self._has_block and self._lives() and self._place.end is None

    def _lives(self) -> bool:
        opening = self._opening
        return opening is not None and not self._is_over and self._is_present(opening)

    def __del__(self) -> None:
        # The app has dropped it, on any thread: no code can call or close it any more.
        if self._lives() and self._opening is not None and not self._opening.binding.is_forked:
            self._opening.binding.call(self._opening.end_session, self._place)

    async def __aenter__(self) -> Self:
        self._has_block = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
