"""The life of a batcher: its state, its event loop, its owners, and signals. Event loop's thread.

    Status           the state, and the error that has broken the batcher
    CurrentModel     the model that the workers load, over its reloads
    LiveSettings     the settings, over the calls of `reconfigure`
    LoopBinding      the process, event loop and thread that an opening belongs to
    Owners           the lifespans and `async with` blocks that keep it open
    CallOnSignal     runs a callback on a signal, then the previous handler; main thread

`Status`, `CurrentModel` and `LiveSettings` live as long as their batcher; sessions come and go.
Only `Status` changes the state, and it logs every change.
"""

import asyncio
import copy
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn

from fast_batcher._core.values import MOVES, Event, State
from fast_batcher._identity import identify_model
from fast_batcher._opening.ledger import Ledger
from fast_batcher._process import at_fork, monotonic
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    NotReadyError,
)
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Reconfiguration, Settings

# The remedy for a coroutine that another thread needs.
RUN_THREADSAFE = "asyncio.run_coroutine_threadsafe(..., loop), where loop is the batcher's"
# The number of no thread: a forked child has a copy of the loop, which says that it is running.
_NO_THREAD = -1


class LoopBinding:
    """The process, event loop and thread of an opening, which are present when it is made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        # A call comes from this loop if the loop runs and the call is in its thread. To ask
        # `asyncio.get_running_loop` takes a system call, 0.3 us, on Python 3.11.
        self.loop = asyncio.get_running_loop()
        self.thread = get_ident()
        at_fork(self, in_child=LoopBinding._unbind)

    def _unbind(self) -> None:
        """Let no call of a forked child take the copy of the loop for one that runs."""
        self.thread = _NO_THREAD

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the event loop runs in another thread than this call."""
        return self.loop.is_running() and self.thread != get_ident()

    @property
    def is_current(self) -> bool:
        """Whether the event loop runs in the thread of this call."""
        return self.loop.is_running() and self.thread == get_ident()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked copy: workers and event loop belong to another process."""
        return self._pid != os.getpid()

    def require_own_process(self) -> None:
        """Raise if this is a forked copy."""
        if self.is_forked:
            raise RuntimeError(
                f"{self._name}: this DynBatcher was opened in another process (pid {self._pid}) "
                "and does not survive a fork; open one in each process, for example in the lifespan"
            )

    def require_own_thread(self, call: str, remedy: str) -> None:
        """Raise if this is another thread than the event loop's."""
        if self.runs_elsewhere:
            raise RuntimeError(
                f"{self._name}: {call} must be called on the event loop's thread; from other "
                f"threads use {remedy}"
            )

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a function on the loop's thread, from any thread; False if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args, context=Context())
        except RuntimeError:
            return False
        return True


@dataclass(eq=False)
class Owner:
    """An `async with` block or lifespan that was entered and not left yet."""

    loop: asyncio.AbstractEventLoop
    # False once the batcher was closed after this owner entered.
    is_current: bool = True


