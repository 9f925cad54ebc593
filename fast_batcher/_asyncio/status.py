"""The state of a batcher, and the error that has broken it. API process, the event loop's thread.

A `Status` lives as long as its batcher; sessions come and go. Only this module changes the state,
and it logs every change.
"""

import asyncio
import copy
import logging
import sys
from typing import NoReturn

from fast_batcher._asyncio.ledger import Ledger
from fast_batcher._core.values import MOVES, Event, State
from fast_batcher._process import monotonic
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    NotReadyError,
)

logger = logging.getLogger("fast_batcher")

# The remedies for a batcher that was not opened, in an app and in a script.
GIVE_LIFESPAN = (
    "Give its lifespan to the app: FastAPI(lifespan=batcher.lifespan), and in tests use `with "
    "TestClient(app)`, which runs it"
)
OPEN_IT = "`async with batcher` or `await batcher.open()` opens it"


class Status:
    """The state of one batcher.

    Args:
        name: The batcher's name, for errors and logs.
        ledger: Counts rejected calls.
        is_logged: Whether changes are logged.
    """

    def __init__(self, name: str, ledger: Ledger, *, is_logged: bool = True) -> None:
        self.name = name
        self._ledger = ledger
        self._is_logged = is_logged
        self.state = State.NEW
        # True after SIGTERM: calls are still answered, but probes report not ready.
        self.is_leaving = False
        # The error of the last failed start, None otherwise.
        self._start_error: BatcherError | None = None
        # Reason for which the pool has given up for now, or None; and the moment of the next try.
        self._given_up: str | None = None
        self._next_try = 0.0
        # Futures of the running `wait_while_opening` calls.
        self._waiters: list[asyncio.Future[None]] = []
        # The moment at which the batcher broke, None while it is not broken.
        self._broken_since: float | None = None

    def begin(self) -> None:
        """Start an opening, and clear the errors of the previous one."""
        self.is_leaving = False
        self._start_error = self._given_up = None
        self.move(Event.OPEN)

    def move(self, event: Event) -> None:
        """Move to the state that follows this event, which must be legal in the present one."""
        before, self.state = self.state, MOVES[self.state, event]
        self._broken_since = monotonic() if self.state is State.BROKEN else None
        if self._is_logged:
            logger.info("%s: %s -> %s (%s)", self.name, before.value, self.state.value, event.value)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    async def wait_while_opening(self) -> None:
        """Wait until the batcher is open, broken, draining or closed."""
        if self.state is State.OPENING:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    @property
    def has_waiters(self) -> bool:
        """Whether a caller waits for the end of the opening, and gets its error."""
        return any(not waiter.done() for waiter in self._waiters)

    def fail_start(self, error: BatcherError) -> None:
        """Break: a worker could not load its model, or no host process could be started."""
        self._start_error = error
        self.move(Event.START_FAILED)

    def give_up(self, reason: str, seconds: float) -> None:
        """Break: all restarts are spent, and the next try is `seconds` away."""
        self._given_up, self._next_try = reason, monotonic() + seconds
        if self.state in (State.OPENING, State.OPEN):
            self.move(Event.GIVEN_UP)

    def recover(self) -> None:
        """Recover: a worker is ready again after all had spent their restarts."""
        self._given_up = None
        self.move(Event.RECOVERED)

    def end(self) -> None:
        """Close; legal in every state but CLOSED."""
        self._given_up = None
        self.move(Event.CLOSE)

    @property
    def takes_calls(self) -> bool:
        """Whether calls are accepted."""
        return self.state is State.OPEN or self.state is State.OPENING

    @property
    def given_up_reason(self) -> str | None:
        """Reason for which the pool has given up for now, None if it has not."""
        return self._given_up

    @property
    def has_failed_to_start(self) -> bool:
        """Whether the last start has failed."""
        return self._start_error is not None

    @property
    def is_given_up(self) -> bool:
        """Whether every worker has spent its restarts, and another try is to come."""
        return self._given_up is not None

    @property
    def broken_seconds(self) -> float | None:
        """Seconds for which the batcher has been continuously broken, None if it is not broken."""
        return None if self._broken_since is None else monotonic() - self._broken_since

    def broken_error(self) -> BatcherError | None:
        """Make the error of a broken batcher for one caller; None if it is not broken.

        Each caller gets its own error object: a shared one would collect tracebacks.
        """
        if self._start_error is not None:
            error = copy.copy(self._start_error)
            error.__cause__ = self._start_error.__cause__
            return error
        if self._given_up is None:
            return None
        seconds = max(0.0, self._next_try - monotonic())
        return NotReadyError(
            f"{self.name}: {self._given_up}; the next try is in {seconds:.3g} seconds",
            retry_after=seconds,
        )

    def unanswered_error(self) -> BatcherError:
        """Make the error for one caller whose request ends without an outcome."""
        return self.broken_error() or BatcherClosedError(
            f"{self.name} was closed before it had answered"
        )

    def reject_call(self, what: str) -> NoReturn:
        """Raise the error for a call that is not accepted.

        Args:
            what: The reason if the batcher is neither broken nor closed.
        """
        broken_error = self.broken_error()
        if broken_error is not None:
            raise broken_error
        if self.state in (State.DRAINING, State.CLOSED):
            self._ledger.reject_call("closed")
            raise BatcherClosedError(
                f"{self.name} is {self.state.value} and takes no requests; `await open()` or "
                "`async with` opens a closed batcher again"
            )
        remedy = GIVE_LIFESPAN if "fastapi" in sys.modules else OPEN_IT
        raise NotReadyError(f"{self.name}: {what}. {remedy}")
