"""Single flight before the call: a session that looks outputs up before another one computes them.

    DynBatcher --accept--> CachingSession --miss--> LocalSession or RemoteSession
               <--hit----- |         ^              |
                           +- cache -+ <---output---+

API process, on the event loop's thread. Callers with equal keys that wait at the same time share a
computation. Its request has the deadline of one of them, the leader; if it fails because of that
deadline, it is sent again for the callers with later ones. `Deliveries` gives each caller its own
copy of the output: a turn of the loop makes copies for a few milliseconds, and copies that would
take longer are made in a thread, one after the other.
"""

import asyncio
import copy
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import replace
from inspect import isawaitable
from typing import Any, Final, NamedTuple

from fast_batcher._arrays.joining import is_much
from fast_batcher._core.host import OpenCalls
from fast_batcher._core.values import Request, settle
from fast_batcher._process import monotonic
from fast_batcher._session.life import CurrentModel, Status
from fast_batcher._session.offload import offload
from fast_batcher._session.outcomes import Ledger, set_exception, timeout_of
from fast_batcher._session.output_cache import EXITS, OutputCache
from fast_batcher._session.session import Session
from fast_batcher._transport.pickling import to_cause
from fast_batcher.caching import hash_input
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    ConfigurationError,
    DeadlineExceededError,
    NotReadyError,
    QueueFullError,
    copy_error,
)
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Reconfiguration, Settings
from fast_batcher.stats import BatcherStats, Explanation
from fast_batcher.types import CachedNone

# Seconds of one turn of the event loop in which copies are made. With the last copy, which may take
# as long, and the callers that go on with their copies, a turn stays below 5 ms.
SLICE: Final = 0.001
# Parts of an output above which a thread copies it. `deepcopy` takes 0.1 us for a number, and 1 us
# for a list or dict.
MOST_PARTS: Final = 2000
# Bytes of its arrays above which a thread copies it. The system takes up to 4 ms for a MiB of fresh
# memory on virtual machines.
MOST_BYTES: Final = 2**18


class _Delivery(NamedTuple):
    # The callers that still wait. The owner of this list removes callers that leave.
    callers: list[Request]
    output: Any


class Deliveries:
    """Outputs of which some callers have no copy yet."""

    def __init__(self, settle: Callable[[Request, Any], None]) -> None:
        self._settle = settle
        # A task works on each of them as long as it is not empty; the first entry is under way.
        self._small: deque[_Delivery] = deque()
        self._large: deque[_Delivery] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, callers: list[Request], output: Any, loop: AbstractEventLoop) -> None:
        """Give each caller a copy, from the next turn of the event loop on."""
        self._small.append(_Delivery(callers, output))
        if len(self._small) == 1:
            self._start(self._copy_here(), loop)

    def _add_large(self, delivery: _Delivery) -> None:
        self._large.append(delivery)
        if len(self._large) == 1:
            self._start(self._copy_in_thread(), asyncio.get_running_loop())

    def _start(self, work: Coroutine[Any, Any, None], loop: AbstractEventLoop) -> None:
        task = loop.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy_here(self) -> None:
        """Make copies for `SLICE` seconds in each turn of the event loop."""
        until = monotonic() + SLICE
        while self._small:
            delivery = self._small[0]
            is_large = _is_large(delivery.output)
            while delivery.callers and not is_large:
                began_at = monotonic()
                self._settle(delivery.callers.pop(0), copy_output(delivery.output))
                now = monotonic()
                # The size of an object of the user's class is unknown.
                is_large = now - began_at > SLICE
                if now > until:
                    await asyncio.sleep(0)
                    until = monotonic() + SLICE
            self._small.popleft()
            if delivery.callers:
                self._add_large(delivery)

    async def _copy_in_thread(self) -> None:
        """Make one copy after the other: Python code in several threads would slow the loop."""
        while self._large:
            delivery = self._large[0]
            while delivery.callers:
                copied = await offload(True, copy_output, delivery.output)
                if delivery.callers:
                    self._settle(delivery.callers.pop(0), copied)
                del copied
            self._large.popleft()

    async def wait(self, seconds: float) -> None:
        """Wait until every caller has its copy, at most `seconds`."""
        until = monotonic() + seconds
        # The copies of a large output are the work of another task, which starts meanwhile.
        while self._tasks and (left := until - monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left)

    def finish(self) -> None:
        """Give every caller its copy now; blocks."""
        for delivery in (*self._small, *self._large):
            while delivery.callers:
                self._settle(delivery.callers.pop(0), copy_output(delivery.output))