class Owners:
    """Counts owners, so that the last one that leaves closes the batcher.

    `aclose` and `stop` close the batcher for all owners, which then leave without effect.
    """

    def __init__(self) -> None:
        self._owners: list[Owner] = []

    def note_end(self) -> None:
        """Record that the batcher was closed: owners that entered before leave without effect."""
        for owner in self._owners:
            owner.is_current = False

    def enter(self, loop: asyncio.AbstractEventLoop) -> Owner:
        """Add an owner."""
        # Owners on a closed loop will never leave.
        self._owners = [owner for owner in self._owners if not owner.loop.is_closed()]
        self._owners.append(Owner(loop))
        return self._owners[-1]

    def remove(self, owner: Owner) -> None:
        """Remove an owner whose block failed to start."""
        self._owners.remove(owner)

    def leave(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Remove an owner of this loop."""
        # Owners of one loop are interchangeable, except that owners of earlier openings go first.
        owners = [owner for owner in self._owners if owner.loop is loop]
        if not owners:
            return True
        owner = min(owners, key=lambda owner: owner.is_current)
        self._owners.remove(owner)
        return owner.is_current and not self.is_owned()

    def is_owned(self) -> bool:
        """Return whether the present opening has an owner on a loop that is not closed."""
        return any(owner.is_current and not owner.loop.is_closed() for owner in self._owners)


logger = logging.getLogger("fast_batcher")


@contextmanager
def call_on_sigterm(
    loop: asyncio.AbstractEventLoop, function: Callable[[], object], name: str, delay: float = 0.0
) -> Iterator[None]:
    """Call a function on the loop at each SIGTERM during the block, before the previous handler.

    Outside the main thread, which alone may set handlers, only a warning is logged: test clients
    run an app's lifespan in another thread.
    """
    if not is_main_thread():
        logger.warning(
            "%s: drain_on_sigterm=True has no effect, because the lifespan runs in thread %r and "
            "signal handlers can be set in the main thread only; SIGTERM will not end readiness "
            "before the server closes the batcher. In a test that does not matter; a server that "
            "runs its event loop in another thread calls begin_drain() itself",
            name,
            threading.current_thread().name,
        )
        yield
        return
    with CallOnSignal(signal.SIGTERM, loop, function, delay):
        yield


# The signals that end a server.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def call_on_end(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> Iterator[None]:
    """Call a function on the loop at each SIGINT or SIGTERM, before the previous handler.

    Outside the main thread it does nothing.
    """
    with ExitStack() as handlers:
        for number in END_SIGNALS if is_main_thread() else ():
            handlers.enter_context(CallOnSignal(number, loop, function))
        yield


class CallOnSignal(AbstractContextManager[None]):
    """Calls a function on the loop at each such signal during the block, then the previous handler.

    The previous handler of the first signal is called after `delay` seconds. Main thread.
    """

    def __init__(
        self,
        number: signal.Signals,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], object],
        delay: float = 0.0,
    ) -> None:
        self._number = number
        self._loop = loop
        self._function = function
        # Seconds from the signal to the previous handler.
        self._delay = delay
        self._before = signal.getsignal(number)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        signal.signal(self._number, self)

    def __call__(self, _: int, frame: FrameType | None) -> None:
        delay, self._delay = self._delay, 0.0
        try:
            self._loop.call_soon_threadsafe(self._function, context=Context())
            if delay:
                self._loop.call_soon_threadsafe(self._set_timer, delay, context=Context())
                return
        except RuntimeError:  # the loop is closed, and so is the batcher
            pass
        self._call_before(frame)

    def _set_timer(self, delay: float) -> None:
        self._timer = self._loop.call_later(delay, self._call_before, None)

    def _call_before(self, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(self._number, frame)
        elif self._before is signal.SIG_DFL:
            # Nothing else would end the program.
            signal.signal(self._number, signal.SIG_DFL)
            signal.raise_signal(self._number)

    def __exit__(self, *_: object) -> None:
        """Set the previous handler again."""
        if self._timer is not None:
            self._timer.cancel()
        # A handler that was set meanwhile stays. A previous handler that was not set from Python
        # (None) cannot be restored.
        number, before = self._number, self._before
        if before is not None and signal.getsignal(number) is self:
            signal.signal(number, before)


def is_main_thread() -> bool:
    """Return whether this is the thread that may set signal handlers, as that of a server."""
    return threading.current_thread() is threading.main_thread()


# Seconds of a start after which a line says what it waits for: a person begins to doubt.
SLOW_LOAD = 5.0


def _are_lines_visible() -> bool:
    """Whether the program has configured logging: uvicorn configures its own loggers alone."""
    return logger.hasHandlers()


def _show_line(text: str) -> None:
    """Write a line to the terminal of a server, unless the logger's level is above INFO."""
    if logger.level <= logging.INFO > logging.root.manager.disable:
        with suppress(AttributeError, OSError):  # a program without a terminal has none
            sys.stderr.write(f"INFO:     fast_batcher: {text}\n")


class StartLines:
    """Lines for a person who starts a server, whose model may load for minutes.

    A program that has configured logging has records of the first and the last. Without handlers,
    Python shows no record below WARNING.
    """

    def __init__(self, name: str, describe_wait: Callable[[], str]) -> None:
        self._name = name
        self._describe_wait = describe_wait
        self._began = monotonic()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SLOW_LOAD, self._tell_wait, context=Context())
        if not _are_lines_visible():
            _show_line(f"{name}: loading the model")

    def _tell_wait(self) -> None:
        text = f"{self._name}: still loading after {monotonic() - self._began:.0f} s: waiting for "
        text += self._describe_wait()
        if _are_lines_visible():
            logger.info("%s", text)
        else:
            _show_line(text)

    def end(self, *, is_ready: bool) -> None:
        """Tell that the model is ready; an error has its own record."""
        self._timer.cancel()
        if is_ready and not _are_lines_visible():
            _show_line(f"{self._name}: ready after {monotonic() - self._began:.1f} s")


