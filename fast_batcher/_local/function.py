"""The user's function, what it returns and what it raises. Runs where the batches run."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fast_batcher._transport.codec import one_line
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    InferenceError,
    assign,
    from_model,
)


@dataclass(frozen=True)
class Target:
    """What the user decorated, and how Python binds it.

    Raises:
        ConfigurationError: It cannot be batched.
    """

    # Called with an instance or class first if it is bound to one, then with a batch.
    call: Callable[..., Any]
    name: str
    # Whether calling it returns a coroutine, as far as that can be known without a call.
    is_async: bool
    binds_instance: bool
    binds_class: bool
    # Whether it is defined in a class, where `Class.method(instance, ...)` is a way to call it.
    is_in_class: bool

    @classmethod
    def of(cls, written: Any) -> "Target":
        """Inspect what stands below the decorator."""
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
        # Python binds what has `__get__`. A bound method has it too, and is not bound again.
        binds = hasattr(type(call), "__get__") and not isinstance(call, types.MethodType)
        return cls(
            call=call,
            name=name,
            is_async=is_async(call),
            binds_instance=binds and not is_static,
            binds_class=is_class,
            is_in_class=name.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>"),
        )


class FailedOutput(NamedTuple):
    """Takes the place of an output: the error for one caller."""

    error: BatcherError


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a list of items, as the engine and nested calls use it."""

    # Takes a list of items and returns their outputs, or an awaitable for them.
    call: Callable[[list[Any]], Any]
    # The name in messages, logs and the name of the thread.
    name: str
    # See `Target`.
    is_async: bool
    # Makes a list of outputs from what the function returned for a number of items. Raises
    # OutputMismatchError if there is not one for each.
    split: Callable[[Any, int], list[Any]]

    def outcomes(self, result: Any, count: int) -> list[Any]:
        """What it returned as one output or `FailedOutput` per item.

        Raises:
            OutputMismatchError: It returned something other than one output per item.
        """
        outputs = self.split(result, count)
        # Checking each type once takes a fraction of the time of checking each output.
        if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
            return [
                FailedOutput(as_error(output)) if isinstance(output, BaseException) else output
                for output in outputs
            ]
        return outputs


def as_error(raised: BaseException) -> BatcherError:
    """A new error for one caller. It is an instance of what was raised, too, which is its cause."""
    original = raised if isinstance(raised, Exception) else None
    error = from_model(original, f"the function raised {one_line(raised)}", "")
    assign(error, "__cause__", raised)
    return error


def drop_own_frame(raised: BaseException) -> None:
    """Drop the first frame of its traceback, which is the worker's.

    That frame holds the batch, the batch its callers, and they the error: only the garbage
    collector would free them.
    """
    if raised.__traceback__ is not None:
        assign(raised, "__traceback__", raised.__traceback__.tb_next)


def is_async(call: object) -> bool:
    """Whether calling it returns a coroutine, as far as that can be known without a call."""
    if isinstance(call, functools.partial):
        return is_async(call.func)
    # A callable object has its function in its class.
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
        if alive is None:  # all its callers have gone: they would keep it alive
            raise InferenceError("the instance whose method this was is gone")
        return call(alive, *args, **kwargs)

    return call_method
