"""Pump: the loop of a session, which passes events to the scheduler and carries out its actions.

Runs in the API process, on the event loop's thread. One run applies the events, polls the
scheduler, carries out the actions and sets the timer. The pump runs once per turn of the event loop
for all requests that arrived in that turn, so that no request has a task, timer, lock or event of
its own. It makes no decisions, which is for the scheduler, and interprets no answers, which is for
`Answers`.
"""

import asyncio
import math
from contextvars import Context

from fast_batcher._asyncio.cost_evaluator import CostEvaluator
from fast_batcher._asyncio.ledger import Ledger, is_beyond_reach
from fast_batcher._asyncio.reports import Reports
from fast_batcher._asyncio.status import Status
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import (
    Batch,
    Dispatch,
    Expire,
    Fail,
    Phase,
    Replace,
    Request,
    Skip,
    Stall,
)
from fast_batcher._parent.pool import Pool
from fast_batcher._parent.sending import BatchSender
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import dumps
from fast_batcher.errors import BatcherError

# An answer that is larger than a pipe is not late as long as each further part of it arrives within
# this many seconds. A worker that writes rarely waits longer for a CPU.
REST_OF_FRAME = 0.05


class Pump:
    """The loop of one session.

    Args:
        scheduler: Makes the decisions.
        sender: Sends batches.
        pool: Reads the workers' frames, and replaces workers.
        ledger: Settles and counts the requests.
        evaluator: Calls the user's functions for each input.
        status: Makes the error for calls while the batcher is broken.
        reports: Makes errors and log lines.
        loop: The event loop that serves the batcher.
    """

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
            waits = request.phase in (Phase.QUEUED, Phase.RETRYING)
            self._ledger.cancel(request, "waiting" if waits else "running")

    def reject(self, requests: list[Request], error: Exception) -> None:
        """Fail requests that were not enqueued because of an internal error."""
        to_error = self._reports.internal_error(error)
        for request in requests:
            if not request.is_settled:
                self._ledger.reject(request, to_error(), "internal error")

    def take_arrivals(self, now: float) -> None:
        """Submit the arrivals to the scheduler, and fail the requests that it rejects.

        Args:
            now: The moment.
        """
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
        """Submit the arrivals, poll the scheduler, carry out its actions, set the timer.

        Args:
            now: The moment.
            has_read: As for `Scheduler.poll`. Frames cannot be read while a frame is handled, whose
                memory would be overwritten.
        """
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
