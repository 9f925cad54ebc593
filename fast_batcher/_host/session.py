"""`RemoteSession`: a session whose scheduler and workers are in the host process.

    DynBatcher --accept--> HostCalls --HostLink--> host: scheduler, workers
                callers <--settle--        <------

API process, on the event loop's thread. The host decides about queues, deadlines, batches and
retries. This module follows its state, and joins another host when it has died.
"""

import asyncio
import logging
import sys
import warnings
from dataclasses import fields, replace
from importlib.machinery import PathFinder
from typing import Any

from fast_batcher._asyncio.binding import LoopBinding
from fast_batcher._asyncio.ledger import Ledger
from fast_batcher._asyncio.status import Status
from fast_batcher._clock import monotonic
from fast_batcher._core.lifecycle import Event, State
from fast_batcher._core.messages import Request
from fast_batcher._core.restarts import Restarts
from fast_batcher._host.calls import HostCalls
from fast_batcher._host.identity import HostKey, make_key
from fast_batcher._host.link import HostLink
from fast_batcher._host.protocol import FRAME_ROOM, Hello, HostState, Welcome, unpack_start_error
from fast_batcher._transport.codec import dumps, loads
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    ConfigurationError,
    WorkerStartupError,
)
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Reconfiguration, Settings
from fast_batcher.stats import BatcherStats, Explanation

logger = logging.getLogger("fast_batcher")

