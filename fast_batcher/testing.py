"""A test kit for apps with batchers: workers in the test's own process, faults and batches.

    with BatcherKit() as kit:          or the fixture `batcher_kit` of the pytest plugin
        with TestClient(app) as client:
            ...

While a kit is active, the batchers that open compute on threads of this process. The scheduler, the
policies, the deadlines, the errors, and the pickling of inputs and outputs are the same as in
production. No process is started, so tests are fast, `breakpoint()` works in `infer`, coverage
measures it, and pytest's monkeypatch can patch it.

See docs/testing.md.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Self, cast, get_args

from fast_batcher._core.policy import Load, Policy
from fast_batcher._core.queue import Queue
from fast_batcher._core.values import Batch, Release, Request, settle
from fast_batcher._independence import MOST_INPUTS, find_dependence
from fast_batcher._opening.ledger import Ledger
from fast_batcher._opening.life import CurrentModel, Status
from fast_batcher._opening.opening import LocalOpening, Opening, Parts
from fast_batcher._parent.sending import BatchSender, decode, dump_inputs, make_pickler
from fast_batcher._parent.worker_handle import WorkerHandle
from fast_batcher._parent.worker_thread import ThreadWorker
from fast_batcher._process import monotonic
from fast_batcher._transport.pickling import describe
from fast_batcher._worker.frames import limit_output, pickle_output, unpickle_item
from fast_batcher.batcher import DynBatcher, list_open, opening_makers
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    copy_error,
    read_answer,
)
from fast_batcher.model import Model
from fast_batcher.settings import COUNT, SECONDS_OR_ZERO, Settings, WorkerKind

__all__ = ["BatcherKit", "FormedBatch", "WorkerKind", "assert_independent"]

# Seconds for the start of a model in which a debugger stops: a day.
_LONG = 86_400.0


@dataclass(frozen=True)
class FormedBatch:
    """A batch that a batcher has sent to a worker."""

    batcher: str
    """Name of the batcher."""
    inputs: list[Any]
    """The inputs, as the callers gave them."""
    method: str
    """Name of the model's method."""
    reason: str
    """Reason for which it left: "full", "idle", "hold", "window", "deadline", "drain" or "retry".
    """


@dataclass
class _Fault:
    """An error for the next calls."""

    error: BaseException
    # Name of the batcher; None for any.
    batcher: str | None
    # Calls that are still to fail.
    count: int


