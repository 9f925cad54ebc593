"""The session: everything that `open` creates and the next close releases. Event loop's thread.

    DynBatcher --accept--> Pump --submit, poll--> Scheduler
                            | Dispatch                ^
                            v                         | batch_done
                        BatchSender ==> worker ==> Answers --settle--> callers

`Session` is what a batcher needs of an opening. `LocalSession` schedules the requests in this
process, the API process or the host, and owns the workers; `RemoteSession` (`_host/client.py`)
passes them to the host process of a shared batcher.

One run of the pump applies the events, polls the scheduler, carries out the actions and sets the
timer. It runs once per turn of the event loop for all requests that arrived in that turn, so that
no request has a task, timer, lock or event of its own. The pump makes no decisions, which is for
the scheduler. `Answers` gives a worker that has answered its next batch first; then each caller of
the answered batch gets its outcome.

Callbacks of the event loop run in an empty context (`contextvars`): by default they would see, and
keep, the context variables of the first caller of a turn. `end` may run on any thread once the loop
is closed.
"""

import asyncio
import functools
import logging
import math
from asyncio import AbstractEventLoop
from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from fast_batcher._core.explanation import Setup, explain
from fast_batcher._core.policy import make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.queue import BatchPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import (
    QUEUED,
    RETRYING,
    Batch,
    Dispatch,
    Event,
    Expire,
    Fail,
    Failure,
    Limits,
    Replace,
    Request,
    Skip,
    Stall,
    State,
)
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.sending import BatchSender, SenderEvents
from fast_batcher._parent.staging import MOST_AT_ONCE, MemoryService
from fast_batcher._parent.worker_process import Exit, WorkerProcess
from fast_batcher._process import monotonic
from fast_batcher._session.life import LoopBinding, Status
from fast_batcher._session.outcomes import CostEvaluator, Ledger, Reports, is_beyond_reach
from fast_batcher._shared_memory.outbox import Answer, OutboxReader
from fast_batcher._transport.channels import KIND_NAMES, Frame, Kind
from fast_batcher._transport.pickling import SerializedError, dumps, loads, measure_size, one_line
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    InferenceError,
    PoisonRequestError,
    TransportError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.model import ModelSpec
from fast_batcher.observing import WorkerChanged
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation


class Session(Protocol):
    """An opening of a batcher, bound to one event loop at a time."""

    @property
    def binding(self) -> LoopBinding:
        """Process, event loop and thread of the session."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods of a model that has several, by name."""

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""

    def read_stats(self) -> BatcherStats:
        """Return a snapshot of counts and quantiles."""

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""

    def begin(self) -> None:
        """Start the workers, without waiting for them."""

    def accept(self, request: Request) -> None:
        """Take over a request, whose caller gets exactly one outcome.

        Called in the caller's context, which the user's functions see.
        """

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of an accepted request, which may have been sent or have ended."""

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request that has not been accepted yet."""

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, which were checked before."""

    def begin_drain(self) -> None:
        """Expect no further requests, and finish the accepted ones."""

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model."""

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for the accepted requests, then end the workers."""

    def end(self, grace: float) -> None:
        """Release everything, and block until the workers are dead."""

    def rebind(self, loop: AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed.

        Callers that waited on the closed loop get no outcome.
        """


# An answer that is larger than a pipe is not late as long as each further part of it arrives within
# this many seconds. A worker that writes rarely waits longer for a CPU.
REST_OF_FRAME = 0.05


