"""Decorated functions and methods: their batchers, and the formats of their items. Any thread.

A function has one batcher. A method has one batcher for each instance, which is released with the
instance. Nothing is stored on instances: they can be copied and pickled. A function that blocks,
and every function of a thread decorator, has one opening and one thread for all its callers. An
async function of an `aio` decorator runs on the event loop of its callers, so it has an opening for
each loop.

`ListFormat` is for functions of a list. `FeatureFormat` is for functions of a dict with one array
per feature: an item is a row of all features, the rows of a batch are padded to one length and
stacked, and the function's outputs are split into rows.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter, mul
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.joining import is_much, join
from fast_batcher._arrays.outputs import list_outputs, split, split_rows
from fast_batcher._identity import identify_function
from fast_batcher._local.function import DecoratorSettings, Function, UserFunction, bind_weakly
from fast_batcher._local.opening import (
    FunctionOpening,
    LoopCalls,
    OpeningWait,
    compute_inline,
    is_exiting,
    make_requests,
    run_inline,
    running_batch,
)
from fast_batcher._opening.ledger import Counters, Ledger
from fast_batcher._opening.offload import offload
from fast_batcher._opening.output_cache import OutputCache
from fast_batcher._process import at_fork
from fast_batcher.errors import BatcherClosedError
from fast_batcher.settings import suggest_parameter
from fast_batcher.types import BatchProcessorStats, PriorityStrategy


class LocalBatcher:
    """Batches the calls of one function."""

    def __init__(
        self, function: Function, settings: DecoratorSettings, identity: str, *, is_aio: bool
    ) -> None:
        # Part of the keys of cached outputs; "" without a cache.
        self.identity = identity
        self._function = function
        self._settings = settings
        self._runs_on_loop = is_aio and function.is_async
        self._reset()
        # A forked child has one thread, and others may have held the lock.
        at_fork(self, in_child=LocalBatcher._reset)

    def _reset(self) -> None:
        # Protects everything below, and the schedulers of the openings.
        self._lock = threading.Lock()
        self._ledger = Ledger(self._function.name, self._settings.observers)
        self._is_closed = False
        # Sessions, by the event loop that computes their batches; None for a thread.
        self._openings: dict[asyncio.AbstractEventLoop | None, FunctionOpening] = {}
        # Calls, by the callers' event loop. A call from a new loop removes those of closed loops.
        self._loops: dict[asyncio.AbstractEventLoop, LoopCalls] = {}
        # Ends the thread, if there is one, when this batcher is collected.
        self._finalizer: weakref.finalize[[], LocalBatcher] | None = None

    def process(self, items: Sequence[Any]) -> list[Any]:
        """Block this thread until the outputs of zero or more items are computed."""
        if not items:
            return []
        self._reject_at_exit()
        with self._lock:
            opening = self._opening_on(None)
        with OpeningWait(opening) as can_end:
            if can_end:
                return self._wait(opening, items)
        computing = compute_inline(self._function, items, self._settings.batch_size)
        return run_inline(computing, is_async=self._function.is_async)

    def _wait(self, opening: FunctionOpening, items: Sequence[Any]) -> list[Any]:
        future: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        requests = make_requests(items, future, self._settings)
        opening.keep_context(requests)
        try:
            opening.submit([requests])
            return future.result()
        except BaseException:
            opening.cancel(requests)
            raise
        finally:
            # An error holds this frame, which must not hold the error.
            del future, requests

    def aprocess(self, items: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Await the outputs of the items, on the event loop that runs in this thread."""
        calls = self._calls_here()
        if running_batch.get() is None:
            return calls.process(items)
        return self._aprocess_nested(calls, items)

    def aprocess_one(self, item: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of one item; not for nested calls. See `LoopCalls.process_one`."""
        return self._calls_here().process_one(item)

    async def _aprocess_nested(self, calls: LoopCalls, items: Sequence[Any]) -> list[Any]:
        with OpeningWait(calls.opening) as can_end:
            if can_end:
                return await calls.process(items)
        computing = compute_inline(self._function, items, self._settings.batch_size)
        if self._function.is_async:
            return await computing
        return await asyncio.to_thread(run_inline, computing, is_async=False)  # not on the loop

    def stats(self) -> BatchProcessorStats:
        """Return the statistics since the first call or the last `clear_stats`."""
        with self._lock:
            waiting = sum(opening.waiting for opening in self._openings.values())
            counters = self._ledger.counters
            sizes, seconds = counters.batch_sizes.copy(), counters.infer_seconds
        items, batches = sum(map(mul, sizes, sizes.values())), sizes.total()
        return BatchProcessorStats(
            queue_size=waiting,
            total_processed=items,
            total_batches=batches,
            avg_batch_size=items / max(1, batches),
            avg_processing_time=seconds / max(1, batches),
            late_errors=counters.late_errors.count,
        )

    def clear_stats(self) -> None:
        """Reset the counts to 0."""
        with self._lock:
            late_errors = self._ledger.counters.late_errors
            late_errors.count = 0
            self._ledger.counters = Counters(late_errors=late_errors)

    def start(self) -> None:
        """Accept calls again after a shutdown; the next call makes an opening."""
        with self._lock:
            self._is_closed = False

    def shutdown(self, *, cancel: bool = False) -> None:
        """Accept no more calls, and wait until all are settled and the thread has ended.

        A call from the function itself, or from a function that it waits for, returns at once. On
        an event loop, calls that were made earlier in this turn are settled, too.
        """
        for opening in self._close(cancel=cancel):
            with OpeningWait(opening) as can_end:
                if can_end:
                    opening.ended.result()
                    opening.worker.join()

    async def ashutdown(self, *, cancel: bool = False) -> None:
        """Shut down without blocking the event loop; openings of other loops settle their calls."""
        for opening in self._close(cancel=cancel):
            with OpeningWait(opening) as can_end:
                if can_end:
                    await asyncio.shield(asyncio.wrap_future(opening.ended))
                    opening.worker.join()

    def _close(self, *, cancel: bool) -> list[FunctionOpening]:
        calls = None
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            calls = self._loops.get(asyncio.get_running_loop())
        if calls is not None:
            calls.flush()  # calls of this turn came before the shutdown
        with self._lock:
            self._is_closed = True
            # The openings keep the present loops to their end.
            self._loops = {}
            openings, self._openings = self._openings, {}
            if self._finalizer is not None:
                # The opening ends its thread. A finalizer would keep it as long as this batcher.
                self._finalizer.detach()
                self._finalizer = None
        for opening in openings.values():
            opening.close(cancel=cancel)
        return list(openings.values())

    def _reject_at_exit(self) -> None:
        # Called before the lock is taken: a daemon thread may have been killed with the lock.
        if is_exiting():
            raise BatcherClosedError(f"{self._function.name}: the interpreter is ending")

    def _calls_here(self) -> LoopCalls:
        loop = asyncio.get_running_loop()
        known = self._loops.get(loop)
        if known is not None:
            return known
        if not self._runs_on_loop:
            self._reject_at_exit()
        with self._lock:
            closed = [known for known in self._loops if known.is_closed()]
            for ended_loop in closed:
                del self._loops[ended_loop]
            ended = [self._openings.pop(known) for known in closed if known in self._openings]
            opening = self._opening_on(loop if self._runs_on_loop else None)
            calls = self._loops[loop] = LoopCalls(opening, loop, self._settings)
        for opening in ended:
            opening.close(cancel=True)
        return calls

    def _opening_on(self, loop: asyncio.AbstractEventLoop | None) -> FunctionOpening:
        """Return the opening whose batches run on this loop, or in a thread. Call with the lock."""
        if self._is_closed:
            raise BatcherClosedError(
                f"{self._function.name} was shut down and takes no calls; start() opens it again"
            )
        opening = self._openings.get(loop)
        if opening is None:
            parts = self._ledger, self._lock, self._loops, loop
            opening = FunctionOpening(self._function, self._settings, *parts)
            self._openings[loop] = opening
            if loop is None:
                # Neither thread nor opening refers to this batcher: it can be collected while the
                # thread waits.
                self._finalizer = weakref.finalize(self, opening.worker.stop)
                self._finalizer.atexit = False
        return opening


# Makes the result of a call from the outputs of its items in their order.
Finish = Callable[[list[Any]], Any]

# Stacks the outputs of one call, which may come from several batches, without padding.
_STACKED = Collation.stack()
_list_outputs = partial(list_outputs, returned="the function returned", copies=True, to_cpu=False)


class ListFormat:
    """A list is several items; any other argument is one item."""

    # Whether converting large arguments would block an event loop.
    copies = False

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Finish]:
        """Return the items of a call, and a function from their outputs to its result."""
        if len(args) != 1 or kwargs:
            raise TypeError(
                "a batched function is called with one argument, an item or a list of items"
            )
        (item,) = args
        return (item, list) if isinstance(item, list) else ([item], itemgetter(0))

    def make_function(self, user_function: UserFunction, call: Any) -> Function:
        """Make a function of a list of items."""
        return Function(call, user_function.name, user_function.is_async, _list_outputs)


class FeatureFormat:
    """Items are rows of features; see `ListFormat` for the methods."""

    copies = True

    def __init__(self, settings: DecoratorSettings) -> None:
        self._collation = Collation.pad(
            value=0,
            # `batched` takes `pad_tokens` and documents `pad_token`.
            values=settings.pad_tokens if settings.pad_token is None else settings.pad_token,
            side=settings.padding_side,
            outputs=settings.outputs,
        )
        self._spread_kwargs = settings.spread_kwargs

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Finish]:
        """Return the rows of the features, and a function that stacks their outputs."""
        features = args[0] if args else kwargs
        # A tokenizer returns a mapping that is no dict.
        if len(args) > 1 or bool(args) == bool(kwargs) or not isinstance(features, Mapping):
            given = ", ".join(
                [*[type(value).__name__ for value in args], *[f"{name}=" for name in kwargs]]
            )
            raise TypeError(
                "a batched inference function is called with one dict of features, or with the "
                "features as keyword arguments, each an array or tensor with one row per input; "
                f"this call has ({given})"
            )
        return split_rows(features, self._collation), partial(join, collation=_STACKED)

    def make_function(self, user_function: UserFunction, call: Any) -> Function:
        """Make a function of rows, which stacks them for the function of features."""

        def call_with_rows(rows: list[Any]) -> Any:
            features = join(rows, self._collation)
            return call(**features) if self._spread_kwargs else call(features)

        def split_outputs(outputs: Any, count: int) -> list[Any]:
            # Copies, because the function may keep an array that it returns and fill it again.
            return split(outputs, count, self._collation, copy=True)

        return Function(call_with_rows, user_function.name, user_function.is_async, split_outputs)


_CallT = TypeVar("_CallT", bound=Callable[..., Any])


def mark_async(call: _CallT) -> _CallT:
    """Mark a function that returns a coroutine, so that frameworks await it like an `async def`.

    An `async def` around the other coroutine would cost every call.
    """
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(call)
    call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001  the only way before 3.12
    return call


@dataclass(frozen=True)
class BatchingPlan:
    """Settings of a decorated function, shared by its bindings, and the batchers of a method."""

    user_function: UserFunction
    settings: DecoratorSettings
    call_format: ListFormat | FeatureFormat
    # Whether an async function runs on the event loop of its callers.
    is_aio: bool
    cache: OutputCache | None
    # The batchers of a method by the id of the instance: instances need not be hashable, and equal
    # instances have separate batchers. Without a lock: the collection of an instance may run
    # between any two instructions, and the process may be forked at any moment.
    instance_batchers: dict[int, tuple[weakref.ref[Any], LocalBatcher]] = field(
        default_factory=dict
    )

    @functools.cached_property
    def has_short_cut(self) -> bool:
        """Whether a single item may use the short cut `LoopCalls.process_one`."""
        settings = self.settings
        is_plain = settings.max_batch_length is None and settings.ranks_above >= 1
        return is_plain and self.cache is None and not self.call_format.copies

    def make_batcher(self, call: Callable[..., Any], instance: object = None) -> LocalBatcher:
        """Make a batcher for the function, or for the function bound to an instance."""
        function = self.call_format.make_function(self.user_function, call)
        identity = ""
        if self.cache is not None:
            identity = identify_function(self.user_function.call, instance)
        return LocalBatcher(function, self.settings, identity, is_aio=self.is_aio)

    def batcher_of(self, instance: Any) -> LocalBatcher:
        """Return the batcher of a method of this instance, made on first use."""
        key, batchers = id(instance), self.instance_batchers
        known = batchers.get(key)
        if known is None:
            batcher = self.make_batcher(bind_weakly(self.user_function.call, instance), instance)
            reference = weakref.ref(instance, lambda _: batchers.pop(key, None) and None)
            # If another thread was faster, its batcher wins; this one has not started a thread yet.
            known = batchers.setdefault(key, (reference, batcher))
        return known[1]


class _Binding(NamedTuple):
    """Instance and function of a bound method."""

    # An instance, or the class of a class method.
    instance: Any
    # The unbound function.
    function: "Decorated"


class Decorated:
    """A function or method whose calls are batched; base class of the four decorators' results."""

    # Names of the decorator's options besides `batch_size`, `timeout_ms` and
    # `small_batch_threshold`.
    option_names: ClassVar[frozenset[str]]
    # Whether calls are awaited, and an async function runs on the event loop of its callers.
    is_aio: ClassVar[bool] = False
    # Whether the function takes features; otherwise it takes a list.
    has_features: ClassVar[bool] = False

    def __init__(self, plan: BatchingPlan, binding: _Binding | None = None) -> None:
        batcher: LocalBatcher | None = None
        if binding is not None:
            # Each look-up of a method makes an object, so this is kept cheap: `__getattr__` finds
            # the function's attributes, except `__doc__`, which the class has, too.
            self.__doc__ = binding.function.__doc__
            batcher = plan.batcher_of(binding.instance)
        else:
            # First: it also copies the attributes of a function that was decorated before.
            functools.update_wrapper(self, plan.user_function.call)  # type: ignore[arg-type]  # callable
            if not plan.user_function.binds_class:
                batcher = plan.make_batcher(plan.user_function.call)
        self._plan = plan
        self._binding = binding
        # The batcher of the function itself; None for a class method that is not bound.
        self._own_batcher = batcher

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """Bind to one instance, or to one class if it is a class method."""
        function = self._plan.user_function
        if self._binding is not None or not (function.binds_instance or function.binds_class):
            return self
        if function.binds_class:
            instance = owner if owner is not None else type(instance)
        if instance is None:
            return self
        return type(self)(self._plan, _Binding(instance, self))

    def __getattr__(self, name: str) -> Any:
        if self._binding is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        instance, function = self._binding
        if name == "__wrapped__":
            return types.MethodType(self._plan.user_function.call, instance)
        if name == "__self__":
            return instance
        if name == "__func__":
            return function
        return getattr(function, name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._binding is not None:
            return getattr, (self._binding.instance, self._plan.user_function.call.__name__)
        # Pickled like a function, by its name.
        name: str = self.__qualname__
        return name

    def __repr__(self) -> str:
        where = "" if self._binding is None else f" of {self._binding.instance!r:.100}"
        return f"<batched {self._plan.user_function.call!r}{where}>"

    @property
    def stats(self) -> BatchProcessorStats:
        """Statistics since the first call or the last `clear_stats()`."""
        stats = self._batcher.stats()
        if self._plan.cache is not None:
            stats.cache_stats = self._plan.cache.stats()
        return stats

    def clear_stats(self) -> None:
        """Reset the counts to 0. The cache's own counts stay."""
        self._batcher.clear_stats()

    def start(self) -> None:
        """Accept calls again after `shutdown()`. A new function needs no start."""
        self._batcher.start()

    @property
    def _batcher(self) -> LocalBatcher:
        if self._own_batcher is None:
            raise TypeError(f"{self.__qualname__} is a class method; look it up on its class")
        return self._own_batcher

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) + bool(kwargs) == 2 and self._is_called_on_class(args):
            return self.__get__(args[0], type(args[0]))._call(args[1:], kwargs)  # noqa: SLF001  its own class
        items, finish = self._plan.call_format.items_of(args, kwargs)
        return finish(self._batcher.process(items))

    async def _acall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) + bool(kwargs) == 2 and self._is_called_on_class(args):
            return await self.__get__(args[0], type(args[0]))._acall(args[1:], kwargs)  # noqa: SLF001  its own class
        plan, batcher = self._plan, self._batcher
        is_item = len(args) == 1 and not kwargs and not isinstance(args[0], list)
        if is_item and plan.has_short_cut and running_batch.get() is None:
            return await batcher.aprocess_one(args[0])
        call_format, cache = plan.call_format, plan.cache
        is_long = call_format.copies and is_much((args, kwargs), dim=0)
        items, finish = await offload(is_long, call_format.items_of, args, kwargs)
        if not items:
            outputs = []
        elif cache is not None:
            outputs = await cache.process(items, batcher.identity, batcher.aprocess)
        else:
            outputs = await batcher.aprocess(items)
        return await offload(call_format.copies and is_much(outputs), finish, outputs)

    def _is_called_on_class(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call with two arguments is `Class.method(instance, ...)`."""
        function = self._plan.user_function
        return (
            bool(args)
            and self._binding is None
            and function.binds_instance
            and function.is_in_class
        )

    async def _ashutdown(self, *, cancel: bool) -> None:
        await self._batcher.ashutdown(cancel=cancel)
        if self._plan.cache is not None:
            await self._plan.cache.settle()


def decorate(
    kind: type[Decorated],
    written: Any,
    batch_size: int,
    timeout_ms: float,
    small_batch_threshold: int,
    options: dict[str, Any],
) -> Any:
    """Decorate a function, or return a decorator if there is no function yet."""
    for name in options:
        if name not in kind.option_names:
            known = ("batch_size", "timeout_ms", "small_batch_threshold", *kind.option_names)
            hint = suggest_parameter(name, known)
            raise TypeError(f"dynamically() got an unexpected keyword argument {name!r}{hint}")
    # The defaults of `batched`, whose thread decorators have no such option either.
    strategy = PriorityStrategy.NONE if kind.is_aio else PriorityStrategy.PRIORITY
    given = {"priority_strategy": strategy, **options}
    if given.pop("batch_item_cls", None) is not None:
        warnings.warn(
            "batch_item_cls is accepted for programs written for batched, and not used: there are "
            "no batch items here",
            stacklevel=3,
        )
    settings = DecoratorSettings(batch_size, timeout_ms, small_batch_threshold, **given)
    call_format = FeatureFormat(settings) if kind.has_features else ListFormat()

    def decorate_function(written: Any) -> Decorated:
        function = UserFunction.of(written)
        cache = None if settings.cache is None else OutputCache(settings.cache, function.name)
        return kind(BatchingPlan(function, settings, call_format, kind.is_aio, cache))

    return decorate_function if written is None else decorate_function(written)
