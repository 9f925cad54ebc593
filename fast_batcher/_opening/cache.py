"""Single flight: equal inputs that are in flight share one computation, and a cache may know it.

    DynBatcher --accept--> SingleFlight --miss--> Opening
               <--answer-- |         ^              |
                           +- cache -+ <---output---+

API process, on the event loop's thread; one for each opening of a batcher with a cache. A flight
begins with the first call of a key: the cache is asked, and after a miss the opening. Each call has
a future of its own, and gets a copy of the output, or of the error.
"""

import asyncio
import copy
from collections.abc import Awaitable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from fast_batcher._arrays.joining import is_much
from fast_batcher._core.values import Failure, Request, settle
from fast_batcher._identity import digest_input
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import CurrentModel
from fast_batcher._opening.offload import offload
from fast_batcher._opening.opening import Opening
from fast_batcher._opening.outcomes import timeout_of
from fast_batcher._opening.output_cache import EXITS, OutputCache, is_awaitable
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import to_cause
from fast_batcher.errors import (
    BatcherClosedError,
    ConfigurationError,
    DeadlineExceededError,
    NotReadyError,
    QueueFullError,
    copy_error,
)
from fast_batcher.observing import Outcome
from fast_batcher.types import Cache, CachedNone

# Seconds of copies after which the event loop turns. With the last copy, which may take as long,
# and the callers that go on with their copies, a turn stays below 5 ms.
SLICE: Final = 0.001
# Parts of an output above which a thread copies it. `deepcopy` takes 0.1 us for a number, and 1 us
# for a list or dict.
MOST_PARTS: Final = 2000
# Bytes of its arrays above which a thread copies it. The system takes up to 4 ms for a MiB of fresh
# memory on virtual machines.
MOST_BYTES: Final = 2**18


@dataclass(eq=False)
class _Flight:
    """An output on its way to the calls that wait for it."""

    key: Any
    # The reloads that had begun before it, None if one was running.
    reloads: int | None
    # The calls in order of arrival, each with the timer of its deadline, None without one.
    calls: dict[Request, asyncio.TimerHandle | None] = field(default_factory=dict)
    # The call whose deadline the opening keeps, and the request of the opening; None while the
    # cache is asked, and after the end.
    leader: Request | None = None
    request: Request | None = None
    # Whether the cache has the output.
    is_stored: bool = False
    # The task that gives each call its copy of the output.
    delivery: asyncio.Task[None] | None = None


