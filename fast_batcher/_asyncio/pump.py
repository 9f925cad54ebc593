"""Carries events to the scheduler and its decisions out. API process, the event loop's thread.

The pump decides nothing. It is one loop: apply the events, poll the scheduler, do the actions, set
the timer. It runs once per turn of the event loop and takes along everything that arrived in that
turn, so that there is no task, timer, lock or event per request.
"""

import asyncio
import math
from contextvars import Context

from fast_batcher._asyncio.cost_evaluator import CostEvaluator
from fast_batcher._asyncio.ledger import Ledger, is_beyond_reach
from fast_batcher._asyncio.reports import Reports
from fast_batcher._asyncio.status import Status
from fast_batcher._clock import monotonic
from fast_batcher._core.messages import (
    Batch,
    Dispatch,
    Expire,
    Fault,
    Phase,
    Replace,
    Request,
    Stall,
)
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._parent.batch_sender import BatchSender
from fast_batcher._parent.pool import Pool
from fast_batcher.errors import BatcherError

# An answer that is larger than a pipe arrives in time if more of it comes within this many seconds,
# again and again. A worker that is writing is rarely given no CPU for longer.
REST_OF_FRAME = 0.05


class Pump:
    """The loop of one session.

    Args:
        scheduler: Decides.
        sender: Sends batches.
        pool: Reads what the workers say, and replaces workers.
        ledger: Ends the requests.
        evaluator: Asks the user's functions about each input.
        status: Why requests are refused while the batcher is broken.
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
        self._evaluator = evaluator
        self._status = status
        self._reports = reports
        self._loop = loop
        self._arena = sender.arena
        # Types of inputs that may be staged; empty before something large has come.
        self._staged_types = sender.arena.probes
        # Requests of this turn of the loop, and whether `_run` is scheduled to take them.
        self.arrivals: list[Request] = []
        self._is_scheduled = False
        # One timer for the earliest moment at which the scheduler wants to be polled.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        # Workers whose answer has come in part, and until when more of it has to come.
        self._answering: dict[int, float] = {}
        # Waited for while the batcher drains.
        self._drained: asyncio.Future[None] | None = None

    # Requests.

    def accept(self, request: Request) -> None:
        """Let a request wait for the next run of the pump, in this turn of the event loop.

        Called in the caller's context, which the user's functions see.
        """
        if self._evaluator.is_needed:
            error = self._evaluator.find_fault(request)
            if error is not None:
                self._ledger.reject(request, error, "invalid input")
                return
        if request.priority:
            self._scheduler.rank_requests()
        if type(request.value) in self._staged_types and self._has_place():
            request.staged = self._arena.stage(request.value)
        if self._ledger.observers:
            request.context = self._ledger.observers.copy_context()
        self.arrivals.append(request)
        if not self._is_scheduled:
            self.run_soon()

    def has_room(self, request: Request) -> bool:
        """Whether the queue has room for a request behind the requests that have just arrived."""
        if not self._scheduler.counts_bytes:
            return self._has_place()
        # In the queue their bytes are part of its sum; here they would be added for each request.
        self.take_arrivals(monotonic())
        return self._scheduler.has_room(1, request)

    def _has_place(self) -> bool:
        return self._scheduler.has_room(len(self.arrivals) + 1)

    def abandon(self, request: Request) -> None:
        """Forget a request whose caller has gone.

        Nothing here waits: cancel scopes cancel again at every wait.
        """
        self.take_arrivals(monotonic())  # it may be one of them
        self._cancel(request)
        self._wake_at(self._scheduler.next_expiry)
        self.notice_drained()

    def _cancel(self, request: Request) -> None:
        """Take a request out of the scheduler."""
        if self._scheduler.cancel(request):
            waits = request.phase in (Phase.QUEUED, Phase.RETRYING)
            self._ledger.cancel(request, "waiting" if waits else "running")

    def reject(self, requests: list[Request], error: Exception) -> None:
        """Fail requests which the scheduler has not taken because of an internal error."""
        to_error = self._reports.internal_error(error)
        for request in requests:
            if not request.is_settled:
                self._ledger.reject(request, to_error(), "internal error")

    def take_arrivals(self, now: float) -> None:
        """Give the scheduler the requests that have arrived, and fail the requests that it rejects.

        Args:
            now: The moment.
        """
        arrivals, self.arrivals = self.arrivals, []
        if not arrivals:
            return
        try:
            rejected = self._scheduler.submit(now, arrivals)
        except Exception as error:  # noqa: BLE001  whatever it is, its calls have to end
            self.reject(arrivals, error)
            return
        self._ledger.counters.submitted += len(arrivals) - len(rejected)
        for request, refusal in rejected:
            told = self._status.broken_error() or refusal.to_error()
            self._ledger.reject(request, told, refusal.reason)

    # The loop.

    def run_soon(self) -> None:
        """Run once in this turn of the event loop, or in the next."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run, context=Context())

    def _run(self) -> None:
        """Advance; called by the event loop, and by nothing that reads a frame.

        If something may have expired, what has arrived is read first: the event loop may have been
        blocked, and the answer be there already.
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
        """Submit what has arrived, poll the scheduler, do its actions, set the timer.

        Args:
            now: The moment.
            has_read: As for `Scheduler.poll`. Nothing can be read while a frame is being handled:
                its memory would be overwritten.
        """
        self.take_arrivals(now)
        actions, wake_at = self._scheduler.poll(now, has_read=has_read, answering=self._answering)
        for action in actions:
            try:
                self._do(action)
            except Exception as error:  # noqa: BLE001  the other actions have to be done
                to_error = self._reports.internal_error(error)
                if isinstance(action, Expire):
                    self._ledger.expire(action.request, to_error(), str(action.reason))
                elif isinstance(action, Dispatch):
                    batch = action.batch
                    self.withdraw(batch, [(one, to_error()) for one in batch.requests])
        if wake_at is not None:
            self._wake_at(wake_at)
        if self._drained is not None:
            self.notice_drained()

    def _do(self, action: Dispatch | Expire | Stall | Replace | Fault) -> None:
        if isinstance(action, Dispatch):
            batch = action.batch
            self._ledger.counters.count_batch(len(batch.requests), batch.release)
            unsendable = self._sender.send(action.batch)
            if unsendable:
                self.withdraw(action.batch, unsendable)
        elif isinstance(action, Expire):
            error = self._reports.expiry_error(action)
            self._ledger.expire(action.request, error, str(action.reason))
        elif isinstance(action, Stall):
            self._reports.log_stall(action.worker)
        elif isinstance(action, Replace):
            self._pool.replace(action.worker)
            self._reports.log_infer_timeout(action.worker)
        else:
            to_error = self._reports.internal_error(action.error)
            for request in action.requests:
                self._ledger.fail(request, to_error(), "internal error")

    def withdraw(self, batch: Batch, unsendable: list[tuple[Request, BatcherError]]) -> None:
        """Fail the requests of a batch that cannot be sent; the worker has the others."""
        if self._scheduler.workers.find(batch.worker, batch.id) is not batch:
            return  # it has been lost, and its requests with it, while the batch was being sent
        errors = dict(unsendable)
        for request in self._scheduler.workers.withdraw(monotonic(), batch, list(errors)):
            self._ledger.fail(request, errors[request], "not sendable")
        # If no request of the batch is left, its worker is free.
        self.run_soon()

    # The timer.

    def _wake_at(self, moment: float) -> None:
        """Advance at this moment, if not before."""
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
        """Go on with another event loop; the one before is closed, and its timer with it."""
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
        """End `wait_until_drained` if nothing waits or runs any more."""
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
