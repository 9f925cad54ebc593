"""`@fast_batcher.aio.dynamically`: calls from event loops, computed in batches.

An async function runs on the loop of its callers, any other in a thread of its own.
"""

import importlib
import warnings
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from fast_batcher._local.decorated import Decorated, mark_async, plan
from fast_batcher._local.settings import LocalSettings
from fast_batcher.dynamic import InT, Outputs, OutT
from fast_batcher.types import AsyncCache, PriorityStrategy

if TYPE_CHECKING:
    from fast_batcher.aio import inference

__all__ = ["AsyncBatchedFunction", "dynamically", "inference"]


class AsyncBatchedFunction(Decorated, Generic[InT, OutT]):
    """A function whose calls are batched and awaited. `async with` shuts it down at the end."""

    @overload
    def __call__(self, item: list[InT], /) -> Coroutine[Any, Any, list[OutT]]: ...
    @overload
    def __call__(self, item: InT, /) -> Coroutine[Any, Any, OutT]: ...
    @mark_async
    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Wait for the output of an item, or for the outputs of a list of items.

        A list is split over batches as needed, and the first error ends the wait for all of it. An
        empty list gives an empty list.

        Raises:
            InferenceError: The function raised; also an instance of what it raised.
            OutputMismatchError: The function returned something other than one output per input.
            QueueFullError: There is no room for all items; none was queued. With `process=True`
                there was no room for one while none of its others was under way.
            BatcherClosedError: It was shut down.

        Cancellation: safe at any time. Items that wait are forgotten; those that are being computed
        are computed, and their outputs dropped. Other callers are not affected.
        """
        return self._acall(args, kwargs)

    def start(self) -> None:
        """Take calls again after `shutdown()`. The first call does all else that is needed."""
        self._batcher.start()

    async def shutdown(self, *, cancel: bool = False) -> None:
        """Take no more calls, and wait until all that have come are settled. May be called again.

        Called by the function itself, or by one that it waits for, it does not wait for that.

        Args:
            cancel: Whether items that wait fail with `BatcherClosedError` at once, instead of being
                computed. A batch that is being computed is waited for in any case.

        Cancellation: safe; only the wait ends.
        """
        await self._ashutdown(cancel=cancel)

    async def __aenter__(self) -> Self:
        """Take calls."""
        self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down."""
        await self.shutdown()


def __getattr__(name: str) -> Any:
    # So that `fast_batcher.aio.inference.dynamically` needs no import of its own.
    if name == "inference":
        return importlib.import_module("fast_batcher.aio.inference")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def dynamically(
    func: Callable[[list[InT]], Outputs[OutT]], /
) -> AsyncBatchedFunction[InT, OutT]: ...
@overload
def dynamically(
    func: Callable[[Any, list[InT]], Outputs[OutT]], /
) -> AsyncBatchedFunction[InT, OutT]: ...
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
    max_batch_length: int | None = None,
    priority_strategy: PriorityStrategy = PriorityStrategy.NONE,
    cache: AsyncCache[Any, Any] | None = None,
    batch_item_cls: Any = None,
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Callable[[Callable[..., Any]], AsyncBatchedFunction[Any, Any]]: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    max_batch_length: int | None = None,
    priority_strategy: PriorityStrategy = PriorityStrategy.NONE,
    cache: AsyncCache[Any, Any] | None = None,
    batch_item_cls: Any = None,
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Any:
    """Batch the awaited calls of a function that takes a list of items and returns as many outputs.

    As `fast_batcher.dynamically`, but for calls from event loops alone. An `async def` runs as a
    task on the loop of its callers; with calls from several loops it runs on each of them, with one
    batch at a time on each. Any other function runs in a thread of its own, with one batch at a
    time for all loops.

    Inputs and outputs are shared as for `fast_batcher.dynamically`; an output from `cache` is the
    object that the cache holds.

    What a task calls that an `async def` has started and that goes on after its batch is batched as
    for any other caller. No later batch may wait for such a task, for that would never end.

    Args:
        func: A function, a method, or nothing for a decorator with settings.
        batch_size: Most items that the function is given.
        timeout_ms: Bound on how long a batch may be held back while the function is free,
            milliseconds. In this process it never is: a batch leaves as soon as the function is
            free. With `process=True` it is the `max_delay` of an adaptive `DynBatcher`.
        small_batch_threshold: How many items a call may have to go before the others, where
            `priority_strategy` says so.
        max_batch_length: Most that the lengths of the items of a batch add up to; a longer item is
            computed alone. The length of a dict is that of its first value.
        priority_strategy: Who goes first when more items wait than a batch holds. With
            `process=True` an error of several items is that of the first in this order.
        cache: Where an output is looked for before it is computed. One that raises is done without,
            and logged once.
        batch_item_cls: Accepted for programs written for `batched`, and not used.
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
        priority_strategy=priority_strategy,
        isolate_errors=isolate_errors,
    )
    note_batch_item_cls(batch_item_cls)

    def decorate(func: Any) -> AsyncBatchedFunction[Any, Any]:
        return AsyncBatchedFunction(plan(func, settings, is_aio=True, cache=cache, process=process))

    return decorate if func is None else decorate(func)


def note_batch_item_cls(batch_item_cls: Any) -> None:
    """Warn about the one argument of `batched` that does nothing here."""
    if batch_item_cls is not None:
        warnings.warn(
            "batch_item_cls is accepted for programs written for batched, and not used: there are "
            "no batch items here",
            stacklevel=3,
        )