class SingleFlight:
    """The calls of a batcher with a cache, before their opening."""

    def __init__(self, opening: Opening, cache: Cache, model: CurrentModel, ledger: Ledger) -> None:
        self.binding = opening.binding
        self.methods = opening.methods
        self._opening = opening
        self._name = opening.status.name
        self._cache = OutputCache(cache, self._name)
        # Its identity is part of the keys.
        self._model = model
        self._ledger = ledger
        # The flights that further calls may join, by key; and those of the open calls.
        self._by_key: dict[Any, _Flight] = {}
        self._flights: dict[Request, _Flight] = {}
        # The flights that wait for an asynchronous cache, and the tasks that do so.
        self.lookups: dict[_Flight, asyncio.Task[None]] = {}
        # Held during a copy on the event loop, and during one in a thread: Python code in several
        # threads would slow the loop.
        self._copying = asyncio.Lock(), asyncio.Lock()
        # Seconds of copies since the loop has turned for them.
        self._copied = 0.0

    # Calls.

    def accept(self, request: Request) -> None:
        """Let a call join the flight of an equal input, or begin one.

        A call with a higher priority begins one of its own: the request of the other may wait long.
        """
        try:
            key = self._make_key(request)
            flight = self._by_key.get(key)
        except ConfigurationError as error:
            self._ledger.reject(request, error)
            return
        except BaseException:  # noqa: BLE001  it cannot be pickled; the opening says so
            self._opening.accept(request)
            return
        settings = self._opening.settings
        request.arrival = monotonic()
        if not (request.has_deadline and self._opening.has_deadlines):
            request.fix_deadline(request.arrival, None, settings.timeout)
        sent = None if flight is None else flight.request
        if flight is not None and (sent is None or sent.priority >= request.priority):
            self._join(flight, request)
            self._ledger.count_cached("hit" if flight.is_stored else "coalesced")
        elif len(self.lookups) >= settings.queue_limit:
            text = (
                f"{len(self.lookups)} inputs are looked up in the cache already "
                f"(max_queue_size={settings.queue_limit})"
            )
            self._ledger.reject(request, QueueFullError(text))
        else:
            self._begin(request, key)

    def _make_key(self, request: Request) -> Any:
        """Return the key of an output: of the model, the method and the input."""
        key_of, value = self._opening.settings.key, request.value
        if key_of is None:
            key: Any = digest_input(value)
        else:
            try:
                key = key_of(value)
                hash(key)
            except BaseException as error:  # noqa: BLE001  the caller gets it
                text = f"key: {error!r:.200} for an input of type {type(value)}"
                raise ConfigurationError(text) from to_cause(error)
        method = None if request.group is None else request.group.method.name
        named = f"{self._model.spec.identity}:{method or 'infer'}"
        return f"{named}:{key}" if isinstance(key, str) else (named, key)

    def has_room(self, request: Request) -> bool:
        """Return whether the queue has room for a request, if all that are looked up are misses."""
        return self._opening.has_room(request, len(self.lookups))

    def _join(self, flight: _Flight, request: Request) -> None:
        """Let a call wait for the output of a flight, until its deadline."""
        timer = None
        if request.deadline != inf:
            left = request.deadline - request.arrival
            timer = self.binding.loop.call_later(left, self._expire, request, context=Context())
        flight.calls[request] = timer
        self._flights[request] = flight

    def _expire(self, request: Request) -> None:
        """End a call at its deadline, unless the opening does so."""
        if self._flights[request].leader is not request:
            kind = DeadlineExceededError if self._opening.load[0] else NotReadyError
            timeout = timeout_of(request, self._opening.settings)
            error = kind(f"there was no answer within its timeout of {timeout} s")
            self._ledger.give(request, Failure(error))
            self.abandon(request, "expired")

    def _leave(self, request: Request) -> _Flight | None:
        """Take a call that ends out of its flight; return None if it is in none."""
        flight = self._flights.pop(request, None)
        if flight is not None:
            settle(request)
            timer = flight.calls.pop(request)
            if timer is not None:
                timer.cancel()
        return flight

    def abandon(self, request: Request, outcome: Outcome = "cancelled") -> None:
        """Remove a call that ends, unless that was done; its flight ends with the last call."""
        flight = self._leave(request)
        if flight is None:
            self._opening.abandon(request)  # an input without a key, or a call that has ended
            return
        sent = flight.request
        if flight.calls:
            if sent is not None:
                # The caller may change its input now; the others have equal ones.
                sent.value = next(iter(flight.calls)).value
            return
        self._forget(flight)
        flight.request = flight.leader = None
        lookup = self.lookups.pop(flight, None)
        if lookup is not None:
            self._ledger.counters.submitted += 1
            self._ledger.end(request, outcome, "waiting")
            if not self.binding.loop.is_closed():
                lookup.cancel()
        elif sent is not None:
            self._opening.abandon(sent)

    # Flights.

    def _begin(self, request: Request, key: Any) -> None:
        """Look the output up, in a task if the cache is asynchronous."""
        reloads = None if self._model.is_reloading else self._model.reloads
        flight = self._by_key[key] = _Flight(key, reloads)
        self._join(flight, request)
        found = self._cache.look_up(key)
        if is_awaitable(found):
            self.lookups[flight] = asyncio.create_task(self._look_up(flight, found))
        else:
            self._take_found(flight, found)

    async def _look_up(self, flight: _Flight, found: Awaitable[Any]) -> None:
        output = await found
        # Otherwise the cache has ignored the cancellation of this task.
        if self.lookups.pop(flight, None) is not None:
            self._take_found(flight, output)

    def _take_found(self, flight: _Flight, found: Any) -> None:
        """Deliver the output that the cache has, or let the opening compute a missing one."""
        if found is None:
            self._ledger.count_cached("miss")
            self._send(flight)
        else:
            self._ledger.count_cached("hit")
            flight.is_stored = True
            self._deliver(flight, None if found is CachedNone.NONE else found)

    def _send(self, flight: _Flight) -> None:
        """Send a request with the latest deadline and the highest priority of the calls."""
        flight.leader = max(flight.calls, key=lambda call: call.deadline)
        request = flight.request = copy.copy(flight.leader)
        request.rank(max(call.priority for call in flight.calls), request.share)
        request.caller = self.binding.loop.create_future()
        # A reference to the request in here would be a cycle.
        request.caller.add_done_callback(partial(self._take_outcome, flight))
        self._opening.accept(request)

    def _take_outcome(self, flight: _Flight, done: asyncio.Future[Any]) -> None:
        """Deliver and store an output; fail the calls, or send again for later deadlines."""
        error = done.exception()
        if error is None and flight.reloads == self._model.reloads:
            self._cache.store(flight.key, done.result())
        request, flight.request, flight.leader = flight.request, None, None
        if request is None:  # the last call has left in the same turn of the loop
            return
        if error is None:
            self._deliver(flight, done.result())
            return
        is_late = _is_late(error, request)
        for call in [*flight.calls]:
            if not is_late or call.deadline <= request.deadline:
                self._leave(call)
                self._ledger.give(call, Failure(copy_error(error)))
        if flight.calls:
            self._send(flight)
        else:
            self._forget(flight)

    def _deliver(self, flight: _Flight, output: Any) -> None:
        """Give each call a copy of the output, from the next turn of the event loop on.

        Until then further calls join: a crowd in one turn costs one look-up and one task.
        """
        copying = self._copy(flight, output, _is_large(output))
        flight.delivery = self.binding.loop.create_task(copying, context=Context())

    async def _copy(self, flight: _Flight, output: Any, is_large: bool) -> None:
        """Make the copies for `SLICE` seconds in each turn of the loop; large ones in a thread."""
        self._forget(flight)
        async with self._copying[is_large]:
            while flight.calls:
                began_at = monotonic()
                copied = await offload(is_large, copy_output, output)
                call = next(iter(flight.calls), None)
                if call is not None:
                    self._leave(call)
                    self._ledger.give(call, copied)
                del copied, call
                if is_large:
                    continue
                seconds = monotonic() - began_at
                self._copied += seconds
                if self._copied > SLICE:
                    self._copied = 0.0
                    await asyncio.sleep(0)
                if seconds > SLICE:  # the size of an object of the user's class is unknown
                    break
        if flight.calls:
            await self._copy(flight, output, is_large=True)

    def _forget(self, flight: _Flight) -> None:
        """Let no further call join a flight."""
        if self._by_key.get(flight.key) is flight:
            del self._by_key[flight.key]

    # Life.

    def begin_drain(self) -> None:
        """Expect no further requests, unless accepted ones are looked up and may be misses."""
        if not self.lookups:
            self._opening.begin_drain()

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for look-ups, and as long for the opening; then end."""
        settings = self._opening.settings
        if self.lookups:
            await asyncio.wait(self.lookups.values(), timeout=settings.drain_timeout)
        self._opening.begin_drain()
        await self._opening.aclose()
        await self._cache.settle(settings.stop_timeout)

    def end(self, grace: float) -> None:
        """Fail the calls whose inputs are looked up, and release everything; blocks."""
        is_closed = self.binding.loop.is_closed()
        for call in [call for flight in self.lookups for call in flight.calls]:
            if not is_closed:  # the futures of a closed loop cannot be settled
                closed = BatcherClosedError(f"{self._name} was closed before it had answered")
                self._ledger.give(call, Failure(closed))
            self.abandon(call, "cancelled" if is_closed else "failed")
        self._opening.end(grace)


def _is_late(error: BaseException, request: Request) -> bool:
    """Return whether a request has failed because of its deadline or target."""
    if not isinstance(error, DeadlineExceededError | NotReadyError):
        return False
    return error.retry_after is not None or request.deadline <= monotonic()


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
