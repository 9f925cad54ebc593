"""`Decorated`, the callable that replaces a decorated function. Runs on the callers' threads.

A function has one batcher. A method has one batcher for each instance, which is released with the
instance. Nothing is stored on instances: they can be copied and pickled.
"""

import asyncio
import functools
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from fast_batcher._arrays.joining import is_much
from fast_batcher._local.batcher import LocalBatcher
from fast_batcher._local.call_formats import FeatureFormat, ListFormat
from fast_batcher._local.function import UserFunction, bind_weakly
from fast_batcher._local.nesting import running_batch
from fast_batcher._local.settings import DecoratorSettings
from fast_batcher._session.offload import offload
from fast_batcher._session.output_cache import OutputCache
from fast_batcher._suggestions import suggest_parameter
from fast_batcher.types import BatchProcessorStats, PriorityStrategy

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
        """Whether a single item may use the short cut `LoopSubmitter.process_one`."""
        settings = self.settings
        is_plain = settings.max_batch_length is None and settings.ranks_above >= 1
        return is_plain and self.cache is None and not self.call_format.copies

    def make_batcher(self, call: Callable[..., Any]) -> LocalBatcher:
        """Make a batcher for the function, or for the function bound to an instance."""
        function = self.call_format.make_function(self.user_function, call)
        return LocalBatcher(function, self.settings, is_aio=self.is_aio)

    def batcher_of(self, instance: Any) -> LocalBatcher:
        """Return the batcher of a method of this instance, made on first use."""
        key, batchers = id(instance), self.instance_batchers
        known = batchers.get(key)
        if known is None:
            batcher = self.make_batcher(bind_weakly(self.user_function.call, instance))
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
        # None for a class method that is not bound.
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
            outputs = await cache.process(items, batcher.aprocess)
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
    """Decorate a function, or return a decorator if there is no function yet.

    Args:
        kind: The class of the result.
        written: The function or method below the decorator, None for a decorator with options.
        batch_size: See `fast_batcher.dynamically`.
        timeout_ms: See there.
        small_batch_threshold: See there.
        options: The other keyword arguments of the decorator.

    Raises:
        ConfigurationError: A value is wrong, or `written` cannot be decorated.
        TypeError: The decorator has no option of this name.
    """
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