def _is_large(output: Any) -> bool:
    try:
        return is_much(output, most_parts=MOST_PARTS, most_bytes=MOST_BYTES)
    except Exception:  # noqa: BLE001  the user's classes may raise anything
        return False


def copy_output(output: Any) -> Any:
    """Copy an output for one caller; immutable ones are not copied."""
    try:
        return copy.deepcopy(output)
    except EXITS:
        raise
    except BaseException:  # noqa: BLE001  the user's code may raise anything
        return output


class _Computation:
    """The search for one output; the caller of its request."""

    def __init__(self, key: Any, session: "CachingSession", *, is_cacheable: bool) -> None:
        self.key = key
        self.is_cacheable = is_cacheable
        # The callers that still wait, in order of arrival.
        self.callers: list[Request] = []
        # The request of the session below; None before a miss, and after its end.
        self.request: Request | None = None
        # For the functions `cost` and `group_by`, and for observers.
        self.context = copy_context()
        self._session = session

    def release_request(self) -> Request | None:
        """Return the request, which refers to this computation, and forget it."""
        request, self.request = self.request, None
        return request

    def set_result(self, output: Any) -> None:
        """Take the output of the model."""
        self._session.take_output(self, output)

    def set_exception(self, error: BaseException) -> None:
        """Take the error of the computation."""
        self._session.take_error(self, error)


