"""Calls of many inputs, of a model's methods, and from other threads. API process."""

import math
from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic

from fast_batcher._core.values import Request, settle
from fast_batcher._process import monotonic
from fast_batcher._session.life import LoopBinding
from fast_batcher._session.outcomes import set_exception
from fast_batcher._session.session import Session
from fast_batcher.errors import ConfigurationError
from fast_batcher.model import InputT, OutputT
from fast_batcher.settings import Settings, checked_priority, checked_timeout

# Most full batches per worker that one `process_many` call has queued or running: one that runs and
# one that waits behind it. More would only delay other callers.
MANY_BATCHES_PER_WORKER = 2


def set_options(request: Request, timeout: float | None, priority: int) -> None:
    """Check the timeout and the priority of a call, and give them to its request."""
    if timeout is not None:
        request.deadline = monotonic() + checked_timeout(timeout)
        request.has_explicit_deadline = True
        request.timeout = timeout
    request.priority = checked_priority(priority)


async def process_many(
    find_session: Callable[[], Session],
    values: Iterable[Any],
    settings: Settings,
    *,
    timeout: float | None,
    priority: int,
    method: str | None = None,
) -> list[Any]:
    """Wait for the outputs of many inputs, in their order.

    While requests of the call are in flight, the next one waits until the queue has room for it; a
    request of a call that has none in flight is accepted or rejected at once.
    """
    priority = checked_priority(priority)
    limit = settings.timeout if timeout is None else checked_timeout(timeout)
    deadline = math.inf if limit is None else monotonic() + limit
    # With a target, a batch that waits behind another batch of the same call might be rejected.
    batches = MANY_BATCHES_PER_WORKER if settings.max_latency is None else 1
    most_in_flight = batches * settings.batch_limit * settings.most_workers
    loop = get_running_loop()
    outputs: list[Any] = []
    in_flight: deque[Request] = deque()
    session: Session | None = None
    try:
        for value in values:
            request = Request(value, loop.create_future(), deadline)
            request.timeout = timeout
            request.priority = priority
            if timeout is None:
                request.target = math.inf  # the default timeout is no target
            while session and in_flight:
                if len(in_flight) < most_in_flight and session.has_room(request):
                    break
                outputs.append(await in_flight[0].caller)
                in_flight.popleft()
            session = find_session()
            request.group = None if method is None else session.methods[method].group
            session.accept(request)
            in_flight.append(request)
        while in_flight:
            outputs.append(await in_flight[0].caller)
            in_flight.popleft()
    finally:
        for request in in_flight:
            assert session is not None, "it has accepted them"
            session.abandon(request)
            if request.caller.done() and not request.caller.cancelled():
                request.caller.exception()  # mark as retrieved, so that asyncio does not log it
            del request
        # An error holds this frame, which must not hold the error.
        in_flight.clear()
    return outputs


# Waits for the outputs of many inputs; called with values, timeout, priority and method.
CallMany = Callable[[Iterable[Any], float | None, int, str], Coroutine[Any, Any, list[Any]]]


class BatchMethod(Generic[InputT, OutputT]):
    """A method of a model that is marked with `batchable`, for callers."""

    def __init__(self, call_many: CallMany, name: str) -> None:
        self._call_many = call_many
        self._name = name

    async def process_batched(
        self, value: InputT, *, timeout: float | None = None, priority: int = 0
    ) -> OutputT:
        """Wait for the method's output for one input, as `DynBatcher.process_batched` does."""
        (output,) = await self._call_many([value], timeout, priority, self._name)
        return output  # type: ignore[no-any-return]

    async def process_many(
        self, values: Iterable[InputT], *, timeout: float | None = None, priority: int = 0
    ) -> list[OutputT]:
        """Wait for the outputs of many inputs, in their order; see `DynBatcher.process_many`."""
        return await self._call_many(values, timeout, priority, self._name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"


class BatchMethods:
    """The `batchable` methods of a model as attributes."""

    def __init__(self, call_many: CallMany, names: Sequence[str]) -> None:
        self._methods = {name: BatchMethod[Any, Any](call_many, name) for name in names}

    def __getattr__(self, name: str) -> BatchMethod[Any, Any]:
        if name.startswith("_"):  # a copy is asked for special methods before it has attributes
            raise AttributeError(name)
        method = self._methods.get(name)
        if method is None:
            known = ", ".join(self._methods) or (
                "none; mark methods of its class with batchable(), and give the batcher the class, "
                'not a "module:Class" string'
            )
            raise AttributeError(f"no batchable method {name!r}; the model has {known}")
        return method

    def __dir__(self) -> list[str]:
        return sorted(self._methods)

    def find(
        self, function: Callable[[Any, list[InputT]], Sequence[OutputT | Exception]]
    ) -> BatchMethod[InputT, OutputT]:
        """Return the method of the model's class, with its types: `find(Embedder.embed_text)`."""
        name = getattr(function, "__name__", "")
        if name not in self._methods:
            raise ConfigurationError(
                f"function={function!r:.100}: give a batchable method of the model's class, one of "
                f"{', '.join(self._methods) or 'none'}"
            )
        return self._methods[name]


class ThreadCalls:
    """Requests that the event loop's thread has not taken yet."""

    def __init__(self, find_session: Callable[[], Session]) -> None:
        self._find_session = find_session
        self._submitted: deque[Request] = deque()

    def submit(self, request: Request, binding: LoopBinding) -> bool:
        """Pass a request to the loop's thread, from any thread; False if the loop is closed."""
        self._submitted.append(request)
        if not binding.call(self.take):
            with suppress(ValueError):  # another loop has just taken it
                self._submitted.remove(request)
                return False
        return True

    def take(self) -> None:
        """Give the submitted requests to the session, or an error to their callers."""
        while self._submitted:
            request = self._submitted.popleft()
            try:
                request.caller.context.run(self._find_session().accept, request)
            except Exception as error:  # noqa: BLE001  every call must end
                settle(request)
                set_exception(request, error)
