"""`RemoteSession`: a session whose scheduler and workers are in the host process.

    DynBatcher --accept--> HostCalls --HostLink--> host: scheduler, workers
                callers <--settle--        <------

API process, on the event loop's thread. The host decides about queues, deadlines, batches and
retries. This module follows its state, and joins another host when it has died.
"""

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fast_batcher._core.supervision import Restarts
from fast_batcher._core.values import Event, Request, State
from fast_batcher._host.calls import HostCalls
from fast_batcher._host.hello import find_key, make_hello, pack_changes
from fast_batcher._host.link import HostLink
from fast_batcher._host.protocol import FRAME_ROOM, Hello, HostState, Welcome, unpack_start_error
from fast_batcher._process import monotonic
from fast_batcher._session.life import LoopBinding, Status
from fast_batcher._session.outcomes import Ledger
from fast_batcher._transport.channels import Frame, Kind
from fast_batcher._transport.pickling import loads
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    WorkerStartupError,
)
from fast_batcher.model import ModelSpec
from fast_batcher.observing import ReporterChanged
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation

if TYPE_CHECKING:
    from fast_batcher._core.prediction import Method

logger = logging.getLogger("fast_batcher")

# Seconds that a host may take to end after `stop_timeout`, when it kills its workers.
END_GRACE = 5.0


