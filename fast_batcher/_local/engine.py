"""Engines of decorated functions: callers, batches, the threads and tasks that compute. Any thread.

An engine applies an event to the scheduler, polls it, and carries out the actions. The events are
calls and the ends of batches. No request has a deadline, so there is no timer. The scheduler
belongs to one thread at a time, so each event is applied under a lock, which is never held while
code of the user runs. Requests are made on the callers' threads; `deliver` runs on the thread that
has the outcomes.

An engine computes one batch at a time. While its function calls another decorated function, the
engine waits for the other engine. A call that closes a cycle of waits would be a deadlock: it is
computed inline, by its caller.

The threads that compute are daemons, because a function may block for ever and the wait at exit
needs a limit. They must end before the interpreter finalizes: a thread that requests the GIL after
that is killed at once. Inside a C++ function, as when PyTorch frees a tensor, the C++ runtime then
aborts the process. So an exit hook ends the threads and waits for them. It runs on the main thread,
after all non-daemon threads have ended, because these may call decorated functions, and after
`atexit` hooks registered later than the import of this module.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import logging
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Container, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager, closing
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

from fast_batcher._core.policy import GreedyPolicy
from fast_batcher._core.queue import SummedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import Batch, Dispatch, Fail, Failure, Limits, Request, settle_open
from fast_batcher._late_errors import LateErrors, log_late_error
from fast_batcher._local.function import (
    DecoratorSettings,
    Function,
    as_error,
    drop_own_frame,
    length_of,
)
from fast_batcher._observers import BatchContexts, Observers, describe_answer
from fast_batcher._process import at_fork
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    OutputMismatchError,
    QueueFullError,
    can_be_shown,
    clear_frames,
    is_kind,
    is_out_of_memory,
)
from fast_batcher.observing import Outcome, RequestEnded

logger = logging.getLogger("fast_batcher")

# The future of a caller: an event loop's, or one for a caller that blocks its thread.
CallerFuture = asyncio.Future[Any] | concurrent.futures.Future[Any]


@dataclass(slots=True, eq=False)
class Call:
    """Collects the outcomes of the items of one call."""

    # The caller waits for this.
    future: CallerFuture
    # Number of items without an outcome.
    missing: int
    # The outputs by position, or the failure of an item.
    outcome: list[Any] | Failure

    def put(self, position: int, outcome: Any) -> bool:
        """Store the outcome of one item; return whether this ends the call."""
        if type(outcome) is Failure:
            self.outcome = outcome
            return True
        outputs = self.outcome  # read once: another thread may put a failure there
        if type(outputs) is list:
            outputs[position] = outcome
        self.missing -= 1
        return not self.missing


def make_requests(
    items: Sequence[Any], future: CallerFuture, settings: DecoratorSettings
) -> list[Request]:
    """Make the requests of a call, each with its cost and priority if the settings use them.

    A request's `caller` is the call and the item's position in it.
    """
    call = Call(future, len(items), [None] * len(items))
    requests = [Request(item, (call, position)) for position, item in enumerate(items)]
    if settings.max_batch_length is not None:
        for request in requests:
            request.cost = max(1, length_of(request.value))
    if len(items) > settings.ranks_above:
        for request in requests:
            request.priority = settings.priority(request.value)
    return requests


def has_failed(request: Request) -> bool:
    """Return whether the call of a request has a failure, of another of its items."""
    caller = request.caller
    return type(caller) is tuple and type(caller[0].outcome) is Failure


def deliver(requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
    """Give the caller of each request its outcome, an output or a `Failure`.

    A future belongs to the thread of its event loop, so each loop is woken once for all its
    futures.
    """
    resolved: defaultdict[Any, list[tuple[CallerFuture, Any]]] = defaultdict(list)
    for request, outcome in zip(requests, outcomes, strict=True):
        future = request.caller
        if type(future) is tuple:
            call, position = future
            if not call.put(position, outcome):
                continue
            future, outcome = call.future, call.outcome
        blocks = type(future) is concurrent.futures.Future
        resolved[None if blocks else future.get_loop()].append((future, outcome))
    here = running_loop()
    for loop, pairs in resolved.items():
        if loop is None or loop is here:
            _set_outcomes(pairs)
        else:
            # The loop is closed, and its callers are gone.
            with contextlib.suppress(Exception):
                loop.call_soon_threadsafe(_set_outcomes, pairs)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def is_cancelled() -> bool:
    """Return whether the current task is being cancelled; else a CancelledError is an error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _set_outcomes(pairs: list[tuple[CallerFuture, Any]]) -> None:
    for future, outcome in pairs:
        try:
            if type(outcome) is Failure:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome)
        except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            pass  # the caller has gone, or another item failed first
        except Exception:
            # The event loop may have its own class of futures. The other callers must not wait.
            logger.exception("the future of a caller has refused its outcome")


