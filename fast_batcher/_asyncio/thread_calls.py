"""Hands requests of other threads to the session, on the event loop's thread. API process."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from fast_batcher._asyncio.binding import LoopBinding
from fast_batcher._asyncio.ledger import set_exception
from fast_batcher._asyncio.session import Session
from fast_batcher._core.values import Request, settle


class ThreadCalls:
    """Requests that the event loop's thread has not taken yet.

    Args:
        find_session: Returns the session that accepts calls now, or raises the error
            for the caller.
    """

    def __init__(self, find_session: Callable[[], Session]) -> None:
        self._find_session = find_session
        self._submitted: deque[Request] = deque()

    def submit(self, request: Request, binding: LoopBinding) -> bool:
        """Pass a request to the loop's thread, from any thread; False if the loop is closed."""
        self._submitted.append(request)
        if not binding.call(self.take):
            with suppress(ValueError):  # another loop has just taken it
                self._submitted.remove(request)
                return False
        return True

    def take(self) -> None:
        """Give the submitted requests to the session, or an error to their callers."""
        while self._submitted:
            request = self._submitted.popleft()
            try:
                request.caller.context.run(self._find_session().accept, request)
            except Exception as error:  # noqa: BLE001  every call must end
                settle(request)
                set_exception(request, error)