class BatcherKit:
    """Replaces the workers of every batcher that opens while the kit is active.

    Args:
        workers: "threads", one thread of this process per worker; or "processes", as in production.
            With both, the kit records batches, holds them, and lets calls fail.
        timeouts: False lets every call wait without a limit, whatever its timeout: for a debugger.

    Use it as a context manager. At its end the batchers that it has served are closed; one that its
    first call has opened opens again with the first call of the next test. Its methods may be
    called on any thread. `shared=True` and workers on a cluster have no effect: each batcher has
    local workers of its own.

    Raises:
        ConfigurationError: `workers` is neither "threads" nor "processes".
    """

    def __init__(self, workers: WorkerKind = "threads", *, timeouts: bool = True) -> None:
        if workers not in get_args(WorkerKind):
            raise ConfigurationError(
                f"workers={workers!r:.100}: give one of {', '.join(get_args(WorkerKind))}"
            )
        self.workers: WorkerKind = workers
        self.timeouts: bool = timeouts
        # Batches in the order in which they left, retries included.
        self.batches: list[FormedBatch] = []
        self._latency = 0.0
        # Requests that must wait before a batch leaves; 0 while nothing is held.
        self._held_until = 0.0
        self._faults: deque[_Fault] = deque()
        self._lock = threading.Lock()
        # The batchers that have opened, with the sessions that serve them.
        self._opened: list[tuple[DynBatcher[Any, Any], _KitOpening]] = []

    def __enter__(self) -> Self:
        """Begin to serve the batchers that open.

        Raises:
            ConfigurationError: A batcher is open already, and no kit serves it.
        """
        for batcher in list_open():
            if not isinstance(batcher._opening, _KitOpening):  # noqa: SLF001  part of the library
                raise ConfigurationError(
                    f"{batcher.name} is open already, and the kit would not serve it: enter the "
                    "kit before the app's lifespan; a fixture of a client asks for `batcher_kit`"
                )
        opening_makers.append(self._make_opening)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the batchers that are still open, and serve no more."""
        opening_makers.remove(self._make_opening)
        self._hold_until(0)
        # An error of one batcher does not keep the others open.
        with ExitStack() as ends:
            for batcher, _opening in self._list_open():
                ends.callback(batcher._end_test)  # noqa: SLF001  part of the library
        self._opened.clear()

    @property
    def sizes(self) -> list[int]:
        """Sizes of the batches so far."""
        return [len(batch.inputs) for batch in self.batches]

    @property
    def latency(self) -> float:
        """Seconds added to the time of each batch; settable, for workers in threads."""
        return self._latency

    @latency.setter
    def latency(self, seconds: float) -> None:
        SECONDS_OR_ZERO.check("latency", seconds)
        if self.workers != "threads":
            raise ConfigurationError(
                f"latency={seconds!r}: workers in processes take the time that their model takes; "
                'use BatcherKit(workers="threads")'
            )
        self._latency = seconds

    @contextmanager
    def hold(self, until: int | None = None) -> Iterator[None]:
        """Hold the batches, so that a test decides which requests share one.

        In the body of the `with` statement a batch leaves when `until` requests wait, when it is
        full, when the batcher drains, and before a request would miss `max_latency`. A held request
        ends at its deadline, as every other. Afterwards the waiting requests leave as in
        production, or as an outer `hold` says.

        Args:
            until: Number of requests, 1 or more; None to hold them to the end of the body.

        Raises:
            ConfigurationError: `until` is wrong.
        """
        if until is not None:
            COUNT.check("until", until)
        before = self._held_until
        self._hold_until(inf if until is None else until)
        try:
            yield
        finally:
            self._hold_until(before)

    def fail_next(
        self,
        error: BaseException | type[BaseException],
        count: int = 1,
        *,
        batcher: str | None = None,
    ) -> None:
        """Make the next calls fail with this error, before they are queued.

        Args:
            error: An error of this library, as `QueueFullError("full", retry_after=2)`, or of the
                model: its callers get it as from `infer`, as an `InferenceError` as well. Each call
                gets a copy. A class is called with a text.
            count: Number of calls, 1 or more.
            batcher: Name of the batcher whose calls fail; None for the next calls of any.

        Raises:
            ConfigurationError: `count` is invalid, `error` is not an exception, its class takes
                other arguments than a text, or `batcher` is not a name.
        """
        COUNT.check("count", count)
        made = _make_instance(error)
        if not isinstance(batcher, str | None):
            raise ConfigurationError(f"batcher={batcher!r:.100}: give the name of the batcher")
        with self._lock:
            self._faults.append(_Fault(made, batcher, count))

    def reset(self) -> None:
        """Clear the batches, the faults and the latency for the next test."""
        with self._lock:
            self._faults.clear()
        self.batches.clear()
        self._latency = 0.0

    def _hold_until(self, count: float) -> None:
        self._held_until = count
        for _, opening in self._list_open():
            opening.wake()

    def _list_open(self) -> list[tuple[DynBatcher[Any, Any], "_KitOpening"]]:
        """List the batchers that have opened and were not closed."""
        return [
            (batcher, opening)
            for batcher, opening in self._opened
            if batcher._is_present(opening)  # noqa: SLF001  part of the library
        ]

    def _make_opening(
        self,
        batcher: DynBatcher[Any, Any],
        model: CurrentModel,
        settings: Settings,
        status: Status,
        ledger: Ledger,
    ) -> Opening:
        opening = _KitOpening(self, model, self._change(settings), status, ledger)
        self._opened = [*self._list_open(), (batcher, opening)]
        return opening

    def _change(self, settings: Settings) -> Settings:
        """Return the settings of a batcher under test."""
        changes: dict[str, Any] = {"shared": False, "shared_version": None}
        if not settings.in_process:
            changes["workers"] = None
        if not self.timeouts:
            limits = ("timeout", "infer_timeout", "max_latency")
            changes |= dict.fromkeys(limits) | {"start_timeout": _LONG}
        if self.workers == "threads":
            # A thread has the memory of this process.
            changes |= {"max_shared_bytes": 0, "max_rss_bytes": None}
        return replace(settings, **changes)

    def _take_fault(self, batcher: str) -> BatcherError | None:
        """Return the error of a call that is to fail."""
        with self._lock:
            for fault in self._faults:
                if fault.batcher in (None, batcher):
                    fault.count -= 1
                    if not fault.count:
                        self._faults.remove(fault)
                    return _copy(fault.error)
        return None


def _make_instance(error: object) -> BaseException:
    made = error
    if isinstance(error, type) and issubclass(error, BaseException):
        try:
            made = error("it was asked for by a test")
        except Exception as reason:
            raise ConfigurationError(
                f"error={error!r:.100}: the class takes other arguments ({reason}); give an "
                "instance"
            ) from reason
    if not isinstance(made, BaseException):
        raise ConfigurationError(f"error={error!r:.100}: give an exception or its class")
    return made


def _copy(error: BaseException) -> BatcherError:
    """Copy an error for one caller; a model's error becomes an `InferenceError` as well."""
    if isinstance(error, BatcherError):
        return cast("BatcherError", copy_error(error))
    return describe(error).to_error()


