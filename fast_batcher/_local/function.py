"""The user's function, and what it returns or raises. Runs where batches run."""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fast_batcher._arrays.leaves import copy_rows
from fast_batcher._transport.codec import one_line
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    InferenceError,
    OutputMismatchError,
    assign,
    from_model,
)


class Failure:
    """In place of an output: the error of one caller."""

    __slots__ = ("error",)

    def __init__(self, error: BatcherError) -> None:
        self.error = error


class Function:
    """A function of a list of inputs.

    Args:
        call: Takes a list of inputs; returns their outputs, or something to be awaited for them.
        name: For messages.
        split: Makes the list of outputs out of what the function returned for so many inputs;
            raises OutputMismatchError where there is not one for each.
    """

    __slots__ = ("_split", "call", "is_async", "name")

    def __init__(
        self,
        call: Callable[[list[Any]], Any],
        name: str,
        *,
        is_async: bool,
        split: Callable[[Any, int], list[Any]] | None = None,
    ) -> None:
        self.call = call
        self.name = name
        # Whether calling it gives a coroutine, as far as one can tell beforehand.
        self.is_async = is_async
        self._split = split or rows

    def outcomes(self, result: Any, count: int) -> list[Any]:
        """What it returned as one output or `Failure` per input.

        Raises:
            OutputMismatchError: It returned something other than one output per input.
        """
        outputs = self._split(result, count)
        # A set of types takes a fraction of the time of a look at each output.
        if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
            return [Failure(as_error(o)) if isinstance(o, BaseException) else o for o in outputs]
        return outputs


def rows(outputs: Any, count: int) -> list[Any]:
    """The outputs as a list of `count`.

    Sequences are taken as they are, arrays and tensors row by row along the first axis.

    Raises:
        OutputMismatchError: Anything else, or another length: pairing what is there with the wrong
            callers would be worse than an error.
    """
    if type(outputs) is list and len(outputs) == count:
        return outputs
    is_array = hasattr(outputs, "shape") and hasattr(outputs, "__getitem__")
    is_text = isinstance(outputs, str | bytes | bytearray | memoryview)
    if is_text or not (isinstance(outputs, Sequence) or is_array):
        raise OutputMismatchError(
            f"the function returned {type(outputs).__name__} for {count} inputs; return a list "
            "with one output per input"
        )
    if getattr(outputs, "shape", None) == ():
        raise OutputMismatchError(
            f"the function returned a {type(outputs).__name__} without axes for {count} inputs; "
            "its first axis is the batch"
        )
    if len(outputs) != count:
        raise OutputMismatchError(
            f"the function returned {len(outputs)} outputs for {count} inputs; return one per input"
        )
    return list(outputs)


def own_rows(outputs: Any, count: int) -> list[Any]:
    """The outputs as a list of `count`; those of one array or tensor are copies of its rows.

    A view would keep the whole batch in memory, and would change when the function fills the array
    again, or when another caller writes into a row that lies in the same memory.

    Raises:
        OutputMismatchError: As for `rows`.
    """
    found = rows(outputs, count)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(outputs, numpy.ndarray):
        return copy_rows(outputs)
    if torch is not None and isinstance(outputs, torch.Tensor):
        return [row.clone() for row in found]
    return found


def as_error(raised: BaseException) -> BatcherError:
    """The error for one caller; also an instance of what was raised, which is its cause."""
    original = raised if isinstance(raised, Exception) else None
    error = from_model(original, f"the function raised {one_line(raised)}", "")
    assign(error, "__cause__", raised)
    return error


def without_own_frame(raised: BaseException) -> BaseException:
    """Drop the first frame of its traceback, which is ours.

    It holds the batch, the batch its callers, and those the error: only the garbage collector would
    ever free them.
    """
    if raised.__traceback__ is not None:
        assign(raised, "__traceback__", raised.__traceback__.tb_next)
    return raised


def is_async(call: object) -> bool:
    """Whether calling it gives a coroutine, as far as one can tell without doing it."""
    if isinstance(call, functools.partial):
        return is_async(call.func)
    # An object that can be called has its function in its class.
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def bind_weakly(call: Callable[..., Any], instance: object) -> Callable[[list[Any]], Any]:
    """The method of an instance that does not keep the instance alive.

    Raises:
        ConfigurationError: No weak references to it are possible.
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
        if alive is None:  # nobody waits any more, or it would be alive
            raise InferenceError("the instance whose method this was is gone")
        return call(alive, *args, **kwargs)

    return call_method
