"""`DynBatcher`: the asyncio shell around the core. API process, the event loop's thread.

    endpoint --process_batched--> submit --> Scheduler <--poll-- _pump --Dispatch--> Pool ==> worker
       ^                                                                                        |
       +------------- future <-- settle <-- frame_arrived <=====================================+

It decides nothing: it tells the scheduler what happened and when, and carries out what the
scheduler answers. Its only loop is *apply the event, poll, do the actions, set the timer*. One
`_pump` per turn of the event loop takes along everything that arrived in that turn; there is no
task, timer, lock or event per request.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import itertools
import logging
import math
import multiprocessing.process
import os
import sys
from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypedDict, Unpack, overload

from fast_batcher._arrays.batches import is_much, join, split_rows
from fast_batcher._arrays.collation import Collation
from fast_batcher._asyncio.cost_evaluator import CostEvaluator
from fast_batcher._asyncio.futures import ThreadCaller, fail, is_beyond_reach, set_exception, settle
from fast_batcher._asyncio.offload import offload
from fast_batcher._asyncio.signals import call_on_sigterm
from fast_batcher._clock import monotonic
from fast_batcher._core.batch_packer import BatchPacker
from fast_batcher._core.lifecycle import Event, State, next_state
from fast_batcher._core.limits import Limits
from fast_batcher._core.messages import (
    Batch,
    Dispatch,
    Expire,
    ExpiryReason,
    Fault,
    Refusal,
    Replace,
    Request,
    Stall,
)
from fast_batcher._core.policy import make_policy
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._parent.batch_sender import (
    BatchSender,
    Failure,
    SharedOutputs,
)
from fast_batcher._parent.input_arena import LEAST, MOST_AT_ONCE
from fast_batcher._parent.pool import Exit, Pool
from fast_batcher._parent.shared_inputs import SharedInputSender
from fast_batcher._shared_memory.layouts import to_shape
from fast_batcher._transport.codec import one_line, size_of
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    CollationError,
    ConfigurationError,
    DeadlineExceededError,
    NotReadyError,
    PoisonRequestError,
    TransportError,
    WorkerLostError,
    WorkerStartupError,
)
from fast_batcher.model import InferenceModel, InputT, OutputT
from fast_batcher.settings import (
    MAX_FRAME_BYTES,
    MAX_PRIORITY,
    MAX_SECONDS,
    MAX_SHARED_BYTES,
    RECONFIGURABLE,
    SHARED_MEMORY_THRESHOLD,
    PolicyName,
    Settings,
    change_settings,
    check_costs,
    check_model,
    check_name,
    check_settings,
)
from fast_batcher.stats import BatcherStats, Counters

logger = logging.getLogger("fast_batcher")

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_OUTPUT_ATOMS, _SHARED_OUTPUTS, _FREED = Kind.OUTPUT_ATOMS, Kind.SHARED_OUTPUTS, Kind.FREED
# Frames that leave their batch unanswered.
UNFINISHED_KINDS = frozenset({Kind.OUTPUTS_PART, Kind.PONG, Kind.FREED})
# Frames after which some of the batch's requests may be tried again.
RAISED_KINDS = frozenset({Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.FATAL})
# Of one `process_many` call at most this many full batches per worker are queued or running: one
# that runs, and one that waits full behind it. More would only stand in other callers' way.
MANY_BATCHES_PER_WORKER = 2
# An answer that is larger than a pipe arrives in time if more of it comes within this many seconds,
# again and again. A worker that is writing is rarely given no CPU for longer.
REST_OF_FRAME = 0.05


class Reconfiguration(TypedDict, total=False):
    """What `DynBatcher.reconfigure` can change."""

    max_batch_size: int
    max_delay: float | None
    max_queue_size: int | None
    max_latency: float | None


class _GivenUp(NamedTuple):
    """Why no worker is started for now."""

    reason: str
    # The moment of the next try.
    next_try: float


class _Owner(NamedTuple):
    """One that is inside `async with` or a lifespan."""

    loop: asyncio.AbstractEventLoop
    # How often the batcher had been ended before.
    ends: int


class _PoolEvents(NamedTuple):
    """What the pool calls: methods of the batcher that are not for its users."""

    worker_ready: Callable[[int, list[tuple[int, float]]], None]
    worker_retired: Callable[[int], None]
    worker_lost: Callable[[int, Exit], None]
    worker_failed_to_start: Callable[[int, WorkerStartupError], None]
    workers_given_up: Callable[[str, float], None]
    frame_arrived: Callable[[int, Frame], None]
    idle_workers: Callable[[], list[int]]


class DynBatcher(Generic[InputT, OutputT]):
    """Answers single requests with a model that computes batches, in worker processes of its own.

    Args:
        model: A subclass of `InferenceModel`, importable under its name, or "module:Class", which
            only the workers import.
        max_batch_size: Most requests in a batch, 1 or more.
        max_delay: Longest deliberate wait of a batch while a worker is free, seconds. A bound, not
            a wait, but for `policy="fixed"`; None bounds "adaptive" by a lone request's time alone.
        model_args: Positional arguments of the model's constructor; picklable.
        model_kwargs: Keyword arguments of the model's constructor; picklable.
        num_workers: Processes, each with a copy of the model.
        policy: "greedy": a free worker takes what waits at once; "adaptive": the same, but for
            holds where callers have been seen to come back soon and a larger batch is worth it;
            "fixed": wait for a full batch or `max_delay` seconds after the first request.
        max_queue_size: Most requests waiting; default the larger of 1024 and 8 batches per worker.
        timeout: Seconds until a call gives up where it names none; None for no limit. A worker also
            counts as not ready when it has run one batch for as long and no caller waits for it.
        infer_timeout: Seconds that one batch may take before its worker is replaced, or None. No
            other limit replaces a worker that computes.
        start_timeout: Seconds that a worker may take to load the model.
        stop_timeout: Seconds that a worker may take to end before it is made to.
        drain_timeout: Seconds that `aclose` lets accepted requests finish; the default stays below
            the 30 s that Kubernetes gives a pod.
        max_frame_bytes: Largest message to or from a worker; larger batches are sent in parts.
        auto_open: Whether the first call opens a batcher that nobody has opened.
        name: For logs and health checks; default the model's name.
        max_queue_bytes: Most bytes of inputs waiting, or None. Every input is then measured: a
            buffer, array or tensor by its length, anything else by pickling it.
        idempotent: Whether an input may be computed twice. With False nothing is tried again that a
            worker has begun with, and a batch that fails is not divided.
        isolate_errors: Whether a batch for which `infer` raised is divided until the guilty inputs
            are alone, so that the others are answered. Out of memory divides it too.
        max_restarts: Most restarts of one worker within `restart_window`, None for no limit. When
            all workers have spent them, calls fail at once until a later try succeeds.
        restart_window: Seconds that a restart counts, and from the last one to the next try.
        restart_backoff: Seconds from the first death to the restart; doubles up to 10 s.
        max_batches_per_worker: Batches after which a worker is replaced, or None. The replacement
            is ready first, so that for a while there is one copy more of the model.
        max_rss_bytes: Resident memory of a worker from which on it is replaced so, or None. What it
            shares for large inputs counts, once they have been there, and all with `pin_memory`.
            Linux.
        max_latency: Seconds from its arrival by which a request should be answered, or None. One
            that cannot be is refused at once, by the time that batches have taken so far; one that
            turns out late while it waits is dropped if others can run in its place. Both fail with
            `DeadlineExceededError`, which tells in `retry_after` when to come again. One that runs
            past it is answered all the same, until its `timeout`.
        cost: What an input costs, for example its number of tokens: above 0, at most 1e15. Called
            once per input on the event loop's thread, so it must be quick. Default: the model's
            `cost`, if its class has a static or class method of that name. Batches are then formed
            of near costs.
        max_batch_cost: Most that a batch may cost, or None. An input that costs more goes alone.
        max_request_cost: Most that an input may cost, or None.
        cost_is_padded: Whether a batch costs its size times its highest cost, as inputs do that are
            padded to the longest; False for the sum of the costs.
        group_by: From an input to a hashable key: only inputs with equal keys share a batch. Called
            as `cost` is.
        max_shared_bytes: Most bytes of memory that the workers share with this process for large
            inputs and batches of 256 KiB or more, taken as they are needed; 0 for none. What finds
            no room goes through a pipe, as everything does on other systems than Linux. As much
            again is there for the outputs of each worker, which are copied out of it, each into
            memory of its own.
        shared_memory_threshold: Bytes from which on an array, a CPU tensor or another buffer may
            reach the model as a view of that memory, which it may change, and which is occupied as
            long as there is a view. 4 to 64 KiB for those inside of other things and for outputs,
            whatever is set; 56 KiB or more for those that are copied there when they arrive. Text
            and `bytes` are always copied out: Python has no views of them.
        pin_memory: Whether a worker whose PyTorch has a GPU registers the memory of large inputs
            with CUDA when it has loaded the model. Then `tensor.is_pinned()`, and
            `stack(inputs).to("cuda", non_blocking=True)` copies at full speed while the model goes
            on; a batch ends when the device has done all that it was told. That is the current
            device: a model for another calls `torch.cuda.set_device` in its constructor. All of
            `max_shared_bytes` is resident from then on, and none is given back to the system.
            Without a GPU a warning says that nothing is registered. Not tried on a GPU yet.

    Raises:
        ConfigurationError: A setting is wrong. Nothing has been started.

    Constructing starts nothing, except under a running event loop, where opening begins at the
    loop's next turn. All methods but `submit` belong to the thread of that loop.
    """

    def __init__(
        self,
        model: type[InferenceModel[InputT, OutputT]] | str,
        max_batch_size: int = 32,
        max_delay: float | None = None,
        *,
        model_args: Sequence[Any] = (),
        model_kwargs: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        policy: PolicyName = "adaptive",
        max_queue_size: int | None = None,
        timeout: float | None = 30.0,
        infer_timeout: float | None = None,
        start_timeout: float = 300.0,
        stop_timeout: float = 2.0,
        drain_timeout: float = 20.0,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        auto_open: bool = True,
        name: str | None = None,
        max_queue_bytes: int | None = None,
        idempotent: bool = True,
        isolate_errors: bool = True,
        max_restarts: int | None = 5,
        restart_window: float = 60.0,
        restart_backoff: float = 0.1,
        max_batches_per_worker: int | None = None,
        max_rss_bytes: int | None = None,
        max_latency: float | None = None,
        cost: Callable[[InputT], float] | None = None,
        max_batch_cost: float | None = None,
        max_request_cost: float | None = None,
        cost_is_padded: bool = True,
        group_by: Callable[[InputT], Hashable] | None = None,
        max_shared_bytes: int = MAX_SHARED_BYTES,
        shared_memory_threshold: int = SHARED_MEMORY_THRESHOLD,
        pin_memory: bool = False,
    ) -> None:
        self._settings = check_settings(
            max_batch_size=max_batch_size,
            max_delay=max_delay,
            num_workers=num_workers,
            policy=policy,
            max_queue_size=max_queue_size,
            timeout=timeout,
            infer_timeout=infer_timeout,
            start_timeout=start_timeout,
            stop_timeout=stop_timeout,
            drain_timeout=drain_timeout,
            max_frame_bytes=max_frame_bytes,
            auto_open=auto_open,
            max_queue_bytes=max_queue_bytes,
            idempotent=idempotent,
            isolate_errors=isolate_errors,
            max_restarts=max_restarts,
            restart_window=restart_window,
            restart_backoff=restart_backoff,
            max_batches_per_worker=max_batches_per_worker,
            max_rss_bytes=max_rss_bytes,
            max_latency=max_latency,
            max_shared_bytes=max_shared_bytes,
            shared_memory_threshold=shared_memory_threshold,
            pin_memory=pin_memory,
        )
        self._model = check_model(model, model_args, model_kwargs, max_frame_bytes)
        self.name = check_name(name, self._model.name)
        self._costs = check_costs(
            model,
            cost=cost,
            max_batch_cost=max_batch_cost,
            max_request_cost=max_request_cost,
            cost_is_padded=cost_is_padded,
            group_by=group_by,
        )
        # Asks the user's functions about inputs; None where there are none.
        self._cost_evaluator: CostEvaluator | None = None
        if self._costs.cost is not None or group_by is not None:
            self._cost_evaluator = CostEvaluator(
                self._costs.cost, group_by, max_request_cost, self.name
            )
        self._counters = Counters()
        # Requests of other threads that the loop's thread has not looked at yet.
        self._submitted: deque[Request] = deque()
        self._state = State.NEW
        # The moment since which it is broken, None while it is not.
        self._broken_since: float | None = None
        # Those inside `async with` and lifespans; the last to leave closes. After an end that one
        # of them, or another caller, has ordered, the others leave without effect.
        self._owners: list[_Owner] = []
        self._ends = 0
        self._make_parts()

        # Process, loop and the loop's thread that the batcher belongs to while it is open.
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        # The same loop while calls on it need no closer look: opening or open, not draining.
        self._serving_loop: asyncio.AbstractEventLoop | None = None

        if auto_open:
            self._begin_open_soon()

    def _make_parts(self) -> None:
        """What lives from one opening to the next closing."""
        settings = self._settings
        costs = self._costs
        packer = None
        if costs.cost is not None:
            packer = BatchPacker(costs.max_batch_cost, is_padded=costs.cost_is_padded)
        self._scheduler = Scheduler(
            make_policy(settings.policy, settings.max_delay),
            self._counters,
            _limits_of(settings),
            packer=packer,
            is_grouped=costs.group_by is not None,
            measure_size=size_of,
        )
        events = _PoolEvents(
            worker_ready=self._worker_ready,
            worker_retired=self._worker_retired,
            worker_lost=self._worker_lost,
            worker_failed_to_start=self._worker_failed_to_start,
            workers_given_up=self._workers_given_up,
            frame_arrived=self._frame_arrived,
            idle_workers=self._idle_workers,
        )
        self._pool = Pool(self._model, settings, events, self.name)
        pool = self._pool
        shared_inputs = SharedInputSender(
            lambda: pool.slabs,
            pool.lanes,
            pool.run_in_thread,
            self.name,
            max(settings.shared_memory_threshold, LEAST),
            settings.max_frame_bytes,
            settings.max_batch_size,
        )
        self._sender = BatchSender(
            pool.senders,
            settings.max_frame_bytes,
            settings.shared_memory_threshold,
            shared_inputs,
            self._refused_late,
            pool.outboxes,
        )
        self._rows = shared_inputs.rows
        # Types of inputs that may have rows; empty before something large has come.
        self._staged_types = shared_inputs.rows.probes
        # Why it is broken.
        self._start_error: WorkerStartupError | None = None
        # SIGTERM has come: calls are answered, and no new clients are wanted.
        self._is_leaving = False
        self._given_up: _GivenUp | None = None
        # Places of workers that have been ready once: when that is all of them, the batcher is
        # open.
        self._seen_ready: set[int] = set()
        # Requests of this turn of the loop, and whether a `_pump` is scheduled to take them.
        self._arrivals: list[Request] = []
        self._pump_is_due = False
        # Workers whose answer has come in part, and until when more of it has to come.
        self._answering: dict[int, float] = {}
        # One timer for the earliest moment at which the scheduler wants to be asked.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        # Those who wait in `open` and in `aclose`.
        self._ready_waiters: list[asyncio.Future[None]] = []
        self._drained: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    # Calls.

    async def process_batched(  # noqa: C901  flat on purpose
        self, value: InputT, *, timeout: float | None = None, priority: int = 0
    ) -> OutputT:
        """Wait for the model's output for one input.

        The input joins the next batch; its place is kept in order of arrival.

        Args:
            value: One input, without a batch axis. Must be picklable; it should not be changed
                until the call returns.
            timeout: Seconds from now until the caller loses interest, `math.inf` for no limit, None
                for the batcher's `timeout`. Covers the start of the workers too. Given here, it is
                a target as well: a call that cannot be answered in time is refused at once.
            priority: Higher goes first; equals go in order of arrival, and lower ones fill what
                room is left in a batch. One batch in eight goes by age alone, so that none starves.
                -100 to 100.

        Returns:
            What `infer` returned at this input's position.

        Raises:
            QueueFullError: `max_queue_size` requests or `max_queue_bytes` bytes wait already;
                nothing was queued.
            DeadlineExceededError: The timeout passed first; or, with `retry_after` set, it or
                `max_latency` could not be met.
            NotReadyError: The timeout passed and no worker was ready, or all have spent their
                restarts.
            InferenceError: The model raised; also an instance of what it raised.
            OutputMismatchError: The model returned something other than one output per input.
            CollationError: The model has a `collation`, and the input cannot be joined to others.
            UnsendableValueError: The input cannot be pickled.
            RequestTooLargeError: The pickled input is larger than `max_frame_bytes`, or costs more
                than `max_request_cost`.
            ConfigurationError: `timeout` or `priority` is invalid; or `cost` or `group_by` raised,
                or returned something invalid, for this input.
            WorkerLostError: The worker died while it computed this input, and `idempotent` is
                False.
            PoisonRequestError: Two workers died while they computed this input.
            WorkerStartupError: The model could not be loaded.
            BatcherClosedError: The batcher is draining or closed.

        Cancellation: safe at any time. A waiting input is forgotten; a running one is computed and
        its output dropped. Other inputs of the batch are not affected. A large input may be read
        for some milliseconds more: a `bytearray` cannot be resized meanwhile, and an array must not
        be with `refcheck=False`.
        """
        if not self._pump_is_due:
            loop = get_running_loop()
            if loop is not self._serving_loop:
                self._serve_on(loop)
            self._pump_is_due = True
            loop.call_soon(self._pump)
        else:
            # Others have called in this turn of the loop, so it is this one, or asyncio objects.
            loop = self._loop  # type: ignore[assignment]  # set since it has a pump
        deadline = None if timeout is None else monotonic() + _checked(timeout)
        future: asyncio.Future[OutputT] = Future(loop=loop)
        request = Request(value, future, deadline)
        if timeout is not None:
            request.timeout = timeout
        if priority != 0:
            request.priority = _checked_priority(priority)
            self._scheduler.rank_requests()
        if type(value) in self._staged_types:
            self._stage(request)
        self._arrivals.append(request)
        try:
            return await future
        except BaseException as error:
            if request.is_settled:
                # The error holds this frame, which must not hold the error.
                del future, request
                raise
            if not isinstance(error, RuntimeError) or get_running_loop() is loop:
                self._abandon(request)
                raise
        # A task cannot wait for a future of another loop than its own, so it has another.
        _call_in_loop(loop, self._abandon, request)
        self._serve_on(get_running_loop())
        return await self.process_batched(value, timeout=timeout, priority=priority)

    async def process_many(
        self, values: Iterable[InputT], *, timeout: float | None = None, priority: int = 0
    ) -> list[OutputT]:
        """Wait for the outputs of many inputs, in their order.

        They are queued a few batches at a time, so that other callers get their turns, and count
        against `max_queue_size` one by one.

        Args:
            values: Inputs as for `process_batched`; none gives an empty list.
            timeout: As for `process_batched`, for all of them together.
            priority: As for `process_batched`, of each of them.

        Raises:
            BatcherError: As `process_batched`, the error of the first input that has one. The
                others are abandoned. So with `max_latency` one input that is refused fails the
                call.

        Cancellation: safe at any time; all of them are abandoned.
        """
        priorities = itertools.repeat(_checked_priority(priority))
        return await self._process_ranked(values, priorities, timeout=timeout)

    async def _process_ranked(
        self, values: Iterable[InputT], priorities: Iterable[int], *, timeout: float | None = None
    ) -> list[OutputT]:
        """Wait for the outputs of many inputs, each with a priority of any size.

        `process_many` calls it, and decorated functions do.
        """
        limit = self._settings.timeout if timeout is None else _checked(timeout)
        deadline = math.inf if limit is None else monotonic() + limit
        # With a target a batch that waits behind another of its own call might be refused.
        batches = MANY_BATCHES_PER_WORKER if self._settings.max_latency is None else 1
        window = batches * self._settings.max_batch_size
        window *= self._settings.num_workers
        outputs: list[OutputT] = []
        in_flight: deque[Request] = deque()
        try:
            for value, priority in zip(values, priorities, strict=False):
                request = Request(value, get_running_loop().create_future(), deadline)
                request.timeout = timeout
                if timeout is None:
                    request.target = math.inf  # the default timeout is no target
                if priority != 0:
                    request.priority = priority
                # With requests of its own under way it waits for room; else it is refused.
                while in_flight and (len(in_flight) >= window or not self._has_room(request)):
                    outputs.append(await in_flight[0].caller)
                    in_flight.popleft()
                self._enqueue(request)
                in_flight.append(request)
            while in_flight:
                outputs.append(await in_flight[0].caller)
                in_flight.popleft()
        finally:
            for request in in_flight:
                self._abandon(request)
                if request.caller.done() and not request.caller.cancelled():
                    request.caller.exception()  # seen, so that asyncio does not report it
        return outputs

    async def process_rows(
        self,
        batch: Any,
        *,
        collation: Collation | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Any:
        """Wait for the outputs of an input that is itself a batch of k rows.

        Its rows are k inputs: they share batches with those of other callers, count as k against
        `max_batch_size` and `max_queue_size`, and are spread over as many batches as they need.

        Args:
            batch: An array or tensor with a batch axis, or a structure of them, as a dict of
                features. A list in it has one entry per row.
            collation: Where the batch axis is: `batch_dim[0]` in `batch`, `batch_dim[1]` in what is
                returned; and how rows of unequal outputs are padded. Default `Collation.stack()`.
            timeout: As for `process_batched`, for all rows together.
            priority: As for `process_batched`, of each row.

        Returns:
            The outputs of the rows in their order, joined to one batch: arrays and tensors with a
            batch axis, numbers as an array, texts as a list, or a structure of such things.

        Raises:
            CollationError: `batch` has no rows, or features of different numbers of them: then
                nothing was queued. Or the outputs cannot be joined.
            BatcherError: As `process_many`.

        Cancellation: as for `process_many`.
        """
        collation = Collation.stack() if collation is None else collation
        if not isinstance(collation, Collation):
            raise ConfigurationError(
                f"collation={collation!r:.100}: make one with Collation.stack() or Collation.pad()"
            )
        is_long = is_much(batch, dim=collation.batch_dim[0])
        rows = await offload(is_long, split_rows, batch, collation)
        if not rows:
            raise CollationError(
                "the input is a batch of no rows, for which nobody knows what the outputs would "
                "look like; do not send it"
            )
        outputs = await self.process_many(rows, timeout=timeout, priority=priority)
        joining = functools.partial(join, dim=collation.batch_dim[1])
        return await offload(is_much(outputs), joining, outputs, collation)

    def submit(
        self, value: InputT, *, timeout: float | None = None, priority: int = 0
    ) -> concurrent.futures.Future[OutputT]:
        """Queue one input from any thread, for endpoints written with `def`.

        Args:
            value: As for `process_batched`.
            timeout: As for `process_batched`.
            priority: As for `process_batched`.

        Returns:
            A future for the output; its errors are those of `process_batched`. Cancelling it is
            cancelling the call. Do not wait for it on the event loop's own thread.

        Raises:
            NotReadyError: The batcher has not been opened, so there is no loop to serve it.
            BatcherClosedError: The batcher is draining or closed.
        """
        self._require_own_process()
        loop = self._loop
        if loop is None or self._serving_loop is None:
            self._refuse("submit() needs a batcher that has been opened on an event loop")
        deadline = None if timeout is None else monotonic() + _checked(timeout)
        future: concurrent.futures.Future[OutputT] = concurrent.futures.Future()
        request = Request(value, ThreadCaller(future), deadline)
        request.timeout = timeout
        if priority != 0:
            request.priority = _checked_priority(priority)

        # Whoever keeps the future keeps the function below, and is not to keep the input with it.
        held = [request]

        def abandon_if_cancelled(future: concurrent.futures.Future[OutputT]) -> None:
            request = held.pop()
            if future.cancelled():
                _call_in_loop(loop, self._abandon, request)

        future.add_done_callback(abandon_if_cancelled)
        self._submitted.append(request)
        if not _call_in_loop(loop, self._take_submitted):
            with contextlib.suppress(ValueError):  # another loop has just taken it
                self._submitted.remove(request)
                raise NotReadyError(f"{self.name}: the event loop that served it is closed")
        return future

    def empty(self, shape: int | Sequence[int], dtype: Any = "uint8") -> Any:
        """A NumPy array for one large input, for example a body that is read in pieces.

        Filled, and given to a call as it is or with another dtype or shape of as many bytes, it
        reaches the worker without another copy, and read-only: there is none for a second try. It
        should not be changed until the call returns, and may be used again then, unless the model
        keeps views of its inputs. Arrays that are kept occupy the memory; and for good if they were
        there when the process forked, as its child sees what is written there later.

        Args:
            shape: Of the array.
            dtype: Of the array, or what NumPy makes one of.

        Returns:
            An array whose values are whatever was there; an ordinary one where it is too small or
            too large for shared memory, there is no room, or the system would take milliseconds to
            find the memory.

        Raises:
            TypeError: There is no such dtype, or a size is no whole number.
            ValueError: There is no such shape.
            RuntimeError: It was called outside of an event loop.
        """
        import numpy

        sizes = to_shape(shape)
        array = None
        loop = get_running_loop()
        if loop is self._serving_loop and min(sizes, default=0) > 0:
            self._pump_soon(loop)  # which sees the turn end
            self._rows.enable()
            array = self._rows.give(numpy.dtype(dtype), sizes)
        return numpy.empty(sizes, dtype) if array is None else array

    # Life.

    async def open(self, *, wait_ready: bool = True) -> None:
        """Start the workers and wait until every one is ready.

        A closed batcher is opened again, and a broken one with all restarts before it.

        Args:
            wait_ready: False returns at once, so that an app can answer probes while the model
                loads; calls are queued until a worker is ready.

        Raises:
            WorkerStartupError: A worker could not load its model; the cause is its traceback. No
                process is left.
            NotReadyError: The workers have died until their restarts were spent.
            BatcherClosedError: It is draining, or was closed while it was opening.

        Cancellation: safe; the workers go on loading.
        """
        loop = get_running_loop()
        if self._state is State.BROKEN:
            await self._pool.aclose()
        # It may have waited for that, and another call of this have come first.
        self._begin_open()
        if loop is not self._serving_loop and self._start_error is None:
            self._serve_on(loop)
        if wait_ready and self._state is State.OPENING:
            waiter = loop.create_future()
            self._ready_waiters.append(waiter)
            await waiter
        broken_error = self._broken_error()
        if broken_error is not None:
            await self._pool.aclose()
            raise broken_error
        if wait_ready and self._state is not State.OPEN:  # it was ended meanwhile
            self._refuse("it was not ready")

    def begin_drain(self) -> None:
        """Take no more requests and report not ready, while what is queued is being finished.

        For a preStop hook, or a moment before `aclose`. May be called again.
        """
        if self._state in (State.NEW, State.OPENING, State.OPEN, State.BROKEN):
            self._move(Event.DRAIN)
            self._serving_loop = None
            self._take_arrivals(monotonic())
            self._scheduler.begin_drain()
            if self._loop is not None and not self._loop.is_closed():
                self._wake_ready_waiters()
                self._pump_soon(self._loop)

    def _leave(self) -> None:
        """Report not ready, and answer calls as before: those of accepted requests are to come."""
        logger.info("%s: not ready any more (SIGTERM)", self.name)
        self._is_leaving = True

    async def aclose(self) -> None:
        """Finish what has been accepted, then end the workers. May be called again, in any state.

        Requests that are not answered within `drain_timeout` fail with `BatcherClosedError`.
        Workers end within `stop_timeout`, or are terminated and killed.

        Cancellation: safe; the workers are then killed at once.
        """
        loop = get_running_loop()
        if self._state is State.CLOSED or self._is_foreign():
            return
        if self._closing is not None and self._closing.get_loop() is loop:
            await asyncio.wait([self._closing])
            return
        if self._loop is not None and self._loop is not loop:
            self._require_closed_loop("aclose()")
            self.stop()
            return
        closing = self._closing = loop.create_future()
        try:
            self.begin_drain()
            await self._wait_until_drained(loop)
            # While this waited, somebody may have stopped the batcher and opened it again.
            if self._closing is closing:
                self._fail_open_requests()
                await self._pool.aclose()
        finally:
            # After a cancelled wait nothing is waited for any more.
            if self._closing is closing:
                self._end(grace=0.0)
            closing.set_result(None)

    def stop(self) -> None:
        """End now, from synchronous code, in any state. May be called again.

        Requests that have not been answered fail with `BatcherClosedError`. Blocks until the
        workers are dead: up to `stop_timeout` seconds if one is computing, and half a second more
        if it has to be killed. Works after the event loop has been closed; then nobody is left to
        be told. From another thread it asks the loop's thread, and waits for it.
        """
        if self._is_foreign():
            return
        loop, grace = self._loop, self._settings.stop_timeout
        if loop is not None and loop.is_running() and get_ident() != self._thread:
            # Futures and file descriptors belong to the loop's thread, so that thread has to do it.
            ended: concurrent.futures.Future[None] = concurrent.futures.Future()
            if _call_in_loop(loop, self._end_for_thread, ended):
                ended.result()
                return
        self._end(grace)

    async def __aenter__(self) -> Self:
        """Open, and wait until every worker is ready."""
        await self._enter(wait_ready=True)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close as `aclose` does, whatever happened in the body; see `lifespan` for several."""
        await self._exit()

    @overload
    def lifespan(self, app: Any, /) -> AbstractAsyncContextManager[None]: ...
    @overload
    def lifespan(
        self, /, *, wait_ready: bool = True, drain_on_sigterm: bool = False
    ) -> Callable[[Any], AbstractAsyncContextManager[None]]: ...
    def lifespan(
        self, app: Any = None, /, *, wait_ready: bool = True, drain_on_sigterm: bool = False
    ) -> Any:
        """The batcher's life as an app's lifespan: `FastAPI(lifespan=batcher.lifespan)`.

        Several lifespans on one event loop may share the batcher, also with `async with`: the first
        opens it, and the last that ends closes it. `aclose` and `stop` end it for all of them.

        Args:
            app: What the framework passes. Without it, the call returns a lifespan made with the
                other arguments: `FastAPI(lifespan=batcher.lifespan(wait_ready=False))`.
            wait_ready: Whether the app starts to answer only when every worker is ready.
            drain_on_sigterm: Whether SIGTERM ends `is_ready`, and with it `/readyz`, at once, while
                the server still finishes its requests. The server's own handler follows. Where
                the lifespan does not run in the main thread, as with `TestClient`, a warning says
                that SIGTERM has no such effect.

        Raises:
            WorkerStartupError: A worker could not load its model; the server then stops.
        """

        @asynccontextmanager
        async def run(app: Any) -> AsyncIterator[None]:
            with contextlib.ExitStack() as stack:
                if drain_on_sigterm:
                    draining = call_on_sigterm(get_running_loop(), self._leave, self.name)
                    stack.enter_context(draining)
                await self._enter(wait_ready=wait_ready)
                try:
                    yield
                finally:
                    await self._exit()

        return run if app is None else run(app)

    def reconfigure(self, **changes: Unpack[Reconfiguration]) -> None:
        """Change settings while it runs: all that are given, or none if one of them is wrong.

        What has been accepted is kept. If more waits than the new `max_queue_size` allows, new
        requests are refused until there is room; batches that were sent stay as they are. Requests
        keep the target that they were accepted with, and deadlines are not changed.

        Args:
            changes: `max_batch_size`, `max_delay`, `max_queue_size` and `max_latency`, each as at
                construction; those that are left out stay as they are.

        Raises:
            ConfigurationError: A setting is wrong; nothing has been changed.
            RuntimeError: It was called from another thread than that of the event loop.
        """
        unknown = sorted(set(changes) - set(RECONFIGURABLE))
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]}: it cannot be changed while the batcher runs; what can is "
                f"{', '.join(RECONFIGURABLE)}"
            )
        if self._loop is not None and self._loop.is_running() and get_ident() != self._thread:
            raise RuntimeError(
                f"{self.name}: reconfigure() belongs to the thread of the event loop; from another "
                "one use loop.call_soon_threadsafe"
            )
        settings = change_settings(self._settings, changes)
        policy = None
        if settings.max_delay != self._settings.max_delay:
            policy = make_policy(settings.policy, settings.max_delay)
        self._settings = settings
        self._rows.rows_per_slab = settings.max_batch_size
        self._scheduler.reconfigure(_limits_of(settings), policy)
        if self._serving_loop is not None and not self._serving_loop.is_closed():
            # What waits may be a full batch now, or have waited long enough.
            self._pump_soon(self._serving_loop)

    # What can be seen of it.

    @property
    def state(self) -> str:
        """One of "new", "opening", "open", "draining", "closed" and "broken"."""
        return str(self._state)

    @property
    def is_ready(self) -> bool:
        """Whether calls are taken and at least one worker can compute them."""
        is_open = self._state is State.OPEN and not self._is_leaving
        return is_open and self._scheduler.workers.ready_count > 0

    @property
    def timeout(self) -> float | None:
        """Seconds until a call gives up where it names no timeout; None for no limit."""
        return self._settings.timeout

    @property
    def start_error(self) -> BatcherError | None:
        """Why the batcher is broken, None if it is not."""
        return self._broken_error()

    @property
    def _broken_seconds(self) -> float | None:
        """Seconds for which it has been broken without a break, None if it is not. For `/livez`."""
        return None if self._broken_since is None else monotonic() - self._broken_since

    @property
    def stats(self) -> BatcherStats:
        """A snapshot of counts and quantiles."""
        return self._counters.snapshot(
            state=self.state,
            workers_ready=self._scheduler.workers.ready_count,
            num_workers=self._settings.num_workers,
            waiting=self._scheduler.waiting,
            running=self._scheduler.workers.running,
        )

    def __repr__(self) -> str:
        scheduler = self._scheduler
        return (
            f"<{type(self).__name__} {self.name!r} {self._state.value} "
            f"workers={scheduler.workers.ready_count}/{self._settings.num_workers} "
            f"waiting={scheduler.waiting} running={scheduler.workers.running} "
            f"completed={self._counters.completed} failed={self._counters.failed}>"
        )

    # What the pool tells.

    def _worker_ready(self, worker: int, times: list[tuple[int, float]]) -> None:
        """A worker has loaded its model; sizes and seconds of the batches of its warm-up."""
        self._scheduler.worker_ready(monotonic(), worker, times)
        place = self._place(worker)
        if place in self._seen_ready:
            self._counters.restarts += 1
        self._seen_ready.add(place)
        if self._state is State.OPENING and len(self._seen_ready) == self._settings.num_workers:
            self._move(Event.ALL_READY)
            self._wake_ready_waiters()
        elif self._state is State.BROKEN:
            self._given_up = None
            self._serving_loop = self._loop
            self._move(Event.RECOVERED)
        self._advance(monotonic())

    def _worker_retired(self, worker: int) -> None:
        """A worker has been replaced by another that is ready; it answers what it has."""
        self._scheduler.workers.retire(worker)

    def _worker_lost(self, worker: int, exit: Exit) -> None:
        """A worker that was ready is dead."""
        self._sender.forget(worker, exit.inherited)
        lost = self._scheduler.worker_lost(
            worker, exit.taken, exit.begun, out_of_memory=exit.may_be_out_of_memory
        )
        how = f"worker {self._place(worker)} ended with {exit.text}"
        for request in lost.failed:
            fail(self._counters, request, WorkerLostError(f"{how} while it had this request"))
        for request in lost.poisonous:
            error = PoisonRequestError(
                f"{how} while it had this request, as another had before; it is not tried again"
            )
            fail(self._counters, request, error)
        self._advance(monotonic())

    def _worker_failed_to_start(self, worker: int, error: WorkerStartupError) -> None:
        """A worker was never ready: the end of an opening, a set-back of a replacement."""
        if self._state is not State.OPENING:
            logger.warning("%s: %s; trying again", self.name, error, exc_info=error)
            return
        # A caller that waits in `open` has it raised, and shows it.
        if all(waiter.done() for waiter in self._ready_waiters):
            logger.error(
                "%s: %s; calls fail until it is opened again", self.name, error, exc_info=error
            )
        self._start_error = error
        self._serving_loop = None
        self._move(Event.START_FAILED)
        self._pool.abandon()
        self._fail_open_requests()
        self._wake_ready_waiters()

    def _workers_given_up(self, reason: str, seconds: float) -> None:
        """Every worker has spent its restarts: nobody shall wait for them."""
        self._given_up = _GivenUp(reason, monotonic() + seconds)
        if self._state in (State.OPENING, State.OPEN):
            self._serving_loop = None
            # Calls of this very turn are refused too.
            self._pump_is_due = False
            self._move(Event.GIVEN_UP)
        self._take_arrivals(monotonic())
        for request in self._scheduler.give_up():
            fail(self._counters, request, self._given_up_error(self._given_up))
        self._wake_ready_waiters()
        if self._drained is not None:
            self._notice_drained()

    def _idle_workers(self) -> list[int]:
        """The ready workers that have nothing to do."""
        return self._scheduler.workers.idle_workers

    def _place(self, worker: int) -> int:
        """Which of the workers this is; a replacement has its predecessor's place."""
        return worker % self._settings.num_workers

    def _frame_arrived(self, worker: int, frame: Frame) -> None:
        """A worker has answered; raises if the answer makes no sense, and the pool replaces it."""
        if frame.kind is not _OUTPUT_ATOMS and frame.kind in UNFINISHED_KINDS:
            self._go_on(worker, frame)
            return
        scheduler = self._scheduler
        has_raised = frame.kind is not _OUTPUT_ATOMS and frame.kind in RAISED_KINDS
        batch = scheduler.batch_done(monotonic(), worker, frame.batch_id, has_raised)
        if batch is None:
            self._refuse_answer(frame)
            return
        self._counters.infer_times.append((frame.seconds, 1))
        if self._pool.recycles:
            self._pool.batch_answered(worker)
        if has_raised:
            self._retry_or_fail(worker, frame, batch)
            return
        # Give the worker its next batch before anything is done about this one.
        if scheduler.is_poll_due:
            self._advance(monotonic())
        if frame.kind is _SHARED_OUTPUTS:
            self._collect(worker, frame, batch)
        else:
            self._settle(worker, frame, batch.requests)
        if self._drained is not None:
            self._notice_drained()

    def _retry_or_fail(self, worker: int, frame: Frame, batch: Batch) -> None:
        """`infer` raised: some of the batch may be tried again, the others have their error."""
        is_fatal = frame.kind is Kind.FATAL
        failed = self._scheduler.batch_raised(
            monotonic(),
            batch,
            out_of_memory=frame.kind is Kind.OUT_OF_MEMORY,
            is_fatal=is_fatal,
        )
        self._settle(worker, frame, failed)
        if is_fatal:
            logger.error(
                "%s: worker %d is replaced: its device is of no use any more",
                self.name,
                self._place(worker),
            )
            self._scheduler.workers.retire(worker)
            self._pool.kill(worker)
        self._advance(monotonic())

    def _collect(self, worker: int, frame: Frame, batch: Batch) -> None:
        """The outputs of a batch are in the outbox of its worker: copy them, if anybody waits."""
        try:
            outputs = self._sender.find_answer(worker, frame)
        except Exception as error:
            self._fail_all(batch.requests, error)
            raise
        if all(request.is_settled for request in batch.requests):
            outputs.answer.release()
        elif outputs.answer.size <= MOST_AT_ONCE:
            self._settle(worker, frame, batch.requests, outputs)
        else:
            self._scheduler.workers.begin_copy_out(batch)
            self._pool.run_in_thread(
                functools.partial(outputs.answer.copy, releases_gil=True),
                functools.partial(self._finish_collecting, worker, frame, batch, outputs),
            )

    def _finish_collecting(
        self,
        worker: int,
        frame: Frame,
        batch: Batch,
        outputs: SharedOutputs,
        _: BaseException | None,
    ) -> None:
        """On the loop again: they have been copied, or could not be, which is found again."""
        if not self._scheduler.workers.end_copy_out(batch):
            return
        try:
            self._settle(worker, frame, batch.requests, outputs)
        except Exception as error:  # noqa: BLE001  no frame is being read that could end with it
            self._pool.kill_on_protocol_error(worker, error)
        if self._drained is not None:
            self._notice_drained()

    def _settle(
        self,
        worker: int,
        frame: Frame,
        requests: list[Request],
        outputs: SharedOutputs | None = None,
    ) -> None:
        """Give each request of an answered batch its outcome."""
        try:
            if outputs is None:
                outcomes = self._sender.read(worker, frame, len(requests))
            else:
                outcomes = outputs.read(len(requests))
        except Exception as error:
            self._fail_all(requests, error)
            raise
        settle(self._counters, requests, outcomes)

    def _fail_all(self, requests: list[Request], error: Exception) -> None:
        """The worker will be replaced; these are no longer on it, and must not be forgotten."""
        failure = Failure(functools.partial(TransportError, str(error)))
        settle(self._counters, requests, [failure] * len(requests))

    def _refuse_answer(self, frame: Frame) -> None:
        """A worker has answered a batch that it does not have."""
        if not self._scheduler.is_closed:  # else nobody waits for it any more
            raise TransportError(f"an answer to batch {frame.batch_id}, which it does not have")

    def _go_on(self, worker: int, frame: Frame) -> None:
        """The worker has said something that is not the end of a batch."""
        if frame.kind is _FREED:
            self._sender.free(worker, frame)
            return
        if frame.kind is Kind.PONG:
            self._pool.answered_ping(worker)
            return
        batch = self._scheduler.workers.find(worker, frame.batch_id)
        if batch is None:
            self._refuse_answer(frame)
        else:
            self._sender.keep_part(worker, frame)

    # Opening.

    def _begin_open_soon(self) -> None:
        try:
            loop = get_running_loop()
        except RuntimeError:
            return
        loop.call_soon(self._open_if_new)

    def _open_if_new(self) -> None:
        if self._state is State.NEW:
            self._begin_open()

    def _begin_open(self) -> None:
        """Start the workers, if nobody has done so; READY arrives as an event."""
        if self._state not in (State.NEW, State.CLOSED, State.BROKEN):
            return
        _check_platform()
        if self._state is State.BROKEN:
            self._fail_open_requests()
        if self._state is not State.NEW:
            self._make_parts()
        loop = get_running_loop()
        self._pid = os.getpid()
        self._bind(loop)
        self._move(Event.OPEN)
        self._pool.open(loop)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = self._serving_loop = loop
        self._thread = get_ident()

    async def _enter(self, *, wait_ready: bool) -> None:
        """Open for an owner, for whom `_exit` has to follow."""
        loop = get_running_loop()
        owner = _Owner(loop, self._ends)
        # A loop that was closed within `async with` never came to its end.
        self._owners = [one for one in self._owners if not one.loop.is_closed()]
        self._owners.append(owner)
        try:
            await self.open(wait_ready=wait_ready)
        except BaseException:
            # The caller's `async with` has not begun, so its end will not come.
            self._owners.remove(owner)
            is_ours = self._loop in (None, loop) and self._state is not State.DRAINING
            if is_ours and owner.ends == self._ends and not self._is_owned():
                self._end(grace=0.0)
            raise
        if owner.ends != self._ends:  # it was ended while this waited to open a broken one
            self._owners.remove(owner)
            self._owners.append(_Owner(loop, self._ends))

    async def _exit(self) -> None:
        """Close, unless others are inside, or all of them have been put out before."""
        loop = get_running_loop()
        # Which of those on this loop makes no difference, if the oldest goes first.
        owner = next((one for one in self._owners if one.loop is loop), None)
        if owner is not None:
            self._owners.remove(owner)
            if owner.ends != self._ends or self._is_owned():
                return
        await self.aclose()

    def _is_owned(self) -> bool:
        return any(one.ends == self._ends and not one.loop.is_closed() for one in self._owners)

    def _serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that calls on this loop can be served, or raise."""
        self._require_own_process()
        if self._state is State.NEW:
            if not self._settings.auto_open:
                self._refuse("it has not been opened")
            self._begin_open()
        if self._state not in (State.OPENING, State.OPEN):
            if self._given_up is not None and self._loop is not None and self._loop.is_closed():
                # The timer of the next try has gone with that loop.
                self._rebind(loop)
                self._serving_loop = None
            self._refuse("it takes no calls")
        if self._loop is not loop:
            self._require_closed_loop("this call")
            self._rebind(loop)

    def _require_own_process(self) -> None:
        if self._is_foreign():
            raise RuntimeError(
                f"{self.name}: this DynBatcher was opened in another process (pid {self._pid}) and "
                "does not survive a fork; open one in each process, for example in the lifespan"
            )

    def _is_foreign(self) -> bool:
        """Whether this is a forked copy: workers and loop are those of another process."""
        return self._pid not in (0, os.getpid())

    def _refuse(self, what: str) -> NoReturn:
        """Raise the error that tells why calls are not taken."""
        broken_error = self._broken_error()
        if broken_error is not None:
            raise broken_error
        if self._state in (State.DRAINING, State.CLOSED):
            self._counters.rejected += 1
            raise BatcherClosedError(
                f"{self.name} is {self._state.value} and takes no requests; `await open()` or "
                "`async with` opens a closed batcher again"
            )
        raise NotReadyError(
            f"{self.name}: {what}. Give its lifespan to the app: FastAPI(lifespan=batcher.lifespan)"
            ", and in tests use `with TestClient(app)`, which runs it"
        )

    def _require_closed_loop(self, what: str) -> None:
        assert self._loop is not None, "asked only of a batcher that has a loop"
        if not self._loop.is_closed():
            raise RuntimeError(
                f"{self.name}: {what} comes from another event loop than the one that serves it, "
                "which is still alive; from other threads use submit()"
            )

    def _rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with another loop. Those who waited on the closed one cannot be told anything."""
        logger.info("%s: goes on with another event loop", self.name)
        for request in self._scheduler.open_requests():
            if is_beyond_reach(request):
                self._cancel(request)
        self._arrivals = [r for r in self._arrivals if not is_beyond_reach(r)]
        self._bind(loop)
        self._pump_is_due = False
        self._timer, self._timer_at = None, math.inf
        self._ready_waiters.clear()
        self._pool.rebind(loop)
        self._take_submitted()
        self._pump_soon(loop)

    def _broken_error(self) -> BatcherError | None:
        """Why it is broken, for one caller; tracebacks grow on shared errors."""
        if self._start_error is not None:
            error = copy.copy(self._start_error)
            error.__cause__ = self._start_error.__cause__
            return error
        return None if self._given_up is None else self._given_up_error(self._given_up)

    def _given_up_error(self, given_up: _GivenUp) -> NotReadyError:
        seconds = max(0.0, given_up.next_try - monotonic())
        return NotReadyError(
            f"{self.name}: {given_up.reason}; the next try is in {seconds:.3g} seconds",
            retry_after=seconds,
        )

    def _wake_ready_waiters(self) -> None:
        for waiter in self._ready_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._ready_waiters.clear()

    def _move(self, event: Event) -> None:
        before, self._state = self._state, next_state(self._state, event)
        self._broken_since = monotonic() if self._state is State.BROKEN else None
        logger.info("%s: %s -> %s (%s)", self.name, before.value, self._state.value, event.value)

    # The loop: apply the event, poll, do the actions, set the timer.

    def _enqueue(self, request: Request) -> None:
        """Let a request wait for the pump of this turn."""
        loop = get_running_loop()
        if loop is not self._serving_loop:
            self._serve_on(loop)
        if request.priority:
            self._scheduler.rank_requests()
        if type(request.value) in self._staged_types:
            self._stage(request)
        self._arrivals.append(request)
        self._pump_soon(loop)

    def _stage(self, request: Request) -> None:
        """Copy a large input into shared memory while it waits, if it is going to be taken."""
        # The others may have come from any thread: see `process_batched`.
        is_here = get_running_loop() is self._serving_loop
        if is_here and self._scheduler.has_room(len(self._arrivals) + 1):
            row = self._rows.take(request.value)
            if row is not None:
                request.staged = row

    def _pump_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Advance; called by the loop itself, and by nothing that has a frame in hand.

        What has arrived is read before anybody is called late: if the loop was blocked, the answer
        may have been there for long.
        """
        self._pump_is_due = False
        self._rows.copied = 0
        now = monotonic()
        if self._scheduler.next_expiry > now:
            self._advance(now)
            return
        answering = self._pool.read_all()
        now = monotonic()
        for worker, begun in self._pool.find_sending():
            self._scheduler.workers.not_sent_yet(now, worker, begun)
        for worker in answering:
            self._answering[worker] = now + REST_OF_FRAME
        self._answering = {one: until for one, until in self._answering.items() if until > now}
        self._advance(now, has_read=True)
        look_again_at = min(self._answering.values(), default=math.inf)
        if look_again_at < self._timer_at:
            self._set_timer(look_again_at)

    def _advance(self, now: float, *, has_read: bool = False) -> None:
        """Take what has come, poll, do the actions, set the timer.

        Args:
            now: The moment.
            has_read: As for `Scheduler.poll`. While a frame is looked at nothing can be read: the
                frame would be written over.
        """
        if self._arrivals:
            self._take_arrivals(now)
        self._poll(now, has_read=has_read)

    def _poll(self, now: float, *, has_read: bool) -> None:
        actions, wake_at = self._scheduler.poll(now, has_read=has_read, answering=self._answering)
        for action in actions:
            try:
                if isinstance(action, Dispatch):
                    self._send(action.batch)
                else:
                    self._do(action)
            except Exception as error:  # noqa: BLE001  the other actions have to be done
                self._report(error)
                if isinstance(action, Expire):
                    set_exception(action.request, self._fault_error(error))
        if wake_at is not None and wake_at < self._timer_at:
            self._set_timer(wake_at)
        if self._drained is not None:
            self._notice_drained()

    def _send(self, batch: Batch) -> None:
        try:
            unsendable = self._sender.send(batch)
        except Exception as error:  # noqa: BLE001  whatever it is, its calls have to end
            unsendable = self._refuse_all(batch, error)
        if unsendable:
            self._withdraw(batch, unsendable)

    def _refuse_all(self, batch: Batch, error: Exception) -> list[tuple[Request, BatcherError]]:
        """Sending a batch has raised, and nobody knows why: none of it can be sent."""
        self._report(error)
        return [(request, self._fault_error(error)) for request in batch.requests]

    def _reject(self, arrivals: list[Request], error: Exception) -> None:
        """Taking these has raised, and none has been taken: tell those who do not know yet."""
        self._report(error)
        for request in arrivals:
            if not request.is_settled:
                self._counters.rejected += 1
                request.is_settled = True
                set_exception(request, self._fault_error(error))

    def _report(self, error: Exception) -> None:
        # What a log handler raises must not do what is being reported once more.
        with contextlib.suppress(Exception):
            logger.error(
                "%s: an internal error; the calls that it hits fail, and the batcher goes on",
                self.name,
                exc_info=error,
            )

    def _fault_error(self, error: Exception) -> BatcherError:
        return BatcherError(
            f"{self.name}: an internal error of fast_batcher ({one_line(error)}); its traceback is "
            "in the log. Please report it"
        )

    def _take_arrivals(self, now: float) -> None:
        arrivals, self._arrivals = self._arrivals, []
        self._submit(now, arrivals)

    def _has_room(self, request: Request) -> bool:
        """Whether it would be taken into the queue behind those that have just arrived."""
        if not self._scheduler.has_room(len(self._arrivals) + 1):
            return False
        if self._settings.max_queue_bytes is None:
            return True
        # In the queue they are part of its sum; here each further input would count them again.
        self._take_arrivals(monotonic())
        return self._scheduler.has_room(1, request)

    def _submit(self, now: float, arrivals: list[Request]) -> None:
        accepted = arrivals
        try:
            if self._cost_evaluator is not None:
                accepted = self._evaluate_costs(self._cost_evaluator, arrivals)
            refused = self._scheduler.submit(now, accepted)
        except Exception as error:  # noqa: BLE001  whatever it is, its calls have to end
            self._reject(arrivals, error)
            return
        for request, refusal in refused:
            request.is_settled = True
            set_exception(request, self._broken_error() or refusal.to_error())

    def _evaluate_costs(
        self, cost_evaluator: CostEvaluator, arrivals: list[Request]
    ) -> list[Request]:
        """Refuse those for which the user's functions have no answer; returns the others."""
        accepted = []
        for request in arrivals:
            fault = cost_evaluator.find_fault(request)
            if fault is None:
                accepted.append(request)
                continue
            self._counters.rejected += 1
            request.is_settled = True
            set_exception(request, fault)
        return accepted

    def _do(self, action: Expire | Stall | Replace | Fault) -> None:
        if isinstance(action, Expire):
            self._tell_expired(action.request, action.reason, action.refusal)
        elif isinstance(action, Stall):
            logger.warning(
                "%s: worker %d is not ready: it has computed one batch for timeout=%s seconds, and "
                "no caller waits for it any more; it gets no other before it answers, and is "
                "replaced %s",
                self.name,
                self._place(action.worker),
                self._settings.timeout,
                "by infer_timeout alone, which is not set"
                if self._settings.infer_timeout is None
                else f"after infer_timeout={self._settings.infer_timeout} seconds",
            )
        elif isinstance(action, Replace):
            self._pool.replace(action.worker)
            logger.warning(
                "%s: worker %d is replaced: its batch took longer than infer_timeout=%s seconds",
                self.name,
                self._place(action.worker),
                self._settings.infer_timeout,
            )
        else:
            self._report(action.error)
            for request in action.requests:
                fail(self._counters, request, self._fault_error(action.error))

    def _set_timer(self, wake_at: float) -> None:
        assert self._loop is not None, "there is something to wait for only on a loop"
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, wake_at - monotonic()), self._wake)
        self._timer_at = wake_at

    def _wake(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._pump()

    def _withdraw(self, batch: Batch, refused: list[tuple[Request, BatcherError]]) -> None:
        """Requests of a batch that cannot be sent fail; the worker has the others."""
        for request, error in refused:
            if not request.is_settled:
                fail(self._counters, request, error)
        self._scheduler.withdraw(monotonic(), batch, [request for request, _ in refused])
        # A batch of which nothing was left has left its worker free.
        self._pump_soon(get_running_loop())

    def _refused_late(self, batch: Batch, refused: list[tuple[Request, BatcherError]]) -> None:
        """The same of a batch that was thought to be sent."""
        if self._scheduler.workers.find(batch.worker, batch.id) is batch:
            self._withdraw(batch, refused)

    def _tell_expired(
        self, request: Request, reason: ExpiryReason, refusal: Refusal | None
    ) -> None:
        if refusal is not None:
            set_exception(request, refusal.to_error())
            return
        timeout = self._settings.timeout if request.timeout is None else request.timeout
        limit = f"its timeout of {timeout} seconds"
        if reason is ExpiryReason.NOT_READY:
            error: BatcherError = NotReadyError(f"no worker was ready for the call within {limit}")
        elif reason is ExpiryReason.WAITING:
            error = DeadlineExceededError(f"the request was still waiting after {limit}")
        elif reason is ExpiryReason.RUNNING:
            error = DeadlineExceededError(f"the model had not answered within {limit}")
        else:
            error = DeadlineExceededError(
                f"the batch ran longer than infer_timeout={self._settings.infer_timeout} seconds"
            )
        set_exception(request, error)

    def _abandon(self, request: Request) -> None:
        """The caller has gone. Nothing here waits: cancel scopes cancel again at every wait."""
        self._take_arrivals(monotonic())  # it may be one of them
        self._cancel(request)
        if self._scheduler.next_expiry < self._timer_at:
            self._set_timer(self._scheduler.next_expiry)
        if self._drained is not None:
            self._notice_drained()

    def _cancel(self, request: Request) -> None:
        self._scheduler.cancel(request)
        # The queue may keep the request for some time.
        if request.staged is not None:
            request.staged.give_up()

    def _take_submitted(self) -> None:
        """Queue what other threads have submitted."""
        while self._submitted:
            request = self._submitted.popleft()
            try:
                self._enqueue(request)
            except (BatcherError, RuntimeError) as error:
                request.is_settled = True
                set_exception(request, error)
            except Exception as error:  # noqa: BLE001  whatever it is, the call has to end
                self._reject([request], error)

    # Ending.

    async def _wait_until_drained(self, loop: asyncio.AbstractEventLoop) -> None:
        drained = self._drained = loop.create_future()
        try:
            self._notice_drained()
            await asyncio.wait([drained], timeout=self._settings.drain_timeout)
        finally:
            if self._drained is drained:
                self._drained = None

    def _notice_drained(self) -> None:
        is_awaited = self._drained is not None and not self._drained.done()
        if is_awaited and not self._scheduler.waiting and not self._scheduler.workers.running:
            assert self._drained is not None
            self._drained.set_result(None)

    def _fail_open_requests(self) -> None:
        while self._submitted:
            self._arrivals.append(self._submitted.popleft())
        self._take_arrivals(monotonic())
        for request in self._scheduler.close():
            if is_beyond_reach(request):
                self._counters.cancelled += 1
            else:
                error = self._broken_error() or BatcherClosedError(
                    f"{self.name} was closed before it had answered"
                )
                fail(self._counters, request, error)

    def _end_for_thread(self, ended: concurrent.futures.Future[None]) -> None:
        try:
            self._end(self._settings.stop_timeout)
        finally:
            ended.set_result(None)

    def _end(self, grace: float) -> None:
        if self._state is State.CLOSED:
            return
        self._move(Event.CLOSE)
        self._ends += 1
        self._pid = 0
        self._serving_loop = None
        self._given_up = None
        # Calls of this very turn are refused too, and not left to a pump that never comes.
        self._pump_is_due = False
        self._fail_open_requests()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pool.stop(grace)
        if self._loop is not None and not self._loop.is_closed():
            self._wake_ready_waiters()
            self._notice_drained()


def _call_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any
) -> bool:
    """Call on the loop's thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _limits_of(settings: Settings) -> Limits:
    """What the scheduler needs of the settings."""
    return Limits(
        max_batch_size=settings.max_batch_size,
        max_queue_size=settings.max_queue_size,
        max_queue_bytes=settings.max_queue_bytes,
        timeout=settings.timeout,
        max_latency=settings.max_latency,
        infer_timeout=settings.infer_timeout,
        idempotent=settings.idempotent,
        isolate_errors=settings.isolate_errors,
    )


def _checked(timeout: Any) -> float:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not (0 < timeout <= MAX_SECONDS or timeout == math.inf):
        raise ConfigurationError(
            f"timeout={timeout!r:.100}: give more than 0 seconds and at most a year, or math.inf "
            "for no limit"
        )
    return float(timeout)


def _checked_priority(priority: Any) -> int:
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ConfigurationError(
            f"priority={priority!r:.100}: give a whole number from {-MAX_PRIORITY} to "
            f"{MAX_PRIORITY}"
        )
    return int(priority)


def _check_platform() -> None:
    if sys.platform == "win32":
        raise ConfigurationError(
            "fast_batcher needs Linux or macOS; on Windows run it inside WSL or a container"
        )
    # Set while a spawned process imports the main module. A batcher opened then would spawn a
    # process that imports the main module, and so on.
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "a batcher is being opened while a worker process imports the main module; put what "
            "the script does under `if __name__ == '__main__':`"
        )
