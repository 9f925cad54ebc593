"""The opening: everything that `open` creates and the next close releases. Event loop's thread.

    DynBatcher --accept--> arrivals --submit, poll--> Scheduler
                                         | Dispatch       ^
                                         v                | batch_done
                                     WorkerHandle ==> reported --settle--> callers

`Opening` is what a batcher needs of one. `LocalOpening` schedules the requests in this
process, an API process or the host, and owns the workers; `RemoteOpening` (`_host/client.py`)
passes them to the host process of a shared batcher. The methods of `LocalOpening` stand in the
order of a request's way.

An opening runs once per turn of the event loop, for all requests that arrived in that turn, so that
no request has a task, timer, lock or event of its own. It makes no decisions, which is for the
scheduler. `end` may run on any thread once the loop is closed.
"""

import asyncio
import functools
import logging
import math
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any, NoReturn

from fast_batcher._core.explanation import Setup
from fast_batcher._core.policy import Policy, make_policy
from fast_batcher._core.prediction import Method
from fast_batcher._core.scaling import SCALING_INTERVAL, Scaling, WorkerLoad
from fast_batcher._core.stream_scheduler import StreamScheduler
from fast_batcher._core.values import (
    CALL_FAILED,
    QUEUED,
    RETRYING,
    Batch,
    Dispatch,
    EndSession,
    Event,
    Expire,
    Fail,
    Failed,
    Failure,
    Order,
    Replace,
    Report,
    Request,
    SessionPlace,
    Skip,
    Stall,
    State,
    Step,
    or_infinite,
)
from fast_batcher._opening.kinds import BatchKind, StreamKind
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import CurrentModel, LoopBinding, Status
from fast_batcher._opening.outcomes import CostEvaluator, Reports, timeout_of
from fast_batcher._opening.streams import give_chunks
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.sending import BatchSender, SharedOutcomes
from fast_batcher._parent.staging import LARGEST_COPY_ON_LOOP, MemoryService
from fast_batcher._parent.worker_handle import Exit, Outcomes, Unsendable, WorkerHandle
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher._parent.worker_thread import ThreadWorker
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import dumps
from fast_batcher.errors import (
    BatcherClosedError,
    ConfigurationError,
    PoisonRequestError,
    SessionLostError,
    TransportError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.model import ModelKind, ModelSpec
from fast_batcher.observing import WorkerChanged
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation

logger = logging.getLogger("fast_batcher")


class Opening(ABC):
    """An opening of a batcher, which lives and dies with one event loop.

    `_run` is called once in a turn of the loop after `run_soon`, and at the moment given to
    `_wake_at`.
    """

    # False in a test without timeouts.
    has_deadlines = True

    def __init__(
        self,
        binding: LoopBinding,
        methods: Sequence[Method],
        settings: Settings,
        status: Status,
        ledger: Ledger,
    ) -> None:
        # Process, event loop and thread of the opening.
        self.binding = binding
        # The methods of the model, by name.
        self.methods = {method.name: method for method in methods}
        self.settings = settings
        self.status = status
        self._ledger = ledger
        self._name = status.name
        self._is_scheduled = False
        # One timer for the earliest moment at which `_run` has something to do.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        # Done when `_is_drained`; None unless `_wait_until_drained` waits.
        self._drained: asyncio.Future[None] | None = None

    # Requests.

    @abstractmethod
    def accept(self, request: Request) -> None:
        """Take over a request, whose caller gets exactly one outcome.

        Called in the caller's context, which the user's functions see.
        """

    @abstractmethod
    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone.

        This must not await: a cancel scope raises again at every `await`.
        """

    @abstractmethod
    def begin_session(self) -> None:
        """Expect requests that have a session."""

    @abstractmethod
    def end_session(self, session: SessionPlace) -> None:
        """End the session of a caller; must not await."""

    @abstractmethod
    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request that has not been accepted yet."""

    @abstractmethod
    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""

    # State and statistics.

    @property
    @abstractmethod
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""

    @property
    def num_workers(self) -> int:
        """Workers that there should be now."""
        return self.settings.fewest_workers

    @property
    def backlog(self) -> float | None:
        """Predicted seconds in which the ready workers answer everything; None if unknown."""
        return None

    def describe_wait(self) -> str:
        """Describe what an opening waits for, for people."""
        return self.status.waits_for or "the host process, whose workers load the model"

    def read_stats(self) -> BatcherStats:
        """Return a snapshot of the counts and the load."""
        return self._ledger.counters.snapshot(
            self.status.state, self.num_workers, self.load, self.backlog
        )

    @abstractmethod
    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""

    # Life.

    @abstractmethod
    def begin(self) -> None:
        """Start the workers, without waiting for them."""

    @abstractmethod
    def reconfigure(self, settings: Settings) -> None:
        """Use the changed settings from now on."""

    @property
    @abstractmethod
    def can_reload(self) -> bool:
        """Whether `reload` can succeed; otherwise only another opening brings workers."""

    @abstractmethod
    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model.

        The end of the opening ends it with `BatcherClosedError`; a later outcome is dropped.
        """

    @abstractmethod
    def begin_drain(self) -> None:
        """Expect no further requests, and finish the accepted ones."""

    @abstractmethod
    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for the accepted requests, then end the workers."""

    @abstractmethod
    def end(self, grace: float) -> None:
        """Release everything, and block until the workers are dead."""

    # The event loop. Its callbacks run in an empty context: by default they would see, and keep,
    # the context variables of the first caller of a turn.

    @abstractmethod
    def _run(self) -> None:
        """Do the work of this turn of the loop; begins with `self._is_scheduled = False`.

        Called by the event loop, never while an answer is handled.
        """

    def run_soon(self) -> None:
        """Schedule a run in this turn of the event loop, or in the next; never on a closed loop."""
        if not (self._is_scheduled or self.binding.loop.is_closed()):
            self._is_scheduled = True
            self.binding.loop.call_soon(self._run, context=Context())

    def _wake_at(self, moment: float) -> None:
        """Set the timer to this moment, unless it is set to an earlier one; as `run_soon`."""
        if moment >= self._timer_at or self.binding.loop.is_closed():
            return
        self._stop_timer()
        delay = max(0.0, moment - monotonic())
        self._timer = self.binding.loop.call_later(delay, self._wake, context=Context())
        self._timer_at = moment

    def _wake(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._run()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    @abstractmethod
    def _is_drained(self) -> bool:
        """Return whether no request is left to wait for."""

    async def _wait_until_drained(self) -> None:
        """Wait until `_is_drained`, at most `drain_timeout` seconds, or the rest after SIGTERM."""
        left = max(0.0, self.status.drain_until - monotonic())
        drained = self._drained = self.binding.loop.create_future()
        try:
            self._notice_drained()
            await asyncio.wait([drained], timeout=min(self.settings.drain_timeout, left))
        finally:
            if self._drained is drained:
                self._drained = None

    def _notice_drained(self) -> None:
        """End `_wait_until_drained` if no request is left to wait for."""
        if self._drained is not None and not self._drained.done() and self._is_drained():
            self._drained.set_result(None)


# Workers that a line about a slow start names.
SHOWN_WORKERS = 4
# An answer that is larger than a pipe is not late as long as each further part of it arrives within
# this many seconds. A worker that writes rarely waits longer for a CPU.
REST_OF_ANSWER = 0.05


class Parts:
    """Makes the parts of an opening that differ in an app, in a host and in tests."""

    def make_policy(self, settings: Settings, report: Callable[[BaseException], None]) -> Policy:
        """Make the policy that decides when a batch leaves; a rule may `report` its errors."""
        return make_policy(settings.policy, settings.max_delay, report)

    def open_memory(self, settings: Settings, loop: AbstractEventLoop, name: str) -> MemoryService:
        """Open the shared memory for inputs."""
        return MemoryService(loop, settings.max_shared_bytes, name)

    def make_sender(
        self, settings: Settings, memory: MemoryService, workers: Mapping[int, Any], name: str
    ) -> BatchSender:
        """Make the sender of batches to processes."""
        return BatchSender(settings, memory, workers, name)

    def make_worker(self, settings: Settings, sender: BatchSender, *arguments: Any) -> WorkerHandle:
        """Make a worker; the arguments are those of `WorkerHandle`."""
        if settings.in_process:
            return ThreadWorker(*arguments)
        return WorkerProcess(sender, *arguments)

    def make_evaluator(
        self, settings: Settings, name: str, methods: Sequence[Method]
    ) -> CostEvaluator | None:
        """Make the evaluator of costs and groups, None if there is nothing to evaluate."""
        evaluator = CostEvaluator(settings, name, methods)
        return evaluator if evaluator.is_needed else None


class LocalOpening(Opening):
    """An opening with a scheduler and workers of its own."""

    def __init__(
        self,
        model: CurrentModel,
        settings: Settings,
        status: Status,
        ledger: Ledger,
        parts: Parts | None = None,
    ) -> None:
        parts = self._parts = parts or Parts()
        # The part of the opening that depends on the kind of the model.
        is_stepped = model.spec.kind is ModelKind.STEPS
        kind = self.kind = (StreamKind if is_stepped else BatchKind)(ledger)
        size = kind.make_limits(settings).max_batch_size
        methods = [Method(*method, size) for method in model.spec.methods]
        super().__init__(LoopBinding(status.name), methods, settings, status, ledger)
        self._model = model
        self._observers = ledger.observers
        # Empty without observers.
        self._active = ledger.observers.active
        self._reports = Reports(self._name, settings)
        evaluator = parts.make_evaluator(settings, self._name, methods)
        self._evaluate = None if evaluator is None else evaluator.evaluate
        self.scheduler = kind.make_scheduler(settings, methods, self._make_policy(settings))
        self.memory = parts.open_memory(settings, self.binding.loop, self._name)
        self.pool = Pool(
            model.spec,
            settings,
            self,
            self.memory,
            ledger.observers,
            self._name,
            lambda *arguments: parts.make_worker(settings, self.sender, *arguments),
        )
        self.sender = parts.make_sender(settings, self.memory, self.pool.workers, self._name)
        self._arena = self.sender.arena
        # Types of inputs that may be staged; empty until the first large input.
        self._staged_types = self._arena.probes
        # Requests of this turn of the loop.
        self._arrivals: list[Request] = []
        # Workers whose answer has arrived in part, with the moment by which more of it must arrive.
        self._answering: dict[int, float] = {}
        # Decides about the number of workers, None if it is fixed; its bounds and target; and the
        # timer of its next look.
        self._scaling: Scaling | None = None
        self._scaled_by: tuple[int, int, float | None] | None = None
        self._scaling_timer: asyncio.TimerHandle | None = None
        # Workers that are not needed, and end with their last stream or session; and the moment by
        # which their sessions end if a person has asked for fewer workers.
        self._leaving, self._leave_by = 0, math.inf
        # Requests that the scheduler has rejected on arrival.
        self._rejected = 0
        self._set_scaling()
        self._look_later()

    # Requests: from the caller to the queue.

    def accept(self, request: Request) -> None:
        """Add a request to the arrivals of this turn, which the next run submits."""
        if self._active:
            request.context = self._observers.copy_context()
        if self._evaluate is not None:
            error = self._evaluate(request)
            if error is not None:
                self._ledger.reject(request, error)
                return
        if request.is_ranked:
            self.scheduler.rank_requests(request.share)
        staged_types = self._staged_types
        # The copy is made before the scheduler admits the request, which it does once per turn: a
        # rejected request releases the copy.
        if staged_types and type(request.value) in staged_types and self._has_queue_room():
            request.staged = self._arena.stage(request.value)
        self._arrivals.append(request)
        if not self._is_scheduled:
            self.run_soon()

    def _run(self) -> None:
        """Advance; read all arrived answers first if a request may have expired."""
        self._is_scheduled = False
        if self._staged_types:
            self._arena.end_turn()
        now = monotonic()
        if self.scheduler.next_expiry > now:
            self._advance(now)
        else:
            self._read_and_advance()

    def _run_if_due(self) -> None:
        """Let a run follow an event, which may have brought the next expiry forward."""
        if self.scheduler.is_poll_due:
            self.run_soon()

    def _read_and_advance(self) -> None:
        """Read all arrived answers, then advance.

        The event loop may have been blocked, and the answer of a late request may have arrived in
        time.
        """
        answering = self.pool.read_all()
        now = monotonic()
        for worker, begun in self.pool.find_sending():
            self.scheduler.not_sent_yet(now, worker, begun)
        for worker in answering:
            self._answering[worker] = now + REST_OF_ANSWER
        self._answering = {
            worker: until for worker, until in self._answering.items() if until > now
        }
        self._advance(now, has_read=True)
        self._wake_at(min(self._answering.values(), default=math.inf))

    def _advance(self, now: float, *, has_read: bool = False) -> None:
        """Submit the arrivals, poll the scheduler, carry out its actions, set the timer."""
        if self._arrivals:
            self._submit_arrivals(now)
        actions, wake_at = self.scheduler.poll(now, has_read=has_read, answering=self._answering)
        for action in actions:
            try:
                if isinstance(action, Dispatch):
                    self._send(action.batch)
                else:
                    self._do(action)
            except Exception as error:  # noqa: BLE001  the other actions must be carried out
                self._give_up(action, error)
        if wake_at is not None and wake_at < self._timer_at:
            self._wake_at(wake_at)
        if self._drained is not None:
            self._notice_drained()

    def _submit_arrivals(self, now: float) -> None:
        """Submit the arrivals to the scheduler, and fail the requests that it rejects."""
        arrivals, self._arrivals = self._arrivals, []
        if not arrivals:
            return
        try:
            rejected = self.scheduler.submit(now, arrivals)
        except Exception as fault:  # noqa: BLE001  every call must end
            self._reject_all(arrivals, fault)
            return
        self._ledger.counters.submitted += len(arrivals) - len(rejected)
        for request, rejection in rejected:
            self._rejected += 1
            error = self.status.broken_error() or rejection.to_error()
            self._ledger.reject(request, error)

    def _reject_all(self, arrivals: list[Request], fault: Exception) -> None:
        to_error = self._ledger.internal_error(fault)
        for request in arrivals:
            if not request.is_settled:
                self._ledger.reject(request, to_error())

    # Batches: from the queue to the worker.

    def _send(self, batch: Batch) -> None:
        if self._active:
            batch.contexts = self._observers.follow(batch, dumps)
        size, worker = len(batch.requests), self.pool.workers[batch.worker]
        worker.compute(batch)
        # This is done while the worker wakes up.
        self.kind.count_sent(size, batch.release)

    def _do(self, action: Expire | Stall | Replace | Skip | EndSession | Fail) -> None:
        if isinstance(action, Expire):
            error = self._reports.expiry_error(action)
            self._ledger.expire(action.request, error, str(action.reason))
        elif isinstance(action, Stall):
            index = self.scheduler.index_of(action.worker)
            if index is not None:  # an observer may have closed the batcher in this turn
                self._reports.log_stall(index)
        elif isinstance(action, Skip):
            self.kind.skip(self.pool.workers[action.batch.worker], action.batch)
        elif isinstance(action, EndSession):
            self._release_state(action)
        elif isinstance(action, Replace):
            self.pool.replace(action.worker)
            index = self.scheduler.index_of(action.worker)
            assert index is not None, "it has a batch"
            self._reports.log_infer_timeout(index)
        else:
            to_error = self._ledger.internal_error(action.error)
            for request in action.requests:
                self._ledger.fail(request, to_error(), "internal error")

    def _release_state(self, action: EndSession) -> None:
        worker = self.pool.workers.get(action.worker)
        if worker is not None:  # it may have died meanwhile
            worker.order(Order.LEAVE, action.session_id)
        self._notice_drained()

    def _give_up(self, action: object, error: Exception) -> None:
        """Fail the requests of an action that has raised."""
        to_error = self._ledger.internal_error(error)
        if isinstance(action, Expire):
            self._ledger.expire(action.request, to_error(), str(action.reason))
        elif isinstance(action, Dispatch):
            batch = action.batch
            self.inputs_unsendable(batch, [(request, to_error()) for request in batch.requests])

    def inputs_unsendable(self, batch: Batch, unsendable: Unsendable) -> None:
        """Fail requests whose input cannot be sent; the worker gets the others."""
        if not self.scheduler.is_running(batch):
            return  # the worker was lost while the batch was being sent
        errors = dict(unsendable)
        for request in self.scheduler.withdraw(monotonic(), batch, list(errors)):
            self._ledger.fail(request, errors[request], "not sendable")
        if not batch.requests:
            self._observers.lose([batch], "not sendable")
        # If no request of the batch is left, its worker is free.
        self.run_soon()

    # Answers: from the worker to the callers.

    def reported(
        self,
        worker: int,
        batch_id: int,
        seconds: float,
        answer: Outcomes,
        note: Report | None = None,
    ) -> None:
        """Refill a worker that has answered a batch, then settle the batch."""
        if note is not None and self._take_note(worker, batch_id, seconds, answer, note):
            return
        batch = self._take_back(worker, batch_id, seconds)
        if batch is None:
            return
        # The worker computes its next batch while the callers of this one get their outcomes.
        if self.scheduler.is_poll_due:
            self._advance(monotonic())
        self._settle(batch, batch.requests, answer)

    def _take_note(
        self, worker: int, batch_id: int, seconds: float, answer: Outcomes, note: Report
    ) -> bool:
        """Take a step or a failure; return False for an answer, whose elements are counted."""
        if note.step is not None:
            self._take_step(worker, note.step, seconds, answer)
        elif note.failed is Failed.SKIPPED:
            self._note_skipped(worker, batch_id)
        elif note.failed is not None:
            self._take_failure(worker, batch_id, seconds, note.failed, answer)
        else:
            self.scheduler.count_elements(*note.elements)
        return note.step is not None or note.failed is not None

    def _take_failure(
        self, worker: int, batch_id: int, seconds: float, how: Failed, answer: Outcomes
    ) -> None:
        """Try the requests of a batch again, or fail them; each gets an error of its own."""
        found = self.scheduler.find(worker, batch_id)
        if found is not None and how is Failed.FATAL and self.settings.mps:
            # Another worker of the GPU may have caused it: the batch is lost with its worker.
            self._end_device(found, answer()[0].error)
            return
        has_raised = how is not Failed.FOR_GOOD
        batch = self._take_back(worker, batch_id, seconds, has_raised=has_raised)
        if batch is None:
            return
        requests = self._after_failure(batch, how) if has_raised else batch.requests
        self._fail_lost(self.scheduler.batch_failed(monotonic(), batch), CALL_FAILED)
        self._advance(monotonic())
        self._settle(batch, requests, lambda: [answer()[0] for _ in requests])

    def _note_skipped(self, worker: int, batch_id: int) -> None:
        """Forget a batch that was not computed, because no caller waits for it."""
        batch = self.scheduler.batch_done(monotonic(), worker, batch_id, has_raised=True)
        if batch is None:
            self._reject_answer(batch_id)
        elif batch.open_count:
            error = TransportError(f"batch {batch.id} was skipped, and callers wait for it")
            self._fail_batch(batch, batch.requests, error)
            raise error
        else:
            self._observers.lose([batch], "skipped")
            self._advance(monotonic())

    def _take_back(
        self, worker: int, batch_id: int, seconds: float, *, has_raised: bool = False
    ) -> Batch | None:
        """Take a computed batch from its worker; None after `close`."""
        now = monotonic()
        batch = self.scheduler.batch_done(now, worker, batch_id, has_raised)
        if batch is None:
            self._reject_answer(batch_id)
            return None
        self.kind.complete(now, batch, seconds)
        if self.pool.recycles:
            self.pool.batch_answered(worker)
        return batch

    def _settle(self, batch: Batch, requests: list[Request], answer: Outcomes) -> None:
        """Give the callers of an answered batch their outcomes."""
        try:
            if isinstance(answer, SharedOutcomes) and self._is_copied_out(batch, answer):
                return
            outcomes = answer()
            if len(outcomes) != len(requests):
                _reject_count(len(outcomes), len(requests))
            self._ledger.answer(batch, requests, outcomes)
        except Exception as error:
            self._fail_batch(batch, requests, error)
            raise
        if self._drained is not None:
            self._notice_drained()

    def _is_copied_out(self, batch: Batch, answer: SharedOutcomes) -> bool:
        """Begin to copy a large answer in a thread; drop one for which no caller waits."""
        if not batch.open_count:
            answer.drop()
        elif answer.size > LARGEST_COPY_ON_LOOP:
            self._copy_out(batch, answer)
            return True
        return False

    def _copy_out(self, batch: Batch, answer: SharedOutcomes) -> None:
        """Copy a large answer in a thread, then settle its batch."""

        def finish(_: BaseException | None) -> None:
            if self.scheduler.end_copy_out(batch):
                try:
                    # An error of the copy is raised again by the reading.
                    self._settle(batch, batch.requests, answer.__call__)
                except Exception as error:  # noqa: BLE001  no event is handled that could raise
                    self.pool.kill_on_protocol_error(batch.worker, error)
                    self._notice_drained()

        self.scheduler.begin_copy_out(batch)
        self.memory.run_in_thread(answer.copy, finish)

    def _after_failure(self, batch: Batch, how: Failed) -> list[Request]:
        """Let the scheduler handle an error of `infer`; return the requests that the error ends.

        Those of a batch whose callers have all left are returned, too, although they are settled:
        the ledger notes the error.
        """
        if how is Failed.EVICTED:
            return self._streams.stream_evicted(batch)
        is_fatal = how is Failed.FATAL
        failed = self.scheduler.batch_raised(
            monotonic(), batch, out_of_memory=how is Failed.OUT_OF_MEMORY, is_fatal=is_fatal
        )
        if is_fatal:
            self._end_device(batch)
        return failed if batch.open_count else batch.requests

    def _end_device(self, batch: Batch, error: BaseException | None = None) -> None:
        """Replace the worker of a batch, which has lost its device."""
        self._reports.log_fatal_error(batch.worker_index, error)
        self.scheduler.device_lost(batch.worker)
        self.pool.kill(batch.worker)

    def _reject_answer(self, batch_id: int) -> None:
        """Raise the error for an answer to a batch that the worker does not have."""
        if not self.scheduler.is_closed:  # after `close` such answers are expected
            raise TransportError(f"a worker answered batch {batch_id}, which it does not have")

    def _fail_batch(self, batch: Batch, requests: list[Request], error: Exception) -> None:
        """Fail requests whose answer cannot be read; their worker will be replaced."""
        outcomes = [Failure(TransportError(str(error))) for _ in requests]
        self._ledger.answer(batch, requests, outcomes)

    # The steps of a `SteppedModel`.

    @property
    def _streams(self) -> StreamScheduler:
        if not isinstance(self.scheduler, StreamScheduler):
            raise TransportError("a step came from a worker whose model answers in batches")
        return self.scheduler

    def _take_step(self, worker: int, step: Step, seconds: float, answer: Outcomes) -> None:
        """Give the requests of a step their chunks, and answer the streams that have ended."""
        scheduler, find, now = self._streams, self.scheduler.find, monotonic()
        heard, ended, grown = step
        streams = [batch for found in heard if (batch := find(worker, found)) is not None]
        finished = [batch for found in ended if (batch := find(worker, found)) is not None]
        if len(streams) < len(heard) or len(finished) < len(ended):
            self._reject_answer([*heard, *ended][0])
            return
        # If it cannot be read, the worker is replaced, and has its streams until then. Not read in
        # a thread: the chunks of the next step must not overtake these.
        outcomes = answer()
        if len(outcomes) != len(streams):
            _reject_count(len(outcomes), len(streams))
        for batch in finished:
            scheduler.batch_done(now, worker, batch.id)
        scheduler.stepped(now, worker, streams, grown)
        if scheduler.is_poll_due:
            # Newcomers travel while the worker computes its next step.
            self._advance(now)
        self._ledger.complete_step(now, streams, outcomes, seconds, scheduler.queue_size)
        failures = self._give_chunks(streams, outcomes)
        for batch in finished:
            outcome = failures.get(batch.id, batch.call.chunks)
            self._ledger.answer(batch, batch.requests, [outcome])
            if self.pool.recycles:
                self.pool.batch_answered(worker)
        if self._drained is not None:
            self._notice_drained()

    def _give_chunks(self, streams: list[Batch], outcomes: list[Any]) -> dict[int, Failure]:
        """Give the requests of a step their chunks; let some streams wait for readers.

        Streams that fail before their end leave. Returns the others that fail, by batch id.
        """
        failures, full = give_chunks(streams, outcomes, self._deadline_of)
        for batch in streams if failures else ():
            if batch.id in failures and self.scheduler.cancel(batch.call):
                self._ledger.fail(batch.call, failures[batch.id].error, "failed")
                self.run_soon()
        for batch in full:
            if self.scheduler.is_running(batch):  # it has not ended
                batch.call.caller.pause(functools.partial(self._stream_read, batch))
                self._streams.pause(batch)
                self.pool.workers[batch.worker].order(Order.PAUSE, batch.id)
        return failures

    def _deadline_of(self, request: Request) -> float:
        """Return the moment by which a stream must have its next chunk, or be read."""
        if not self.has_deadlines:
            return math.inf
        return monotonic() + or_infinite(timeout_of(request, self.settings))

    def _stream_read(self, batch: Batch, resumes: bool) -> None:
        """Handle that a caller has read a chunk of a paused stream."""
        batch.call.deadline = self._deadline_of(batch.call)
        if resumes and self.scheduler.is_running(batch):
            self._streams.resume(monotonic(), batch)
            self.pool.workers[batch.worker].order(Order.RESUME, batch.id)
            self._run_if_due()

    # Other calls.

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""
        self._submit_arrivals(monotonic())  # the request may be among them
        if self.scheduler.cancel(request):
            waits = request.phase in (QUEUED, RETRYING)
            self._ledger.cancel(request, "waiting" if waits else "running")
        self._run_if_due()
        self._notice_drained()

    def begin_session(self) -> None:
        """Expect requests that have a session."""
        self.scheduler.use_sessions()

    def end_session(self, session: SessionPlace) -> None:
        """End the session of a caller; must not await."""
        self._submit_arrivals(monotonic())  # a request of it may be among them
        self._fail_lost(self.scheduler.end_session(monotonic(), session), "its caller has ended it")
        self.run_soon()

    def _fail_lost(self, requests: list[Request], how: str) -> None:
        for request in requests:
            error = SessionLostError(f"the session has ended: {how}")
            self._ledger.fail(request, error, "session lost")

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request behind the arrivals of this turn."""
        if not self.scheduler.requests_differ:
            return self._has_queue_room(ahead)
        # The queue knows its bytes and shares; here they would be counted for each request.
        self._submit_arrivals(monotonic())
        return self.scheduler.has_room(ahead + 1, request)

    def _has_queue_room(self, ahead: int = 0) -> bool:
        return self.scheduler.has_room(len(self._arrivals) + ahead + 1)

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self.run_soon()  # the run ends the arena's turn
        self._arena.enable()
        return self._arena.allocate(dtype, shape)

    # State and statistics.

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""
        scheduler = self.scheduler
        return scheduler.ready_count, scheduler.waiting, scheduler.running

    def read_stats(self) -> BatcherStats:
        """Return a snapshot of the counts, the load, and the figures of the kind of model."""
        gpu_bytes = self.pool.read_gpu_bytes()
        return replace(super().read_stats(), gpu_bytes=gpu_bytes, **self.scheduler.figures)

    @property
    def num_workers(self) -> int:
        """Workers that there should be now."""
        return self.pool.fleet.count - self._leaving

    @property
    def backlog(self) -> float | None:
        """Predicted seconds in which the ready workers answer everything; None if unknown."""
        return self.scheduler.seconds_of_backlog(monotonic())

    def describe_wait(self) -> str:
        """Name the workers that load the model."""
        loading = [worker for worker in self.pool.workers.values() if not worker.is_ready]
        names = [
            f"worker {worker.index}" + ("" if worker.pid is None else f" (pid {worker.pid})")
            for worker in loading
        ]
        more = f" and {len(names) - SHOWN_WORKERS} others" if len(names) > SHOWN_WORKERS else ""
        return (
            f"{', '.join(names[:SHOWN_WORKERS])}{more}, to import the model and run its "
            f"constructor and warm-up (start_timeout={self.settings.start_timeout:g} seconds)"
        )

    @property
    def queue_room(self) -> int:
        """Requests for which the queue has room; negative after a `reconfigure`."""
        return self.settings.queue_limit - self.scheduler.waiting - len(self._arrivals)

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""
        settings = self.settings
        setup = Setup(
            settings.batch_limit,
            self.num_workers,
            settings.max_batch_cost is not None,
            settings.group_by is not None,
            settings.enabled,
            self.scheduler.is_short_of_memory,
            self.scheduler.service.steps,
            self.scheduler.seconds_each,
        )
        return self.kind.explain(setup, self.scheduler)

    # Events of the pool.

    def worker_ready(
        self, worker: WorkerHandle, times: list[tuple[int, float]], *, is_restart: bool
    ) -> None:
        """Give a ready worker batches; `times` are sizes and seconds of its warm-up batches."""
        index, allowed, now = worker.index, worker.allowed_sizes, monotonic()
        self.scheduler.worker_ready(now, worker.id, times, worker.stages, index, allowed)
        if is_restart:
            self._ledger.counters.restarts += 1
            place = worker.pid, "", worker.node, worker.id
            self._observers.tell(WorkerChanged(self._name, index, "restarted", *place))
        if self.status.state is State.OPENING:
            self._notice_all_ready()
        elif self.status.state is State.BROKEN:
            self.status.recover()
        self._advance(monotonic())

    def _notice_all_ready(self) -> None:
        if self.pool.fleet.all_were_ready:
            self.status.move(Event.ALL_READY)

    def worker_lost(self, worker: int, exit: Exit) -> None:
        """Retry the requests of a dead worker, or fail them."""
        index = self.scheduler.index_of(worker)
        if index is None:  # the scheduler was closed, and has forgotten its workers
            return
        lost = self.scheduler.batches_of(worker)
        how = f"worker {index} ended with {exit.text}"
        if exit.begun is not None and not exit.is_ours:
            for batch in lost:
                if batch.id <= exit.begun and not batch.open_count:
                    self._ledger.note_late_error(WorkerLostError(f"{how} while it computed it"))
        self._observers.lose(lost, "worker lost")
        failed, poisonous = self.scheduler.worker_lost(
            worker, exit.taken, exit.begun, out_of_memory=exit.may_be_out_of_memory
        )
        for request in failed:
            kind = WorkerLostError if request.session is None else SessionLostError
            error = kind(f"{how} while it had this request")
            self._ledger.fail(request, error, "worker lost")
        for request in poisonous:
            text = f"{how} while it had this request, as another had before; it is not tried again"
            self._ledger.fail(request, PoisonRequestError(text), "poison request")
        self._advance(monotonic())

    def worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """Break the batcher while it opens; afterwards only log, because the pool tries again."""
        if self.status.state is not State.OPENING:
            logger.warning("%s: %s; trying again", self._name, error, exc_info=error)
            return
        self.status.fail_start(error)
        self.pool.abandon()
        self._fail_open_requests()

    def workers_given_up(self, reason: str, seconds: float) -> None:
        """Break the batcher: calls fail at once until the next try of a worker succeeds."""
        self.status.give_up(reason, seconds)
        self._submit_arrivals(monotonic())
        self._fail(self.scheduler.give_up())
        self._notice_drained()

    def worker_retired(self, worker: int) -> None:
        """Give a worker no more batches: it finishes those it has, and ends."""
        ends_at = monotonic() + self.settings.drain_timeout
        lost = self.scheduler.retire(worker, ends_at)
        self._fail_lost(lost, "its worker was replaced, or is not needed any more")
        self._run_if_due()

    def idle_workers(self) -> list[int]:
        """Return the ready workers without a batch."""
        return self.scheduler.idle_workers

    # Scaling.

    def _set_scaling(self) -> None:
        """Scale by the backlog from now on if the settings have a range of workers."""
        fewest, most = self.settings.fewest_workers, self.settings.most_workers
        bounds = fewest, most, self.settings.max_latency
        if bounds == self._scaled_by:  # what it has observed counts on
            return
        self._scaled_by = bounds
        self._scaling = None
        if fewest < most:
            self._scaling = Scaling(*bounds)
            self.scheduler.learn_times()

    def _look_later(self) -> None:
        """Look at the number of workers again soon, if it may change by itself."""
        if self._scaling_timer is not None:
            self._scaling_timer.cancel()
        loop = self.binding.loop
        if (self._scaling is not None or self._leaving) and not loop.is_closed():
            self._scaling_timer = loop.call_later(SCALING_INTERVAL, self._scale, context=Context())

    def _scale(self) -> None:
        """Change the number of workers if the load asks for it, and end what may leave."""
        if self.pool.is_closing:
            return
        if self._scaling is not None and self.status.state is State.OPEN:
            self._follow_load(self._scaling, monotonic())
        self._end_surplus()
        self._look_later()

    def _follow_load(self, scaling: Scaling, now: float) -> None:
        counters, count = self._ledger.counters, self.pool.fleet.count
        load = WorkerLoad(
            wanted=self.num_workers,
            ready=self.scheduler.ready_count,
            is_loading=self.pool.fleet.is_loading,
            is_failing=self.pool.fleet.is_failing,
            arrived=counters.submitted + self._rejected,
            rejected=self._rejected,
            backlog=self.scheduler.seconds_behind(now),
            full_batch=self.scheduler.full_batch,
            needed=self.scheduler.needed_workers,
        )
        decision = scaling.decide(now, load)
        if decision is not None:
            text = "%s: %d workers instead of %d: %s"
            logger.info(text, self._name, decision.workers, load.wanted, decision.reason)
            self._leaving, self._leave_by = max(0, count - decision.workers), math.inf
            if decision.workers > count:
                self.pool.scale(self.settings, decision.workers)

    def _end_surplus(self) -> None:
        """End the workers that are not needed and have finished; unready ones first."""
        fleet, leaving = self.pool.fleet, self._leaving
        others = fleet.count - leaving
        finished = self.scheduler.let_leave(monotonic(), leaving, others, self._leave_by)
        count = min(leaving, fleet.count_unready() + len(finished))
        if count:
            self._leaving -= count
            self.pool.scale(self.settings, fleet.count - count, finished)
        self._run_if_due()

    # Life.

    def begin(self) -> None:
        """Start the workers, which report to `worker_ready` and `worker_failed_to_start`."""
        self.status.begin()
        self._observers.watch_collector()
        self.pool.open()

    def reconfigure(self, settings: Settings) -> None:
        """Use the changed settings from now on."""
        self._submit_arrivals(monotonic())  # which came before the change
        keeps_policy = settings.max_delay == self.settings.max_delay
        policy = None if keeps_policy else self._make_policy(settings)
        self.settings = settings
        wanted = min(max(self.num_workers, settings.fewest_workers), settings.most_workers)
        if wanted < self.num_workers:
            self._leave_by = monotonic() + settings.drain_timeout
        self._leaving = max(0, self.pool.fleet.count - wanted)
        self.pool.scale(settings, wanted + self._leaving)
        self._set_scaling()
        self._end_surplus()
        self._look_later()
        if self.status.state is State.OPENING:
            self._notice_all_ready()
        self._arena.batch_size = settings.batch_limit
        self.scheduler.reconfigure(self.kind.make_limits(settings), policy)
        # The waiting requests may be a full batch now, or have waited long enough.
        self.run_soon()

    def _make_policy(self, settings: Settings) -> Policy:
        return self._parts.make_policy(settings, self._reports.log_policy_error)

    @property
    def can_reload(self) -> bool:
        """Whether the batcher is not broken: its workers would wait for their next try."""
        return self.status.state is not State.BROKEN

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model."""
        if self._model.is_reloading:
            raise ConfigurationError(f"{self._name}: a reload runs; wait for its end")
        self._model.begin_reload()
        loaded = None
        try:
            await self.pool.reload(model_spec)
            loaded = model_spec
            self._ledger.counters.generation += 1
        finally:
            # Otherwise `end` came first, and the next opening may reload already.
            if loaded is not None or not self.pool.is_closing:
                self._model.end_reload(loaded)

    def begin_drain(self) -> None:
        """Reject new requests, and finish the accepted ones."""
        self._submit_arrivals(monotonic())
        self.scheduler.begin_drain()
        self.run_soon()

    def _is_drained(self) -> bool:
        scheduler = self.scheduler
        return not (scheduler.waiting or scheduler.running or scheduler.session_count)

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for the accepted requests, then end the workers."""
        await self._wait_until_drained()
        for batch in self.scheduler.list_batches() if self.kind.gives_chunks else ():
            # The worker would finish the stream, which may have no end.
            self.kind.skip(self.pool.workers[batch.worker], batch)
        self._fail_open_requests()
        await self.pool.aclose()
        self._observers.unwatch_collector()

    def end(self, grace: float) -> None:
        """Close the opening, and block until the workers are dead."""
        self._observers.unwatch_collector()
        self._fail_open_requests()
        self._stop_timer()
        if self._scaling_timer is not None:
            self._scaling_timer.cancel()
        self.pool.stop(grace)
        if not self.binding.loop.is_closed():
            self._notice_drained()

    def _fail_open_requests(self) -> None:
        self._submit_arrivals(monotonic())
        self._observers.lose(self.scheduler.list_batches(), "closed")
        self._fail(self.scheduler.close())

    def _fail(self, requests: list[Request]) -> None:
        """Fail requests because the batcher is broken or is being closed."""
        # The futures of a closed loop cannot be settled.
        is_beyond_reach = self.binding.loop.is_closed()
        for request in requests:
            if is_beyond_reach:
                self._ledger.cancel(request, "event loop closed")
            else:
                error = self.status.unanswered_error()
                is_closed = isinstance(error, BatcherClosedError)
                self._ledger.fail(request, error, "closed" if is_closed else "broken")


def _reject_count(found: int, count: int) -> NoReturn:
    raise TransportError(f"{found} outcomes came back for {count} requests")
