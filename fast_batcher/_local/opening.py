"""Sessions of decorated functions: callers, batches, threads and tasks that compute. Any thread.

A `FunctionOpening` is for a decorated function what a `LocalOpening` is for a `DynBatcher`: it
drives a scheduler, and the `Ledger` gives its callers their outcomes. It needs no event loop: the
events are calls and the ends of batches, and no request has a deadline, so there is no timer. The
scheduler belongs to one thread at a time, so each event is applied under a lock, which is never
held while code of the user runs: batches are sent, and outcomes given, after it is released.

An opening computes one batch at a time. While its function calls another decorated function, the
opening waits for the other opening. A call that closes a cycle of waits would be a deadlock: it is
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
import inspect
import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import closing, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any

from fast_batcher._core.policy import GreedyPolicy
from fast_batcher._core.queue import SummedPacker
from fast_batcher._core.scheduler import Scheduler
from fast_batcher._core.values import (
    Action,
    Batch,
    Dispatch,
    Fail,
    Failure,
    Limits,
    Request,
)
from fast_batcher._local.function import (
    DecoratorSettings,
    Function,
    as_error,
    drop_own_frame,
    length_of,
)
from fast_batcher._observers import BatchContexts
from fast_batcher._opening.ledger import Ledger, give_outcome
from fast_batcher._opening.output_cache import ends_task
from fast_batcher._process import at_fork
from fast_batcher.errors import (
    BatcherClosedError,
    BatcherError,
    QueueFullError,
    clear_frames,
    is_kind,
    is_out_of_memory,
)

logger = logging.getLogger("fast_batcher")


@dataclass(slots=True, eq=False)
class Call:
    """Collects the outputs of the items of one call."""

    # Waits for the list of outputs: a future, or a `LoopCaller`.
    caller: Any
    # Number of items without an output.
    missing: int
    # Outputs, by the position of their inputs.
    outputs: list[Any]
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class ItemCaller:
    """The caller of one item of a call: the first error, or the last output, ends the call."""

    call: Call
    position: int

    @property
    def has_failed(self) -> bool:
        """Whether the call has an error, of this item or another."""
        return self.call.has_failed

    def set_result(self, output: Any) -> None:
        """Note the output of this item."""
        call = self.call
        call.outputs[self.position] = output
        call.missing -= 1
        if not call.missing:
            call.caller.set_result(call.outputs)

    def set_exception(self, error: BaseException) -> None:
        """End the call; an error that comes after another is as good as told."""
        if not self.call.has_failed:
            self.call.has_failed = True
            self.call.caller.set_exception(error)


class LoopCaller:
    """A caller on an event loop, whose outcome comes from another thread: see `LoopCalls`."""

    __slots__ = ("_future", "_given")

    def __init__(self, future: asyncio.Future[Any], given: deque[Any]) -> None:
        self._future = future
        self._given = given

    def set_result(self, output: Any) -> None:
        """Give the output at the next wake-up of the loop."""
        self._given.append((self._future.set_result, output))

    def set_exception(self, error: BaseException) -> None:
        """Give the error at the next wake-up of the loop."""
        self._given.append((self._future.set_exception, error))


class LoopCalls:
    """The calls of one event loop: submitted once per turn, and answered once per batch."""

    def __init__(
        self,
        opening: "FunctionOpening",
        loop: asyncio.AbstractEventLoop,
        settings: DecoratorSettings,
    ) -> None:
        self.opening = opening
        self._loop = loop
        self._settings = settings
        # The requests of each call of this turn. While there are any, a `flush` is scheduled.
        self._pending: list[list[Request]] = []
        # Outcomes that another thread has left for callers. It appends while the loop takes.
        self.given: deque[tuple[Callable[[Any], object], Any]] = deque()

    def process(self, items: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Await the outputs of one or more items; the first error ends the wait for all."""
        future, caller = self._make_caller()
        return self._wait(future, make_requests(items, caller, self._settings))

    def process_one(self, item: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of one item that has neither a cost nor a priority.

        This omits the `Call` object, which would cost most calls a quarter of their CPU: without
        the short cut an async function misses the target of `benchmarks/decorators.py`.
        """
        future, caller = self._make_caller()
        return self._wait(future, [Request(item, caller)])

    def _make_caller(self) -> tuple[asyncio.Future[Any], Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        is_here = self.opening.loop is self._loop
        return future, future if is_here else LoopCaller(future, self.given)

    async def _wait(self, future: asyncio.Future[Any], requests: list[Request]) -> Any:
        if not self._pending:
            self._loop.call_soon(self.flush, context=Context())
        self._pending.append(requests)
        self.opening.keep_context(requests)
        try:
            return await future
        except BaseException:
            if requests in self._pending:
                self._pending.remove(requests)
            else:
                self.opening.cancel(requests)
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, requests

    def flush(self) -> None:
        """Submit the calls of this turn."""
        pending, self._pending = self._pending, []
        if pending:
            self.opening.submit(pending)

    def wake(self) -> None:
        """Let the loop give callers what another thread has left for them. Any thread."""
        if self.given:
            try:
                self._loop.call_soon_threadsafe(self._give)
            except Exception:  # noqa: BLE001  the loop is closed, and its callers are gone
                self.given.clear()

    def _give(self) -> None:
        while self.given:  # a caller may have gone, and has an error if another item failed first
            give_outcome(self.opening.function.name, *self.given.popleft())


def make_requests(items: Sequence[Any], caller: Any, settings: DecoratorSettings) -> list[Request]:
    """Make the requests of a call, each with its cost and priority if the settings use them."""
    call = Call(caller, len(items), [None] * len(items))
    requests = [Request(item, ItemCaller(call, position)) for position, item in enumerate(items)]
    if settings.max_batch_length is not None:
        for request in requests:
            request.cost = max(1, length_of(request.value))
    if len(items) > settings.ranks_above:
        for request in requests:
            request.priority = settings.priority(request.value)
    return requests


@dataclass(slots=True, eq=False)
class RunningBatch:
    """The batch that a thread or task computes; nested calls find it in `running_batch`."""

    opening: Hashable
    # A task that an async function starts may outlive the batch. From then on the opening does not
    # wait for the task. Never set on an opening's own thread: anything that runs there delays the
    # opening's next batch.
    has_ended: bool = False


# The batch that this thread or task computes, None outside of all batches. A thread that a function
# starts does not inherit it, because nothing shows whether the function waits for that thread.
running_batch: ContextVar[RunningBatch | None] = ContextVar("running_batch", default=None)


class _Waits:
    """Wait-for graph of the openings."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset, also in a forked child: it has one thread, and another may have held the lock."""
        self.lock = threading.Lock()
        # The number of waits by waiting opening and target.
        self.counts: Counter[tuple[Hashable, Hashable]] = Counter()

    def has_path(self, start: Hashable, end: Hashable) -> bool:
        """Return whether opening `start` is `end`, or waits for it, directly or through others."""
        reached = {start}
        while new := {to for waiter, to in self.counts if waiter in reached} - reached:
            reached |= new
        return end in reached


_waits = _Waits()
at_fork(_waits, in_child=_Waits.forget)


@dataclass(slots=True)
class OpeningWait:
    """Context manager that records that the running batch of this thread or task waits.

    `__enter__` returns whether the wait can end. It cannot if the target is the batch's own
    opening, or waits for it; then no wait is recorded. Outside of batches none is recorded either.

    A class, because `contextlib.contextmanager` sets an attribute of each error that passes, and
    errors of users may refuse that.
    """

    # The opening to wait for.
    target: Hashable
    # The opening that waits, None if no wait was recorded.
    waiter: Hashable | None = None

    def __enter__(self) -> bool:
        batch = running_batch.get()
        if batch is None or batch.has_ended:
            return True
        with _waits.lock:
            if _waits.has_path(self.target, batch.opening):
                return False
            self.waiter = batch.opening
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


# An opening has one worker: functions written for `batched` are never called concurrently, and may
# rely on that.
_WORKER = 0


class FunctionOpening:
    """Accepts requests from any thread, and settles each of them once."""

    def __init__(
        self,
        function: Function,
        settings: DecoratorSettings,
        ledger: Ledger,
        lock: threading.Lock,
        loops: dict[asyncio.AbstractEventLoop, LoopCalls],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.function = function
        # The event loop that computes the batches; None for a thread.
        self.loop = loop
        self._ledger = ledger
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
        self._lock = lock
        # The loops with callers.
        self._loops = loops
        # Whether the opening accepts no more requests, and whether it has ended its worker.
        self._is_closing = False
        self._has_ended = False
        # Resolved when the opening is closed, everything is settled and the worker has ended.
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.worker: FunctionThread | FunctionTask
        self.worker = FunctionThread(self) if loop is None else FunctionTask(self)

    @property
    def waiting(self) -> int:
        """Number of requests that are in no batch yet. Read it under the lock."""
        return self._scheduler.waiting

    def submit(self, calls: Sequence[list[Request]]) -> None:
        """Enqueue the requests of each call; a call is rejected whole if not all of them fit."""
        accepted: list[Request] = []
        # Calls without room, each with the number of requests that waited before it.
        rejected: list[tuple[list[Request], int]] = []
        with self._lock:
            if max(map(len, calls)) > self._settings.ranks_above:
                # The queue is ranked from the first such call on: ranks cost every request some
                # microseconds.
                self._scheduler.rank_requests()
            waiting = self._scheduler.queue_size
            room = 0 if self._is_closing else self._most_waiting - waiting
            for requests in calls:
                if len(accepted) + len(requests) <= room:
                    accepted += requests
                else:
                    rejected.append((requests, waiting + len(accepted)))
            now = monotonic()
            self._scheduler.submit(now, accepted)
            actions = self._scheduler.poll(now)[0]
            is_closing = self._is_closing
        self._carry_out(actions)
        for requests, before in rejected:
            self._reject(requests, before, is_closing=is_closing)

    def _reject(self, requests: list[Request], waiting: int, *, is_closing: bool) -> None:
        """Give the caller of requests that were not accepted an error."""
        name = self.function.name
        for request in requests:
            error: BatcherError = BatcherClosedError(f"{name} was shut down and takes no calls")
            if not is_closing:
                error = QueueFullError(
                    f"{name}: no room for {len(requests)} more, {waiting} wait already "
                    f"(max_queue_size={self._most_waiting})"
                )
            self._ledger.reject(request, error)
        self._finish_giving()

    def keep_context(self, requests: list[Request]) -> None:
        """Keep the context of the caller of requests that are about to be submitted."""
        if self._ledger.observers.active:
            context = self._ledger.observers.copy_context()
            for request in requests:
                request.context = context

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel requests whose caller has gone; the output of a running request is dropped."""
        with self._lock:
            gone = [request for request in requests if self._scheduler.cancel(request)]
        for request in gone:
            self._ledger.cancel(request, "waiting or running")

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out what the scheduler has decided; call it without the lock."""
        for action in actions:
            if isinstance(action, Dispatch):
                self.worker.compute(action.batch)
                continue
            assert isinstance(action, Fail), "without deadlines nothing expires"
            self._fail(action.requests, self._ledger.internal_error(action.error), "internal error")

    def is_running(self, batch: Batch) -> bool:
        """Return whether a batch was dispatched and not settled."""
        with self._lock:
            return self._scheduler.is_running(batch)

    async def compute(self, batch: Batch, runner: asyncio.Runner | None = None) -> None:
        """Call the function with a batch, and settle the batch.

        A thread gives its runner, which computes an awaitable; then the coroutine awaits nothing.
        """
        if not batch.open_count:  # its callers have left before it began
            self._drop(batch)
            return
        running = running_batch.get()
        if running is None:  # the thread has one for all batches
            running = RunningBatch(self)
            running_batch.set(running)
        started = monotonic()
        try:
            # The call is made in this frame, which `_settle` removes from the traceback.
            with self._contexts.join(self._ledger.observers.follow(batch, lambda one: one)):
                result = self.function.call([request.value for request in batch.requests])
                if inspect.isawaitable(result):
                    result = await result if runner is None else _run(runner, result)
            seconds = monotonic() - started
            outcomes = self.function.outcomes(result, len(batch.requests))
        except BaseException as error:
            running.has_ended = runner is None
            self._settle(batch, monotonic() - started, raised=error)
            # The error refers to the function's frame, and so to this one: drop the batch from it.
            del batch
            if runner is None and ends_task(error):
                raise
        else:
            running.has_ended = runner is None
            self._settle(batch, seconds, outcomes)

    def _settle(
        self,
        batch: Batch,
        seconds: float,
        outcomes: Sequence[Any] = (),
        raised: BaseException | None = None,
    ) -> None:
        """Settle a batch for which the function has returned or raised; dispatch the next batch."""
        try:
            requests = self._take_back(batch, seconds, raised)
            if raised is not None:
                outcomes = [Failure(as_error(raised)) for _ in requests]
            batch.began_at, batch.infer_seconds = batch.sent_at, seconds
            self._ledger.answer(batch, requests, outcomes)
            self._finish_giving()
        except BaseException as error:  # noqa: BLE001  the worker must go on
            self._recover(batch, error)

    def _take_back(
        self, batch: Batch, seconds: float, raised: BaseException | None
    ) -> list[Request]:
        """Dispatch the next batch, which may be half of one that has raised; return who ends.

        The worker computes the next batch while the callers of this one get their outcomes.
        """
        out_of_memory = False
        if raised is not None:
            drop_own_frame(raised)
            out_of_memory = is_out_of_memory(raised)
            if out_of_memory:  # its frames hold the batch that was too large
                clear_frames(raised)
        requests = batch.requests
        with self._lock:
            counters = self._ledger.counters
            counters.batch_sizes[len(requests)] += 1
            counters.infer_seconds += seconds
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=raised is not None)
            if raised is not None:
                failed = self._scheduler.batch_raised(
                    now, batch, out_of_memory=out_of_memory, is_fatal=not is_kind(raised, Exception)
                )
                # If all callers have left, the ledger notes the error.
                requests = failed if batch.open_count else requests
            actions = self._scheduler.poll(now)[0]
        self._carry_out(actions)
        return requests

    def _recover(self, batch: Batch, error: BaseException) -> None:
        """Fail the callers of a batch whose settling raised, and dispatch the next batch.

        Callers that have an outcome keep it. The error is one of an observer, of a caller's event
        loop, or of this library; it may be of any type, and no caller may wait for ever.
        """
        to_error = self._ledger.internal_error(error)
        with self._lock:
            batch.settle_open()
        for request in batch.requests:
            self._ledger.give(request, Failure(to_error()))
        self._drop(batch)

    def _drop(self, batch: Batch) -> None:
        """Take back a batch without callers, unless that was done; the next one is dispatched."""
        with self._lock:
            now = monotonic()
            self._scheduler.batch_done(now, _WORKER, batch.id, has_raised=True)
            actions = self._scheduler.poll(now)[0]
        self._carry_out(actions)
        self._finish_giving()

    def close(self, *, cancel: bool) -> None:
        """Accept no more requests; fail all if the event loop of the worker does not run."""
        is_lost = self.loop is not None and not self.loop.is_running()
        with self._lock:
            self._is_closing = True
            running = self._scheduler.list_batches() if is_lost else []
            unanswered: list[Request] = []
            if is_lost:
                unanswered = self._scheduler.close()
            elif cancel:
                unanswered = self._scheduler.give_up()
        self._ledger.observers.lose(running, "closed")
        why = "the event loop that computed it has ended" if is_lost else "it was shut down"
        text = f"{self.function.name}: {why} before it had answered"
        self._fail(unanswered, lambda: BatcherClosedError(text), "closed")

    def _fail(
        self, requests: Iterable[Request], to_error: Callable[[], BatcherError], reason: str
    ) -> None:
        """Give callers an error; their requests are settled already."""
        for request in requests:
            self._ledger.fail(request, to_error(), reason)
        self._finish_giving()

    def _finish_giving(self) -> None:
        """Wake the event loops of the callers that got an outcome; end if this was the last one."""
        for calls in self._loops.copy().values():
            calls.wake()
        if not self._is_closing:
            return
        with self._lock:
            scheduler = self._scheduler
            # The worker is idle only if no request waits and no batch runs, including batches whose
            # callers have all gone.
            is_done = scheduler.is_closed or scheduler.idle_workers
            if not is_done or self._has_ended:
                return
            self._has_ended = True
        self.worker.stop()


# Longest wait in seconds for threads that still compute. The default `stop_timeout` of a
# `DynBatcher`, which limits the same wait for worker processes.
EXIT_TIMEOUT = 2.0

_is_exiting = False


class FunctionThread(threading.Thread):
    """Computes blocking functions, and those of all thread decorators; starts at construction.

    The opening gives it a batch only while it has no other. Without one it blocks on its queue,
    without a time-out. The exit of the program waits for the thread, at most `EXIT_TIMEOUT` seconds
    if it computes.
    """

    def __init__(self, opening: FunctionOpening) -> None:
        super().__init__(name=f"fast_batcher {opening.function.name}", daemon=True)
        # The opening; None after the end, to break the reference cycle with it.
        self._opening: FunctionOpening | None = opening
        # `SimpleQueue.put` is reentrant: a finalizer may call `stop` between any two instructions.
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self.start()

    def compute(self, batch: Batch) -> None:
        """Compute a batch soon."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread, and then resolve the opening's `ended`: no batch will follow.

        A finalizer may call it, so it takes no locks.
        """
        self._inbox.put(None)

    def run(self) -> None:
        """Compute batches until `stop` is called."""
        opening = self._opening
        assert opening is not None, "a thread runs once"
        try:
            with suppress(StopIteration):  # a coroutine with a runner awaits nothing
                self._compute_batches(opening).send(None)
        except BaseException:
            # The end of the loop cancels the tasks that the function left on it.
            logger.exception("%s: a task has raised while its event loop was closed", self.name)
        finally:
            self._opening = None
            opening.ended.set_result(None)

    async def _compute_batches(self, opening: FunctionOpening) -> None:
        # Makes an event loop for the first awaitable.
        with closing(asyncio.Runner()) as runner:
            while (batch := self._inbox.get()) is not None:
                await opening.compute(batch, runner)
                del batch  # its inputs are freed before the next wait

    def end(self) -> None:
        """Fail the waiting items, and end the thread after its current batch; may be repeated."""
        opening = self._opening
        if opening is not None:
            opening.close(cancel=True)


def _run(runner: asyncio.Runner, awaitable: Awaitable[Any]) -> Any:
    """Return the result of an awaitable, or raise its error.

    An event loop that runs until a task is done reads `__class__` of the task's error. If that
    raises, the loop never ends.
    """
    raised = []

    async def catch() -> Any:
        try:
            return await awaitable
        except BaseException as error:  # noqa: BLE001  it is raised outside of the loop
            raised.append(error)

    # The runner would reuse the context of its first batch.
    result = runner.run(catch(), context=copy_context())
    if raised:
        raise raised.pop()
    return result


class FunctionTask:
    """Computes the batches of an async function on its callers' event loop, each in a task.

    The loop runs between two batches: a function that never waits must not block it for the whole
    queue.
    """

    def __init__(self, opening: FunctionOpening) -> None:
        self._opening = opening
        # An event loop holds only weak references to its tasks.
        self._task: asyncio.Task[None] | None = None

    def compute(self, batch: Batch) -> None:
        """Compute a batch soon."""
        assert self._opening.loop is not None, "or a thread would compute"
        # The context is empty: the batch must not see the context variables of its first caller.
        task = Context().run(self._opening.loop.create_task, self._opening.compute(batch))
        task.add_done_callback(partial(self._end, batch), context=Context())
        self._task = task

    def stop(self) -> None:
        """Resolve `ended`: the task ends with its batch."""
        self._opening.ended.set_result(None)

    def join(self) -> None:
        """Return at once: nothing is left after `ended`."""

    def _end(self, batch: Batch, task: asyncio.Task[None]) -> None:
        """Compute the batch of a task that was cancelled before its first step, in another task."""
        if not task.cancelled():
            task.exception()  # mark as retrieved: all callers have their errors
        elif self._opening.is_running(batch):
            self.compute(batch)


def is_exiting() -> bool:
    """Return whether the exit hook has run, after which threads accept no calls."""
    return _is_exiting


def _end_threads() -> None:
    """End the threads of all functions and wait for them."""
    global _is_exiting
    _is_exiting = True
    # Batchers do not list all threads: the thread of a collected batcher may still compute.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, FunctionThread)]
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
