"""`DynBatcher`: the public interface of a batcher, its life cycle and its documentation.

Runs in the API process, on the event loop's thread; `submit` and `stop` on any thread. An `Opening`
(`_opening/opening.py`), one for each call of `open`, does the work: this module queues and
dispatches nothing itself. `Status` holds the one state of a batcher; whether it takes calls, is
draining or has ended is derived from it.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import inspect
import logging
import math
import multiprocessing.process
import os
import sys
import warnings
import weakref
from asyncio import Future, get_running_loop
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from contextvars import Context
from dataclasses import replace
from threading import get_ident
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.joining import is_much, join
from fast_batcher._arrays.outputs import is_one_value, split_rows
from fast_batcher._core.values import STATE_OPEN, Event, Request, State
from fast_batcher._devices import CoreClaim, find_gpus, find_missing
from fast_batcher._identity import identify_reloaded
from fast_batcher._mps import check_control
from fast_batcher._opening.cache import SingleFlight
from fast_batcher._opening.calls import BatchMethods, ThreadCalls, process_many, set_options
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import (
    RUN_THREADSAFE,
    CurrentModel,
    LiveSettings,
    Owners,
    StartLines,
    Status,
    call_on_end,
    call_on_sigterm,
    is_main_thread,
)
from fast_batcher._opening.loop_watch import watch_loop
from fast_batcher._opening.offload import offload
from fast_batcher._opening.opening import LocalOpening, Opening
from fast_batcher._opening.sessions import BatchSession
from fast_batcher._opening.streams import ChunkQueue, ChunkT, Stream, StreamCall
from fast_batcher._process import frozen, monotonic
from fast_batcher._shared_memory.inputs import to_shape
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    CollationError,
    ConfigurationError,
    NotReadyError,
)
from fast_batcher.model import (
    InputT,
    Model,
    ModelKind,
    ModelSpec,
    OutputT,
    check_model,
    concatenates,
    find_cost,
    find_kind,
    list_kinds,
    name_of,
    warn_about_hooks,
)
from fast_batcher.observing import Observer
from fast_batcher.policy import BatchPolicy
from fast_batcher.settings import (
    LIVE_OPTIONS,
    OBSERVERS,
    OPTIONS,
    SECONDS_OR_ZERO,
    BatcherOptions,
    PolicyName,
    Reconfiguration,
    Settings,
    SettingValue,
    checked_timeout,
    reject_for_model,
    reject_unknown_options,
    warn_about_workers,
)
from fast_batcher.stats import BatcherStats, Explanation

logger: logging.Logger = logging.getLogger("fast_batcher")

# The test kits that are active (`fast_batcher.testing`): the last one makes the sessions.
opening_makers: list[
    Callable[["DynBatcher[Any, Any]", CurrentModel, Settings, Status, Ledger], Opening]
] = []

# The batchers that have been opened: a name is to tell those apart that are open.
_opened: "weakref.WeakKeyDictionary[DynBatcher[Any, Any], None]" = weakref.WeakKeyDictionary()

_InitT = TypeVar("_InitT", bound=Callable[..., None])


def _note_arguments(init: _InitT) -> _InitT:
    """Let a constructor find in `_given` the names of the arguments that it was called with.

    An argument that equals its default is the code's choice all the same.
    """
    names = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def note_and_call(self: Any, *args: Any, **kwargs: Any) -> None:
        self._given = frozenset((*names[: len(args)], *kwargs))
        init(self, *args, **kwargs)

    return cast("_InitT", note_and_call)


class DynBatcher(Generic[InputT, OutputT]):
    """Answers single requests with a model that computes batches in worker processes.

    Constructing starts nothing: the lifespan, `async with`, `open` or the first call does. See
    docs/settings.md.

    Args:
        model: An importable class, or "module:Class".
        max_batch_size: Most requests in a batch.
        max_delay: Most seconds to hold a batch.
        model_args: Positional arguments of the model's constructor.
        model_kwargs: Keyword arguments of it.
        num_workers: Processes with a copy of the model; (1, 8) follows the load.
        policy: "adaptive", "greedy", "fixed" or a `BatchPolicy`.
        max_latency: Target in seconds; what would miss it fails early.
        max_queue_size: Most waiting requests.
        timeout: Seconds until a call fails.
        infer_timeout: Seconds that a batch may take.
        auto_open: Whether the first call opens the batcher.
        name: Name in logs and metrics.
        cost: Function of an input's cost.
        group_by: Function of a key; equal keys share batches.
        options: `BatcherOptions`.

    Raises:
        ConfigurationError: A setting is wrong.
        TypeError: An option is unknown.
    """

    # The names of the constructor's arguments.
    _given: frozenset[str]

    @_note_arguments
    def __init__(
        self,
        model: type[Model[InputT, OutputT]] | str,
        max_batch_size: int = 32,
        max_delay: float | None = None,
        *,
        model_args: Sequence[Any] = (),
        model_kwargs: Mapping[str, Any] | None = None,
        num_workers: int | tuple[int, int] = 1,
        policy: PolicyName | BatchPolicy = "adaptive",
        max_latency: float | None = None,
        max_queue_size: int | None = None,
        timeout: float | None = 30.0,
        infer_timeout: float | None = None,
        auto_open: bool = True,
        name: str | None = None,
        cost: Callable[[InputT], float] | None = None,
        group_by: Callable[[InputT], Hashable] | None = None,
        **options: Unpack[BatcherOptions],
    ) -> None:
        # First, while the arguments are the only local variables.
        values: dict[str, Any] = {name: one for name, one in locals().items() if name in OPTIONS}
        reject_unknown_options(options)
        values |= {"cost": find_cost(model) if cost is None else cost, **options}
        if concatenates(model):
            values.setdefault("cost_is_padded", False)
        # The names of the arguments, with their sources. Another option has its default.
        self._sources = dict.fromkeys(self._given, "code")
        general: dict[str, Any] = {}
        # Most programs have none outside. A misspelt prefix is a warning.
        if any(name.upper().startswith(("FAST_BATCHER_", "FASTBATCHER_")) for name in os.environ):
            from fast_batcher.configuration import find_options

            for option, (value, source, is_general) in find_options(name or name_of(model)).items():
                if option in self._given:
                    self._sources[option] = f"code, not {source}"
                else:
                    (general if is_general else values)[option] = value
                    self._sources[option] = source
        self._model_class = model
        settings = self._make_settings(values, general)
        self._live = LiveSettings(settings)
        spec = self._check_model(model_args, model_kwargs)
        self._model = CurrentModel(spec)
        self.name: str = spec.name if name is None else name
        warn_about_workers(settings)
        warn_about_hooks(model)
        missing = find_missing(settings.devices or (), os.environ)
        if missing:  # a warning, because an app may be imported or tested on another machine
            text = "%s: devices=%r: this machine has %s: the model would not find %s"
            present = ", ".join(find_gpus(os.environ)) or "no GPU"
            logger.warning(text, self.name, settings.devices, present, ", ".join(missing))
        self._ledger = Ledger(self.name, settings.observers)
        self._status = Status(self.name, self._ledger)
        # The present opening, or the last one that has ended; None before the first opening.
        self._opening: Opening | None = None
        # Receiver of the calls: the opening, or the cache before it.
        self._calls: Opening | SingleFlight | None = None
        # Closes a batcher that is dropped while it is open; None before the first opening.
        self._finalizer: weakref.finalize[..., Any] | None = None
        # Whether a call has opened it, and nothing else.
        self._was_opened_by_call = False
        # Whether a lifespan opens it in a server, as far as is known.
        self._is_served = False
        # Whether a call has come after the end of the event loop of earlier ones.
        self._has_changed_loops = False
        # Done when the running `aclose` ends; None without one.
        self._closing: Future[None] | None = None
        self._thread_calls = ThreadCalls()
        self._sessions: weakref.WeakSet[BatchSession[InputT, OutputT]] = weakref.WeakSet()
        # Closes it at the end of the drain that SIGTERM began, None before.
        self._late_close: asyncio.Task[None] | None = None
        # The last reload, None before the first.
        self._reload: asyncio.Task[None] | None = None
        names = [name for name, _ in spec.methods if name != "infer"]
        # The methods of the model that are marked with `batchable`, as attributes:
        # `batcher.methods.embed_text.process_batched(text)`; `methods.find(Model.embed_text)` has
        # the types of the method.
        self.methods: BatchMethods = BatchMethods(self._call_many, names)
        self._owners = Owners()
        self._cores = CoreClaim(0 if settings.has_host else settings.most_workers)

    # Calls.

    async def process_batched(
        self,
        value: InputT,
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
    ) -> OutputT:
        """Wait for the model's output for one input, which joins a batch in order of arrival.

        Args:
            value: One input, without a batch axis. Picklable, and not changed until the call
                returns.
            timeout: Seconds until the call fails, None for the batcher's, `math.inf` for no limit.
                A call that cannot be answered in a timeout given here is rejected at once.
            priority: -100 to 100; inputs of higher priority go first.
            share: Name of the caller, text or int: shares are served in turn.

        Returns:
            The output of `infer` at this input's position.

        Raises:
            QueueFullError: Too many requests wait; nothing was queued.
            DeadlineExceededError: The timeout passed, or with `retry_after` could not be met.
            InferenceError: The model raised; also an instance of the raised type.
            BatcherError: Base of all; see docs/errors.md.

        Cancellation: safe at any time. A waiting input leaves the queue; the output of a running
        one is dropped.
        """
        calls = self._calls
        if calls is None or self._status.state is not STATE_OPEN:
            calls = self._find_calls()
        binding = calls.binding
        if binding.thread != get_ident() or not binding.loop.is_running():
            calls = self._find_calls()
            binding = calls.binding
        future: Future[OutputT] = Future(loop=binding.loop)
        request = Request(value, future)
        if timeout is not None or priority != 0 or share is not None:
            set_options(request, timeout, priority, share, self._settings.timeout)
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

    def stream(
        self: "DynBatcher[InputT, list[ChunkT]]",
        value: InputT,
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
    ) -> StreamCall[ChunkT]:
        """Wait for the first chunk of a `SteppedModel`, and return an iterator over all of them.

            return StreamingResponse(await batcher.stream(text))

        What fails before the first chunk raises here, so that an endpoint can answer with a status.
        `StreamingResponse` takes chunks that are text or bytes.

        Args:
            value: As for `process_batched`.
            timeout: Seconds until the call fails without a first chunk, and later without a further
                one. Default the batcher's.
            priority: As for `process_batched`.
            share: As for `process_batched`.

        Raises:
            ConfigurationError: The model is no `SteppedModel`; or as for `process_batched`.
            BatcherError: The errors of `process_batched`.

        Cancellation: safe at any time; a stream whose first chunk is awaited leaves. A cancelled
        read of the returned stream loses nothing, and can be repeated.
        """
        return StreamCall(self._begin_stream(value, timeout, priority, share))

    async def _begin_stream(
        self: "DynBatcher[InputT, list[ChunkT]]",
        value: InputT,
        timeout: float | None,
        priority: int,
        share: str | int | None,
    ) -> Stream[ChunkT]:
        if self._model.spec.kind is not ModelKind.STEPS:
            raise ConfigurationError(f"{self.name}: stream() needs a model that is a SteppedModel")
        opening = self._find_opening()
        queue = ChunkQueue(opening.binding.loop)
        request = Request(value, queue)
        set_options(request, timeout, priority, share, self._settings.timeout)
        opening.accept(request)
        stream: Stream[ChunkT] = Stream(request, queue, opening.abandon, opening.binding.call)
        try:
            await stream.wait()
        except BaseException:  # a traceback may hold the stream
            await stream.aclose()
            raise
        return stream

    def session(self, *, timeout: float | None = None) -> BatchSession[InputT, OutputT]:
        """Begin a session with a `SessionModel`, which keeps a state for it in one worker.

            async with batcher.session(timeout=60) as session:
                async for chunk in websocket.iter_bytes():
                    await websocket.send_text(await session.process_batched(chunk))

        Calls of different sessions share batches; those of one session are computed in order. The
        session has its place in a worker from its first call to the end of the block.

        Args:
            timeout: Seconds without a call after which the session ends. Default the batcher's
                `timeout`, and without one it does not end by itself.

        Raises:
            ConfigurationError: The model is no `SessionModel`, or the batcher has a `cache`; or the
                timeout is wrong.
        """
        model = self._model_class
        if self._settings.cache is not None or (
            isinstance(model, type) and find_kind(model) is not ModelKind.SESSIONS
        ):
            raise ConfigurationError(
                f"{self.name}: session() needs a model that is a SessionModel, and no cache"
            )
        if timeout is None:
            timeout = self._settings.timeout
        idle_timeout = math.inf if timeout is None else checked_timeout(timeout)
        find, is_present = self._find_opening, self._is_present
        made: BatchSession[InputT, OutputT] = BatchSession(
            idle_timeout, find, is_present, lambda: self._settings.timeout
        )
        self._sessions.add(made)
        return made

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
        """Wait for the outputs of many inputs, in their order.

        A few batches of inputs are queued at a time, so that other callers are served, too. Each
        input counts as one request.

        Args:
            values: Inputs as for `process_batched`. A single one is rejected: a text, a mapping, a
                table, a named tuple.
            timeout: As for `process_batched`, for all inputs together.
            priority: As for `process_batched`, for each input.
            share: As for `process_batched`, for each input.
            return_exceptions: Whether an input that fails has its error in the place of its output,
                and the others are computed, as in `asyncio.gather`.

        Raises:
            ConfigurationError: `values` is a single input.
            BatcherError: As for `process_batched`; the first input that fails cancels the others. A
                note of the error has its position.

        Cancellation: safe at any time; all inputs are cancelled.
        """
        return await self._call_many(values, timeout, priority, share, None, return_exceptions)

    async def _call_many(
        self,
        values: Iterable[Any],
        timeout: float | None,
        priority: int,
        share: str | int | None,
        method: str | None,
        return_exceptions: bool,
    ) -> list[Any]:
        """Wait for the outputs of many inputs of one method; see `process_many`."""
        if is_one_value(values):
            called = "process_many" if method is None else f"methods.{method}.process_many"
            raise ConfigurationError(
                f"{called}: values is of type {type(values).__name__}: give a list of inputs; "
                "process_batched takes one input"
            )
        return await process_many(
            self._find_calls,
            values,
            self._settings,
            timeout=timeout,
            priority=priority,
            share=share,
            method=method,
            return_exceptions=return_exceptions,
        )

    async def process_rows(
        self,
        batch: Any,
        *,
        collation: Collation | None = None,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
    ) -> Any:
        """Wait for the outputs of an input that is itself a batch of k rows.

        Each row is one input: rows share batches with the inputs of other callers, and count as k
        requests.

        Args:
            batch: An array or tensor with a batch axis, or a structure of them. A list in it has
                one entry per row.
            collation: Position of the batch axis, `batch_dim[0]` in `batch` and `batch_dim[1]` in
                the result; and the padding of unequal outputs. Default `Collation.stack()`.
            timeout: As for `process_batched`, for all rows together.
            priority: As for `process_batched`, for each row.
            share: As for `process_batched`, for each row.

        Returns:
            The outputs of the rows in their order, joined to one batch.

        Raises:
            CollationError: `batch` has no rows, or its features have different numbers of rows; or
                the outputs cannot be joined.
            BatcherError: The errors of `process_many`.

        Cancellation: as for `process_many`.
        """
        collation = Collation.stack() if collation is None else collation
        is_known = isinstance(collation, Collation)
        if not is_known or collation.lengths is not None:
            raise ConfigurationError(
                f"collation={collation!r:.100}: make one with Collation.stack() or Collation.pad()"
            )
        is_long = is_much(batch, dim=collation.batch_dim[0])
        rows = await offload(is_long, split_rows, batch, collation)
        if not rows:
            raise CollationError(
                "the input is a batch without rows, so the type of the outputs is unknown; "
                "omit the call"
            )
        outputs = await self.process_many(rows, timeout=timeout, priority=priority, share=share)
        joining = dataclasses.replace(collation, batch_dim=collation.batch_dim[::-1])
        return await offload(is_much(outputs), join, outputs, joining)

    def submit(
        self,
        value: InputT,
        *,
        timeout: float | None = None,
        priority: int = 0,
        share: str | int | None = None,
    ) -> concurrent.futures.Future[OutputT]:
        """Queue one input from any thread, for endpoints written with `def`.

        Args:
            value: As for `process_batched`.
            timeout: As for `process_batched`.
            priority: As for `process_batched`.
            share: As for `process_batched`.

        Returns:
            A future for the output, with the errors of `process_batched`. Cancelling the future
            cancels the call. A wait for it on the event loop's own thread raises RuntimeError.

        Raises:
            NotReadyError: The batcher has not been opened, or its event loop is closed. A loop that
                ends later fails the future with this error.
            BatcherClosedError: The batcher is draining or closed.
        """
        self._require_own_process()
        opening = self._accepting_opening(
            "submit() needs a batcher that has been opened on an event loop"
        )
        request = Request(value, None)
        set_options(request, timeout, priority, share, self._settings.timeout)
        try:
            return self._thread_calls.submit(self._find_calls, request, opening.binding)
        except RuntimeError:
            raise NotReadyError(f"{self.name}: the event loop that served it is closed") from None

    def allocate_input(self, shape: int | Sequence[int], dtype: Any = "uint8") -> Any:
        """Make a NumPy array in shared memory for one large input, for example a request body.

        Fill it and pass it to a call, as it is or viewed with another dtype or shape of the same
        size: it reaches the worker without another copy. Writes of the model are not visible here.
        Do not change the array until the call returns; after that it may be reused, unless the
        model keeps views of its inputs. An array occupies shared memory as long as it exists, and
        for good if the process forked meanwhile, because the child shares the memory.

        Args:
            shape: The shape of the array.
            dtype: The dtype of the array, in any form that NumPy accepts.

        Returns:
            An uninitialized array. It is outside of shared memory if it is too small or too large,
            if there is no room, or if the system would take milliseconds to provide the memory.

        Raises:
            TypeError: The dtype does not exist, or a size is not a whole number.
            ValueError: The shape is invalid.
            RuntimeError: No event loop runs in this thread.
        """
        import numpy

        sizes = to_shape(shape)
        array = None
        opening = self._opening
        loop = get_running_loop()
        is_served = self._status.takes_calls and min(sizes, default=0) > 0
        if opening is not None and is_served and opening.binding.loop is loop:
            array = opening.allocate_input(numpy.dtype(dtype), sizes)
        return numpy.empty(sizes, dtype) if array is None else array

    # Life.

    async def open(self, *, wait_ready: bool = True) -> None:
        """Start the workers and wait until every one is ready.

        A closed batcher is opened again; a broken one is opened again with a full restart budget.

        Args:
            wait_ready: False returns at once, so that an app can answer probes while the model
                loads; calls are queued until a worker is ready.

        Raises:
            WorkerStartupError: A worker could not load its model; the cause is its traceback. No
                process is left.
            NotReadyError: The workers have died, and their restarts are spent.
            BatcherClosedError: The batcher is draining, or was closed while it was opening.

        Cancellation: safe; the workers continue to load.
        """
        broken = self._opening if self._status.state is State.BROKEN else None
        if broken is not None and not self._leave_closed_loop():
            await broken.aclose()
            if self._status.state is State.CLOSED:
                raise BatcherClosedError(f"{self.name} was closed before it was ready")
        # During that wait another call may have opened the batcher.
        opening = self._begin_open()
        if self._status.state is not State.BROKEN:
            opening = self._find_opening()
        if wait_ready:
            await self._status.wait_while_opening()
        if (broken_error := self._status.broken_error()) is not None:
            await opening.aclose()
            raise broken_error
        if wait_ready and self._status.state is not State.OPEN:
            raise BatcherClosedError(f"{self._status.name} was told to stop before it was ready")

    def begin_drain(self) -> None:
        """Reject new requests and report not ready, while accepted requests are finished.

        Call this in a preStop hook, or some time before `aclose`. May be repeated.
        """
        if self._status.state in (State.NEW, State.OPENING, State.OPEN, State.BROKEN):
            self._status.move(Event.DRAIN)
            if self._calls is not None:
                self._calls.begin_drain()

    async def aclose(self) -> None:
        """Finish the accepted requests, then stop the workers. May be repeated, in any state.

        Requests that are not answered within `drain_timeout` fail with `BatcherClosedError`.
        Workers that do not end within `stop_timeout` are terminated, and then killed.

        Cancellation: safe; the workers are then killed at once. The host process of a `shared`
        batcher is told, and ends without being waited for.
        """
        loop = get_running_loop()
        opening, calls = self._opening, self._calls
        if opening is None or calls is None:
            self._end(grace=0.0)
            return
        if self._status.state is State.CLOSED or opening.binding.is_forked:
            return
        if self._closing is not None and self._closing.get_loop() is loop:
            await asyncio.wait([self._closing])
            return
        if self._leave_closed_loop():
            return
        closing = self._closing = loop.create_future()
        try:
            self.begin_drain()
            self._warn_about_sessions()
            await calls.aclose()
        finally:
            # If the wait was cancelled, end without waiting.
            if self._is_present(opening):
                self._end(grace=0.0)
            if self._closing is closing:
                self._closing = None
            closing.set_result(None)

    def _warn_about_sessions(self) -> None:
        loose = sum(session.is_loose for session in self._sessions)
        if loose:
            logger.warning(
                "%s: aclose() waits up to drain_timeout=%s seconds for sessions without an `async "
                "with` block (%d): begin them in one, or end each with `await session.aclose()`",
                self.name,
                self._settings.drain_timeout,
                loose,
            )

    def stop(self) -> None:
        """Close at once, from synchronous code, in any state. May be repeated.

        Unanswered requests fail with `BatcherClosedError`. Blocks until the workers have exited: up
        to `stop_timeout` seconds if a worker computes, and half a second more if it must be killed.
        May be called after the event loop has been closed; then its callers get no error. A call on
        another thread runs on the loop's thread, and waits for the result.
        """
        opening, grace = self._opening, self._settings.stop_timeout
        if opening is not None and opening.binding.is_forked:
            return
        if opening is not None and opening.binding.runs_elsewhere:
            # Futures and file descriptors belong to the loop's thread, so that thread has to do it.
            ended: concurrent.futures.Future[None] = concurrent.futures.Future()
            if opening.binding.call(self._end_for_thread, ended):
                ended.result()
                return
        self._end(grace)

    async def __aenter__(self) -> Self:
        """Open, and wait until every worker is ready."""
        await self._enter(wait_ready=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close as `aclose` does, whatever happened in the body; see `lifespan` for several."""
        if self._owners.leave(get_running_loop()):
            await self.aclose()

    @overload
    def lifespan(self, app: Any, /) -> AbstractAsyncContextManager[None]: ...
    @overload
    def lifespan(
        self,
        /,
        *,
        wait_ready: bool = True,
        drain_on_sigterm: bool = False,
        lame_duck: float = 0.0,
        freeze_gc: bool = True,
    ) -> Callable[[Any], AbstractAsyncContextManager[None]]: ...
    def lifespan(
        self,
        app: Any = None,
        /,
        *,
        wait_ready: bool = True,
        drain_on_sigterm: bool = False,
        lame_duck: float = 0.0,
        freeze_gc: bool = True,
    ) -> Any:
        """Open and close the batcher with an app: `FastAPI(lifespan=batcher.lifespan)`.

        Several lifespans on one event loop may share the batcher: the first opens it, and the last
        closes it. docs/deployment.md describes the end.

        Args:
            app: The app, passed by the framework. Without it, the call returns a lifespan with the
                other arguments: `lifespan=batcher.lifespan(wait_ready=False)`.
            wait_ready: Whether the app starts to answer only when every worker is ready.
            drain_on_sigterm: Whether SIGTERM makes `/readyz` false at once, while the server still
                finishes its requests, for at most `drain_timeout`.
            lame_duck: Seconds from SIGTERM to the server's own handler, 0 or more, in which it
                still accepts connections; needs `drain_on_sigterm`.
            freeze_gc: Whether garbage collections skip what is alive when the batcher is ready.

        Raises:
            WorkerStartupError: A worker could not load its model; the server then stops.
            ConfigurationError: `lame_duck` is invalid.
        """
        SECONDS_OR_ZERO.check("lame_duck", lame_duck)
        if lame_duck and not drain_on_sigterm:
            raise ConfigurationError(
                f"lame_duck={lame_duck}: it has no effect without drain_on_sigterm=True"
            )

        @asynccontextmanager
        async def run(app: Any) -> AsyncIterator[None]:
            draining: AbstractContextManager[None] = nullcontext()
            if drain_on_sigterm:
                leave = functools.partial(self._leave, lame_duck)
                draining = call_on_sigterm(get_running_loop(), leave, self.name, lame_duck)
            with draining:
                # Test clients run an app in another thread.
                self._is_served = is_main_thread() and not opening_makers
                with call_on_end(get_running_loop(), self._end_opening):
                    await self._enter(wait_ready=wait_ready)
                try:
                    # The collection before would take most of a short test's time.
                    with frozen() if freeze_gc and not opening_makers else nullcontext():
                        yield
                finally:
                    await self.__aexit__()

        return run if app is None else run(app)

    async def reload(
        self,
        *,
        model_args: Sequence[Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace the workers by workers whose model has other arguments, for example new weights.

        The workers are replaced one by one, each when its successor has loaded the model. If one
        cannot load it, all return to the previous arguments. docs/deployment.md has the rest, also
        for `shared`.

        Args:
            model_args: Positional arguments of the model's constructor, None for the current ones.
            model_kwargs: Keyword arguments of the model's constructor, None for the current ones.

        Raises:
            WorkerStartupError: A worker could not load the model; its cause is the traceback.
            BatcherClosedError: The batcher is draining or closed, or was closed meanwhile.
            NotReadyError: The batcher has not been opened.
            WorkerLostError: The host process of a `shared` batcher died meanwhile.
            ConfigurationError: An argument is wrong; or another reload runs, with `shared` in any
                server process.

        Cancellation: safe; the reload continues.
        """
        await self._status.wait_while_opening()
        if self._status.state is not State.BROKEN:
            self._find_opening()
        elif self._reload is not None and not self._reload.done():
            raise ConfigurationError(f"{self.name}: a reload runs; wait for its end")
        args, kwargs = model_args, model_kwargs
        if args is None or kwargs is None:
            present = self._model.spec.read_arguments()
            args = present[0] if args is None else args
            kwargs = present[1] if kwargs is None else kwargs
        spec = self._check_model(args, kwargs)
        if self._settings.needs_identity:
            spec = identify_reloaded(spec, self._model.spec, self._settings.shared_version)
        # A task of its own, because the caller may be cancelled.
        self._reload = asyncio.create_task(self._load_model(spec), context=Context())
        self._reload.add_done_callback(self._note_reload)
        await asyncio.shield(self._reload)

    def reconfigure(self, **changes: Unpack[Reconfiguration]) -> None:
        """Change settings while the batcher runs; if one is invalid, change none.

        Accepted requests are kept, with their targets and deadlines; sent batches do not change. Of
        too many workers those with the least live work exit: they finish their batches, and have
        `drain_timeout` seconds for their streams and sessions. A change during a reload takes
        effect at its end. With `shared` a change applies to all server processes.

        Args:
            changes: `max_batch_size`, `max_delay`, `max_queue_size`, `max_latency` and
                `num_workers`, each as at construction; omitted settings do not change.

        Raises:
            ConfigurationError: A setting is wrong, or `num_workers` was given and the batcher has
                `devices`; no setting was changed.
            RuntimeError: The calling thread is not that of the event loop.
        """
        self._require_own_process()
        settings = self._settings.changed(changes)
        reject_for_model(settings, list_kinds(self._model_class, settings.stepped), changes)
        if self._opening is not None:
            self._opening.binding.require_own_thread("reconfigure()", "loop.call_soon_threadsafe")
        if "num_workers" in changes:
            warn_about_workers(settings)
        self._live.change(changes)
        if not settings.has_host:
            self._cores.num_workers = settings.most_workers
        if self._opening is not None:
            self._opening.reconfigure(settings)

    # State and statistics.

    def explain(self) -> Explanation:
        """Explain the limit of the recent batch sizes, and the predicted gain of other settings.

        Returns:
            Figures and a cause; `str` gives them in sentences. The load and the gains are
            predictions from the times of the batches so far.
        """
        return Explanation() if self._opening is None else self._opening.explain()

    def add_observer(self, observer: Observer) -> None:
        """Add an observer; it gets all events from now on.

        Raises:
            ConfigurationError: `observer` is not a `fast_batcher.observing.Observer`.
        """
        OBSERVERS.check("observer", [observer])
        self._ledger.observers.add(observer)

    @property
    def state(self) -> str:
        """State of the batcher: "new", "opening", "open", "draining", "closed" or "broken"."""
        return str(self._status.state)

    @property
    def is_ready(self) -> bool:
        """Whether calls are accepted and at least one worker is ready."""
        is_open = self._status.state is State.OPEN and not self._status.is_leaving
        return is_open and self._load[0] > 0

    @property
    def timeout(self) -> float | None:
        """Seconds until a call without its own timeout fails; None for no limit."""
        return self._settings.timeout

    @property
    def start_error(self) -> BatcherError | None:
        """Error that made the batcher broken; None if it is not broken."""
        return self._status.broken_error()

    @property
    def _load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""
        return (0, 0, 0) if self._opening is None else self._opening.load

    @property
    def settings(self) -> Mapping[str, SettingValue]:
        """The options in use, by name, each with its source.

        The source is "code", "default", "reconfigure", the name of an environment variable, or a
        file and the place in it: see docs/settings.md, "Options from outside". If the code has
        precedence over another source, it is "code, not" and that source.
        """
        first, current = self._live.first, self._live.current
        found = {}
        for name in OPTIONS:
            value, source = getattr(current, name), self._sources.get(name, "default")
            is_changed = name in LIVE_OPTIONS and value != getattr(first, name)
            found[name] = SettingValue(value, "reconfigure" if is_changed else source)
        return found

    @property
    def _settings(self) -> Settings:
        return self._live.current

    def _check_model(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> ModelSpec:
        settings, model = self._settings, self._model_class
        most, in_threads = settings.max_frame_bytes, settings.in_process
        spec = check_model(model, args, kwargs, most, in_threads=in_threads)
        return replace(spec, kind=ModelKind.STEPS) if settings.stepped else spec

    def _make_settings(self, values: dict[str, Any], general: dict[str, Any]) -> Settings:
        """Make the settings, with those options for all batchers that fit this one."""
        with suppress(ConfigurationError):
            return self._make_fitting({**values, **general})
        try:
            settings = self._make_fitting(values)
        except ConfigurationError as error:
            named = [
                f"{name} is from {source}"
                for name, source in self._sources.items()
                if name in str(error) and not source.startswith("code") and name not in general
            ]
            raise ConfigurationError("; ".join([str(error), *named])) from None
        reasons: dict[str, ConfigurationError] = {}
        for name in [*general] * 2:  # one may need another one
            try:
                settings = self._make_fitting({**values, name: general[name]})
            except ConfigurationError as error:
                reasons[name] = error
            else:
                reasons.pop(name, None)
                values[name] = general[name]
        for name, reason in reasons.items():
            source = self._sources.pop(name)
            logger.warning("%s is not used: it does not fit this batcher: %s", source, reason)
        return self._make_fitting(values) if reasons else settings

    def _make_fitting(self, values: dict[str, Any]) -> Settings:
        """Make settings that fit the model, as far as its class is known."""
        settings, model = Settings(**values), self._model_class
        if settings.stepped and isinstance(model, type) and find_kind(model) is not ModelKind.STEPS:
            raise ConfigurationError(
                f"stepped=True: {model.__name__} is no SteppedModel; omit it, or derive the class "
                "from SteppedModel"
            )
        reject_for_model(settings, list_kinds(model, settings.stepped))
        return settings

    @property
    def stats(self) -> BatcherStats:
        """A snapshot of counts and quantiles."""
        if self._opening is not None:
            stats, calls = self._opening.read_stats(), self._calls
            if isinstance(calls, SingleFlight):
                stats = dataclasses.replace(stats, cache_lookups=len(calls.lookups))
            return stats
        places = 0 if self._model.spec.kind is ModelKind.STEPS else None
        workers = self._settings.fewest_workers
        return self._ledger.counters.snapshot(self.state, workers, (0, 0, 0), places=places)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled, as a part of an app would be."""
        raise TypeError(
            f"{self.name}: a batcher owns processes and cannot be copied or pickled; build the app "
            "and its batcher in a function, and pass this function to the other process"
        )

    if not TYPE_CHECKING:  # type checkers have an error of their own for such a call

        def __call__(self, app: "DynBatcher") -> NoReturn:
            """Name the remedy for a batcher in the place of its lifespan or of a function."""
            # FastAPI takes no such parameter, so `Depends(batcher)` fails at its definition.
            raise TypeError(
                f"{self.name}: a batcher cannot be called: FastAPI(lifespan=batcher.lifespan) "
                "opens it with the app, and `await batcher.process_batched(value)` computes"
            )

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<{type(self).__name__} {self.name!r} {stats.state} "
            f"workers={stats.workers_ready}/{stats.num_workers} "
            f"waiting={stats.waiting} running={stats.running} "
            f"completed={stats.completed} failed={stats.failed}>"
        )

    # The life of an opening.

    def _begin_open(self, *, by_call: bool = False) -> Opening:
        """Make an opening and start its workers, unless there is one; return the opening."""
        opening = self._opening
        is_new = self._status.state in (State.NEW, State.CLOSED, State.BROKEN)
        if opening is not None and not is_new:
            return opening
        if not is_new:
            self._status.reject_call("it was not opened")  # draining without having been opened
        overridden = [
            f"{name} ({source})"
            for name, source in self._sources.items()
            if source.startswith("code, not ")
        ]
        if overridden:
            logger.info("%s: options of the code count: %s", self.name, ", ".join(overridden))
        if not opening_makers and any(one.name == self.name for one in list_open()):
            logger.warning(
                "%s: another batcher of this name is open in this process: metrics, logs and "
                "options from outside cannot tell them apart; give one of them another: %s",
                self.name,
                GIVE_NAME,
            )
        _opened[self] = None
        self._was_opened_by_call = by_call
        self._model.end_reload()  # of the previous opening, if its event loop was closed meanwhile
        self._model.identify(self._settings)
        self._opening = self._calls = opening = self._make_opening()
        cache = self._settings.cache
        if cache is not None:
            self._calls = SingleFlight(opening, cache, self._model, self._ledger)
        self._cores.take()
        self._detach_finalizer()
        self._finalizer = weakref.finalize(self, _close_dropped, self._calls, self._status)
        self._finalizer.atexit = False  # the end of the interpreter ends what is left
        watch_loop(self._note_lag)
        opening.begin()
        if self._is_served and self._status.state is State.OPENING:
            self._status.start_lines = StartLines(self.name, opening.describe_wait)
        return opening

    def _note_lag(self, seconds: float) -> bool | None:
        """Count the seconds for which the event loop was blocked; see `loop_watch`."""
        if self._status.state in (State.NEW, State.CLOSED):
            return None
        self._ledger.counters.loop_blocked += seconds
        return seconds > 0 and self.stats.submitted > 0

    def _detach_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    def _make_opening(self) -> Opening:
        settings, status, ledger = self._settings, self._status, self._ledger
        parts = self._model, settings, status, ledger
        if opening_makers:
            return opening_makers[-1](self, *parts)
        if not settings.in_process:
            _check_platform()
        if settings.mps:
            check_control()
        if settings.has_host:
            # Most programs need no host.
            from fast_batcher._host.client import RemoteOpening

            return RemoteOpening(self._model, self._live, status, ledger)
        return LocalOpening(*parts)

    async def _load_model(self, spec: ModelSpec) -> None:
        """Replace the model of the opening, unless the batcher was closed before this task ran."""
        opening = self._opening
        if opening is None or self._status.state is not State.BROKEN:
            opening = self._accepting_opening()
        await (opening.reload(spec) if opening.can_reload else self._reopen(spec))

    async def _reopen(self, spec: ModelSpec) -> None:
        """Open a broken batcher with another model, which it keeps if it can load it."""
        model, counters = self._model, self._ledger.counters
        before = model.spec, counters.generation
        # The generation changes before the batcher opens: a host gives other processes its model.
        model.spec = spec
        counters.generation += 1
        try:
            await self.open()
        except BaseException:
            if model.spec.identity == spec.identity:
                model.spec, counters.generation = before
            raise
        if model.spec.identity != spec.identity:
            raise ConfigurationError(
                f"{self.name}: another server process has reloaded the model meanwhile"
            )

    def _note_reload(self, done: Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            logger.info("%s: reloaded, generation %d", self.name, self.stats.generation)

    def _find_opening(self) -> Opening:
        """Return the opening for calls on the running event loop; open a new batcher first."""
        self._require_own_process()
        status = self._status
        if status.state is State.NEW:
            if not self._settings.auto_open:
                status.reject_call("it has not been opened")
            self._begin_open(by_call=True)
        # The timer of the next try is lost with its loop.
        elif (status.takes_calls or status.given_up is not None) and self._leave_closed_loop():
            self._warn_about_loops()
            self._begin_open(by_call=self._was_opened_by_call)
        return self._accepting_opening()

    def _warn_about_loops(self) -> None:
        """Warn once that the calls of this program come on one event loop after the other."""
        if self._was_opened_by_call and not self._has_changed_loops and not opening_makers:
            self._has_changed_loops = True
            logger.warning(
                "%s: its event loop was closed, so this call starts new workers, which load the "
                "model again. In a test use `with TestClient(app)`: without `with` each request "
                "has a loop of its own. In a script call `asyncio.run` once",
                self.name,
            )

    def _find_calls(self) -> Opening | SingleFlight:
        """Return what takes calls on the running event loop."""
        self._find_opening()
        assert self._calls is not None, "made with the opening"
        return self._calls

    def _leave_closed_loop(self) -> bool:
        """End an opening whose event loop is closed; return False if it is of the running loop.

        Raises:
            RuntimeError: The opening belongs to another loop, which is not closed.
        """
        opening = self._opening
        assert opening is not None, "its callers look"
        if opening.binding.loop is get_running_loop():
            return False
        if not opening.binding.loop.is_closed():
            raise RuntimeError(
                f"{self.name}: a call came on another event loop than the batcher's, which is not "
                f"closed; from other threads use submit() for one input, or {RUN_THREADSAFE}"
            )
        logger.info("%s: its event loop is closed, and its workers end", self.name)
        self._end(self._settings.stop_timeout)
        return True

    def _accepting_opening(self, reason: str = "it takes no calls") -> Opening:
        """Return the opening if calls are accepted, on any thread."""
        if self._opening is None or not self._status.takes_calls:
            self._status.reject_call(reason)
        return self._opening

    def _require_own_process(self) -> None:
        """Raise if the opening belongs to the process that this one was forked from."""
        if self._opening is not None and self._is_present(self._opening):
            self._opening.binding.require_own_process()

    def _is_open(self) -> bool:
        """Whether it was opened in this process, and has neither drained nor lost its loop."""
        opening, states = self._opening, (State.OPENING, State.OPEN, State.BROKEN)
        if opening is None or self._status.state not in states:
            return False
        return not (opening.binding.is_forked or opening.binding.loop.is_closed())

    def _is_present(self, opening: Opening) -> bool:
        """Return whether an opening has neither ended nor been replaced by another one."""
        return self._opening is opening and self._status.state is not State.CLOSED

    async def _enter(self, *, wait_ready: bool) -> None:
        """Register an owner and open the batcher; a call of `__aexit__` must follow."""
        loop = get_running_loop()
        owner = self._owners.enter(loop)
        try:
            await self.open(wait_ready=wait_ready)
        except BaseException:
            # `__aexit__` will not be called, because `__aenter__` failed.
            self._owners.remove(owner)
            is_ours = self._opening is None or self._opening.binding.loop is loop
            is_unused = owner.is_current and not self._owners.is_owned()
            if is_ours and is_unused and self._status.state is not State.DRAINING:
                self._end(grace=0.0)
            raise
        owner.is_current = True  # the batcher may have been closed and opened while this waited

    def _leave(self, lame_duck: float) -> None:
        """Report not ready, but accept calls: open connections may send more requests.

        The server closes the batcher when it has no request left. A stream may have no end: so the
        drain ends `drain_timeout` seconds after the server's own handler.
        """
        logger.info("%s: not ready any more (SIGTERM)", self.name)
        if self._opening is not None and not self._status.is_leaving:
            self._status.is_leaving = True
            seconds = lame_duck + self._settings.drain_timeout
            self._status.drain_until = monotonic() + seconds
            get_running_loop().call_later(seconds, self._end_drain, self._opening)

    def _end_drain(self, opening: Opening) -> None:
        if self._is_present(opening):
            self._late_close = get_running_loop().create_task(self.aclose(), context=Context())

    def _end_opening(self) -> None:
        """End workers that load their model: the program was told to end."""
        if self._status.state is State.OPENING:
            logger.info("%s: ends while its model loads, because of a signal", self.name)
            self._end(grace=0.0)

    def _end_for_thread(self, ended: concurrent.futures.Future[None]) -> None:
        try:
            self._end(self._settings.stop_timeout)
        finally:
            ended.set_result(None)

    def _end_test(self) -> None:
        """Close; a batcher that a call has opened is as if it had not been opened."""
        self.stop()
        if self._was_opened_by_call and self._status.state is State.CLOSED:
            self._status.move(Event.TEST_ENDED)

    def _end(self, grace: float) -> None:
        if self._status.state is State.CLOSED:
            return
        self._status.end()
        self._detach_finalizer()
        self._cores.release()
        self._owners.note_end()
        calls = self._calls
        if calls is not None:
            calls.end(grace)
            if not calls.binding.loop.is_running():
                self._thread_calls.fail(self._status.unanswered_error)


def list_open() -> "list[DynBatcher[Any, Any]]":
    """List the batchers of this process that are open, on event loops that are not closed."""
    # Another thread may open one meanwhile: a list of references is taken at once.
    found = [reference() for reference in _opened.keyrefs()]
    return [one for one in found if one is not None and one._is_open()]  # noqa: SLF001  of this module


def check_batchers(caller: str, *batchers: object) -> None:
    """Raise ConfigurationError unless these are batchers whose names tell them apart."""
    named: dict[str, object] = {}
    for batcher in batchers:
        if not isinstance(batcher, DynBatcher):
            raise ConfigurationError(
                f"{caller}: {batcher!r:.100} is of type {type(batcher).__name__}: give the "
                "DynBatcher itself, several as several arguments"
            )
        if named.setdefault(batcher.name, batcher) is not batcher:
            raise ConfigurationError(
                f"{caller}: two batchers have the name {batcher.name!r}, by which they are told "
                f"apart; give one of them another: {GIVE_NAME}"
            )


# The remedy for batchers of one name.
GIVE_NAME = 'DynBatcher(..., name="...")'


# The tasks that close dropped batchers: an event loop refers to its tasks weakly.
_closing_dropped: set[asyncio.Task[None]] = set()


def _close_dropped(calls: Opening | SingleFlight, status: Status) -> None:
    """Close a batcher that was dropped while it was open, on its loop, and warn. Any thread."""
    if calls.binding.is_forked:
        return

    async def close() -> None:
        try:
            calls.begin_drain()
            await calls.aclose()
        finally:
            status.end()
            calls.end(0.0)

    def begin() -> None:
        task = calls.binding.loop.create_task(close(), context=Context())
        _closing_dropped.add(task)
        task.add_done_callback(_closing_dropped.discard)

    calls.binding.call(begin)  # if the loop is closed, the end of the interpreter ends the workers
    if status.start_error is None:
        text = f"{status.name}: an open batcher was dropped; `await aclose()` or `stop()` closes it"
        warnings.warn(text, ResourceWarning, stacklevel=2)


def _is_started_by_multiprocessing(argv: Sequence[str]) -> bool:
    """Return whether a command line is that of a spawned process or of the resource tracker."""
    return "--multiprocessing-fork" in argv or argv[-1].startswith("from multiprocessing.")


def _check_platform() -> None:
    if sys.platform == "win32":
        raise ConfigurationError(
            'worker processes need Linux or macOS; on Windows give workers="threads", or run the '
            "program inside WSL or a container"
        )
    # `multiprocessing` starts the executable again. There `multiprocessing.freeze_support` takes
    # over from the program, which would open another batcher, and so on.
    if getattr(sys, "frozen", False) and _is_started_by_multiprocessing(sys.argv):
        raise ConfigurationError(
            "a frozen program was started as a worker process and opens a batcher; call "
            "`multiprocessing.freeze_support()` first in its `if __name__ == '__main__':`"
        )
    # Set while a spawned process imports the main module. A batcher opened then would spawn a
    # process that imports the main module, and so on.
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "a batcher is being opened while a worker process imports the main module; guard the "
            "statements of the script with `if __name__ == '__main__':`"
        )
