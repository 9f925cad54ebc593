"""`@fast_batcher.dynamically`: calls of a function, from any thread or loop, computed in batches.

The function runs in a thread of its own, in this process; see `fast_batcher.aio` for functions that
are called from event loops alone, and `DynBatcher` for models that want a process.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from fast_batcher._local.decorated import Decorated, mark_async, plan
from fast_batcher._local.settings import LocalSettings
from fast_batcher.types import PriorityStrategy

InT = TypeVar("InT")
OutT = TypeVar("OutT")
# What a decorated function returns: a sequence, or a coroutine that gives one.
Outputs = Sequence[OutT] | Awaitable[Sequence[OutT]]


class BatchedFunction(Decorated, Generic[InT, OutT]):
    """A function whose calls are batched, in a thread. `with` shuts it down at the end."""

    @overload
    def __call__(self, item: list[InT], /) -> list[OutT]: ...
    @overload
    def __call__(self, item: InT, /) -> OutT: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait in this thread for the output of an item, or the outputs of a list of items.

        A list is split over batches as needed, and the first error ends the wait for all of it. An
        empty list gives an empty list.

        Raises:
            InferenceError: The function raised; also an instance of what it raised.
            OutputMismatchError: The function returned something other than one output per input.
            QueueFullError: There is no room for all items; none was queued. With `process=True`
                there was no room for one while none of its others was under way.
            BatcherClosedError: It was shut down.
        """
        return self._call(args, kwargs)

    @overload
    def acall(self, item: list[InT], /) -> Coroutine[Any, Any, list[OutT]]: ...
    @overload
    def acall(self, item: InT, /) -> Coroutine[Any, Any, OutT]: ...
    @mark_async
    def acall(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """The same to be awaited, on any event loop.

        Cancellation: safe at any time. Items that wait are forgotten; those that are being computed
        are computed, and their outputs dropped. Other callers are not affected.
        """
        return self._acall(args, kwargs)

    def start(self) -> None:
        """Take calls again after `shutdown()`. The first call does all else that is needed."""
        self._batcher.start()

    def shutdown(self, *, cancel: bool = False) -> None:
        """Take no more calls, settle all that have come, and end the thread. May be called again.

        Called by the function itself, or by one that it waits for, it does not wait for that.

        Args:
            cancel: Whether items that wait fail with `BatcherClosedError` at once, instead of being
                computed. A batch that is being computed is waited for in any case.
        """
        self._batcher.shutdown(cancel=cancel)

    def __enter__(self) -> Self:
        """Take calls."""
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down."""
        self.shutdown()


@overload
def dynamically(func: Callable[[list[InT]], Outputs[OutT]], /) -> BatchedFunction[InT, OutT]: ...
@overload
def dynamically(
    func: Callable[[Any, list[InT]], Outputs[OutT]], /
) -> BatchedFunction[InT, OutT]: ...
@overload
def dynamically(func: Callable[..., Any], /) -> BatchedFunction[Any, Any]: ...
@overload
def dynamically(
    func: None = None,
    /,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    *,
    max_batch_length: int | None = None,
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Callable[[Callable[..., Any]], BatchedFunction[Any, Any]]: ...
def dynamically(
    func: Any = None,
    /,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    *,
    max_batch_length: int | None = None,
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Any:
    """Batch the calls of a function that takes a list of items and returns as many outputs.

    Calls that come while the function computes wait, and are computed together as soon as it
    returns. The function runs in a thread of its own, with one batch at a time, in a context of its
    own: context variables of its callers are not seen. It may be an `async def`, which runs on an
    event loop of that thread. A function that calls itself is computed at once, without batching,
    where waiting for its own batch would never end; so is what it calls from tasks on that loop,
    even from those that go on after their batch.

    The thread begins with the first call. It ends with `shutdown()`, with the function or instance
    that it belongs to, and with the program. The end of the program waits up to 2 seconds for a
    batch that is being computed, and cuts it off then, which can abort the process where native
    code runs. Items that wait fail with `BatcherClosedError`, as do calls
    from `atexit` hooks that were registered before the decorator was imported. A forked process
    has a thread of its own.

    Inputs and outputs are the objects of the callers and of the function, without a copy: a
    function that changes an input changes its caller's object, and an object that it returns for
    several items is shared by their callers. Of an array or tensor with a row per item each caller
    gets a copy of its row. With `process=True` nothing is shared.

    Args:
        func: A function, a method, or nothing for a decorator with settings. As a method it batches
            the calls on each instance for itself, as long as that instance lives.
        batch_size: Most items that the function is given.
        timeout_ms: Bound on how long a batch may be held back while the function is free,
            milliseconds. In this process it never is: a batch leaves as soon as the function is
            free. With `process=True` it is the `max_delay` of an adaptive `DynBatcher`.
        small_batch_threshold: Calls of up to so many items go before calls with more; every eighth
            batch goes by age alone, so that none waits for ever.
        max_batch_length: Most that the lengths of the items of a batch add up to; a longer item is
            computed alone. The length of a dict is that of its first value.
        max_queue_size: Most items that wait; None for no limit. A call for whose items there is no
            room is refused. With `process=True` its items are queued a few batches at a time, and
            wait for room while others of the call are under way; else it is refused.
        isolate_errors: Whether a batch for which the function raises is divided, and the halves
            computed again, until only the guilty items fail. Out of memory makes batches smaller.
        process: Whether the function runs in a worker process, as with `DynBatcher`. It has to be a
            function at the top level of a module.

    Raises:
        ConfigurationError: A setting is wrong, or this cannot be decorated.
    """
    settings = LocalSettings(
        batch_size=batch_size,
        timeout_ms=timeout_ms,
        small_batch_threshold=small_batch_threshold,
        max_batch_length=max_batch_length,
        max_queue_size=max_queue_size,
        priority_strategy=PriorityStrategy.PRIORITY,
        isolate_errors=isolate_errors,
    )

    def decorate(func: Any) -> BatchedFunction[Any, Any]:
        return BatchedFunction(plan(func, settings, is_aio=False, process=process))

    return decorate if func is None else decorate(func)
