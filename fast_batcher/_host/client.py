"""The opening of an API process whose scheduler and workers are in the host process.

    DynBatcher --accept--> RemoteOpening --HostLink--> host: scheduler, workers
                callers <--settle--          <------

API process, on the event loop's thread. `RemoteOpening` follows the state of the host, which
decides about queues, deadlines, batches and retries, and joins another host when it has died. The
requests of one turn of the loop are one frame. Large arrays are copied into this process's range
of the shared memory on arrival (`HostInputs`); the host names the rows to its workers, and tells
when no worker views them any more. `OpenCalls` decides what follows if the host is stuck or dead.
"""

import asyncio
import atexit
import contextlib
import functools
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from fast_batcher._core.host import OpenCalls
from fast_batcher._core.prediction import Method
from fast_batcher._core.supervision import Restarts
from fast_batcher._core.values import (
    RETRYING,
    SENT,
    Event,
    Failure,
    Group,
    Request,
    SessionPlace,
    State,
    settle,
)
from fast_batcher._host import messages
from fast_batcher._host.inputs import HostInputs
from fast_batcher._host.link import HostLink, find_key, make_generation, make_hello
from fast_batcher._host.messages import Generation, Handlers, Hello, HostState, Welcome
from fast_batcher._host.protocol import (
    FRAME_ROOM,
    FRAME_SIZE,
    MOST_IN_FRAME,
    Row,
    pack_key,
    pack_options,
    unpack_error,
    unpack_failure,
)
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import Changes, CurrentModel, LiveSettings, LoopBinding, Status
from fast_batcher._opening.opening import Opening
from fast_batcher._opening.outcomes import CostEvaluator, timeout_of
from fast_batcher._opening.streams import ChunkQueue, add_chunk
from fast_batcher._parent.sending import decode
from fast_batcher._parent.staging import CopyState
from fast_batcher._process import after_fork_in_child, monotonic
from fast_batcher._transport.channels import Kind
from fast_batcher._transport.pickling import dump_atoms, dumps, loads, measure_size, one_line
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    ConfigurationError,
    DeadlineExceededError,
    NotReadyError,
    PoisonRequestError,
    QueueFullError,
    SessionLostError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.model import ModelKind, ModelSpec
from fast_batcher.observing import BatchAnswered, BatchDispatched, BatchLost, ReporterChanged
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation

logger = logging.getLogger("fast_batcher")

# Seconds between two looks for a host that another process may have started, perhaps with a model
# that can be loaded. A look takes a lock and a connection.
LOOK_INTERVAL = 2.0
# Seconds that a host may take to end after `stop_timeout`, when it kills its workers.
END_GRACE = 5.0