class CurrentModel:
    """The model that the workers of one batcher load, which a reload replaces."""

    def __init__(self, spec: ModelSpec) -> None:
        # The model given to the constructor. It is part of the host's key, so it never changes.
        self.first = spec
        # The model of the last reload that succeeded.
        self.spec = spec
        # Whether answers may be of another model than `spec`.
        self.is_reloading = False
        # Reloads that have begun.
        self.reloads = 0

    def identify(self, settings: Settings) -> None:
        """Note the model's present identity, if caches need it; workers load it afterwards."""
        if settings.needs_identity:
            self.spec = identify_model(self.spec, settings.shared_version)

    def begin_reload(self) -> None:
        """Note that workers with another model are being started."""
        self.is_reloading = True
        self.reloads += 1

    def end_reload(self, spec: ModelSpec | None = None) -> None:
        """Note that all workers have a new model, or with None the model of before."""
        self.is_reloading = False
        if spec is not None:
            self.spec = spec


# The changes by option: the moment of the last one, by a clock that all processes of a machine
# share, and its value.
Changes = dict[str, tuple[float, Any]]


class LiveSettings:
    """The settings of one batcher, which `reconfigure` changes.

    The processes of a shared batcher and their host merge their changes: of each option the last
    change counts, whichever process made it and whichever host has died meanwhile.
    """

    def __init__(self, first: Settings, changes: Changes | None = None) -> None:
        # The settings given to the constructor. They are part of the host's key, so they never
        # change.
        self.first = first
        self.current = first
        self.changes: Changes = {}
        self.merge(changes or {})

    def change(self, values: Reconfiguration) -> None:
        """Change options now; raise ConfigurationError if a value is wrong."""
        self.current.changed(values)
        now = monotonic()
        self.merge({name: (now, value) for name, value in values.items()})

    def merge(self, changes: Changes) -> bool:
        """Apply the changes that are later than these; return whether there is one."""
        known = self.changes
        later = {
            name: (moment, value)
            for name, (moment, value) in changes.items()
            if name not in known or moment > known[name][0]
        }
        if later:
            self.changes = known | later
            values = {name: value for name, (_, value) in self.changes.items()}
            self.current = replace(self.first, **values)
        return bool(later)


# The remedies for a batcher that was not opened, in an app and in a script.
GIVE_LIFESPAN = (
    "Give its lifespan to the app: FastAPI(lifespan=batcher.lifespan), and in tests use `with "
    "TestClient(app)`, which runs it"
)
OPEN_IT = "`async with batcher` or `await batcher.open()` opens it"


