"""Calls of many inputs, of a model's methods, and from other threads. API process."""

import asyncio
import concurrent.futures
from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Literal, overload

from fast_batcher._core.values import Request, Share, settle
from fast_batcher._opening.cache import SingleFlight
from fast_batcher._opening.life import LoopBinding
from fast_batcher._opening.opening import Opening
from fast_batcher._process import monotonic
from fast_batcher.errors import BatcherError, ConfigurationError, NotReadyError
from fast_batcher.model import InputT, OutputT
from fast_batcher.settings import Settings, checked_priority, checked_share, checked_timeout

# Most full batches per worker that one `process_many` call has queued or running: one that runs and
# one that waits behind it. More would only delay other callers.
MANY_BATCHES_PER_WORKER = 2


def set_options(
    request: Request, timeout: float | None, priority: int, share: Share, default: float | None
) -> None:
    """Check the options of a call that is made now, and give them to its request."""
    if timeout is not None:
        checked_timeout(timeout)
    request.fix_deadline(monotonic(), timeout, default)
    request.rank(checked_priority(priority), checked_share(share))


async def wait_for_answer(calls: Opening | SingleFlight, request: Request) -> Any:
    """Let a request be answered that was made before, perhaps on another thread."""
    future = request.caller = Future(loop=calls.binding.loop)
    calls.accept(request)
    try:
        return await future
    except BaseException:
        if not request.is_settled:
            calls.abandon(request)
        raise
    finally:
        # An error holds this frame, which must not hold the error.
        del future, request


class _ManyCalls:
    """The calls of one `process_many`, and the outputs so far."""

    def __init__(
        self,
        find_calls: Callable[[], Opening | SingleFlight],
        most_in_flight: int,
        method: str | None,
        *,
        return_exceptions: bool,
    ) -> None:
        self._find_calls = find_calls
        self._most = most_in_flight
        self._method = method
        self._return_exceptions = return_exceptions
        # What has taken the last call.
        self._calls: Opening | SingleFlight | None = None
        self._in_flight: deque[Request] = deque()
        self.outputs: list[Any] = []

    async def make_room(self, request: Request) -> None:
        """Wait until the queue has room for the next request, while any is in flight."""
        while self._in_flight:
            is_room = len(self._in_flight) < self._most
            if is_room and self._calls is not None and self._calls.has_room(request):
                return
            await self.take_output()

    def send(self, request: Request) -> None:
        """Accept the next request."""
        try:
            calls = self._calls = self._find_calls()
            request.group = None if self._method is None else calls.methods[self._method].group
            calls.accept(request)
        except BatcherError as error:  # the batcher takes no calls
            if not self._return_exceptions:
                raise
            settle(request)
            request.caller.set_exception(error)
        self._in_flight.append(request)

    async def finish(self) -> None:
        """Wait for the outputs that are missing."""
        while self._in_flight:
            await self.take_output()

    async def take_output(self) -> None:
        """Wait for the output of the oldest request in flight."""
        try:
            output = await self._in_flight[0].caller
        except Exception as error:
            if not self._return_exceptions:
                self._name_input(error)
                raise
            output = error.with_traceback(None)  # its frames would hold the other outputs
        self.outputs.append(output)
        self._in_flight.popleft()

    def _name_input(self, error: Exception) -> None:
        """Add the position of the failed input to its traceback, unless it is the only one."""
        position = len(self.outputs)
        if position + len(self._in_flight) > 1:
            error.add_note(f"input {position} of process_many failed (counted from 0)")

    def abandon(self) -> None:
        """Cancel the requests in flight."""
        for request in self._in_flight:
            if self._calls is not None:
                self._calls.abandon(request)
            if request.caller.done() and not request.caller.cancelled():
                request.caller.exception()  # mark as retrieved, so that asyncio does not log it
            del request
        # An error holds this frame, which must not hold the error.
        self._in_flight.clear()