@dataclass(slots=True, eq=False)
class RunningBatch:
    """The batch that a thread or task computes; nested calls find it in `running_batch`."""

    engine: Hashable
    # A task that an async function starts may outlive the batch. From then on the engine does not
    # wait for the task. Never set on an engine's own thread: anything that runs there delays the
    # engine's next batch.
    has_ended: bool = False


# The batch that this thread or task computes, None outside of all batches. A thread that a function
# starts does not inherit it, because nothing shows whether the function waits for that thread.
running_batch: ContextVar[RunningBatch | None] = ContextVar("running_batch", default=None)


class _Waits:
    """Wait-for graph of the engines."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset, also in a forked child: it has one thread, and another may have held the lock."""
        self.lock = threading.Lock()
        # The number of waits by waiting engine and target.
        self.counts: Counter[tuple[Hashable, Hashable]] = Counter()

    def has_path(self, start: Hashable, end: Hashable) -> bool:
        """Return whether engine `start` is `end`, or waits for it, directly or through others."""
        reached = {start}
        while new := {to for waiter, to in self.counts if waiter in reached} - reached:
            reached |= new
        return end in reached


_waits = _Waits()
at_fork(_waits, in_child=_Waits.forget)


@dataclass(slots=True)
class EngineWait:
    """Context manager that records that the running batch of this thread or task waits.

    `__enter__` returns whether the wait can end. It cannot if the target engine is the batch's own,
    or waits for that engine; then no wait is recorded. Outside of batches none is recorded either.

    A class, because `contextlib.contextmanager` sets an attribute of each error that passes, and
    errors of users may refuse that.
    """

    # The engine to wait for.
    target: Hashable
    # The engine that waits, None if no wait was recorded.
    waiter: Hashable | None = None

    def __enter__(self) -> bool:
        batch = running_batch.get()
        if batch is None or batch.has_ended:
            return True
        with _waits.lock:
            if _waits.has_path(self.target, batch.engine):
                return False
            self.waiter = batch.engine
            _waits.counts[self.waiter, self.target] += 1
        return True

    def __exit__(self, *_: object) -> None:
        if self.waiter is None:
            return
        with _waits.lock:
            _waits.counts -= Counter([(self.waiter, self.target)])  # keeps what is above 0


async def compute_inline(function: Function, items: Sequence[Any], batch_size: int) -> list[Any]:
    """Call the function directly, with `batch_size` items at a time; same errors as in a batch."""
    outputs: list[Any] = []
    for start in range(0, len(items), batch_size):
        part = list(items[start : start + batch_size])
        try:
            result = function.call(part)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            raise as_error(error) from error
        for outcome in function.outcomes(result, len(part)):
            if type(outcome) is Failure:
                raise outcome.error
            outputs.append(outcome)
    return outputs


def run_inline(computing: Coroutine[Any, Any, list[Any]], *, is_async: bool) -> list[Any]:
    """Run `compute_inline` in a thread that has no event loop."""
    if is_async:
        with asyncio.Runner() as runner:
            return runner.run(computing)
    try:
        computing.send(None)
    except StopIteration as done:
        outputs: list[Any] = done.value
        return outputs
    computing.close()
    raise RuntimeError(
        "a function that called itself returned an awaitable; define it with `async def`"
    )


# An engine has one worker: functions written for `batched` are never called concurrently, and may
# rely on that.
_WORKER = 0


class Worker(Protocol):
    """Computes the batches of one engine."""

    def compute(self, batch: Batch) -> None:
        """Compute a batch, then each next batch that the engine returns.

        The engine calls this only while the worker has no batch.
        """

    def stop(self) -> None:
        """End the worker, and then resolve the engine's `ended`: no batch will follow.

        A finalizer may call it, so it takes no locks.
        """

    def join(self) -> None:
        """Wait until the worker has ended. Called after `ended`, so the wait is short."""