def assert_independent(
    model: type[Model[Any, Any]],
    inputs: Sequence[Any],
    *,
    model_args: Sequence[Any] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    method: str = "infer",
) -> None:
    """Assert that the output for an input does not depend on the other inputs of its batch.

    The model computes each input alone, beside copies of it, beside another input of its size and
    beside the longest input, on a thread of this process. It fails for an attention mask that is
    not passed, padding in a mean, batch normalisation or dropout in training mode.

    Args:
        model: The class of the model.
        inputs: One or more inputs, of the same and of different lengths; the first eight count.
        model_args: Positional arguments of its constructor.
        model_kwargs: Keyword arguments of its constructor.
        method: The name of a `batchable` method that computes the inputs.

    Raises:
        AssertionError: An output changes by more than the rounding of its dtype: by a hundredth of
            its largest number, by a twentieth for 16-bit floats, at all for other values.
        BatcherError: The model cannot be loaded, or fails.
        RuntimeError: An event loop runs in this thread: call it with `asyncio.to_thread`.
    """

    async def find() -> str | None:
        batcher = DynBatcher(
            model,
            max_batch_size=MOST_INPUTS,
            model_args=model_args,
            model_kwargs=model_kwargs,
            workers="threads",
            timeout=None,
            cost=lambda _: 1,
        )
        call = batcher if method == "infer" else getattr(batcher.methods, method)
        async with batcher:
            return await find_dependence(
                lambda batch: asyncio.gather(*map(call.process_batched, batch)), inputs
            )

    if not len(inputs):
        raise ConfigurationError("assert_independent: give one or more inputs")
    found = asyncio.run(find())
    if found is not None:
        raise AssertionError(f"{model.__qualname__}: {found}")


