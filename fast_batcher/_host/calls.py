"""Requests of one API process that are with its host: sends them, and settles them.

API process, on the event loop's thread. The requests of one turn of the loop are one frame.
`OpenCalls` decides what follows if the host is stuck or dead.
"""

import asyncio
import functools
import math
from collections.abc import Callable
from contextvars import Context
from typing import Any

from fast_batcher._core.host import OpenCalls
from fast_batcher._core.values import Failure, Phase, Request, settle
from fast_batcher._host.inputs import HostInputs
from fast_batcher._host.link import HostLink
from fast_batcher._host.protocol import unpack_failure
from fast_batcher._host.sending import CallSender, keep_deadline, pack_group
from fast_batcher._process import monotonic
from fast_batcher._session.outcomes import CostEvaluator, Ledger, is_beyond_reach, set_exception
from fast_batcher._session.session import OutcomeReader
from fast_batcher._transport.channels import Frame, Kind
from fast_batcher._transport.pickling import dumps, loads, measure_size
from fast_batcher.errors import (
    BatcherError,
    DeadlineExceededError,
    NotReadyError,
    PoisonRequestError,
    QueueFullError,
    WorkerLostError,
)
from fast_batcher.settings import Settings

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_SENT = Phase.SENT
_ANSWERS = Kind.ANSWERS


