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

    Calls that arrive while the function computes wait, and are computed together as soon as it
    returns. The function runs in its own thread, with one batch at a time, in an empty context: it
    does not see the context variables of its callers. It may be an `async def`, which runs on an
    event loop of that thread. A call that would wait for its own batch, as when a function calls
    itself, is computed at once, without batching. So are calls from tasks that an `async def`
    starts on that loop, even if they outlive their batch.

    The thread starts with the first call. It ends with `shutdown()`, with the function or instance
    that it belongs to, and with the program. The exit of the program waits up to 2 seconds for a
    running batch, and then kills the thread, which can abort the process if native code runs.
    Waiting items fail with `BatcherClosedError`, as do calls from `atexit` hooks that were
    registered before this module was imported. A forked process has its own thread.

    Inputs and outputs are passed without a copy. A function that changes an input changes its
    caller's object, and callers share an object that the function returns for several items. If the
    function returns an array or tensor with a row per item, each caller gets a copy of its row.

    Args:
        func: A function, a method, or nothing for a decorator with options. A method has a batcher
            for each instance, which lives as long as the instance.
        batch_size: Largest number of items in a batch.
        timeout_ms: Accepted for programs written for `batched`: a limit in milliseconds on the wait
            of a batch while the function is free. A batch leaves as soon as the function is free,
            so it never waits that long.
        small_batch_threshold: Calls of at most this number of items go before calls with more;
            every eighth batch goes by age alone, so that no call starves.
        **options: The keyword arguments below.
        max_batch_length: Largest sum of the lengths of the items of a batch, without a limit by
            default. A longer item is computed alone. The length of a dict is that of its first
            value.
        max_queue_size: Largest number of waiting items, without a limit by default. A call whose
            items do not all fit is rejected.
        isolate_errors: Whether a batch for which the function raises is divided, and the halves
            computed again, until only the items that cause the error fail; True by default. Out of
            memory makes batches smaller.

    Raises:
        ConfigurationError: An option is wrong, or `func` cannot be decorated.
    """
    return decorate(BatchedFunction, func, batch_size, timeout_ms, small_batch_threshold, options)
