"""The user's function: its inspection, its outputs and its errors. Runs where the batches run."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fast_batcher._core.values import Failure
from fast_batcher._transport.pickling import one_line
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    InferenceError,
    assign,
    can_be_shown,
    from_model,
    is_kind,
    read,
)


@dataclass(frozen=True)
class UserFunction:
    """A decorated function or method, and its binding behaviour.

    Raises:
        ConfigurationError: The function cannot be batched.
    """

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
    """A function of a list of items, with its name and its splitter; used by engines."""

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
        """Convert the function's result to one output or `Failure` per item.

        Raises:
            OutputMismatchError: The result is not one output per item.
        """
        outputs = self.split(result, count)
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
    # For a callable object the `__call__` of its class counts.
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def bind_weakly(call: Callable[..., Any], instance: object) -> Callable[[list[Any]], Any]:
    """Bind a method to an instance without keeping the instance alive.

    Raises:
        ConfigurationError: The instance supports no weak references.
    """
    try:
        reference = weakref.ref(instance)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(instance).__qualname__} has no room for weak references, so that its batcher "
            "could not be released with it; add '__weakref__' to its __slots__"
        ) from error

    def call_method(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:  # its callers, which would keep it alive, have gone
            raise InferenceError("the instance whose method this was is gone")
        return call(alive, *args, **kwargs)

    return call_method