class RemoteOpening(Opening):
    """An opening that passes requests to the host process of a shared batcher."""

    def __init__(
        self, model: CurrentModel, live: LiveSettings, status: Status, ledger: Ledger
    ) -> None:
        settings = live.current
        self._key = find_key(model.first, live.first, status.name)
        methods = [Method(*method, settings.batch_limit) for method in model.spec.methods]
        super().__init__(LoopBinding(status.name), methods, settings, status, ledger)
        loop = self.binding.loop
        self._model = model
        self._live = live
        # The requests without an outcome.
        self._open = OpenCalls(settings.timeout, idempotent=settings.idempotent)
        self._inputs = HostInputs(settings, loop, self._name, self._open, self._send_later)
        self._link = HostLink(
            self._key,
            self._introduce,
            settings.max_frame_bytes + FRAME_ROOM,
            settings.start_timeout,
            loop,
            self._name,
            handlers=self._list_handlers(),
            joined=self._host_joined,
            unreachable=self._host_unreachable,
            lost=self._host_lost,
        )
        self._evaluator = CostEvaluator(settings, self._name, methods)
        # Chunks that were read since the last run, by the ids of their streams.
        self._reads: Counter[int] = Counter()
        # Ids of sent requests whose callers have gone.
        self._abandoned: list[int] = []
        # Requests for which the host's queue has room, as far as is known, and requests that this
        # host was sent.
        self._room = settings.queue_limit
        self._sent = 0
        self._restarts = Restarts(
            settings.max_restarts, settings.restart_window, settings.restart_backoff
        )
        # The last state that the host has sent; None before the first, and without a host.
        self._host: HostState | None = None
        # Calls of `reload` without an outcome, by number; without a host they wait for the next.
        self._reloads: dict[int, tuple[messages.ReloadCall, asyncio.Future[None]]] = {}
        self._reload_numbers = itertools.count()
        # Sessions of callers that may have a place in the host, by their ids: from their requests
        # until their ends, unless the host says that they have none. One that its caller has
        # dropped ends in the host, by its timeout.
        self._caller_sessions: WeakValueDictionary[int, SessionPlace] = WeakValueDictionary()
        self._session_ids = itertools.count()
        # Whether a host was open.
        self._was_open = False
        # The figures of that state, or of the last one of a host that is gone.
        self._stats: BatcherStats | None = None
        self._explanation = Explanation()
        # Empty without observers that follow batches.
        self._followers = ledger.observers.followers
        # Whether the host sends events for the observers.
        self._is_observed = False
        # Whether this process reports: as the host has said, and without a host for itself.
        self._is_reporter = True
        # Whether sessions without a place get none any more.
        self._is_draining = False
        # Set when there is no host to wait for after the goodbye; None before the goodbye.
        self._hung_up: asyncio.Event | None = None

    # Requests: from the caller to the host.

    def accept(self, request: Request) -> None:
        """Add a request to those of this turn; called in the caller's context."""
        if self._evaluator.is_needed:
            error = self._evaluator.evaluate(request) or pack_group(request)
            if error is not None:
                self._ledger.reject(request, error)
                return
        if self._followers:
            request.context = self._ledger.observers.copy_context()
        if self.settings.max_queue_bytes is not None:
            request.size = measure_size(request.value)
        if crowd := self._find_crowd(request):
            self._ledger.reject(request, QueueFullError(crowd))
            return
        if request.session is not None and not self._note_session(request, request.session):
            return
        self._open.add(monotonic(), request)
        if self._inputs.stage(request):
            self._open.unsent[request.id] = request
        self.run_soon()

    def _find_crowd(self, request: Request) -> str:
        """Describe the requests that wait here and leave no room for this one; "" without such."""
        if not self._link.is_connected and len(self._open) >= self.settings.queue_limit:
            return f"{len(self._open)} requests wait for the host process already"
        limits = self.settings.queue_limit, self.settings.max_queue_bytes
        if self._open.may_wait(request, *limits):
            return ""
        part = f"this process's part of max_shared_bytes={self.settings.max_shared_bytes}"
        return f"{len(self._open.crowded)} large inputs wait for room in {part}"

    def _note_session(self, request: Request, session: SessionPlace) -> bool:
        """Number a new session; reject the request and return False if its session has ended.

        The host, too, lets sessions go on while this process drains, and ends them at the goodbye.
        """
        if session.end is not None:
            error = SessionLostError(f"the session has ended: {session.end}")
            self._ledger.reject(request, error)
            return False
        if self._hung_up is not None:
            closed = BatcherClosedError(f"{self._name} is closing, and takes no new session")
            self._ledger.reject(request, closed)
            return False
        if session.id < 0:
            session.id = next(self._session_ids)
        session.may_begin = not self._is_draining
        return True

    def _send_later(self, request: Request) -> None:
        """Send a request whose large input was copied some time after its arrival."""
        if not request.is_settled:
            keep_deadline(request, self.settings.max_latency)
            self._open.unsent[request.id] = request
            self.run_soon()

    def _run(self) -> None:
        """Send the requests of this turn of the loop, and set the timer."""
        self._is_scheduled = False
        self._inputs.arena.end_turn()
        if self._open.next_expiry <= monotonic():
            self._expire()
        self._inputs.stage_waiting()
        self._flush()
        self._wake_at(self._open.next_expiry)

    def _flush(self) -> None:
        """Send the arrivals and the cancellations, if there is a host."""
        if not self._link.is_connected:
            return
        self._observe()
        # First, so that a session whose caller has gone on has one request at a time.
        if self._abandoned:
            abandoned, self._abandoned = self._abandoned, []
            self._link.tell(messages.Abandon(abandoned))
        arrivals = [*self._open.unsent.values()]
        self._open.unsent.clear()
        for begin in range(0, len(arrivals), MOST_IN_FRAME):
            self._send(arrivals[begin : begin + MOST_IN_FRAME])
        if self._reads:
            self._link.tell(messages.StreamsRead(dict(self._reads)))
            self._reads.clear()

    def _send(self, requests: list[Request]) -> None:
        """Send requests, in one frame if their inputs are small; fail unsendable ones."""
        body = dump_atoms([request.value for request in requests], FRAME_SIZE)
        if body is not None:
            self._send_frame(requests, body)
            return
        unsendable: list[tuple[Request, BatcherError]] = []
        sent: list[Request] = []
        packed: list[Any] = []
        size = 0
        for request in requests:
            item = self._inputs.pack(request)
            if isinstance(item, BatcherError):
                unsendable.append((request, item))
                continue
            sent.append(request)
            packed.append(item)
            size += len(item) if isinstance(item, bytes) else 0
            if size >= FRAME_SIZE:
                self._send_frame(sent, packed)
                sent, packed, size = [], [], 0
        if sent:
            self._send_frame(sent, packed)
        for request, error in unsendable:
            self._fail_unsendable(request, error)

    def _send_frame(self, requests: list[Request], inputs: bytes | list[bytes | Row]) -> None:
        for request in requests:
            request.phase = SENT
            if self._model.spec.kind is ModelKind.STEPS:
                request.chunks = []
                if isinstance(request.caller, ChunkQueue):
                    request.caller.tell_read = functools.partial(self._note_read, request.id)
            if request.session is not None:
                self._caller_sessions[request.session.id] = request.session
        self._sent += len(requests)
        self._room -= len(requests)
        ids = [request.id for request in requests]
        contexts = self._ledger.observers.carry(requests) if self._followers else None
        self._link.send(Kind.ITEMS, dumps((ids, inputs, pack_options(requests), contexts)))

    def _resend(self, request_id: int) -> None:
        """Send the input of a request once more: the worker that had it in its memory is dead."""
        request = self._open.find(request_id)
        item = None if request is None else self._inputs.pickle(request.value)
        if isinstance(item, BatcherError):
            assert request is not None, "its input was pickled"
            self._fail_unsendable(request, item)
            item = None
        self._link.tell(messages.Resent(request_id, item))

    def _fail_unsendable(self, request: Request, error: BatcherError) -> None:
        if settle(request):
            self._fail(request, error, "not sendable")
        self._remove(request)

    # Answers: from the host to the callers.

    def _list_handlers(self) -> Handlers:
        return {
            Kind.ITEMS: self._take_outcomes,
            messages.Resend: self._resend,
            messages.Unplaced: self._note_unplaced,
            messages.StateSent: self._take_state,
            messages.Reconfigure: self._merge_settings,
            messages.ReloadBegun: self._model.begin_reload,
            messages.ReloadEnded: self._take_generation,
            messages.Reloaded: self._finish_reload,
            messages.Told: self._ledger.observers.tell,
            messages.Followed: self._tell_followers,
            messages.ReporterChosen: self._report,
        }

    def _take_outcomes(
        self,
        ids: list[int],
        values: bytes | list[Any],
        ended: list[int],
        freed: list[int],
        room: tuple[int, int],
    ) -> None:
        """Give callers the outcomes or chunks of their requests; streams in `ended` have all.

        `room` has the room that the host's queue had, and the requests that the host had received.
        """
        self._room = room[0] - (self._sent - room[1])
        if freed:
            self._inputs.free(freed)
        calls, (values, read) = self._open, _open_values(values)
        for request_id, packed in zip(ids, values, strict=True):
            request = calls.find(request_id)
            if request is None:
                continue
            outcome = read(packed)
            if request.chunks is None:
                self._answer(request, outcome)
            elif type(outcome) is not Failure:
                add_chunk(request, outcome)
            else:  # of a chunk that cannot be read here the host does not know
                self._ledger.give(request, outcome)
                self.abandon(request)
        for request_id in ended:
            request = calls.find(request_id)
            if request is not None:
                self._answer(request, request.chunks)
        self._notice_drained()

    def _answer(self, request: Request, outcome: Any) -> None:
        """Give a caller the outcome of a request, which the host counts."""
        self._open.remove(request.id)
        if settle(request):
            self._ledger.give(request, outcome)

    def _note_read(self, request_id: int) -> None:
        self._reads[request_id] += 1
        self.run_soon()

    def _expire(self) -> None:
        """Expire the requests that the host should have ended before."""
        self._link.read_all()  # the loop may have been blocked
        for request in self._open.expire(monotonic()):
            limit = f"its timeout of {timeout_of(request, self.settings)} seconds"
            if request.phase == SENT:
                text = f"the host process had not answered within {limit}"
                self._ledger.give(request, Failure(DeadlineExceededError(text)))
                self._abandoned.append(request.id)
            else:
                self._ledger.counters.submitted += 1
                self._ledger.expire(request, *self._explain_unsent(request, limit))
        self._notice_drained()

    def _explain_unsent(self, request: Request, limit: str) -> tuple[BatcherError, str]:
        """Return the error and the reason of a request that was not sent in time."""
        if request.staged is not None and request.staged.state is CopyState.CROWDED:
            text = f"shared memory had no room for its large input within {limit}"
            return DeadlineExceededError(text), "waiting"
        return NotReadyError(f"no host process was there within {limit}"), "not ready"

    def _fail(self, request: Request, error: BatcherError, reason: str) -> None:
        """Give a caller an error; the request is settled. The host counts its own."""
        if request.phase == SENT:
            self._ledger.give(request, Failure(error))
        else:
            self._ledger.counters.submitted += 1
            self._ledger.fail(request, error, reason)

    def _fail_all(self) -> None:
        """Fail every request without an outcome; each caller gets an error of its own."""
        # The futures of a closed loop cannot be settled.
        is_beyond_reach = self.binding.loop.is_closed()
        for request in self._open.take_all():
            if request.staged is not None:
                request.staged.release()
            if not is_beyond_reach:
                self._fail(request, self.status.unanswered_error(), "closed")
        self._notice_drained()

    def _remove(self, request: Request) -> None:
        """Forget a settled request."""
        if request.staged is not None:
            request.staged.release()
        self._open.remove(request.id)
        self._notice_drained()

    # Other calls.

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""
        if settle(request):
            if request.phase == SENT:
                self._abandoned.append(request.id)
                self.run_soon()
            else:
                self._ledger.counters.submitted += 1
                self._ledger.cancel(request, "waiting")
            self._remove(request)

    def begin_session(self) -> None:
        """Do nothing: the host is told with each request."""

    def end_session(self, session: SessionPlace) -> None:
        """End the session of a caller; must not await."""
        if session.end is None:
            session.end = "its caller has ended it"
            self._fail_lost()
            if self._caller_sessions.pop(session.id, None) is not None:
                self._link.tell(messages.EndSessions([session.id]))
            self._notice_drained()

    def _note_unplaced(self, ends: dict[int, str | None]) -> None:
        """Follow the host, and let it forget the sessions; a new one may begin with a later call.

        The host answers the open request of a session first, and tells again.
        """
        unplaced = ends.keys() - {call.session.id for call in self._open if call.session}
        for session_id in unplaced:
            session = self._caller_sessions.pop(session_id, None)
            if session is not None:
                session.end = ends[session_id]
        self._link.tell(messages.EndSessions([*unplaced]))
        self._notice_drained()

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the host's queue has room, as far as is known."""
        most = self.settings.max_queue_bytes
        if most is not None:
            request.size = measure_size(request.value)
            waiting = sum([open_call.size for open_call in self._open])
            if waiting and waiting + request.size > most:
                return False
        own = 0
        if request.share is not None:
            # The calls of other processes count too, but are not known here.
            own = self._open.held_by(request.share)
        return self._room > own + len(self._open.unsent) + len(self._open.crowded) + ahead

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self.run_soon()  # the run ends the arena's turn
        return self._inputs.allocate(dtype, shape)

    # State and statistics.

    @property
    def load(self) -> tuple[int, int, int]:
        """Ready workers, waiting requests and running requests of the host."""
        host = self._host
        if host is None:
            return 0, len(self._open), 0
        return host.workers_ready, host.stats.waiting, host.stats.running

    def read_stats(self) -> BatcherStats:
        """Return the statistics of the host, which are up to a second old."""
        here = super().read_stats()
        host = self._stats
        if host is None:
            return replace(here, is_reporter=self._is_reporter)
        submitted = host.submitted
        if self._host is None:  # the open requests of the other processes are not known any more
            submitted += here.waiting - host.waiting - host.running
        # The host has not seen the requests that were counted here.
        return replace(
            host,
            state=here.state,
            num_workers=here.num_workers if self._host is None else host.num_workers,
            generation=here.generation,
            workers_ready=here.workers_ready,
            waiting=here.waiting,
            running=here.running,
            is_reporter=self._is_reporter,
            submitted=submitted + here.submitted,
            failed=host.failed + here.failed,
            expired=host.expired + here.expired,
            cancelled=host.cancelled + here.cancelled,
            rejected=host.rejected + here.rejected,
            cache_hits=here.cache_hits,
            cache_misses=here.cache_misses,
            cache_coalesced=here.cache_coalesced,
            loop_blocked=here.loop_blocked,
            # There are none without a host.
            live_streams=min(host.live_streams, here.running),
            places=host.places and self.settings.batch_limit * here.workers_ready,
            gpu_bytes={} if self._host is None else host.gpu_bytes,
            sessions=0 if self._host is None else host.sessions,
        )

    def explain(self) -> Explanation:
        """Return the explanation of the host, which is up to a second old."""
        return self._explanation

    def _observe(self) -> None:
        """Ask the host for events, once there is an observer."""
        if self._ledger.observers.active and not self._is_observed:
            self._is_observed = True
            self._link.tell(messages.Observe())

    def _tell_followers(self, dispatched: BatchDispatched, end: BatchAnswered | BatchLost) -> None:
        """Tell the observers that follow batches of a batch that has ended."""
        self._ledger.observers.follow(dispatched, lambda context: context)
        self._ledger.observers.tell(end, follow=True)

    def _report(self, is_reporter: bool) -> None:
        """Begin or cease to report."""
        self._is_reporter = is_reporter
        self._ledger.observers.tell(ReporterChanged(self._name, is_reporter))

    # Events of the link.

    def _introduce(self) -> Hello:
        self._is_observed = bool(self._ledger.observers.active)
        generation = self._ledger.counters.generation
        return make_hello(
            self._model.spec,
            generation,
            self._live,
            self._key,
            observes=self._is_observed,
            was_open=self._was_open,
        )

    def _host_joined(self, welcome: Welcome, memory: tuple[int, int] | None) -> None:
        """Use a host that has welcomed this process, and send it the requests that wait."""
        logger.info("%s: joined the host process (pid %d)", self._name, welcome.process.pid)
        self._link.tell(messages.Reconfigure(self._live.changes))  # some after the introduction
        for call, _ in self._reloads.values():
            self._link.tell(call)
        self._report(False)  # the host tells which process does
        self._inputs.use(memory, welcome.start, welcome.length)
        self._room, self._sent = welcome.room, 0
        for request in [*self._open.unsent.values()]:
            keep_deadline(request, self.settings.max_latency)
            if not self._inputs.stage(request):
                del self._open.unsent[request.id]
        self.run_soon()

    def _host_unreachable(self, error: BaseException) -> None:
        """Break while opening; afterwards count it as the loss of a host."""
        if not isinstance(error, BatcherError):
            cause = error
            error = WorkerStartupError(f"the host process cannot be started: {cause!r}")
            error.__cause__ = cause
        if self._hung_up is not None:
            self._hung_up.set()
        elif self.status.state is State.OPENING:
            self._fail_start(error)
            self._look_later()
        elif self.status.start_error is not None:
            self._look_later()
        else:
            logger.warning("%s: %s; trying again", self._name, error)
            self._rejoin_later()

    def _host_lost(self) -> None:
        """Join the next host, which gets the requests of the dead one."""
        host, self._host = self._host, None
        self.status.waits_for = ""
        if self._hung_up is not None:  # after the goodbye; no request is left
            self._hung_up.set()
            return
        # A host whose first state has not come may have workers.
        is_open = host is None or host.state == State.OPEN or host.workers_ready > 0
        self._retry_requests(had_workers=is_open)
        self._model.end_reload()
        for number in [*self._reloads]:
            text = f"{self._name}: the host process died while it reloaded"
            self._end_reload(number, WorkerLostError(text))
        self._report(True)
        if self.status.start_error is None:
            logger.warning("%s: the host process has died; another takes its place", self._name)
            self._rejoin_later()
        else:  # it has ended because the model cannot be loaded
            self._look_later()

    def _look_later(self) -> None:
        """Join the next host that another process starts, perhaps with another model."""
        self._link.join_later(LOOK_INTERVAL, may_start=False)

    def _retry_requests(self, *, had_workers: bool) -> None:
        """Send the requests of a dead host again once there is another, or fail them."""
        self._inputs.lose()
        self._inputs.stage_waiting()  # all may be sent to the next host
        for request in self._open:
            if request.staged is not None:
                request.staged.release()
        failed, poisonous = self._open.host_lost(had_workers=had_workers)
        for request in failed:
            kind = WorkerLostError if request.session is None else SessionLostError
            error = kind("the host process died with this request")
            self._fail(request, error, "worker lost")
        for request in poisonous:
            text = "two host processes died with this request; it is not sent again"
            self._fail(request, PoisonRequestError(text), "poison request")
        self._abandoned.clear()
        self._end_sessions("the host process died")
        self._fail_lost()
        self._notice_drained()

    def _end_sessions(self, reason: str) -> None:
        """Note that no host has the sessions any more."""
        for session in self._caller_sessions.values():
            session.end = reason
        self._caller_sessions.clear()

    def _fail_lost(self) -> None:
        """Fail the requests that were not sent, and whose sessions have ended."""
        for request in [*self._open]:
            session, was_sent = request.session, request.phase == SENT
            if session is not None and session.end is not None and not was_sent and settle(request):
                error = SessionLostError(f"the session has ended: {session.end}")
                self._fail(request, error, "session lost")
                self._remove(request)

    def _rejoin_later(self) -> None:
        delay, is_given_up = self._restarts.lost(monotonic())
        if is_given_up:
            reason = (
                f"the host process was restarted max_restarts={self.settings.max_restarts} times "
                f"within restart_window={self.settings.restart_window} seconds"
            )
            self._break(reason, delay)
        self._link.join_later(delay)

    def _take_state(self, host: HostState, is_last: bool) -> None:
        """Bring the batcher into the state of its host."""
        self._inputs.memory.give_back_unused()
        self._link.host_ends = is_last
        self._host = host
        self._stats, self._explanation = host.stats, host.explanation
        state = self.status.state
        self.status.waits_for = host.waits_for
        if host.start_error is not None and state is State.OPENING:
            self._fail_start(unpack_error(host.start_error))
        elif host.given_up and (self.status.takes_calls or self.status.given_up):
            self._break(*host.given_up)
        elif host.state == State.OPEN:
            self._restarts.ready(monotonic())
            self._was_open = True
            if state is State.OPENING:
                self.status.move(Event.ALL_READY)
            elif state is State.BROKEN:
                self.status.recover()
        if self._hung_up is None:
            self._link.tell(messages.StateRead())
            self._observe()

    def _fail_start(self, error: BatcherError) -> None:
        self.status.fail_start(error)
        self._fail_all()
        self._end_reloads()

    def _break(self, reason: str, seconds: float) -> None:
        """Fail calls at once, until the next try succeeds."""
        self.status.give_up(reason, seconds)
        self._fail_all()
        if not self._link.is_connected:
            self._end_reloads()

    # Life.

    def begin(self) -> None:
        """Join the host, or start it."""
        self.status.begin()
        self._report(True)
        _openings.add(self)
        self._link.join()

    def reconfigure(self, settings: Settings) -> None:
        """Send the changes to the host, for all API processes."""
        self._flush()  # requests that came before the change
        self._use(settings)
        self._link.tell(messages.Reconfigure(self._live.changes))

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self._inputs.arena.batch_size = settings.batch_limit

    def _merge_settings(self, changes: Changes) -> None:
        """Follow the settings of the host, which another API process has changed."""
        if self._live.merge(changes):
            self._use(self._live.current)

    # Reloads.

    @property
    def can_reload(self) -> bool:
        """Whether there is a host, or will be one without another opening."""
        return self.status.state is not State.BROKEN or (
            self._link.is_connected and self.status.start_error is None
        )

    async def reload(self, model_spec: ModelSpec) -> None:
        """Let the host replace its workers by workers with another model."""
        call = messages.ReloadCall(next(self._reload_numbers), make_generation(0, model_spec))
        self._link.tell(call)
        outcome: asyncio.Future[None] = self.binding.loop.create_future()
        self._reloads[call.number] = call, outcome
        await outcome

    def _finish_reload(self, number: int, packed: tuple[bytes, str] | None) -> None:
        self._end_reload(number, None if packed is None else unpack_error(packed))

    def _end_reload(self, number: int, error: BatcherError | None) -> None:
        """Give a call of `reload` its outcome, unless the end of the opening came first."""
        _, outcome = self._reloads.pop(number, (None, None))
        if outcome is None or outcome.done() or outcome.get_loop().is_closed():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    def _end_reloads(self) -> None:
        """Fail the calls of `reload`: no host will hear of them, or tell of them."""
        for number in [*self._reloads]:
            self._end_reload(number, self.status.unanswered_error())

    def _take_generation(self, generation: Generation) -> None:
        """Follow the model of the host, which this or another API process has reloaded."""
        number, model, identity, _ = generation
        spec = self._model.spec
        self._ledger.counters.generation = number
        if identity == spec.identity:
            self._model.end_reload()
            return
        self._model.end_reload(replace(spec, pickled=model, identity=identity, arguments=None))
        logger.info("%s: the workers have another model, generation %d", self._name, number)

    def begin_drain(self) -> None:
        """Let no further session begin; the batcher sends no other requests."""
        self._is_draining = True

    def _notice_drained(self) -> None:
        """Note that calls have ended; there may be room for an input that waits."""
        if self._open.crowded:
            self.run_soon()
        super()._notice_drained()

    def _is_drained(self) -> bool:
        return not (len(self._open) or self._caller_sessions)

    async def aclose(self) -> None:
        """Wait for the accepted requests, and say goodbye; the last one waits for the workers."""
        await self._wait_until_drained()
        self._fail_all()
        self._end_sessions("the batcher was closed")
        self._end_reloads()
        if self._hung_up is None:
            self._hung_up = asyncio.Event()
            if not self._link.begin_goodbye():
                self._hung_up.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.stop_timeout + END_GRACE):
                await self._hung_up.wait()
        await self._inputs.memory.aclose()
        self._release()

    def end(self, grace: float) -> None:
        """Say goodbye, unless that was done, and release everything; blocks."""
        self._fail_all()
        self._end_reloads()
        if self._hung_up is None:
            self._hung_up = asyncio.Event()
            self._link.say_goodbye(grace + END_GRACE if grace else 0.0)
        self._release()

    def end_for(self, has_ended: threading.Event) -> None:
        """End for another thread, which waits."""
        try:
            self.end(self.settings.stop_timeout)
        finally:
            has_ended.set()

    def _release(self) -> None:
        """Close everything; may be called again."""
        self._host = None
        self._report(False)
        self._stop_timer()
        self._link.close()
        self._inputs.close()
        _openings.discard(self)