# Settings that mean nothing to a host, or are no plain values.
NOT_OF_HOST = frozenset({"cost", "group_by", "observers", "auto_open", "name", "shared"})
# Seconds that a host may take to end after `stop_timeout`, when it kills its workers.
END_GRACE = 5.0


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a host needs."""
    names = [field.name for field in fields(settings) if field.name not in NOT_OF_HOST]
    return {name: getattr(settings, name) for name in names}


def find_key(model_spec: ModelSpec, settings: Settings, name: str) -> HostKey:
    """Make the key of the host for a batcher of this process.

    Raises:
        ConfigurationError: The host's workers cannot import the model.
    """
    module = model_spec.module
    if module == "__main__":
        raise ConfigurationError(
            f"shared={settings.shared!r}: {model_spec.name} is defined in the program that is run, "
            "which the workers of another process cannot import; put it into a module of its own"
        )
    payload = dumps((plain_settings(settings), model_spec.pickled))
    return make_key(settings.shared, payload, _find_file(module), name)


def _find_file(module: str) -> str | None:
    """Return the file of a module, which may not be imported here; None without a file."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    spec, path, parents = None, None, module.split(".")
    # A package of it is not imported, either: that may take long, and have side effects.
    for end in range(1, len(parents) + 1):
        spec = PathFinder.find_spec(".".join(parents[:end]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return None if spec is None else spec.origin


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
        self.binding = LoopBinding(name)
        self._link = HostLink(
            self._key,
            self._make_hello,
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
        # From that state, or from the one of a host that is gone.
        self._stats: BatcherStats | None = None
        self._explanation = Explanation()
        # Done when there is no host to wait for after the goodbye; None before the goodbye.
        self._hung_up: asyncio.Future[None] | None = None

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
            return here
        rejected = host.rejected + here.rejected
        return replace(host, state=here.state, workers_ready=workers_ready, rejected=rejected)

    def explain(self) -> Explanation:
        """Return the explanation of the host, which is up to a second old."""
        return self._explanation

    # Opening.

    def begin(self) -> None:
        """Join the host, or start it."""
        self._status.begin()
        self._link.join()

    def _make_hello(self) -> Hello:
        settings = self._settings
        self._calls.is_observed = bool(self._ledger.observers.active)
        return Hello(
            settings=plain_settings(settings),
            has_costs=settings.cost is not None,
            has_groups=settings.group_by is not None,
            name=self._name,
            model_name=self._model_spec.name,
            model=self._model_spec.pickled,
            sys_path=list(sys.path),
            root_level=logging.getLogger().level,
            library_level=logging.getLogger("fast_batcher").getEffectiveLevel(),
            captures_warnings=warnings.showwarning.__module__ == "logging",
            observes=self._calls.is_observed,
            supervisor=self._key.supervisor,
        )

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings in the host, for all API processes.

        Raises:
            RuntimeError: The calling thread is not that of the event loop.
        """
        self.binding.require_own_thread("reconfigure()")
        self._settings = settings
        self._calls.inputs.reconfigure(settings.max_batch_size)
        names = Reconfiguration.__annotations__
        self._link.send(Kind.RECONFIGURE, dumps({name: getattr(settings, name) for name in names}))

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed."""
        self.binding.rebind(loop)
        self._link.rebind(loop)
        self._calls.rebind(loop)

    # Requests.

    def accept(self, request: Request) -> None:
        """Add a request to those of this turn; called in the caller's context."""
        self._calls.accept(request)

    def has_room(self, request: Request) -> bool:
        """Return whether the host's queue has room, as far as is known."""
        return self._calls.has_room(request)

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""
        self._calls.abandon(request)

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self._calls.run_soon()  # its run ends the arena's turn
        return self._calls.inputs.allocate(dtype, shape)

    # Events of the link.

    def host_joined(self, welcome: Welcome, memory: int) -> None:
        """Use a host that has welcomed this process, and send it the requests that wait."""
        logger.info("%s: joined the host process (pid %d)", self._name, welcome.pid)
        self._calls.room = welcome.room
        self._calls.inputs.use(memory, welcome.start, welcome.length)
        self._calls.run_soon()

    def host_unreachable(self, error: BaseException) -> None:
        """Break while opening; afterwards count it as the loss of a host."""
        if isinstance(error, BatcherError):
            told = error
        else:
            told = WorkerStartupError(f"the host process cannot be started: {error!r}")
            told.__cause__ = error
        if self._hung_up is not None:
            self._end_wait()
        elif self._status.state is State.OPENING:
            self._fail_start(told)
        else:
            logger.warning("%s: %s; trying again", self._name, told)
            self._rejoin_later()

    def host_lost(self) -> None:
        """Join the next host, which gets the requests of the dead one."""
        self._host = None
        self._calls.host_lost()
        if self._hung_up is not None:
            self._end_wait()
        # After a failed start no host is there until the batcher is opened again.
        elif not self._status.has_failed_to_start:
            logger.warning("%s: the host process has died; another takes its place", self._name)
            self._rejoin_later()

    def _end_wait(self) -> None:
        """Note that no host is left to wait for."""
        if self._hung_up is not None and not self._hung_up.done():
            self._hung_up.set_result(None)

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
        elif frame.kind is Kind.EVENT:
            self._ledger.observers.tell(loads(frame.body))
        else:
            self._calls.take(frame)

    # The host's state.

    def _follow(self, host: HostState) -> None:
        """Bring the batcher into the state of its host."""
        self._host = host
        self._stats, self._explanation = host.stats, host.explanation
        state = self._status.state
        if host.start_error is not None and state is State.OPENING:
            self._fail_start(unpack_start_error(host.start_error))
        elif host.given_up is not None and state not in (State.DRAINING, State.CLOSED):
            self._break(*host.given_up)
        elif host.state == State.OPEN:
            self._restarts.ready(monotonic())
            if state is State.OPENING:
                self._status.move(Event.ALL_READY)
            elif state is State.BROKEN:
                self._status.recover()

    def _fail_start(self, error: BatcherError) -> None:
        self._status.fail_start(error)
        self._calls.fail_all(self._closed_error)

    def _break(self, reason: str, seconds: float) -> None:
        """Fail calls at once, until the next try succeeds."""
        self._status.give_up(reason, seconds)
        self._calls.fail_all(self._closed_error)

    def _closed_error(self) -> BatcherError:
        return self._status.broken_error() or BatcherClosedError(
            f"{self._name} was closed before it had answered"
        )

    # Ending.

    def begin_drain(self) -> None:
        """Do nothing: the batcher sends no further requests."""

    async def wait_until_drained(self) -> None:
        """Wait at most `drain_timeout` for the outcomes of the accepted requests."""
        await self._calls.wait_until_drained()

    async def aclose(self) -> None:
        """Fail the requests that are left, and say goodbye; the last one waits for the workers."""
        self._calls.fail_all(self._closed_error)
        if self._hung_up is None:
            self._hung_up = self.binding.loop.create_future()
            if not self._link.begin_goodbye():
                self._end_wait()
        await asyncio.wait([self._hung_up], timeout=self._settings.stop_timeout + END_GRACE)
        self._release()

    def end(self, grace: float) -> None:
        """Say goodbye, unless that was done, and release everything; blocks."""
        self._calls.fail_all(self._closed_error)
        if self._hung_up is None:
            self._hung_up = self.binding.loop.create_future()
            self._link.say_goodbye(grace + END_GRACE)
        self._release()

    def _release(self) -> None:
        """Close everything; may be called again."""
        self._calls.stop()
        self._link.close()
        self._calls.inputs.close()
