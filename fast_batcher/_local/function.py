"""A decorated function and its settings.

A decorator's signature shows the three most used options; the others are keyword arguments.
`DecoratorSettings` holds all of them and is checked when a function is decorated.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, Any, TypedDict, get_args

from fast_batcher._arrays.collation import Outputs, Side
from fast_batcher._core.values import Failure
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    InferenceError,
    OutputMismatchError,
    assign,
    can_be_shown,
    from_model,
    is_kind,
    read,
)
from fast_batcher.observing import Observer
from fast_batcher.settings import (
    BATCH_SIZE,
    CACHE,
    COUNT,
    OBSERVERS,
    SWITCH,
    Range,
    check_fields,
    choice,
    duration,
    whole,
)
from fast_batcher.types import Cache, PriorityStrategy


class ThreadOptions(TypedDict, total=False):
    """Keyword arguments of `fast_batcher.dynamically`, which documents them."""

    max_batch_length: int | None
    max_queue_size: int | None
    isolate_errors: bool
    observers: Sequence[Observer]


class AioOptions(ThreadOptions, total=False):
    """Keyword arguments of `fast_batcher.aio.dynamically`, which documents them."""

    priority_strategy: PriorityStrategy
    cache: Cache | None
    batch_item_cls: Any


class FeatureOptions(TypedDict, total=False):
    """Keyword arguments of both `inference` decorators, which document them."""

    pad_tokens: Mapping[str, float] | None
    pad_token: Mapping[str, float] | None
    padding_side: str
    spread_kwargs: bool
    outputs: Outputs


class InferenceOptions(ThreadOptions, FeatureOptions, total=False):
    """Keyword arguments of `fast_batcher.inference.dynamically`, which documents them."""


class AioInferenceOptions(AioOptions, FeatureOptions, total=False):
    """Keyword arguments of `fast_batcher.aio.inference.dynamically`, which documents them."""


def _check_strategy(name: str, value: object) -> None:
    if not isinstance(value, PriorityStrategy):
        names = ", ".join(f"PriorityStrategy.{strategy.name}" for strategy in PriorityStrategy)
        raise ConfigurationError(f"{name}={value!r:.100}: choose one of {names}")


def _check_tokens(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give a dict with names of features as keys"
        )


_STRATEGY = Range("PriorityStrategy", _check_strategy)
_TOKENS = Range("dict of numbers by feature", _check_tokens)


@dataclass(frozen=True)
class DecoratorSettings:
    """The options of one decorated function."""

    batch_size: Annotated[int, BATCH_SIZE] = 32
    timeout_ms: Annotated[float, duration(zero_allowed=True, unit="milliseconds")] = 5.0
    small_batch_threshold: Annotated[int, whole(0)] = 8
    max_batch_length: Annotated[int | None, COUNT] = None
    max_queue_size: Annotated[int | None, COUNT] = None
    isolate_errors: Annotated[bool, SWITCH] = True
    observers: Annotated[Sequence[Observer], OBSERVERS] = ()
    priority_strategy: Annotated[PriorityStrategy, _STRATEGY] = PriorityStrategy.NONE
    cache: Annotated[Cache | None, CACHE] = None
    pad_tokens: Annotated[Mapping[str, float] | None, _TOKENS] = None
    pad_token: Annotated[Mapping[str, float] | None, _TOKENS] = None
    padding_side: Annotated[Side, choice(get_args(Side))] = "right"
    spread_kwargs: Annotated[bool, SWITCH] = False
    outputs: Annotated[Outputs, choice(get_args(Outputs))] = "several"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pad_tokens is not None and self.pad_token is not None:
            raise ConfigurationError(
                f"pad_token={self.pad_token!r:.100}: it is another name for pad_tokens; give one "
                "of the two"
            )

    @cached_property
    def ranks_above(self) -> float:
        """Number of items above which a call's items get a lower priority than the default."""
        return (
            inf if self.priority_strategy is PriorityStrategy.NONE else self.small_batch_threshold
        )

    def priority(self, item: object) -> int:
        """Return the priority of an item of a large call, below 0, the priority of small calls."""
        return -length_of(item) if self.priority_strategy is PriorityStrategy.LENGTH else -1