class CachingSession(Session):
    """A session with a cache before another session."""

    def __init__(
        self,
        inner: Session,
        model: CurrentModel,
        settings: Settings,
        status: Status,
        ledger: Ledger,
    ) -> None:
        assert settings.cache is not None, "otherwise there is no use for this object"
        super().__init__(inner.binding, [*inner.methods.values()], settings, status, ledger)
        self._inner = inner
        self._cache = OutputCache(settings.cache, self._name)
        # Its weights are part of the keys.
        self._model = model
        model.when_reloading = self._stop_caching
        # The computations that further callers may join, by key; and those of each open call.
        self._by_key: dict[Any, _Computation] = {}
        self._joined: dict[Request, _Computation] = {}
        # The computations that wait for the cache, and the tasks that do so.
        self._lookups: dict[_Computation, asyncio.Task[None]] = {}
        self._deliveries = Deliveries(self._give)
        # The deadlines of the open calls.
        self._calls = OpenCalls(settings.timeout, idempotent=settings.idempotent)

    # Calls.

    def accept(self, request: Request) -> None:
        """Look the output up, or join a computation of an equal input."""
        try:
            key = self._make_key(request)
            computation = self._by_key.get(key)
        except ConfigurationError as error:
            self._ledger.reject(request, error, "invalid input")
            return
        except Exception:  # noqa: BLE001  it cannot be pickled; the session below says so
            self._inner.accept(request)
            return
        if computation is not None:
            self._join(request, computation)
            self._ledger.count_cached("coalesced")
            queued = computation.request
            if queued is not None and queued.priority < request.priority:
                self._inner.raise_priority(queued, request.priority)
        elif len(self._lookups) >= self.settings.queue_limit:
            text = (
                f"{len(self._lookups)} inputs are looked up in the cache already "
                f"(max_queue_size={self.settings.queue_limit})"
            )
            self._ledger.reject(request, QueueFullError(text), "queue full")
        else:
            computation = _Computation(key, self, is_cacheable=not self._model.is_reloading)
            self._by_key[key] = computation
            self._join(request, computation)
            self._look_up(computation)

    def _make_key(self, request: Request) -> Any:
        """Return the key of an output: of the input, the method and the weights."""
        key = self._key_of(request.value)
        named = [] if request.group is None else [request.group.method.name]
        if self._model.spec.weights:
            named.append(self._model.spec.weights)
        if not named:
            return key
        return ":".join([key, *named]) if isinstance(key, str) else (key, *named)

    def _key_of(self, value: Any) -> Any:
        if self.settings.key is None:
            return f"{self._name}:{hash_input(value)}"
        try:
            key = self.settings.key(value)
            hash(key)
        except Exception as error:  # noqa: BLE001  the caller gets it
            text = f"key: {error!r:.200} for an input of type {type(value)}"
            raise ConfigurationError(text) from to_cause(error)
        return key

    def _join(self, request: Request, computation: _Computation) -> None:
        """Let a call wait for a computation."""
        self._calls.add(monotonic(), request)
        self._wake_at(self._calls.next_expiry)
        computation.callers.append(request)
        self._joined[request] = computation

    def abandon(self, request: Request) -> None:
        """Remove a caller; the computation ends with its last caller."""
        if request not in self._joined:
            self._inner.abandon(request)
        elif settle(request) and self._leave(request):
            self._ledger.counters.submitted += 1
            self._ledger.cancel(request, "waiting")

    def _leave(self, request: Request) -> bool:
        """Remove a settled call from its computation; return whether that ends a look-up."""
        self._calls.remove(request.id)
        computation = self._joined.pop(request)
        computation.callers.remove(request)
        if computation.callers:
            if computation.request is not None:
                # The caller may change its input now; the others have equal ones.
                computation.request.value = computation.callers[0].value
            return False
        self._forget(computation)
        lookup = self._lookups.pop(computation, None)
        if lookup is not None and not lookup.get_loop().is_closed():
            lookup.cancel()
        queued = computation.release_request()
        if queued is not None:
            self._inner.abandon(queued)
        return lookup is not None

    def _end_waiting(
        self,
        end: Callable[[Request, BatcherError, str], None],
        request: Request,
        error: BatcherError,
        reason: str,
    ) -> None:
        """Give a settled call its error; count it if its look-up ends with it."""
        if self._leave(request):
            self._ledger.counters.submitted += 1
            end(request, error, reason)
        else:
            set_exception(request, error)

    def _run(self) -> None:
        """Expire the callers whose deadlines passed; that of a leader has usually expired."""
        self._is_scheduled = False
        for request in self._calls.expire(monotonic()):
            kind = DeadlineExceededError if self._inner.load[0] else NotReadyError
            timeout = timeout_of(request, self.settings)
            error = kind(f"there was no answer within its timeout of {timeout} s")
            self._end_waiting(self._ledger.expire, request, error, "waiting")
        self._wake_at(self._calls.next_expiry)

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a request of the session below."""
        self._inner.raise_priority(request, priority)

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request, if all that are looked up are misses."""
        return self._inner.has_room(request, ahead + len(self._lookups))

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        return self._inner.allocate_input(dtype, shape)

    # Computations.

    def _look_up(self, computation: _Computation) -> None:
        """Look the output up, in a task if the cache is asynchronous."""
        found = self._cache.look_up(computation.key)
        if not isawaitable(found):
            self._take_found(computation, found)
            return
        task = self.binding.loop.create_task(
            self._wait_for(computation, found), context=computation.context
        )
        self._lookups[computation] = task
        task.add_done_callback(lambda _: self._notice_drained())

    async def _wait_for(self, computation: _Computation, found: Awaitable[Any]) -> None:
        output = await found
        # Otherwise the cache has ignored the cancellation of this task.
        if self._lookups.pop(computation, None) is not None:
            self._take_found(computation, output)

    def _take_found(self, computation: _Computation, found: Any) -> None:
        """Deliver the output that the cache has, or let the session below compute a missing one."""
        if found is None:
            self._ledger.count_cached("miss")
            self._compute(computation)
        else:
            self._deliver(computation, None if found is CachedNone.NONE else found)
            self._ledger.count_cached("hit")

    def _compute(self, computation: _Computation) -> None:
        """Send the input to the session below, with the latest deadline of the callers."""
        leader = max(computation.callers, key=lambda caller: caller.deadline)
        deadline = leader.deadline if leader.has_explicit_deadline else None
        request = computation.request = Request(leader.value, computation, deadline)
        request.timeout, request.target = leader.timeout, leader.target
        request.group = leader.group
        request.priority = max(caller.priority for caller in computation.callers)
        # A copy: the task that looks up may be running in the context itself.
        computation.context.copy().run(self._inner.accept, request)

    def take_output(self, computation: _Computation, output: Any) -> None:
        """Deliver the output of the model, and store it."""
        computation.release_request()
        self._deliver(computation, output)
        if computation.is_cacheable:
            self._cache.store(computation.key, output)

    def take_error(self, computation: _Computation, error: BaseException) -> None:
        """Fail the callers; if the request was late, compute again for later deadlines."""
        request = computation.release_request()
        if request is None:  # its last caller has left, and the queue has no room for it
            return
        failed = computation.callers
        if _is_late(error, request):
            failed = [caller for caller in failed if caller.deadline <= request.deadline]
        for number, caller in enumerate(failed):
            if self._settle(caller):
                set_exception(caller, copy_error(error) if number else error)
        computation.callers = [caller for caller in computation.callers if not caller.is_settled]
        if computation.callers:
            self._compute(computation)
        else:
            self._forget(computation)

    def _forget(self, computation: _Computation) -> None:
        """Let no further caller join a computation."""
        if self._by_key.get(computation.key) is computation:
            del self._by_key[computation.key]

    def _deliver(self, computation: _Computation, output: Any) -> None:
        """Give each caller a copy of the output."""
        self._forget(computation)
        self._deliveries.add(computation.callers, output, self.binding.loop)

    def _give(self, caller: Request, output: Any) -> None:
        if self._settle(caller):
            with suppress(asyncio.InvalidStateError):  # cancelled, in this turn of the loop
                caller.caller.set_result(output)

    def _settle(self, caller: Request) -> bool:
        """Settle a call; return whether it can be given an outcome."""
        self._calls.remove(caller.id)
        self._joined.pop(caller, None)
        return settle(caller) and not self.binding.loop.is_closed()

    # State and statistics.

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""
        return self._inner.load

    def read_stats(self) -> BatcherStats:
        """Return the statistics of the session that computes, and the present look-ups."""
        return replace(self._inner.read_stats(), cache_lookups=len(self._lookups))

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""
        return self._inner.explain()

    # Life.

    def begin(self) -> None:
        """Start the workers, without waiting for them."""
        self._inner.begin()

    def reconfigure(self, settings: Settings, changes: Reconfiguration) -> None:
        """Apply the settings with some changes, which were checked before."""
        self._inner.reconfigure(settings, changes)
        self.settings = settings

    @property
    def can_reload(self) -> bool:
        """Whether `reload` can succeed; otherwise only another opening brings workers."""
        return self._inner.can_reload

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model; its outputs have other keys."""
        await self._inner.reload(model_spec)

    def _stop_caching(self) -> None:
        """Cache no output that is being computed: it may be of the old or the new weights."""
        for computation in self._by_key.values():
            computation.is_cacheable = False

    def begin_drain(self) -> None:
        """Expect no further requests, unless accepted ones are looked up and may be misses."""
        if not self._lookups:
            self._inner.begin_drain()

    def _is_drained(self) -> bool:
        """Return whether no output is being looked up."""
        # A task may have been cancelled together with all others of its loop.
        return all(task.done() for task in self._lookups.values())

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for look-ups, and as long for computations; then end."""
        await self._wait_until_drained()
        self._inner.begin_drain()
        await self._inner.aclose()
        await self._deliveries.wait(self.settings.drain_timeout)
        self._end_calls()
        await self._cache.settle(self.settings.stop_timeout)

    def end(self, grace: float) -> None:
        """Release everything, and block until the workers are dead."""
        self._end_calls()
        self._inner.end(grace)

    def _end_calls(self) -> None:
        """Fail the calls whose outputs are being looked up, and deliver the outputs of others."""
        self._deliveries.finish()
        for computation in [*self._lookups]:
            for caller in [*computation.callers]:
                if self.binding.loop.is_closed():
                    self.abandon(caller)
                else:
                    settle(caller)
                    error = BatcherClosedError(f"{self._name} was closed before it had answered")
                    self._end_waiting(self._ledger.fail, caller, error, "closed")
        self._stop_timer()


def _is_late(error: BaseException, request: Request) -> bool:
    """Return whether a request has failed because of its deadline or target."""
    if not isinstance(error, DeadlineExceededError | NotReadyError):
        return False
    return error.retry_after is not None or request.deadline <= monotonic()