async def process_many(
    find_calls: Callable[[], Opening | SingleFlight],
    values: Iterable[Any],
    settings: Settings,
    *,
    timeout: float | None,
    priority: int,
    share: Share,
    method: str | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Wait for the outputs of many inputs, in their order.

    While requests of the call are in flight, the next one waits until the queue has room for it; a
    request of a call that has none in flight is accepted or rejected at once.
    """
    priority, share = checked_priority(priority), checked_share(share)
    if timeout is not None:
        checked_timeout(timeout)
    called_at = monotonic()
    # With a target, a batch that waits behind another batch of the same call might be rejected.
    batches = MANY_BATCHES_PER_WORKER if settings.max_latency is None else 1
    most_in_flight = batches * settings.batch_limit * settings.most_workers
    loop = get_running_loop()
    many = _ManyCalls(find_calls, most_in_flight, method, return_exceptions=return_exceptions)
    try:
        for value in values:
            request = Request(value, loop.create_future())
            request.fix_deadline(called_at, timeout, settings.timeout)
            request.rank(priority, share)
            await many.make_room(request)
            many.send(request)
            del request
        await many.finish()
    finally:
        many.abandon()
    return many.outputs


# Waits for the outputs of many inputs; called with values, timeout, priority, share, method, and
# whether errors are returned.
CallMany = Callable[
    [Iterable[Any], float | None, int, Share, str, bool], Coroutine[Any, Any, list[Any]]
]


class BatchMethod(Generic[InputT, OutputT]):
    """A method of a model that is marked with `batchable`, for callers."""

    def __init__(self, call_many: CallMany, name: str) -> None:
        self._call_many = call_many
        self._name = name

    async def process_batched(
        self,
        value: InputT,
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
    ) -> OutputT:
        """Wait for the method's output for one input, as `DynBatcher.process_batched` does."""
        (output,) = await self._call_many([value], timeout, priority, share, self._name, False)
        return output  # type: ignore[no-any-return]

    @overload
    async def process_many(
        self,
        values: Iterable[InputT],
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
        return_exceptions: Literal[False] = False,
    ) -> list[OutputT]: ...
    @overload
    async def process_many(
        self,
        values: Iterable[InputT],
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
        return_exceptions: bool,
    ) -> list[OutputT | BatcherError]: ...
    async def process_many(
        self,
        values: Iterable[InputT],
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Wait for the outputs of many inputs, in their order; see `DynBatcher.process_many`."""
        return await self._call_many(
            values, timeout, priority, share, self._name, return_exceptions
        )

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


class ThreadFuture(concurrent.futures.Future[Any]):
    """The future of a call from another thread; the event loop's thread must not wait for it."""

    def __init__(self, binding: LoopBinding) -> None:
        super().__init__()
        self._binding = binding

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the outcome, at most `timeout` seconds, and return it or raise its error."""
        self._refuse_deadlock(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome, at most `timeout` seconds, and return its error."""
        self._refuse_deadlock(timeout)
        return super().exception(timeout)

    def _refuse_deadlock(self, timeout: float | None) -> None:
        is_wait = not self.done() and (timeout is None or timeout > 0)
        if is_wait and self._binding.is_current:
            raise RuntimeError(
                "submit() was called on the event loop's thread, which computes nothing while it "
                "waits for the result; use `await batcher.process_batched(value)`"
            )


class ThreadCalls:
    """Calls of other threads without an outcome, each with a task on the event loop."""

    def __init__(self) -> None:
        self._futures: set[concurrent.futures.Future[Any]] = set()

    def submit(
        self,
        find_calls: Callable[[], Opening | SingleFlight],
        request: Request,
        binding: LoopBinding,
    ) -> concurrent.futures.Future[Any]:
        """Let a request be answered on the event loop, from any thread.

        Raises:
            RuntimeError: The loop is closed.
        """
        future = ThreadFuture(binding)

        def start() -> None:
            if future.done():  # its thread has withdrawn it, and it was never a call
                return
            task = binding.loop.create_task(_answer(future, find_calls, request))

            def end(done: concurrent.futures.Future[Any]) -> None:
                if done.cancelled():
                    binding.call(task.cancel)

            future.add_done_callback(end)

        # It keeps the caller's context, which the functions `cost` and `group_by` see.
        binding.loop.call_soon_threadsafe(start)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def fail(self, make_error: Callable[[], BaseException]) -> None:
        """Fail the calls of a loop that does not run, and may never do so again."""
        for future in [*self._futures]:
            _settle(future, None, make_error())


async def _answer(
    future: concurrent.futures.Future[Any],
    find_calls: Callable[[], Opening | SingleFlight],
    request: Request,
) -> None:
    """Give a thread the outcome of its call."""
    output: Any = None
    error: BaseException | None = None
    try:
        output = await wait_for_answer(find_calls(), request)
    except asyncio.CancelledError:
        error = NotReadyError("the event loop that served this call has ended")
    except BaseException as raised:
        # Its frames would hold the future, and so the error itself.
        error = raised.with_traceback(None)
        if not isinstance(raised, Exception):  # it ends the program, or the coroutine
            _settle(future, output, error)
            raise
    _settle(future, output, error)


def _settle(
    future: concurrent.futures.Future[Any], output: Any, error: BaseException | None
) -> None:
    """Give a thread its outcome, unless it has one or has cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(output)
    else:
        future.set_exception(error)
