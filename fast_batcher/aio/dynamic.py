"""`@fast_batcher.aio.dynamically`: calls from event loops, computed in batches."""

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Generic, Protocol, Self, Unpack, overload

from fast_batcher._local.decorated import Decorated, decorate, mark_async
from fast_batcher._local.function import AioOptions
from fast_batcher.dynamic import InT, ListFunction, OutT


class AsyncBatchedFunction(Decorated, Generic[InT, OutT]):
    """A function whose calls are batched and awaited. `async with` shuts it down at the end."""

    option_names: ClassVar[frozenset[str]] = AioOptions.__optional_keys__
    is_aio = True

    @overload
    def __call__(self, item: list[InT], /) -> Coroutine[Any, Any, list[OutT]]: ...
    @overload
    def __call__(self, item: InT, /) -> Coroutine[Any, Any, OutT]: ...
    @mark_async
    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Await the output of an item, or the outputs of a list of items.

        A list is split over batches as needed, and the first error ends the wait for all of it. An
        empty list gives an empty list.

        Raises:
            InferenceError: The function raised; also an instance of the raised type.
            OutputMismatchError: The function did not return one output per input.
            QueueFullError: The queue has no room for all items; none was queued.
            BatcherClosedError: The function was shut down.

        Cancellation: safe at any time. Waiting items are removed from the queue; a running batch is
        finished, and its outputs for this caller are dropped. Other callers are not affected.
        """
        return self._acall(args, kwargs)

    async def shutdown(self, *, cancel: bool = False) -> None:
        """Accept no more calls, and wait until the accepted ones are settled. May be repeated.

        A call from the function itself, or from a function that it waits for, returns at once.

        Args:
            cancel: True fails waiting items with `BatcherClosedError` at once; False computes them.
                A running batch is finished in both cases.

        Cancellation: safe; only the wait ends.
        """
        await self._ashutdown(cancel=cancel)

    async def __aenter__(self) -> Self:
        """Accept calls."""
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shut down."""
        await self.shutdown()


class AioDecorator(Protocol):
    """The type of `fast_batcher.aio.dynamically` with options."""

    @overload
    def __call__(self, func: ListFunction[InT, OutT], /) -> AsyncBatchedFunction[InT, OutT]: ...
    @overload
    def __call__(self, func: Callable[..., Any], /) -> AsyncBatchedFunction[Any, Any]: ...


@overload
def dynamically(func: ListFunction[InT, OutT], /) -> AsyncBatchedFunction[InT, OutT]: ...
@overload
def dynamically(func: Callable[..., Any], /) -> AsyncBatchedFunction[Any, Any]: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Unpack[AioOptions],
) -> AioDecorator: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Any,
) -> Any:
    """Batch the awaited calls of a function that takes a list of items and returns their outputs.

    An `async def` runs as a task on the event loop of its callers; with calls from several loops it
    runs on each of them, with one batch at a time on each. Any other function runs in its own
    thread, with one batch at a time for all loops. Inputs and outputs are passed without a copy, as
    by `fast_batcher.dynamically`; an output from `cache` is the object that the cache returns.

    A task that an `async def` starts may outlive its batch. Its calls are then batched like those
    of any other caller. No later batch may wait for the task, because that wait would never end.

    Args:
        func: A function, a method, or nothing for a decorator with options. A method has a batcher
            for each instance, which lives as long as the instance.
        batch_size: Largest number of items in a batch.
        timeout_ms: See `fast_batcher.dynamically`.
        small_batch_threshold: Calls of at most this number of items go before larger ones, if
            `priority_strategy` is not `NONE`.
        **options: The keyword arguments below.
        max_batch_length: See `fast_batcher.dynamically`.
        max_queue_size: See `fast_batcher.dynamically`.
        isolate_errors: See `fast_batcher.dynamically`.
        priority_strategy: Order of waiting items when they exceed a batch;
            `PriorityStrategy.NONE` by default.
        cache: Cache in which outputs are looked up before they are computed; none by default. An
            error of the cache is logged once, and fails no call.
        batch_item_cls: Accepted for programs written for `batched`, and not used.

    Raises:
        ConfigurationError: An option is wrong, or `func` cannot be decorated.
    """
    return decorate(
        AsyncBatchedFunction, func, batch_size, timeout_ms, small_batch_threshold, options
    )
