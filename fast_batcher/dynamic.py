"""`@fast_batcher.dynamically`: calls of a function, from any thread or loop, computed in batches.

The function runs in a thread of this process. See `fast_batcher.aio` for functions that are called
from event loops alone, and `DynBatcher` for models that need a worker process.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, Unpack, overload

from fast_batcher._local.decorated import Decorated, decorate, mark_async
from fast_batcher._local.function import ThreadOptions

InT = TypeVar("InT")
OutT = TypeVar("OutT")
# Return type of a decorated function: a sequence, or an awaitable for one.
Outputs = Sequence[OutT] | Awaitable[Sequence[OutT]]
# A function of a list, or a method of one.
ListFunction = Callable[[list[InT]], Outputs[OutT]] | Callable[[Any, list[InT]], Outputs[OutT]]


class BatchedFunction(Decorated, Generic[InT, OutT]):
    """A function whose calls are batched, in a thread. `with` shuts it down at the end."""

    option_names: ClassVar[frozenset[str]] = ThreadOptions.__optional_keys__

    @overload
    def __call__(self, item: list[InT], /) -> list[OutT]: ...
    @overload
    def __call__(self, item: InT, /) -> OutT: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait in this thread for the output of an item, or the outputs of a list of items.

        A list is split over batches as needed, and the first error ends the wait for all of it. An
        empty list gives an empty list.

        Raises:
            InferenceError: The function raised; also an instance of the raised type.
            OutputMismatchError: The function did not return one output per input.
            QueueFullError: The queue has no room for all items; none was queued.
            BatcherClosedError: The function was shut down.
        """
        return self._call(args, kwargs)

    @overload
    def acall(self, item: list[InT], /) -> Coroutine[Any, Any, list[OutT]]: ...
    @overload
    def acall(self, item: InT, /) -> Coroutine[Any, Any, OutT]: ...
    @mark_async
    def acall(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of an item, or the outputs of a list of items, on any event loop.

        Errors are those of a blocking call.

        Cancellation: safe at any time. Waiting items are removed from the queue; a running batch is
        finished, and its outputs for this caller are dropped. Other callers are not affected.
        """
        return self._acall(args, kwargs)

    def shutdown(self, *, cancel: bool = False) -> None:
        """Accept no more calls, settle the accepted ones, and end the thread. May be repeated.

        A call from the function itself, or from a function that it waits for, returns at once.

        Args:
            cancel: True fails waiting items with `BatcherClosedError` at once; False computes them.
                A running batch is finished in both cases.
        """
        self._batcher.shutdown(cancel=cancel)

    def __enter__(self) -> Self:
        """Accept calls."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()


class ThreadDecorator(Protocol):
    """The type of `fast_batcher.dynamically` with options."""

    @overload
    def __call__(self, func: ListFunction[InT, OutT], /) -> BatchedFunction[InT, OutT]: ...
    @overload
    def __call__(self, func: Callable[..., Any], /) -> BatchedFunction[Any, Any]: ...


@overload
def dynamically(func: ListFunction[InT, OutT], /) -> BatchedFunction[InT, OutT]: ...
@overload
def dynamically(func: Callable[..., Any], /) -> BatchedFunction[Any, Any]: ...
@overload
def dynamically(
    func: None = None,
    /,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Unpack[ThreadOptions],
) -> ThreadDecorator: ...
def dynamically(
    func: Any = None,
    /,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Any,
) -> Any:
    """Batch the calls of a function that takes a list of items and returns a list of outputs.

    Calls that arrive while the function computes are computed together as soon as it returns, in a
    thread of the function. docs/decorators.md describes the thread and its end.

    Args:
        func: A function, a method, or nothing for a decorator with options.
        batch_size: Most items in a batch.
        timeout_ms: Accepted for programs written for `batched`; nothing waits.
        small_batch_threshold: Calls of at most this number of items go first.
        **options: As below.
        max_batch_length: Largest sum of the lengths of the items of a batch.
        max_queue_size: Largest number of waiting items; a call whose items do not fit is rejected.
        isolate_errors: Whether a batch for which the function raises is divided, until only the
            items that cause the error fail; True by default.

    Raises:
        ConfigurationError: An option is wrong, or `func` cannot be decorated.
    """
    return decorate(BatchedFunction, func, batch_size, timeout_ms, small_batch_threshold, options)
