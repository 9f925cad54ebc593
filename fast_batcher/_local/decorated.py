"""What stands in the place of a decorated function. Runs wherever it is called.

Used as a function it has one batcher; used as a method one for each instance, which is released
with the instance. Nothing is stored on instances: they can be copied and pickled as before.
"""

import asyncio
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, Self, TypeVar

from fast_batcher._arrays.batches import is_much
from fast_batcher._asyncio.offload import offload
from fast_batcher._local.batcher import LocalBatcher
from fast_batcher._local.cache import Cache
from fast_batcher._local.function import Function, bind_weakly, is_async, own_rows
from fast_batcher._local.settings import LocalSettings
from fast_batcher.errors import ConfigurationError
from fast_batcher.types import AsyncCache, BatchProcessorStats

_CallT = TypeVar("_CallT", bound=Callable[..., Any])


def mark_async(call: _CallT) -> _CallT:
    """Have frameworks await what this returns, as if it were written with `async def`.

    It returns a coroutine of another function: one around it would cost every call.
    """
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(call)
    call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001  there it is the only way
    return call


class Batcher(Protocol):
    """What computes: `LocalBatcher`, or a worker process."""

    def process(self, items: Sequence[Any]) -> list[Any]:
        """Wait in this thread for the outputs of so many items."""

    def aprocess(self, item: Any, owner: object = None) -> Coroutine[Any, Any, Any]:
        """Wait for the output of one item; `owner` is kept until then."""

    def aprocess_many(self, items: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Wait for the outputs of so many items."""

    def stats(self) -> BatchProcessorStats:
        """What it has done."""

    def clear_stats(self) -> None:
        """Count from 0."""

    def start(self) -> None:
        """Take calls again after a shutdown."""

    def shutdown(self, *, cancel: bool = False) -> None:
        """End, and wait for it."""

    def ashutdown(self, *, cancel: bool = False) -> Coroutine[Any, Any, None]:
        """End, and wait for it."""


class Form(Protocol):
    """How the arguments of a call become items, and their outputs what the call returns."""

    # Whether that takes time where they are large.
    takes_apart: bool

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
        """The items, and whether it is a single one that wants a single output."""

    def result_of(self, outputs: list[Any]) -> Any:
        """What a call with several items returns."""


class ListForm:
    """A list is several items, anything else is one."""

    takes_apart = False

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
        """The items of the one argument."""
        if len(args) != 1 or kwargs:
            raise TypeError(
                "a batched function is called with one argument, an item or a list of items"
            )
        (item,) = args
        return (item, False) if isinstance(item, list) else ([item], True)

    def result_of(self, outputs: list[Any]) -> list[Any]:
        """The outputs in the order of the items."""
        return outputs


@dataclasses.dataclass(frozen=True)
class Plan:
    """What has been decided about a function when it was decorated."""

    # What is called with an instance first if it is a method, with the batch alone if not.
    target: Callable[..., Any]
    # Whether looking it up on an instance or on its class binds it.
    binds_instance: bool
    binds_class: bool
    # Whether it stands in a class, where it may be called as `Class.method(instance, ...)`.
    is_in_class: bool
    # Makes the batcher of a function, or of a method bound to an instance.
    make_batcher: Callable[[Callable[..., Any]], Batcher]
    form: Form
    cache: Cache | None = None


def plan(
    written: Any,
    settings: LocalSettings,
    *,
    is_aio: bool,
    cache: AsyncCache[Any, Any] | None = None,
    form: Any = None,
    process: bool = False,
) -> Plan:
    """Find out what kind of function it is, and what its batchers are made of.

    Args:
        written: What the decorator was given.
        settings: Of the batches and the queue.
        is_aio: Whether an async function runs on the loop of its callers.
        cache: Of the user's, or None.
        form: A `FeatureForm`; None for a function of a list.
        process: Whether it runs in a worker process.

    Raises:
        ConfigurationError: It is no function, or the worker process could not import it.
    """
    is_class = isinstance(written, classmethod)
    is_static = isinstance(written, staticmethod)
    target = written.__func__ if is_class or is_static else written
    if not callable(target):
        raise ConfigurationError(
            f"func={written!r:.100}: decorate a function; settings are named, as in batch_size=32"
        )
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigurationError(
            f"func={written!r:.100}: it is a generator; return a list with one output per input"
        )
    name = getattr(target, "__qualname__", type(target).__qualname__)

    def make_batcher(call: Callable[..., Any]) -> Batcher:
        if process and (call is not target or isinstance(call, types.MethodType)):
            raise ConfigurationError(
                f"process=True: {name} is a method, and its instance is not in the worker process; "
                "decorate a function at the top level of a module, or give a DynBatcher a class"
            )
        if process:
            # Only who wants a process loads what makes one.
            from fast_batcher._local.process_batcher import ProcessBatcher

            return ProcessBatcher(call, settings, form)
        if form is None:
            function = Function(call, name, is_async=is_async(target), split=own_rows)
        else:
            function = form.function(call, name, is_async=is_async(target))
        return LocalBatcher(function, settings, is_aio=is_aio)

    # As Python decides it: what has `__get__` is bound. A bound method has it too, and is bound.
    binds = hasattr(type(target), "__get__") and not isinstance(target, types.MethodType)
    return Plan(
        target=target,
        binds_instance=binds and not is_static,
        binds_class=is_class,
        is_in_class=name.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>"),
        make_batcher=make_batcher,
        form=ListForm() if form is None else form,
        cache=None if cache is None else Cache(cache, name),
    )


class _Instances:
    """The batchers of a method, by instance.

    By identity: instances need not be hashable, and equal ones are not the same. Without a lock:
    an instance may die in the middle of anything, and a process may be forked there.
    """

    def __init__(self) -> None:
        self._batchers: dict[int, tuple[weakref.ref[Any], Batcher]] = {}

    def batcher_of(self, instance: Any, plan: Plan) -> Batcher:
        key, batchers = id(instance), self._batchers
        known = batchers.get(key)
        if known is None:
            batcher = plan.make_batcher(bind_weakly(plan.target, instance))
            reference = weakref.ref(instance, lambda _: batchers.pop(key, None) and None)
            # If another thread was faster, this one is dropped: a batcher starts with its first
            # call.
            known = batchers.setdefault(key, (reference, batcher))
        return known[1]


class Decorated:
    """A function or method whose calls are batched. Made by the decorators; see there."""

    def __init__(self, plan: Plan) -> None:
        functools.update_wrapper(self, plan.target)  # type: ignore[arg-type]  # it is called, too
        self._plan = plan
        self._instances = _Instances()
        # What it is bound to, and the function that was bound.
        self._bound: tuple[Any, Decorated] | None = None
        self._own_batcher: Batcher | None = None
        if not plan.binds_class:
            self._own_batcher = plan.make_batcher(plan.target)

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """The same for one instance, or for one class if it is a class method."""
        plan = self._plan
        if self._bound is not None or not (plan.binds_instance or plan.binds_class):
            return self
        if plan.binds_class:
            instance = owner if owner is not None else type(instance)
        if instance is None:
            return self
        # Every look-up makes one, so it is kept cheap: `__getattr__` finds the rest.
        bound = object.__new__(type(self))
        bound._plan = plan
        bound._bound = (instance, self)
        bound._own_batcher = self._instances.batcher_of(instance, plan)
        bound.__doc__ = self.__doc__  # that of the class would be found before
        return bound

    def __getattr__(self, name: str) -> Any:
        bound = self.__dict__.get("_bound")
        if bound is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        instance, function = bound
        if name == "__wrapped__":
            return types.MethodType(self._plan.target, instance)
        if name == "__self__":
            return instance
        if name == "__func__":
            return function
        return getattr(function, name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._bound is not None:
            instance, _ = self._bound
            return getattr, (instance, self._plan.target.__name__)
        # Like a function: by its name.
        name: str = self.__qualname__
        return name

    def __repr__(self) -> str:
        where = "" if self._bound is None else f" of {self._bound[0]!r:.100}"
        return f"<batched {self._plan.target!r}{where}>"

    @property
    def stats(self) -> BatchProcessorStats:
        """What the function has done since the first call or `clear_stats()`."""
        stats = self._batcher.stats()
        if self._plan.cache is not None:
            stats.cache_stats = self._plan.cache.stats()
        return stats

    def clear_stats(self) -> None:
        """Count from 0 again. The cache counts for itself."""
        self._batcher.clear_stats()

    @property
    def _batcher(self) -> Batcher:
        if self._own_batcher is None:
            raise TypeError(f"{self.__qualname__} is a class method; look it up on its class")
        return self._own_batcher

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_unbound_call(args, kwargs):
            bound = self.__get__(args[0], type(args[0]))
            return bound._call(args[1:], kwargs)  # noqa: SLF001  another of this class
        items, is_single = self._plan.form.items_of(args, kwargs)
        outputs = self._batcher.process(items)
        return outputs[0] if is_single else self._plan.form.result_of(outputs)

    def _acall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        # One item, as most calls have it, without a coroutine in between.
        plan = self._plan
        if (
            len(args) == 1
            and not kwargs
            and type(plan.form) is ListForm
            and plan.cache is None
            and not isinstance(args[0], list)
        ):
            return self._batcher.aprocess(args[0], self)
        return self._acall_form(args, kwargs)

    async def _acall_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_unbound_call(args, kwargs):
            bound = self.__get__(args[0], type(args[0]))
            return await bound._acall(args[1:], kwargs)  # noqa: SLF001  another of this class
        form, cache, batcher = self._plan.form, self._plan.cache, self._batcher
        is_long = form.takes_apart and is_much((args, kwargs), dim=0)
        items, is_single = await offload(is_long, form.items_of, args, kwargs)
        if cache is not None:
            outputs = await cache.process(items, batcher.aprocess_many)
        else:
            outputs = await batcher.aprocess_many(items)
        if is_single:
            return outputs[0]
        return await offload(form.takes_apart and is_much(outputs), form.result_of, outputs)

    def _is_unbound_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is `Class.method(instance, ...)`."""
        plan = self._plan
        binds = self._bound is None and plan.binds_instance and plan.is_in_class
        return binds and len(args) + bool(kwargs) == 2 and bool(args)

    async def _ashutdown(self, *, cancel: bool) -> None:
        await self._batcher.ashutdown(cancel=cancel)
        if self._plan.cache is not None:
            await self._plan.cache.settle()