class Status:
    """The state of one batcher."""

    def __init__(self, name: str, ledger: Ledger, *, is_logged: bool = True) -> None:
        self.name = name
        self._ledger = ledger
        self._is_logged = is_logged
        self.state = State.NEW
        # True after SIGTERM: calls are still answered, but probes report not ready.
        self.is_leaving = False
        # The moment at which the drain that SIGTERM began ends; infinite without one.
        self.drain_until = math.inf
        # The error of the last failed start, None otherwise.
        self.start_error: BatcherError | None = None
        # Reason for which the pool has given up for now, or None; and the moment of the next try.
        self.given_up: str | None = None
        self._next_try = 0.0
        # What workers that have no place in a cluster yet wait for; "" for nothing.
        self.waits_for = ""
        # Futures of the running `wait_while_opening` calls.
        self._waiters: list[asyncio.Future[None]] = []
        # The moment at which the batcher broke, None while it is not broken.
        self._broken_since: float | None = None
        # The lines about an opening of a server, None without one.
        self.start_lines: StartLines | None = None

    def begin(self) -> None:
        """Start an opening, and clear the errors of the previous one."""
        self.is_leaving, self.drain_until = False, math.inf
        self.start_error = self.given_up = None
        self.waits_for = ""
        self.move(Event.OPEN)

    def move(self, event: Event) -> None:
        """Move to the state that follows this event, which must be legal in the present one."""
        before, self.state = self.state, MOVES[self.state, event]
        self._broken_since = monotonic() if self.state is State.BROKEN else None
        if self._is_logged:
            logger.info("%s: %s -> %s (%s)", self.name, before.value, self.state.value, event.value)
        if self.start_lines is not None:
            self.start_lines.end(is_ready=self.state is State.OPEN)
            self.start_lines = None
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

    def fail_start(self, error: BatcherError) -> None:
        """Break: a worker could not load its model, or no host process could be started."""
        # If a caller waits in `open`, the error is raised there.
        if all(waiter.done() for waiter in self._waiters):
            logger.error(
                "%s: %s; calls fail until it is opened again", self.name, error, exc_info=error
            )
        self.start_error = error
        self.move(Event.START_FAILED)

    def give_up(self, reason: str, seconds: float) -> None:
        """Break: all restarts are spent, and the next try is `seconds` away."""
        self.given_up, self._next_try = reason, monotonic() + seconds
        if self.state in (State.OPENING, State.OPEN):
            self.move(Event.GIVEN_UP)

    def recover(self) -> None:
        """Recover: a worker is ready, after all had spent their restarts or had not loaded."""
        self.start_error = self.given_up = None
        self.move(Event.RECOVERED)

    def end(self) -> None:
        """Close; legal in every state but CLOSED."""
        self.given_up = None
        self.move(Event.CLOSE)

    @property
    def takes_calls(self) -> bool:
        """Whether calls are accepted."""
        return self.state is State.OPEN or self.state is State.OPENING

    @property
    def broken_seconds(self) -> float | None:
        """Seconds for which the batcher has been continuously broken, None if it is not broken."""
        return None if self._broken_since is None else monotonic() - self._broken_since

    def broken_error(self) -> BatcherError | None:
        """Make the error of a broken batcher for one caller; None if it is not broken.

        Each caller gets its own error object: a shared one would collect tracebacks.
        """
        if self.start_error is not None:
            error = copy.copy(self.start_error)
            error.__cause__ = self.start_error.__cause__
            return error
        if self.given_up is None:
            return None
        seconds = max(0.0, self._next_try - monotonic())
        return NotReadyError(
            f"{self.name}: {self.given_up}; the next try is in {seconds:.3g} seconds",
            retry_after=seconds,
        )

    def unanswered_error(self) -> BatcherError:
        """Make the error for one caller whose request ends without an outcome."""
        return self.broken_error() or BatcherClosedError(
            f"{self.name} was closed before it answered"
        )

    def reject_call(self, reason: str) -> NoReturn:
        """Raise the error for a call that is not accepted."""
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
        raise NotReadyError(f"{self.name}: {reason}. {remedy}")