def length_of(item: object) -> int:
    """Return the length of an item, for `max_batch_length` and `PriorityStrategy.LENGTH`.

    The length of a dict of features is the length of its first feature. (`batched` documents the
    same, but counts the features.) An item without a length counts 1.
    """
    if isinstance(item, dict):
        item = next(iter(item.values()), ())
    try:
        return len(item)  # type: ignore[arg-type]  # without a length it raises
    except TypeError:
        return 1


@dataclass(frozen=True)
class UserFunction:
    """A decorated function or method, and its binding behaviour."""

    # Takes the instance or class first if it is bound to one, then a batch.
    call: Callable[..., Any]
    name: str
    # Whether a call is known to return a coroutine.
    is_async: bool
    binds_instance: bool
    binds_class: bool
    # Whether it is defined in a class, so that it may be called as `Class.method(instance, ...)`.
    is_in_class: bool

    @classmethod
    def of(cls, written: Any) -> "UserFunction":
        """Inspect the function or method below the decorator."""
        is_class = isinstance(written, classmethod)
        is_static = isinstance(written, staticmethod)
        call = written.__func__ if is_class or is_static else written
        if not callable(call):
            raise ConfigurationError(
                f"func={written!r:.100}: decorate a function; settings are named, as in "
                "batch_size=32"
            )
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise ConfigurationError(
                f"func={written!r:.100}: it is a generator; return a list with one output per input"
            )
        name = getattr(call, "__qualname__", type(call).__qualname__)
        # Python binds objects with `__get__`. A bound method has it too, and is not bound again.
        binds = hasattr(type(call), "__get__") and not isinstance(call, types.MethodType)
        return cls(
            call=call,
            name=name,
            is_async=is_async(call),
            binds_instance=binds and not is_static,
            binds_class=is_class,
            is_in_class=name.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>"),
        )


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a list of items, with its name and its splitter; used by openings."""

    # Takes a list of items and returns their outputs, or an awaitable for them.
    call: Callable[[list[Any]], Any]
    # The name in messages, logs and the name of the thread.
    name: str
    # See `UserFunction`.
    is_async: bool
    # Takes the function's result and the number of items, and returns a list of outputs. Raises
    # OutputMismatchError if there is not one output per item.
    split: Callable[[Any, int], list[Any]]

    def outcomes(self, result: Any, count: int) -> list[Any]:
        """Convert the function's result to one output or `Failure` per item."""
        try:
            outputs = self.split(result, count)
        except OutputMismatchError as error:  # a retry with fewer items cannot succeed
            return [Failure(OutputMismatchError(*error.args)) for _ in range(count)]
        # Checking each type once takes a fraction of the time of checking each output.
        if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
            return [
                Failure(as_error(output)) if is_kind(output, BaseException) else output
                for output in outputs
            ]
        return outputs


def as_error(raised: BaseException) -> BatcherError:
    """Make an error for one caller; it is also an instance of the raised type, and caused by it.

    An exception that cannot be shown is named in the error's text only: it would raise another one
    wherever the app shows or handles it.
    """
    shown = raised if can_be_shown(raised) else None
    original: Any = shown if is_kind(shown, Exception) else None
    error = from_model(original, f"the function raised {one_line(raised)}", "")
    assign(error, "__cause__", shown)
    return error


def drop_own_frame(raised: BaseException) -> None:
    """Drop the first frame of an error's traceback, which is the worker's.

    The frame refers to the batch, the batch to its callers, and these to the error: a cycle that
    only the garbage collector would free.
    """
    traceback = read(raised, "__traceback__")
    if traceback is not None:
        assign(raised, "__traceback__", traceback.tb_next)


def is_async(call: object) -> bool:
    """Return whether a callable is known to return a coroutine, without calling it."""
    if isinstance(call, functools.partial):
        return is_async(call.func)
    # The `__call__` of its class decides about a callable object.
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def bind_weakly(call: Callable[..., Any], instance: object) -> Callable[[list[Any]], Any]:
    """Bind a method to an instance without keeping the instance alive."""
    try:
        reference = weakref.ref(instance)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(instance).__qualname__} allows no weak references, so its batcher could not "
            "be released with it; add '__weakref__' to its __slots__"
        ) from error

    def call_method(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:  # its callers, which would keep it alive, have gone
            raise InferenceError("the instance of this method has been deleted")
        return call(alive, *args, **kwargs)

    return call_method