class _HoldingPolicy(Policy):
    """The policy of the settings, but for batches that a test holds."""

    def __init__(self, parts: "_KitParts", policy: Policy) -> None:
        self._parts = parts
        self._policy = policy
        # The youngest request that waited when as many waited as the test wants: they all leave, in
        # one batch or several.
        self._last_released = -1

    @property
    def learns(self) -> bool:  # type: ignore[override]  # a policy may change it, too
        """Whether the policy of the settings learns now."""
        return self._policy.learns

    def decide(self, now: float, queue: Queue, load: Load) -> Release | float:
        """Hold the batch for a test, or ask the policy of the settings."""
        wanted = self._parts.kit._held_until  # noqa: SLF001  of this module
        if wanted:
            if load.waiting >= wanted:
                self._last_released = max(request.id for request in queue)
            oldest = queue.oldest()
            assert oldest is not None, "there is a batch to decide about"
            return Release.HOLD if oldest.id <= self._last_released else inf
        return self._policy.decide(now, queue, load) if self._policy.may_hold else Release.IDLE

    def end_hold(self) -> None:
        """Tell the policy of the settings."""
        self._policy.end_hold()

    def arrived(self, now: float, count: int, is_idle: bool) -> None:
        """Tell the policy of the settings."""
        self._policy.arrived(now, count, is_idle)

    def batch_done(self, now: float, size: int, load: Load) -> None:
        """Tell the policy of the settings."""
        self._policy.batch_done(now, size, load)

    def batch_skipped(self) -> None:
        """Tell the policy of the settings."""
        self._policy.batch_skipped()


class _PicklingWorker(ThreadWorker):
    """A thread whose inputs and outputs are pickled as for a process: some cannot be sent."""

    copies_outputs = False

    def _pass_inputs(self, batch: Batch) -> list[Any]:
        pickler, limit = make_pickler(self._settings), self._settings.max_frame_bytes
        items, unsendable = dump_inputs(pickler, batch, limit)
        if unsendable:
            self.listener.inputs_unsendable(batch, unsendable)
        return [unpickle_item(item) for item in items]

    def _pass_output(self, output: Any) -> Any:
        return decode(limit_output(pickle_output(output), self._settings.max_frame_bytes))


class _KitParts(Parts):
    """The parts of an opening for tests."""

    def __init__(self, kit: BatcherKit) -> None:
        self.kit = kit

    def make_policy(self, settings: Settings, report: Callable[[BaseException], None]) -> Policy:
        """Make a policy that holds batches for a test."""
        return _HoldingPolicy(self, super().make_policy(settings, report))

    def make_worker(self, settings: Settings, sender: BatchSender, *arguments: Any) -> WorkerHandle:
        """Make a thread, unless the kit has processes."""
        is_threaded = settings.in_process
        if self.kit.workers == "processes" and not is_threaded:
            return super().make_worker(settings, sender, *arguments)
        make = ThreadWorker if is_threaded else _PicklingWorker
        return make(*arguments, latency=lambda: self.kit.latency)


class _KitOpening(LocalOpening):
    """An opening for tests: it records and holds batches, and lets calls fail."""

    def __init__(
        self,
        kit: BatcherKit,
        model: CurrentModel,
        settings: Settings,
        status: Status,
        ledger: Ledger,
    ) -> None:
        self._kit_parts = _KitParts(kit)
        self.has_deadlines = kit.timeouts
        super().__init__(model, settings, status, ledger, self._kit_parts)

    def wake(self) -> None:
        """Decide again about the waiting requests. Any thread."""
        self.binding.call(self.run_soon)

    def accept(self, request: Request) -> None:
        """Let the request fail if a test wants it, or add it to the arrivals."""
        if not self.has_deadlines:
            request.fix_deadline(monotonic(), None, None)
        request.arrival = monotonic()
        error = self._kit_parts.kit._take_fault(self._name)  # noqa: SLF001  of this module
        if error is None:
            super().accept(request)
        elif read_answer(error).reason:  # of calls that a batcher rejects
            self._ledger.reject(request, error)
        else:
            settle(request)
            self._ledger.counters.submitted += 1
            self._ledger.fail(request, error, "test")

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings to a batcher under test."""
        super().reconfigure(self._kit_parts.kit._change(settings))  # noqa: SLF001  of this module

    def _send(self, batch: Batch) -> None:
        inputs = [request.value for request in batch.requests]
        formed = FormedBatch(self._name, inputs, batch.method.name, str(batch.release))
        self._kit_parts.kit.batches.append(formed)
        super()._send(batch)

    def end(self, grace: float) -> None:
        """End, and leave the kit, which has the inputs: a closed batcher keeps its opening."""
        super().end(grace)
        self._kit_parts.kit = BatcherKit()
