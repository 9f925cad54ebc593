"""`@fast_batcher.aio.inference.dynamically`: awaited calls with arrays, in padded batches."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ClassVar, Protocol, Unpack, overload

from fast_batcher._local.decorated import decorate, mark_async
from fast_batcher._local.function import AioInferenceOptions
from fast_batcher.aio.dynamic import AsyncBatchedFunction
from fast_batcher.dynamic import OutT
from fast_batcher.inference import ReturnsList


class AsyncBatchedInference(AsyncBatchedFunction[Any, OutT]):
    """A function of features whose calls are batched and awaited."""

    option_names: ClassVar[frozenset[str]] = AioInferenceOptions.__optional_keys__
    has_features = True

    @overload  # type: ignore[override]  # it takes no list of items
    def __call__(self, features: Mapping[str, Any], /) -> Coroutine[Any, Any, OutT]: ...
    @overload
    def __call__(self, **features: Any) -> Coroutine[Any, Any, OutT]: ...
    @mark_async
    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Await the outputs of a batch of rows. Cancellation is safe at any time.

        Args:
            args: One dict with an array, a tensor, or a list with one entry per row, by feature.
            kwargs: The features, instead of a dict.

        Returns:
            The outputs of these rows, stacked, in the structure that the function returns.

        Raises:
            BatcherError: The errors of `fast_batcher.aio.dynamically`.
            CollationError: The features have different numbers of rows, or none.
        """
        return self._acall(args, kwargs)


class AioInferenceDecorator(Protocol):
    """The type of `fast_batcher.aio.inference.dynamically` with options."""

    @overload
    def __call__(self, func: ReturnsList, /) -> AsyncBatchedInference[Any]: ...
    @overload
    def __call__(self, func: Callable[..., Awaitable[OutT]], /) -> AsyncBatchedInference[OutT]: ...
    @overload
    def __call__(self, func: Callable[..., OutT], /) -> AsyncBatchedInference[OutT]: ...


@overload
def dynamically(func: ReturnsList, /) -> AsyncBatchedInference[Any]: ...
@overload
def dynamically(func: Callable[..., Awaitable[OutT]], /) -> AsyncBatchedInference[OutT]: ...
@overload
def dynamically(func: Callable[..., OutT], /) -> AsyncBatchedInference[OutT]: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Unpack[AioInferenceOptions],
) -> AioInferenceDecorator: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Any,
) -> Any:
    """Batch the awaited calls of a function of features: a dict of arrays or tensors.

    Features, padding and outputs are those of `fast_batcher.inference.dynamically`. Where the
    function runs is decided as for `fast_batcher.aio.dynamically`.

    Args:
        func: A function, a method, or nothing for a decorator with options.
        batch_size: Largest number of rows in a batch.
        timeout_ms: See `fast_batcher.aio.dynamically`.
        small_batch_threshold: Largest number of rows of a call that goes before larger calls, where
            `priority_strategy` says so.
        **options: The keyword arguments below, and those of `fast_batcher.inference.dynamically`.
        priority_strategy: See `fast_batcher.aio.dynamically`.
        cache: See `fast_batcher.aio.dynamically`; each row has an entry of its own.
        batch_item_cls: See `fast_batcher.aio.dynamically`.

    Raises:
        ConfigurationError: An option is wrong, or this cannot be decorated.
    """
    return decorate(
        AsyncBatchedInference, func, batch_size, timeout_ms, small_batch_threshold, options
    )