class HostCalls:
    """The requests without an outcome.

    Args:
        settings: The batcher's settings.
        link: The connection to the host.
        ledger: Counts calls that are rejected here, and has the observers.
        loop: The event loop, which is running.
        name: The batcher's name, for logs.
    """

    def __init__(
        self,
        settings: Settings,
        link: HostLink,
        ledger: Ledger,
        loop: asyncio.AbstractEventLoop,
        name: str,
    ) -> None:
        self._settings = settings
        self._link = link
        self._ledger = ledger
        self._loop = loop
        self.inputs = HostInputs(settings, loop, name)
        self._sender = CallSender(link, self.inputs, settings.queue_limit)
        self._open = OpenCalls(settings.timeout, idempotent=settings.idempotent)
        self._evaluator = CostEvaluator(settings, name)
        self._reader = OutcomeReader()
        # Requests to be sent, by id, and ids of sent requests whose callers have gone.
        self._arrivals: dict[int, Request] = {}
        self._abandoned: list[int] = []
        self._is_scheduled = False
        # Whether the host sends events for the observers.
        self.is_observed = False
        # One timer for the earliest request that the host should have ended.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        # Done when no request is open; None unless `wait_until_drained` waits.
        self._drained: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, request: Request) -> None:
        """Add a request to those of this turn; called in the caller's context."""
        if self._evaluator.is_needed:
            error = self._evaluator.find_fault(request) or pack_group(request)
            if error is not None:
                self._ledger.reject(request, error, "invalid input")
                return
        if not self._link.is_connected and len(self._open) >= self._settings.queue_limit:
            text = f"{len(self._open)} requests wait for the host process already"
            self._ledger.reject(request, QueueFullError(text), "queue full")
            return
        if self._settings.max_queue_bytes is not None:
            request.size = measure_size(request.value)
        self._open.add(monotonic(), request)
        copying = self.inputs.stage(request)
        if copying is None:
            self._arrivals[request.id] = request
        else:
            copying.when_copied = functools.partial(self._send_later, request)
        self.run_soon()

    def _send_later(self, request: Request) -> None:
        """Send a request whose large input has been copied."""
        if not request.is_settled:
            keep_deadline(request, self._settings.max_latency)
            self._arrivals[request.id] = request
            self.run_soon()

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a request, in the host if it was sent."""
        if self._open.find(request.id) is request and request.priority < priority:
            request.priority = priority
            if request.phase is _SENT:
                self._link.send(Kind.PRIORITY, dumps((request.id, priority)))

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the host's queue has room, as far as is known."""
        most = self._settings.max_queue_bytes
        if most is not None:
            request.size = measure_size(request.value)
            waiting = sum([one.size for one in self._open])
            if waiting and waiting + request.size > most:
                return False
        return self._sender.room > len(self._arrivals) + ahead

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""
        if settle(request):
            if request.phase is _SENT:
                self._abandoned.append(request.id)
                self.run_soon()
            else:
                self._ledger.counters.submitted += 1
                self._ledger.cancel(request, "waiting")
            self._remove(request)

    def run_soon(self) -> None:
        """Send what there is at the end of this turn of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run, context=Context())

    def _run(self) -> None:
        """Send what this turn of the loop has brought, and set the timer."""
        self._is_scheduled = False
        self.inputs.end_turn()
        self.flush()
        self._wake_at(self._open.next_expiry)

    def flush(self) -> None:
        """Send what there is, if there is a host."""
        if self._link.is_connected:
            self.observe()
            if self._arrivals:
                arrivals = [*self._arrivals.values()]
                self._arrivals.clear()
                for request, error in self._sender.send(arrivals):
                    if settle(request):
                        self._fail(request, error, "not sendable")
                    self._remove(request)
            if self._abandoned:
                abandoned, self._abandoned = self._abandoned, []
                self._link.send(Kind.ABANDON, dumps(abandoned))

    def observe(self) -> None:
        """Ask the host for events, once there is an observer."""
        if self._ledger.observers.active and not self.is_observed:
            self.is_observed = True
            self._link.send(Kind.OBSERVE)

    def _resend(self, request_id: int) -> None:
        """Send the input of a request once more: the worker that had it in its memory is dead."""
        request = self._open.find(request_id)
        item = None if request is None else self.inputs.pickle(request.value)
        if isinstance(item, BatcherError):
            assert request is not None, "it has an input"
            if settle(request):
                self._fail(request, item, "not sendable")
            self._remove(request)
            item = None
        self._link.send(Kind.RESENT, dumps((request_id, item)))

    # Outcomes.

    def take(self, frame: Frame) -> None:
        """Handle a frame about requests."""
        if frame.kind is _ANSWERS:
            ids, outcomes, room = loads(frame.body)
            self._answer(ids, outcomes, room, _same)
        elif frame.kind is Kind.ITEM_ANSWERS:
            ids, outcomes, room = loads(frame.body)
            self._answer(ids, outcomes, room, self._read_item)
        elif frame.kind is Kind.FREED_INPUTS:
            self.inputs.free(loads(frame.body))
        elif frame.kind is Kind.RESEND:
            for request_id in loads(frame.body):
                self._resend(request_id)

    def _answer(
        self, ids: list[int], outcomes: list[Any], room: tuple[int, int], read: Callable[[Any], Any]
    ) -> None:
        """Give callers the outcomes of their requests."""
        self._sender.note_room(*room)
        calls = self._open
        for request_id, packed in zip(ids, outcomes, strict=True):
            request = calls.remove(request_id)
            if request is None or not settle(request):
                continue
            outcome = read(packed)
            try:
                if outcome.__class__ is Failure:
                    set_exception(request, outcome.error)
                else:
                    request.caller.set_result(outcome)
            except asyncio.InvalidStateError:  # cancelled, in this turn of the loop
                pass
        if self._drained is not None:
            self._notice_drained()

    def _read_item(self, packed: Any) -> Any:
        return (
            self._reader.read_item(packed) if isinstance(packed, bytes) else unpack_failure(packed)
        )

    def _fail(self, request: Request, error: BatcherError, reason: str) -> None:
        """Give a caller an error; the request is settled. The host counts its own."""
        if request.phase is _SENT:
            set_exception(request, error)
        else:
            self._ledger.counters.submitted += 1
            self._ledger.fail(request, error, reason)

    def _remove(self, request: Request) -> None:
        """Forget a settled request."""
        if request.staged is not None:
            request.staged.release()
        self._open.remove(request.id)
        self._arrivals.pop(request.id, None)
        self._notice_drained()

    def fail_all(self, make_error: Callable[[], BatcherError]) -> None:
        """Fail every request without an outcome; each caller gets an error of its own."""
        self._arrivals.clear()
        for request in self._open.take_all():
            if request.staged is not None:
                request.staged.release()
            if not is_beyond_reach(request):
                self._fail(request, make_error(), "closed")
        self._notice_drained()

    # The timer.

    def _wake_at(self, moment: float) -> None:
        if moment >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, moment - monotonic())
        self._timer = self._loop.call_later(delay, self._wake, context=Context())
        self._timer_at = moment

    def _wake(self) -> None:
        """Expire the requests that the host should have ended before."""
        self._timer, self._timer_at = None, math.inf
        self._link.read_all()  # the loop may have been blocked
        for request in self._open.expire(monotonic()):
            timeout = self._settings.timeout if request.timeout is None else request.timeout
            limit = f"its timeout of {timeout} seconds"
            self._arrivals.pop(request.id, None)
            if request.phase is _SENT:
                text = f"the host process had not answered within {limit}"
                set_exception(request, DeadlineExceededError(text))
                self._abandoned.append(request.id)
            else:
                error = NotReadyError(f"no host process was there within {limit}")
                self._ledger.counters.submitted += 1
                self._ledger.expire(request, error, "not ready")
        self._notice_drained()
        self.run_soon()

    # The host, the loop and the end.

    def host_joined(self, room: int) -> None:
        """Send a new host the requests that wait."""
        self._sender.begin(room)
        for request in self._arrivals.values():
            keep_deadline(request, self._settings.max_latency)
        self.run_soon()

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings to requests that come from now on."""
        self.flush()
        self._settings = settings
        self.inputs.reconfigure(settings.batch_limit)

    def host_lost(self) -> None:
        """Send the requests of a dead host again once there is another, or fail them."""
        self.inputs.lose()
        for request in self._open:
            if request.staged is not None:
                request.staged.release()
        loss = self._open.host_lost()
        self._arrivals = {one.id: one for one in loss.again} | self._arrivals
        for request in loss.failed:
            self._fail(
                request, WorkerLostError("the host process died with this request"), "worker lost"
            )
        for request in loss.poisonous:
            text = "two host processes died with this request; it is not sent again"
            self._fail(request, PoisonRequestError(text), "poison request")
        self._abandoned.clear()
        self._notice_drained()

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed."""
        self._loop = loop
        self._drained = None
        self._timer, self._timer_at = None, math.inf
        for request in [*self._open]:
            if is_beyond_reach(request):
                self.abandon(request)
        self.inputs.rebind(loop)
        self._is_scheduled = False
        self.run_soon()

    async def wait_until_drained(self) -> None:
        """Wait at most `drain_timeout` for the outcomes of the accepted requests."""
        drained = self._drained = self._loop.create_future()
        self._notice_drained()
        await asyncio.wait([drained], timeout=self._settings.drain_timeout)
        if self._drained is drained:
            self._drained = None

    def _notice_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not len(self._open):
            self._drained.set_result(None)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _same(value: Any) -> Any:
    return value