class Pump:
    """The loop of one session."""

    def __init__(
        self,
        scheduler: Scheduler,
        sender: BatchSender,
        pool: Pool,
        ledger: Ledger,
        evaluator: CostEvaluator,
        status: Status,
        reports: Reports,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._scheduler = scheduler
        self._sender = sender
        self._pool = pool
        self._ledger = ledger
        self._observers = ledger.observers
        # Empty without observers.
        self._active = ledger.observers.active
        self._find_fault = evaluator.find_fault if evaluator.is_needed else None
        self._status = status
        self._reports = reports
        self._loop = loop
        self._arena = sender.arena
        # Types of inputs that may be staged; empty until the first large input.
        self._staged_types = sender.arena.probes
        # Requests of this turn of the loop, and whether `_run` is scheduled to take them.
        self.arrivals: list[Request] = []
        self._is_scheduled = False
        # One timer for the earliest moment at which the scheduler wants to be polled.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        # Workers whose answer has arrived in part, with the moment by which more of it must arrive.
        self._answering: dict[int, float] = {}
        # Done when no request is left; None unless `wait_until_drained` waits.
        self._drained: asyncio.Future[None] | None = None

    # Requests.

    def accept(self, request: Request) -> None:
        """Add a request to the arrivals of this turn, which the next run of the pump submits.

        Called in the caller's context, which the user's functions see.
        """
        if self._active:
            request.context = self._observers.copy_context()
        if self._find_fault is not None:
            error = self._find_fault(request)
            if error is not None:
                self._ledger.reject(request, error, "invalid input")
                return
        if request.priority:
            self._scheduler.rank_requests()
        staged_types = self._staged_types
        if staged_types and type(request.value) in staged_types and self._has_queue_room():
            request.staged = self._arena.stage(request.value)
        self.arrivals.append(request)
        if not self._is_scheduled:
            self.run_soon()

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of an accepted request, if it waits."""
        self.take_arrivals(monotonic())  # the request may be among them
        self._scheduler.raise_priority(request, priority)

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request behind the arrivals of this turn."""
        if not self._scheduler.counts_bytes:
            return self._has_queue_room(ahead)
        # The queue keeps the sum of its bytes; here it would be computed for each request.
        self.take_arrivals(monotonic())
        return self._scheduler.has_room(ahead + 1, request)

    def _has_queue_room(self, ahead: int = 0) -> bool:
        return self._scheduler.has_room(len(self.arrivals) + ahead + 1)

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone.

        This must not await: a cancel scope raises again at every `await`.
        """
        self.take_arrivals(monotonic())  # the request may be among them
        self._cancel(request)
        self._wake_at(self._scheduler.next_expiry)
        if self._scheduler.workers.deserted:
            self.run_soon()
        self.notice_drained()

    def _cancel(self, request: Request) -> None:
        """Cancel a request in the scheduler, and count it."""
        if self._scheduler.cancel(request):
            waits = request.phase in (QUEUED, RETRYING)
            self._ledger.cancel(request, "waiting" if waits else "running")

    def reject(self, requests: list[Request], error: Exception) -> None:
        """Fail requests that were not enqueued because of an internal error."""
        to_error = self._reports.internal_error(error)
        for request in requests:
            if not request.is_settled:
                self._ledger.reject(request, to_error(), "internal error")

    def take_arrivals(self, now: float) -> None:
        """Submit the arrivals to the scheduler, and fail the requests that it rejects."""
        arrivals, self.arrivals = self.arrivals, []
        if not arrivals:
            return
        try:
            rejected = self._scheduler.submit(now, arrivals)
        except Exception as error:  # noqa: BLE001  every call must end
            self.reject(arrivals, error)
            return
        self._ledger.counters.submitted += len(arrivals) - len(rejected)
        for request, rejection in rejected:
            told = self._status.broken_error() or rejection.to_error()
            self._ledger.reject(request, told, rejection.reason)

    # The loop.

    def run_soon(self) -> None:
        """Schedule a run in this turn of the event loop, or in the next."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run, context=Context())

    def _run(self) -> None:
        """Advance; called by the event loop, never while a frame is handled.

        If a request may have expired, all arrived frames are read first: the event loop may have
        been blocked, and the answer may have arrived in time.
        """
        self._is_scheduled = False
        if self._staged_types:
            self._arena.end_turn()
        now = monotonic()
        if self._scheduler.next_expiry > now:
            self.advance(now)
            return
        answering = self._pool.read_all()
        now = monotonic()
        for worker, begun in self._pool.find_sending():
            self._scheduler.workers.not_sent_yet(now, worker, begun)
        for worker in answering:
            self._answering[worker] = now + REST_OF_FRAME
        self._answering = {one: until for one, until in self._answering.items() if until > now}
        self.advance(now, has_read=True)
        self._wake_at(min(self._answering.values(), default=math.inf))

    def advance(self, now: float, *, has_read: bool = False) -> None:
        """Submit the arrivals, poll the scheduler, carry out its actions, set the timer."""
        if self.arrivals:
            self.take_arrivals(now)
        actions, wake_at = self._scheduler.poll(now, has_read=has_read, answering=self._answering)
        for action in actions:
            try:
                self._do(action)
            except Exception as error:  # noqa: BLE001  the other actions must be carried out
                to_error = self._reports.internal_error(error)
                if isinstance(action, Expire):
                    self._ledger.expire(action.request, to_error(), str(action.reason))
                elif isinstance(action, Dispatch):
                    batch = action.batch
                    self.withdraw(batch, [(one, to_error()) for one in batch.requests])
        if wake_at is not None and wake_at < self._timer_at:
            self._wake_at(wake_at)
        if self._drained is not None:
            self.notice_drained()

    def _do(self, action: Dispatch | Expire | Stall | Replace | Skip | Fail) -> None:
        if isinstance(action, Dispatch):
            self._send(action.batch)
        elif isinstance(action, Expire):
            error = self._reports.expiry_error(action)
            self._ledger.expire(action.request, error, str(action.reason))
        elif isinstance(action, Stall):
            self._reports.log_stall(action.worker)
        elif isinstance(action, Skip):
            self._sender.skip(action.batch)
        elif isinstance(action, Replace):
            self._pool.replace(action.worker)
            self._reports.log_infer_timeout(action.worker)
        else:
            to_error = self._reports.internal_error(action.error)
            for request in action.requests:
                self._ledger.fail(request, to_error(), "internal error")

    def _send(self, batch: Batch) -> None:
        contexts: list[bytes] = []
        if self._active:
            worker = self._reports.index(batch.worker)
            contexts = self._observers.follow(batch, dumps, worker)
        size = len(batch.requests)
        unsendable = self._sender.send(batch, contexts)
        # While the worker wakes up.
        self._ledger.counters.count_batch(size, batch.release)
        if unsendable:
            self.withdraw(batch, unsendable)

    def withdraw(self, batch: Batch, unsendable: list[tuple[Request, BatcherError]]) -> None:
        """Fail requests of a batch that cannot be sent; the worker gets the others."""
        if self._scheduler.workers.find(batch.worker, batch.id) is not batch:
            return  # the worker was lost while the batch was being sent
        errors = dict(unsendable)
        for request in self._scheduler.workers.withdraw(monotonic(), batch, list(errors)):
            self._ledger.fail(request, errors[request], "not sendable")
        if not batch.requests:
            self._observers.lose([batch], "not sendable")
        # If no request of the batch is left, its worker is free.
        self.run_soon()

    # The timer.

    def _wake_at(self, moment: float) -> None:
        """Set the timer to this moment, unless it is set to an earlier one."""
        if moment >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, moment - monotonic())
        self._timer = self._loop.call_later(delay, self._wake, context=Context())
        self._timer_at = moment

    def _wake(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._run()

    # The session's life.

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed, and its timer with it."""
        for request in self._scheduler.open_requests():
            if is_beyond_reach(request):
                self._cancel(request)
        self.arrivals = [one for one in self.arrivals if not is_beyond_reach(one)]
        self._loop = loop
        self._timer, self._timer_at = None, math.inf
        self._drained = None
        self._is_scheduled = False
        self.run_soon()

    async def wait_until_drained(self, seconds: float) -> None:
        """Wait until no request waits or runs, at most `seconds`."""
        drained = self._drained = self._loop.create_future()
        try:
            self.notice_drained()
            await asyncio.wait([drained], timeout=seconds)
        finally:
            if self._drained is drained:
                self._drained = None

    def notice_drained(self) -> None:
        """End `wait_until_drained` if no request waits or runs any more."""
        drained = self._drained
        if drained is None or drained.done():
            return
        if not self._scheduler.waiting and not self._scheduler.workers.running:
            drained.set_result(None)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_SHARED_OUTPUTS = Kind.SHARED_OUTPUTS
_OUTPUT_ATOMS = Kind.OUTPUT_ATOMS
# Frames that bring no outcomes of a batch, or not its last ones.
KINDS_WITHOUT_OUTCOMES = frozenset({Kind.OUTPUTS_FRAGMENT, Kind.PONG, Kind.FREED, Kind.SKIPPED})
# Frames after which some of the batch's requests may be tried again.
RAISED_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})
# Frames that are one failure for every request of their batch.
FAILURE_KINDS = RAISED_KINDS | {Kind.FAILED}


class OutcomeReader:
    """Turns what a worker has pickled for one request into its outcome."""

    def read_item(self, item: bytes) -> Any:
        """Return the output in a separate pickle, or the `Failure` of one that cannot be read."""
        try:
            return loads(item)
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code
            return _unreadable(error)

    def read_error(self, error: SerializedError) -> Failure:
        """Return the failure for one request."""
        return Failure(error.to_error())


class Answers:
    """Reads the answers of one session's workers, and settles the requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        pump: Pump,
        sender: BatchSender,
        pool: Pool,
        memory: MemoryService,
        reports: Reports,
        reader: OutcomeReader,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._pump = pump
        self._sender = sender
        self._pool = pool
        self._memory = memory
        self._reports = reports
        self._reader = reader
        # The ready workers by id.
        self._links: dict[int, WorkerProcess] = {}
        # Outcomes from OUTPUTS_FRAGMENT frames, by worker, until the last frame of their batch:
        # each worker answers one batch at a time.
        self._fragments: dict[int, list[Any]] = {}

    def add_worker(self, link: WorkerProcess) -> None:
        """Add a worker that is ready."""
        self._links[link.id] = link

    def remove_worker(self, worker: int) -> None:
        """Remove a lost worker and its incomplete answer."""
        self._links.pop(worker, None)
        self._fragments.pop(worker, None)

    def take(self, worker: int, frame: Frame) -> None:
        """Handle a frame of a ready worker."""
        kind, has_raised = frame.kind, False
        if kind is not _OUTPUT_ATOMS:
            if kind in KINDS_WITHOUT_OUTCOMES:
                self._take_other(worker, frame)
                return
            has_raised = kind in RAISED_KINDS
        scheduler = self._scheduler
        now = monotonic()
        batch = scheduler.batch_done(now, worker, frame.batch_id, has_raised)
        if batch is None:
            self._reject_answer(frame)
            return
        batch.infer_seconds = frame.seconds
        self._ledger.complete_batch(now, batch)
        if self._pool.recycles:
            self._pool.batch_answered(worker)
        requests = self._after_failure(frame, batch) if has_raised else batch.requests
        # Give the worker its next batch before this one is settled.
        if has_raised or scheduler.is_poll_due:
            self._pump.advance(monotonic())
        try:
            if kind is _SHARED_OUTPUTS:
                self._collect(frame, batch)
            else:
                earlier = self._fragments.pop(worker, None) if self._fragments else None
                outcomes = read_outcomes(frame, earlier, len(requests), self._reader)
                self._ledger.answer(batch, requests, outcomes)
        except Exception as error:
            self._fail(batch, requests, error)
            raise
        self._pump.notice_drained()

    def _take_other(self, worker: int, frame: Frame) -> None:
        """Handle a frame that does not settle requests."""
        if frame.kind is Kind.FREED:
            self._sender.free(worker, frame)
        elif frame.kind is Kind.PONG:
            self._pool.heartbeat.answered(worker)
        elif self._scheduler.workers.find(worker, frame.batch_id) is None:
            self._reject_answer(frame)
        elif frame.kind is Kind.SKIPPED:
            self._take_skipped(worker, frame)
        else:
            self._fragments.setdefault(worker, []).extend(loads(frame.body))

    def _take_skipped(self, worker: int, frame: Frame) -> None:
        """Handle that the worker has not computed a batch for which no caller waits."""
        batch = self._scheduler.batch_done(monotonic(), worker, frame.batch_id, has_raised=True)
        assert batch is not None, "the caller has found it"
        if batch.open_count:
            error = TransportError(f"batch {batch.id} was skipped, and callers wait for it")
            self._fail(batch, batch.requests, error)
            raise error
        self._ledger.observers.lose([batch], "skipped")
        self._pump.advance(monotonic())
        self._pump.notice_drained()

    def _reject_answer(self, frame: Frame) -> None:
        """Raise the error for an answer to a batch that the worker does not have."""
        if not self._scheduler.is_closed:  # after `close` such answers are expected
            raise TransportError(f"an answer to batch {frame.batch_id}, which it does not have")

    def _after_failure(self, frame: Frame, batch: Batch) -> list[Request]:
        """Let the scheduler handle an error of `infer`; return the requests that the error ends.

        Those of a batch whose callers have all left are returned, too, although they are settled:
        the ledger notes the error.
        """
        is_fatal = frame.kind is Kind.FATAL
        failed = self._scheduler.batch_raised(
            monotonic(),
            batch,
            out_of_memory=frame.kind is Kind.OUT_OF_MEMORY,
            is_fatal=is_fatal,
        )
        if is_fatal:
            self._reports.log_fatal_error(batch.worker)
            self._scheduler.workers.retire(batch.worker)
            self._pool.kill(batch.worker)
        return failed if batch.open_count else batch.requests

    def _fail(self, batch: Batch, requests: list[Request], error: Exception) -> None:
        """Fail requests whose answer cannot be read; their worker will be replaced."""
        outcomes = [Failure(TransportError(str(error))) for _ in requests]
        self._ledger.answer(batch, requests, outcomes)

    # Large answers.

    def _collect(self, frame: Frame, batch: Batch) -> None:
        """Copy the outputs of a batch out of its worker's outbox, if a caller waits for them."""
        shared = read_shared_outcomes(frame, self._links[batch.worker].outbox)
        if all(request.is_settled for request in batch.requests):
            shared.answer.release()
            failures = shared.read_errors()
            # None stands for an output, which is not read.
            outcomes = [failures.get(position) for position in range(len(batch.requests))]
            self._ledger.answer(batch, batch.requests, outcomes)
        elif shared.answer.size <= MOST_AT_ONCE:
            self._settle_shared(batch, shared)
        else:
            self._scheduler.workers.begin_copy_out(batch)
            self._memory.run_in_thread(
                functools.partial(shared.answer.copy, releases_gil=True),
                functools.partial(self._finish_collecting, batch, shared),
            )

    def _settle_shared(self, batch: Batch, shared: "SharedOutcomes") -> None:
        outcomes = shared.read(len(batch.requests))
        self._ledger.answer(batch, batch.requests, outcomes)

    def _finish_collecting(
        self, batch: Batch, shared: "SharedOutcomes", _: BaseException | None
    ) -> None:
        """Settle a batch after its copy; an error of the copy is raised again by the reading."""
        if not self._scheduler.workers.end_copy_out(batch):
            return
        try:
            self._settle_shared(batch, shared)
        except Exception as error:  # noqa: BLE001  no frame is being handled that could report it
            self._fail(batch, batch.requests, error)
            self._pool.kill_on_protocol_error(batch.worker, error)
        self._pump.notice_drained()


def read_outcomes(
    frame: Frame, earlier: list[Any] | None, count: int, reader: OutcomeReader
) -> list[Any]:
    """Read the outcomes of a batch, by position."""
    outcomes: list[Any]
    if frame.kind is _OUTPUT_ATOMS:
        outcomes = loads(frame.body)
    elif frame.kind is Kind.OUTPUTS:
        outcomes = [
            reader.read_item(item)
            if isinstance(item, bytes)
            else reader.read_error(_read_error(item))
            for item in (earlier or []) + loads(frame.body)
        ]
    elif frame.kind in FAILURE_KINDS:
        error = SerializedError(*loads(frame.body))
        outcomes = [reader.read_error(error) for _ in range(count)]
    else:
        raise TransportError(f"a worker answered with {KIND_NAMES[frame.kind]}")
    if len(outcomes) != count:
        raise _wrong_count(len(outcomes), count)
    return outcomes


class SharedOutcomes(NamedTuple):
    """Outcomes of a batch that are still in an outbox."""

    # The outputs; ignored at the positions of errors.
    answer: Answer
    # The errors by position.
    errors: dict[int, SerializedError]

    def read(self, count: int) -> list[Any]:
        """Copy the outcomes out, unless that was done before, and free their memory."""
        outcomes = self.answer.load(_unreadable)
        if len(outcomes) != count:
            raise _wrong_count(len(outcomes), count)
        for position, failure in self.read_errors().items():
            if position >= count:
                raise TransportError(f"an error came back for input {position} of {count}")
            outcomes[position] = failure
        return outcomes

    def read_errors(self) -> dict[int, Failure]:
        """Return the failures by position."""
        try:
            return {
                int(position): Failure(SerializedError(*error).to_error())
                for position, error in self.errors.items()
            }
        except (AttributeError, TypeError, ValueError) as raised:
            text = f"errors came back that are not errors: {one_line(raised)}"
            raise TransportError(text) from raised


def read_shared_outcomes(frame: Frame, outbox: OutboxReader | None) -> SharedOutcomes:
    """Find the outcomes that a worker has left in its outbox."""
    start, sizes, frozen, items, errors = loads(frame.body)
    if outbox is None:
        raise TransportError("a worker without an outbox has left something there")
    return SharedOutcomes(outbox.find(start, sizes, frozen, items), errors)


def _read_error(item: Any) -> SerializedError:
    try:
        return SerializedError(*item)
    except TypeError:
        text = f"the output cannot be unpickled: it is a {type(item).__name__}"
        return SerializedError(text, "", None)


def _wrong_count(found: int, count: int) -> TransportError:
    return TransportError(f"{found} outcomes came back for {count} requests")


def _unreadable(error: BaseException) -> Failure:
    text = f"the output cannot be unpickled: {one_line(error)}"
    return Failure(InferenceError(text))


logger = logging.getLogger("fast_batcher")


class ValueAccess:
    """Access of a session to the inputs and outputs of its requests.

    A host process, which must not import the types of the app, has another one.
    """

    reader = OutcomeReader()

    def open_memory(
        self, loop: asyncio.AbstractEventLoop, settings: Settings, name: str
    ) -> MemoryService:
        """Open the memory that is shared with the workers."""
        return MemoryService(loop, settings.max_shared_bytes, name)

    def make_sender(
        self,
        settings: Settings,
        memory: MemoryService,
        workers: Mapping[int, WorkerProcess],
        events: SenderEvents,
        name: str,
    ) -> BatchSender:
        """Make the sender of batches."""
        return BatchSender(settings, memory, workers, events, name)

    def make_evaluator(
        self, settings: Settings, name: str, methods: Sequence[Method]
    ) -> CostEvaluator:
        """Make the evaluator of costs and groups."""
        return CostEvaluator(settings, name, methods)


class LocalSession:
    """A `Session` with workers of its own."""

    def __init__(
        self,
        model_spec: ModelSpec,
        settings: Settings,
        status: Status,
        ledger: Ledger,
        access: ValueAccess | None = None,
    ) -> None:
        access = access or ValueAccess()
        self.settings = settings
        self._status = status
        self._ledger = ledger
        name = self._name = status.name
        self.binding = LoopBinding(name)
        # Indexes of workers that were ready once: when all are in it, the batcher is open.
        self._seen_ready: set[int] = set()

        reports = self._reports = Reports(name, settings)
        methods = [Method(*one, settings.batch_limit) for one in model_spec.methods]
        self.methods: Mapping[str, Method] = {one.name: one for one in methods}
        scheduler = self.scheduler = _make_scheduler(settings, methods)
        memory = self.memory = access.open_memory(self.binding.loop, settings, name)
        pool = self.pool = Pool(model_spec, settings, self, memory, ledger.observers, name)
        sender = self.sender = access.make_sender(settings, memory, pool.workers, self, name)
        evaluator, loop = access.make_evaluator(settings, name, methods), self.binding.loop
        pump = self.pump = Pump(scheduler, sender, pool, ledger, evaluator, status, reports, loop)
        # As methods that pass calls on to the pump they would take 0.1 us of each call.
        self.accept, self.abandon, self.has_room = pump.accept, pump.abandon, pump.has_room
        self.raise_priority = pump.raise_priority
        self._answers = Answers(
            scheduler, ledger, pump, sender, pool, memory, reports, access.reader
        )
        # Handles a frame of a ready worker; directly, as above.
        self.frame_arrived = self._answers.take

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""
        workers = self.scheduler.workers
        return workers.ready_count, self.scheduler.waiting, workers.running

    def read_stats(self) -> BatcherStats:
        """Return a snapshot of the counts and the load."""
        workers_ready, waiting, running = self.load
        return self._ledger.counters.snapshot(
            state=str(self._status.state),
            workers_ready=workers_ready,
            num_workers=self.settings.num_workers,
            waiting=waiting,
            running=running,
        )

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""
        settings = self.settings
        setup = Setup(
            settings.batch_limit,
            settings.num_workers,
            settings.max_batch_cost is not None,
            settings.group_by is not None,
            settings.enabled,
            self.scheduler.is_short_of_memory,
        )
        learned = self.scheduler.service.points()
        explained = explain(self._ledger.counters.list_samples(), setup, learned)
        return replace(explained, service_times=learned)

    # Opening.

    def begin(self) -> None:
        """Start the workers, which report to `worker_ready` and `worker_failed_to_start`."""
        self._status.begin()
        self._ledger.observers.watch_collector()
        self.pool.open()

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, which were checked before."""
        self.binding.require_own_thread("reconfigure()")
        self.pump.take_arrivals(monotonic())  # which came before the change
        keeps_policy = settings.max_delay == self.settings.max_delay
        policy = None if keeps_policy else make_policy(settings.policy, settings.max_delay)
        self.settings = settings
        self.sender.arena.batch_size = settings.batch_limit
        self.scheduler.reconfigure(_limits_of(settings), policy)
        if not self.binding.loop.is_closed():
            # The waiting requests may be a full batch now, or have waited long enough.
            self.pump.run_soon()

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self.pump.run_soon()  # its run ends the arena's turn
        self.sender.arena.enable()
        return self.sender.arena.allocate(dtype, shape)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed.

        Callers that waited on the closed loop get no outcome.
        """
        self.binding.rebind(loop)
        self.pump.rebind(loop)
        self.pool.rebind(loop)

    # Events of the pool and of the sender.

    def worker_ready(self, worker: WorkerProcess, times: list[tuple[int, float]]) -> None:
        """Give a ready worker batches; `times` are sizes and seconds of its warm-up batches."""
        self._answers.add_worker(worker)
        self.scheduler.worker_ready(monotonic(), worker.id, times, worker.stages)
        index = self._reports.index(worker.id)
        reloading = self.pool.reloading
        is_reloaded = reloading is not None and reloading.is_awaited(worker.id)
        if index in self._seen_ready and not is_reloaded:
            self._ledger.counters.restarts += 1
            self._ledger.observers.tell(WorkerChanged(self._name, index, "restarted", worker.pid))
        self._seen_ready.add(index)
        if self._status.state is State.OPENING:
            if len(self._seen_ready) == self.settings.num_workers:
                self._status.move(Event.ALL_READY)
        elif self._status.state is State.BROKEN:
            self._status.recover()
        self.pump.advance(monotonic())

    def worker_lost(self, worker: int, exit: Exit) -> None:
        """Retry the requests of a dead worker, or fail them."""
        self._answers.remove_worker(worker)
        running = self.scheduler.workers.batches.values()
        lost = [batch for batch in running if batch.worker == worker]
        how = f"worker {self._reports.index(worker)} ended with {exit.text}"
        if exit.begun is not None and not exit.is_ours:
            for batch in lost:
                if batch.id <= exit.begun and not batch.open_count:
                    self._ledger.note_late_error(WorkerLostError(f"{how} while it computed it"))
        self._ledger.observers.lose(lost, "worker lost")
        failed, poisonous = self.scheduler.worker_lost(
            worker, exit.taken, exit.begun, out_of_memory=exit.may_be_out_of_memory
        )
        for request in failed:
            error = WorkerLostError(f"{how} while it had this request")
            self._ledger.fail(request, error, "worker lost")
        for request in poisonous:
            text = f"{how} while it had this request, as another had before; it is not tried again"
            self._ledger.fail(request, PoisonRequestError(text), "poison request")
        self.pump.advance(monotonic())

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """Break the batcher while it opens; afterwards only log, because the pool tries again."""
        if self._status.state is not State.OPENING:
            logger.warning("%s: %s; trying again", self._name, error, exc_info=error)
            return
        # If a caller waits in `open`, the error is raised there.
        if not self._status.has_waiters:
            logger.error(
                "%s: %s; calls fail until it is opened again", self._name, error, exc_info=error
            )
        self._status.fail_start(error)
        self.pool.abandon()
        self._fail_open_requests()

    def workers_given_up(self, reason: str, seconds: float) -> None:
        """Break the batcher: calls fail at once until the next try of a worker succeeds."""
        self._status.give_up(reason, seconds)
        self.pump.take_arrivals(monotonic())
        self._fail(self.scheduler.give_up())
        self.pump.notice_drained()

    def worker_retired(self, worker: int) -> None:
        """Give a worker no more batches: another has taken its place."""
        self.scheduler.workers.retire(worker)

    def inputs_unsendable(
        self, batch: Batch, unsendable: list[tuple[Request, BatcherError]]
    ) -> None:
        """Fail requests of a batch whose inputs could not be sent."""
        self.pump.withdraw(batch, unsendable)

    def idle_workers(self) -> list[int]:
        """Return the ready workers without a batch."""
        return self.scheduler.workers.idle_workers

    # Ending.

    def begin_drain(self) -> None:
        """Reject new requests, and finish the accepted ones."""
        self.pump.take_arrivals(monotonic())
        self.scheduler.begin_drain()
        if not self.binding.loop.is_closed():
            self.pump.run_soon()

    def _fail_open_requests(self) -> None:
        """Fail every request that has not been answered."""
        self.pump.take_arrivals(monotonic())
        self._ledger.observers.lose(self.scheduler.workers.all_batches(), "closed")
        self._fail(self.scheduler.close())

    def _fail(self, requests: list[Request]) -> None:
        """Fail requests because the batcher is broken or is being closed."""
        for request in requests:
            if is_beyond_reach(request):
                self._ledger.cancel(request, "event loop closed")
            else:
                error = self._status.unanswered_error()
                is_closed = isinstance(error, BatcherClosedError)
                self._ledger.fail(request, error, "closed" if is_closed else "broken")

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model."""
        await self.pool.reload(model_spec)
        self._ledger.counters.generation += 1

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for the accepted requests, then end the workers."""
        await self.pump.wait_until_drained(self.settings.drain_timeout)
        self._fail_open_requests()
        await self.pool.aclose()

    def end(self, grace: float) -> None:
        """Close the session, and block until the workers are dead."""
        self._ledger.observers.unwatch_collector()
        self._fail_open_requests()
        self.pump.stop()
        self.pool.stop(grace)
        if not self.binding.loop.is_closed():
            self.pump.notice_drained()


def _make_scheduler(settings: Settings, methods: Sequence[Method]) -> Scheduler:
    packer = None
    if settings.cost is not None:
        packer = BatchPacker(settings.max_batch_cost, is_padded=settings.cost_is_padded)
    return Scheduler(
        make_policy(settings.policy, settings.max_delay),
        _limits_of(settings),
        measure_size=measure_size,
        packer=packer,
        is_grouped=settings.group_by is not None,
        methods=methods,
    )


def _limits_of(settings: Settings) -> Limits:
    """Select the settings of the scheduler."""
    return Limits(
        max_batch_size=settings.batch_limit,
        max_queue_size=settings.queue_limit,
        max_queue_bytes=settings.max_queue_bytes,
        timeout=settings.timeout,
        max_latency=settings.max_latency,
        infer_timeout=settings.infer_timeout,
        idempotent=settings.idempotent,
        isolate_errors=settings.isolate_errors,
    )