@dataclass
class Counts:
    """Counts of a function since its first call or the last `clear_stats()`."""

    items: int = 0
    batches: int = 0
    # Total time of all batches.
    seconds: float = 0.0
    late_errors: LateErrors = field(default_factory=LateErrors)


class Engine:
    """Accepts requests from any thread, and settles each of them once."""

    def __init__(
        self,
        function: Function,
        settings: DecoratorSettings,
        counts: Counts,
        lock: threading.Lock,
        make_worker: Callable[["Engine"], Worker],
    ) -> None:
        self.function = function
        self.observers = Observers(function.name, settings.observers)
        self._contexts = BatchContexts()
        self._settings = settings
        self._most_waiting = settings.max_queue_size or sys.maxsize
        length = settings.max_batch_length
        self._scheduler = Scheduler(
            GreedyPolicy(),
            Limits(
                max_batch_size=settings.batch_size,
                max_queue_size=self._most_waiting,
                isolate_errors=settings.isolate_errors,
                batches_per_worker=1,
            ),
            packer=None if length is None else SummedPacker(length),
        )
        self._scheduler.worker_ready(monotonic(), _WORKER)
        self._counts = counts
        self._lock = lock
        # Whether the engine accepts no more requests, and whether it has ended its worker.
        self._is_closing = False
        self._has_ended = False
        # Resolved when the engine is closed, everything is settled and the worker has ended.
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.worker = make_worker(self)

    @property
    def waiting(self) -> int:
        """Number of requests that are in no batch yet. Read it under the lock."""
        return self._scheduler.waiting

    def submit(self, calls: Sequence[list[Request]]) -> None:
        """Enqueue the requests of each call; a call is rejected whole if not all of them fit."""
        accepted: list[Request] = []
        # The first requests of rejected calls with the errors of their callers, and all requests.
        first: list[Request] = []
        errors: list[Failure] = []
        rejected: list[Request] = []
        with self._lock:
            if max(map(len, calls)) > self._settings.ranks_above:
                # Only when the first such call comes: a ranked queue costs every request some
                # microseconds.
                self._scheduler.rank_requests()
            waiting = self._scheduler.queue.size
            room = 0 if self._is_closing else self._most_waiting - waiting
            for requests in calls:
                if len(accepted) + len(requests) <= room:
                    accepted += requests
                else:
                    first.append(requests[0])
                    rejected += requests
                    errors.append(self._reject(requests, waiting + len(accepted)))
            now = monotonic()
            self._scheduler.submit(now, accepted)
            batch = self._poll(now)
            reason = "closed" if self._is_closing else "queue full"
        if batch is not None:
            self.worker.compute(batch)
        deliver(first, errors)
        self._report_ended(rejected, "rejected", reason)

    def keep_context(self, requests: list[Request]) -> None:
        """Keep the context of the caller of requests that are about to be submitted."""
        if self.observers.active:
            context = self.observers.copy_context()
            for request in requests:
                request.context = context

    def _reject(self, requests: list[Request], waiting: int) -> Failure:
        """Settle the requests of one call, and return the error for its caller."""
        settle_open(requests)
        name = self.function.name
        if self._is_closing:
            return Failure(BatcherClosedError(f"{name} was shut down and takes no calls"))
        return Failure(
            QueueFullError(
                f"{name}: no room for {len(requests)} more, {waiting} wait already "
                f"(max_queue_size={self._most_waiting})"
            )
        )

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel requests whose caller has gone; the output of a running request is dropped."""
        with self._lock:
            gone = [request for request in requests if self._scheduler.cancel(request)]
        self._report_ended(gone, "cancelled", "waiting or running")

    def around(self, batch: Batch) -> AbstractContextManager[None]:
        """Tell observers that a batch begins; return the context manager for its computation."""
        return self._contexts.join(self.observers.follow(batch, lambda context: context))

    def settle(
        self,
        batch: Batch,
        seconds: float,
        *,
        result: Any = None,
        raised: BaseException | None = None,
    ) -> Batch | None:
        """Settle a batch for which the function has returned or raised; return the next batch.

        If it has raised, the next batch may be half of this batch.
        """
        try:
            if raised is not None:
                return self._fail(batch, raised, seconds)
            return self._finish(batch, result, seconds)
        except BaseException as error:  # noqa: BLE001  the worker must go on
            return self._recover(batch, error)

    def _finish(self, batch: Batch, result: Any, seconds: float) -> Batch | None:
        try:
            outcomes = self.function.outcomes(result, len(batch.requests))
        except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
            if type(error) is not OutputMismatchError:
                return self._fail(batch, error, seconds)
            outcomes = [Failure(OutputMismatchError(*error.args)) for _ in batch.requests]
        with self._lock:
            now = self._take_back(batch, seconds)
            open_ids = {request.id for request in settle_open(batch.requests)}
            following = self._poll(now)
        if len(open_ids) != len(outcomes):
            self._note_late_error(batch, outcomes, open_ids)
        self._deliver(batch.requests, outcomes)
        self._report_answered(batch, batch.requests, outcomes, open_ids, seconds)
        return following

    def _fail(self, batch: Batch, raised: BaseException, seconds: float) -> Batch | None:
        drop_own_frame(raised)
        out_of_memory = is_out_of_memory(raised)
        if out_of_memory:  # its frames hold the batch that was too large
            clear_frames(raised)
        with self._lock:
            now = self._take_back(batch, seconds, has_raised=True)
            failed = self._scheduler.batch_raised(
                now, batch, out_of_memory=out_of_memory, is_fatal=not is_kind(raised, Exception)
            )
            open_ids = {request.id for request in settle_open(failed)}
            following = self._poll(now)
        if not batch.open_count:
            unheard = Failure(as_error(raised))
            self._note_late_error(batch, [unheard] * len(batch.requests), open_ids)
        outcomes = [Failure(as_error(raised)) for _ in failed]
        self._deliver(failed, outcomes)
        self._report_answered(batch, failed, outcomes, open_ids, seconds)
        return following

    def _note_late_error(
        self, batch: Batch, outcomes: Sequence[Any], open_ids: Container[int]
    ) -> None:
        """Count and log a failure of a batch, unless a caller gets one or has got one before."""
        pairs = zip(batch.requests, outcomes, strict=True)
        failed = [pair for pair in pairs if type(pair[1]) is Failure]
        if not failed or any(
            request.id in open_ids or has_failed(request) for request, _ in failed
        ):
            return
        with self._lock:
            is_logged, omitted = self._counts.late_errors.add(monotonic())
        if is_logged:
            log_late_error(self.function.name, failed[0][1].error, omitted)

    def _recover(self, batch: Batch, error: BaseException) -> Batch | None:
        """Fail the callers of a batch whose settling raised; return the next batch.

        Callers that have an outcome keep it. The error is one of an observer, of a caller's event
        loop, or of this library; it may be of any type, and no caller may wait for ever.
        """
        to_failure = self._log_internal(error)
        with self._lock:
            now = monotonic()
            # It has no effect if the error came after the batch was taken back.
            self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=True)
            batch.settle_open()
            # The next batch has been dispatched if the error came after that.
            dispatched = next(self._scheduler.workers.all_batches(), None)
            following = dispatched or self._poll(now)
        self._deliver(batch.requests, [to_failure() for _ in batch.requests])
        return following

    def _log_internal(self, error: BaseException) -> Callable[[], Failure]:
        """Log an error that is not the function's; return a function that makes failures."""
        name = self.function.name
        # An exception of a log handler must not end the worker.
        with contextlib.suppress(Exception):
            logger.error(
                "%s: settling a batch raised; its callers get an error, and the function goes on",
                name,
                exc_info=error if can_be_shown(error) else None,
            )
        text = f"{name}: settling the batch raised {one_line(error)}; the log has its traceback"
        return lambda: Failure(BatcherError(text))

    def drop(self, batch: Batch) -> Batch | None:
        """Skip a batch that has no callers left; return the next batch, if any."""
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id)
            following = self._poll(now)
        self._end_if_done()
        return following

    def close(self, *, cancel: bool) -> None:
        """Accept no more requests."""
        with self._lock:
            self._is_closing = True
            unanswered = self._scheduler.give_up() if cancel else []
        self._fail_as_closed(unanswered, "was shut down before it had answered")

    def abandon(self) -> None:
        """Fail all requests: the event loop of the worker has ended, or does not run."""
        with self._lock:
            self._is_closing = True
            running = [*self._scheduler.workers.all_batches()]
            unanswered = self._scheduler.close()
        self.observers.lose(running, "closed")
        self._fail_as_closed(unanswered, "the event loop that computed it has ended")

    def _fail_as_closed(self, requests: list[Request], why: str) -> None:
        text = f"{self.function.name}: {why}"
        self._deliver(requests, [Failure(BatcherClosedError(text)) for _ in requests])
        self._report_ended(requests, "failed", "closed")

    def _report_ended(self, requests: Sequence[Request], outcome: Outcome, reason: str) -> None:
        """Tell observers of requests that have ended without an answer."""
        if not self.observers.active:
            return
        now = monotonic()
        for request in requests:
            wait = 0.0 if outcome == "rejected" else now - request.arrival
            event = RequestEnded(self.function.name, outcome, reason, wait, request.context)
            self.observers.tell(event)

    def _report_answered(
        self,
        batch: Batch,
        requests: Sequence[Request],
        outcomes: Sequence[Any],
        open_ids: set[int],
        seconds: float,
    ) -> None:
        """Tell observers of a batch, with the requests whose callers were still waiting."""
        if self.observers.active:
            ended: list[tuple[Request, Outcome]] = [
                (request, "failed" if type(outcome) is Failure else "completed")
                for request, outcome in zip(requests, outcomes, strict=True)
                if request.id in open_ids
            ]
            batch.began_at, batch.infer_seconds = batch.sent_at, seconds
            self.observers.tell(describe_answer(self.function.name, batch, ended))

    def _take_back(self, batch: Batch, seconds: float, *, has_raised: bool = False) -> float:
        """Count a batch that the worker has computed; return the moment."""
        self._counts.items += len(batch.requests)
        self._counts.batches += 1
        self._counts.seconds += seconds
        now = monotonic()
        self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=has_raised)
        return now

    def _poll(self, now: float) -> Batch | None:
        """Return the batch to compute now, if the worker is free and a request waits."""
        actions, _ = self._scheduler.poll(now)
        batch: Batch | None = None
        for action in actions:
            if isinstance(action, Dispatch):
                batch = action.batch
                continue
            assert isinstance(action, Fail), "without deadlines nothing expires"
            to_failure = self._log_internal(action.error)
            deliver(action.requests, [to_failure() for _ in action.requests])
        return batch

    def _deliver(self, requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
        deliver(requests, outcomes)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._is_closing:
            return
        with self._lock:
            scheduler = self._scheduler
            # The worker is idle only if no request waits and no batch runs, including batches whose
            # callers have all gone.
            is_done = scheduler.is_closed or scheduler.workers.idle_workers
            if not is_done or self._has_ended:
                return
            self._has_ended = True
        self.worker.stop()


# Longest wait in seconds for threads that still compute. The default `stop_timeout` of a
# `DynBatcher`, which limits the same wait for worker processes.
EXIT_TIMEOUT = 2.0

_is_exiting = False


class ThreadWorker(threading.Thread):
    """Worker thread for blocking functions and for all thread decorators; starts at construction.

    Without a batch it blocks on its queue, without a time-out. The exit of the program waits for
    the thread, at most `EXIT_TIMEOUT` seconds if it computes.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name=f"fast_batcher {engine.function.name}", daemon=True)
        # None after the end, to break the reference cycle with the engine.
        self._engine: Engine | None = engine
        # `SimpleQueue.put` is reentrant: a finalizer may call `stop` between any two instructions.
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self.start()

    def compute(self, batch: Batch) -> None:
        """Compute a batch, then each next batch that the engine returns."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread once it has no batch."""
        self._inbox.put(None)

    def run(self) -> None:
        """Compute batches until `stop` is called."""
        engine = self._engine
        assert engine is not None, "a thread runs once"
        running_batch.set(RunningBatch(engine))
        try:
            # Makes an event loop for the first awaitable.
            with closing(asyncio.Runner()) as runner:
                while (batch := self._inbox.get()) is not None:
                    while batch is not None:
                        batch = _compute_batch(engine, batch, runner)
        except BaseException:
            # The end of the loop cancels the tasks that the function left on it.
            logger.exception("%s: a task has raised while its event loop was closed", self.name)
        finally:
            self._engine = None
            engine.ended.set_result(None)

    def end(self) -> None:
        """Fail the waiting items, and end the thread after its current batch; may be repeated."""
        engine = self._engine
        if engine is not None:
            engine.close(cancel=True)


def _compute_batch(engine: Engine, batch: Batch, runner: asyncio.Runner) -> Batch | None:
    """Compute one batch and return the next one.

    A separate function, so that its frame releases the inputs before the next wait.
    """
    started = monotonic()
    try:
        # In this frame, which `settle` removes from the traceback.
        with engine.around(batch):
            result = engine.function.call([request.value for request in batch.requests])
            if inspect.isawaitable(result):
                # By default the runner keeps the context of its first batch.
                result, raised = runner.run(_catch(result), context=copy_context())
                if raised is not None:
                    raise raised  # noqa: TRY301  for the frames that the error refers to
    except BaseException as error:  # noqa: BLE001  sys.exit() in a function must not end the thread
        following = engine.settle(batch, monotonic() - started, raised=error)
        # The error refers to the function's frame, and so to this one: drop the batch from it.
        del batch
        return following
    return engine.settle(batch, monotonic() - started, result=result)


async def _catch(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return the result of an awaitable, or its error.

    An event loop that runs until a task is done reads `__class__` of the task's error. If that
    raises, the loop never ends.
    """
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001  it is raised outside of the loop
        return None, error


class TaskWorker:
    """Computes the batches of an async function, in one task at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self._engine = engine
        self._loop = loop
        # An event loop holds only weak references to its tasks.
        self._task: asyncio.Task[None] | None = None
        # The batch that the task computes next. An attribute, not an argument of the task: a task
        # that is cancelled before its first step runs no code, and the batch must not be lost.
        self._next: Batch | None = None

    def compute(self, batch: Batch) -> None:
        """Compute a batch, then each next batch that the engine returns."""
        self._next = batch
        # In an empty context: the batch must not see the context variables of its first caller.
        self._task = Context().run(self._loop.create_task, self._compute_batches())
        self._task.add_done_callback(self._go_on, context=Context())

    def stop(self) -> None:
        """Resolve `ended`: the task ends with its batch."""
        self._engine.ended.set_result(None)

    def join(self) -> None:
        """Return at once: nothing is left after `ended`."""

    async def _compute_batches(self) -> None:
        call = self._engine.function.call
        while (batch := self._next) is not None:
            self._next = None
            running = RunningBatch(self._engine)
            running_batch.set(running)
            started = monotonic()
            try:
                # In this frame, which `settle` removes from the traceback.
                with self._engine.around(batch):
                    result = call([request.value for request in batch.requests])
                    if inspect.isawaitable(result):
                        result = await result
            except BaseException as error:
                running.has_ended = True
                self._next = self._engine.settle(batch, monotonic() - started, raised=error)
                if self._is_for_the_loop(error):
                    raise
            else:
                running.has_ended = True
                self._next = self._engine.settle(batch, monotonic() - started, result=result)
            if self._next is not None:
                # A function that never waits must not block the loop for the whole queue.
                await asyncio.sleep(0)

    @staticmethod
    def _is_for_the_loop(error: BaseException) -> bool:
        """Return whether an error ends the task or the program, and is not the function's own."""
        if is_kind(error, asyncio.CancelledError):
            return is_cancelled()
        return is_kind(error, KeyboardInterrupt) or is_kind(error, SystemExit)

    def _go_on(self, task: asyncio.Task[None]) -> None:
        """Start a new task if one was cancelled before it had computed all batches."""
        if not task.cancelled():
            task.exception()  # mark as retrieved: all callers have their errors
        if task is not self._task:
            return
        following, self._next = self._next, None
        # Callers may have been cancelled together with the task.
        while following is not None and not following.open_count:
            following = self._engine.drop(following)
        if following is not None:
            self.compute(following)


def is_exiting() -> bool:
    """Return whether the exit hook has run, after which threads accept no calls."""
    return _is_exiting


def _end_threads() -> None:
    """End the threads of all functions and wait for them."""
    global _is_exiting
    _is_exiting = True
    # Not through the batchers: the thread of a batcher that was collected may still compute.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, ThreadWorker)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + EXIT_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
        if thread.is_alive():
            logger.warning(
                "%s: the program ends, and the thread still computes after %s seconds; the "
                "interpreter cuts it off, which can abort the process where native code runs",
                thread.name,
                EXIT_TIMEOUT,
            )


atexit.register(_end_threads)