# Openings that have not been ended. The references keep one whose batcher was dropped.
_openings: set[RemoteOpening] = set()
# In a forked copy of the process the connections are closed.
after_fork_in_child(_openings.clear)


@atexit.register
def end_forgotten_openings() -> None:
    """End every opening that was not ended: its host would wait for the next process."""
    for opening in [*_openings]:
        grace, has_ended = opening.settings.stop_timeout, threading.Event()
        if opening.binding.runs_elsewhere and opening.binding.call(opening.end_for, has_ended):
            has_ended.wait(grace + END_GRACE)
        else:
            opening.end(grace)


def _open_values(values: bytes | list[Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the values of a frame, and the function that reads one of them."""
    if isinstance(values, bytes):
        return loads(values), lambda value: value
    return values, _read_outcome


def _read_outcome(packed: bytes | tuple[Any, ...]) -> Any:
    return decode(packed) if isinstance(packed, bytes) else unpack_failure(packed)


def keep_deadline(request: Request, max_latency: float | None) -> None:
    """Let the host count from the arrival here, for a request that is sent some time later."""
    request.has_deadline = True
    if request.phase == RETRYING:  # it is not rejected as late: it was accepted before
        request.target = math.inf
    elif request.timeout is None and max_latency is not None:
        request.target = request.arrival + max_latency


def pack_group(request: Request) -> BatcherError | None:
    """Replace the key of a request's group by bytes; return the error of one without a pickle."""
    group = request.group
    if group is not None and group.key is not None:
        try:
            request.group = Group(pack_key(group.key), group.method)
        except Exception as error:  # noqa: BLE001  pickling is the user's code
            return ConfigurationError(
                f"group_by returned a {type(group.key).__qualname__} that cannot be "
                f"pickled ({one_line(error)}): return a string, a number or a tuple"
            )
    return None