class RemoteSession:
    """A `Session` that passes requests to the host process of a shared batcher.

    Args:
        model_spec: The model that the host's workers load.
        settings: The batcher's settings.
        status: The batcher's state, which follows that of the host.
        ledger: Counts calls that are rejected here, and has the observers.
    """

    def __init__(
        self, model_spec: ModelSpec, settings: Settings, status: Status, ledger: Ledger
    ) -> None:
        self._model_spec = model_spec
        self._settings = settings
        self._status = status
        self._ledger = ledger
        name = self._name = status.name
        self._key = find_key(model_spec, settings, name)
        # None: `find_key` refuses models that have several.
        self.methods: dict[str, Method] = {}
        self.binding = LoopBinding(name)
        self._link = HostLink(
            self._key,
            self._introduce,
            settings.max_frame_bytes + FRAME_ROOM,
            settings.start_timeout,
            self,
            self.binding.loop,
            name,
        )
        self._calls = HostCalls(settings, self._link, ledger, self.binding.loop, name)
        self._restarts = Restarts(
            settings.max_restarts, settings.restart_window, settings.restart_backoff
        )
        # The last state that the host has sent; None before the first, and without a host.
        self._host: HostState | None = None
        # Whether the settings differ from those of a new host.
        self._is_reconfigured = False
        # From that state, or from the one of a host that is gone.
        self._stats: BatcherStats | None = None
        self._explanation = Explanation()
        # Whether this process reports: as the host has said, and without a host for itself.
        self._is_reporter = True
        # Set when there is no host to wait for after the goodbye; None before the goodbye.
        self._hung_up: asyncio.Event | None = None

    # What the batcher shows.

    @property
    def load(self) -> tuple[int, int, int]:
        """Ready workers, waiting requests and running requests of the host."""
        host = self._host
        if host is None:
            return 0, len(self._calls), 0
        return host.workers_ready, host.stats.waiting, host.stats.running

    def read_stats(self) -> BatcherStats:
        """Return the statistics of the host, which are up to a second old."""
        workers_ready, waiting, running = self.load
        here = self._ledger.counters.snapshot(
            state=str(self._status.state),
            workers_ready=workers_ready,
            num_workers=self._settings.num_workers,
            waiting=waiting,
            running=running,
        )
        host = self._stats
        if host is None:
            return replace(here, is_reporter=self._is_reporter)
        submitted = host.submitted
        if self._host is None:  # the open requests of the other processes are not known any more
            submitted += waiting - host.waiting - host.running
        # The host has not seen the requests that were counted here.
        return replace(
            host,
            state=here.state,
            workers_ready=workers_ready,
            waiting=waiting,
            running=running,
            is_reporter=self._is_reporter,
            submitted=submitted + here.submitted,
            failed=host.failed + here.failed,
            expired=host.expired + here.expired,
            cancelled=host.cancelled + here.cancelled,
            rejected=host.rejected + here.rejected,
        )

    def explain(self) -> Explanation:
        """Return the explanation of the host, which is up to a second old."""
        return self._explanation

    # Opening.

    def begin(self) -> None:
        """Join the host, or start it."""
        self._status.begin()
        self._report(True)
        self._link.join()

    def _introduce(self) -> Hello:
        self._calls.is_observed = bool(self._ledger.observers.active)
        return make_hello(
            self._model_spec,
            self._settings,
            self._key,
            observes=self._calls.is_observed,
        )

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings in the host, for all API processes.

        Raises:
            RuntimeError: The calling thread is not that of the event loop.
        """
        self.binding.require_own_thread("reconfigure()")
        self._settings = settings
        self._is_reconfigured = True
        self._calls.reconfigure(settings)
        self._link.send(Kind.RECONFIGURE, pack_changes(settings))

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed."""
        self.binding.rebind(loop)
        self._link.rebind(loop)
        self._calls.rebind(loop)

    # Requests.

    def accept(self, request: Request) -> None:
        """Add a request to those of this turn; called in the caller's context."""
        self._calls.accept(request)

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a request, here or in the host."""
        self._calls.raise_priority(request, priority)

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the host's queue has room, as far as is known."""
        return self._calls.has_room(request, ahead)

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""
        self._calls.abandon(request)

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self._calls.run_soon()  # its run ends the arena's turn
        return self._calls.inputs.allocate(dtype, shape)

    # Events of the link.

    def host_joined(self, welcome: Welcome, memory: tuple[int, int] | None) -> None:
        """Use a host that has welcomed this process, and send it the requests that wait."""
        logger.info("%s: joined the host process (pid %d)", self._name, welcome.process.pid)
        if self._is_reconfigured:
            self._link.send(Kind.RECONFIGURE, pack_changes(self._settings))
        self._report(False)  # the host tells which process does
        self._calls.inputs.use(memory, welcome.start, welcome.length)
        self._calls.host_joined(welcome.room)

    def host_unreachable(self, error: BaseException) -> None:
        """Break while opening; afterwards count it as the loss of a host."""
        if isinstance(error, BatcherError):
            told = error
        else:
            told = WorkerStartupError(f"the host process cannot be started: {error!r}")
            told.__cause__ = error
        if self._hung_up is not None:
            self._hung_up.set()
        elif self._status.state is State.OPENING:
            self._fail_start(told)
        else:
            logger.warning("%s: %s; trying again", self._name, told)
            self._rejoin_later()

    def host_lost(self) -> None:
        """Join the next host, which gets the requests of the dead one."""
        self._host = None
        if self._hung_up is not None:  # after the goodbye; no request is left
            self._hung_up.set()
            return
        self._calls.host_lost()
        self._report(True)
        if not self._status.has_failed_to_start:  # a host ends when its model cannot be loaded
            logger.warning("%s: the host process has died; another takes its place", self._name)
            self._rejoin_later()

    def _rejoin_later(self) -> None:
        delay, is_given_up = self._restarts.lost(monotonic())
        if is_given_up:
            reason = (
                f"the host process was restarted max_restarts={self._settings.max_restarts} times "
                f"within restart_window={self._settings.restart_window} seconds"
            )
            self._break(reason, delay)
        self._link.join_later(delay)

    def frame_arrived(self, frame: Frame) -> None:
        """Handle a frame of the host that is not an answer."""
        if frame.kind in (Kind.STATE, Kind.FAREWELL):
            self._link.host_ends = bool(frame.batch_id)
            self._follow(HostState(*loads(frame.body)))
            if frame.kind is Kind.STATE and self._hung_up is None:
                self._link.send(Kind.STATE_READ)
                self._calls.observe()
        elif frame.kind is Kind.REPORT:
            self._report(loads(frame.body))
        elif frame.kind is Kind.EVENT:
            self._ledger.observers.tell(loads(frame.body))
        else:
            self._calls.take(frame)

    # The host's state.

    def _report(self, is_reporter: bool) -> None:
        """Begin or cease to report."""
        self._is_reporter = is_reporter
        self._ledger.observers.tell(ReporterChanged(self._name, is_reporter))

    def _follow(self, host: HostState) -> None:
        """Bring the batcher into the state of its host."""
        self._host = host
        self._stats, self._explanation = host.stats, host.explanation
        state = self._status.state
        if host.start_error is not None and state is State.OPENING:
            self._fail_start(unpack_start_error(host.start_error))
        elif host.given_up is not None and (self._status.takes_calls or self._status.is_given_up):
            self._break(*host.given_up)
        elif host.state == State.OPEN:
            self._restarts.ready(monotonic())
            if state is State.OPENING:
                self._status.move(Event.ALL_READY)
            elif state is State.BROKEN:
                self._status.recover()

    def _fail_start(self, error: BatcherError) -> None:
        # If a caller waits in `open`, the error is raised there.
        if not self._status.has_waiters:
            logger.error(
                "%s: %s; calls fail until it is opened again", self._name, error, exc_info=error
            )
        self._status.fail_start(error)
        self._calls.fail_all(self._status.unanswered_error)

    def _break(self, reason: str, seconds: float) -> None:
        """Fail calls at once, until the next try succeeds."""
        self._status.give_up(reason, seconds)
        self._calls.fail_all(self._status.unanswered_error)

    # Ending.

    def begin_drain(self) -> None:
        """Do nothing: the batcher sends no further requests."""

    async def reload(self, model_spec: ModelSpec) -> None:
        """Refuse: the other API processes would go on with the arguments of before."""
        raise ConfigurationError(
            f"{self._name}: reload() works without shared={self._settings.shared!r} only; restart "
            f"the server with other arguments for {model_spec.name}"
        )

    async def aclose(self) -> None:
        """Wait for the accepted requests, and say goodbye; the last one waits for the workers."""
        await self._calls.wait_until_drained()
        self._calls.fail_all(self._status.unanswered_error)
        if self._hung_up is None:
            self._hung_up = asyncio.Event()
            if not self._link.begin_goodbye():
                self._hung_up.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.stop_timeout + END_GRACE):
                await self._hung_up.wait()
        await self._calls.inputs.aclose()
        self._release()

    def end(self, grace: float) -> None:
        """Say goodbye, unless that was done, and release everything; blocks."""
        self._calls.fail_all(self._status.unanswered_error)
        if self._hung_up is None:
            self._hung_up = asyncio.Event()
            self._link.say_goodbye(grace + END_GRACE)
        self._release()

    def _release(self) -> None:
        """Close everything; may be called again."""
        self._host = None
        self._report(False)
        self._calls.stop()
        self._link.close()
        self._calls.inputs.close()
