"""`@fast_batcher.inference.dynamically`: calls with arrays or tensors, computed in padded batches.

The function runs in a thread of this process.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ClassVar, Protocol, Unpack, overload

from fast_batcher._local.decorated import decorate, mark_async
from fast_batcher._local.function import InferenceOptions
from fast_batcher.dynamic import BatchedFunction, OutT

# Outputs of a list become an array or a list, depending on its entries: numbers or texts.
ReturnsList = Callable[..., list[Any] | Awaitable[list[Any]]]


class BatchedInference(BatchedFunction[Any, OutT]):
    """A function of features whose calls are batched, in a thread."""

    option_names: ClassVar[frozenset[str]] = InferenceOptions.__optional_keys__
    has_features = True

    @overload  # type: ignore[override]  # it takes no list of items
    def __call__(self, features: Mapping[str, Any], /) -> OutT: ...
    @overload
    def __call__(self, **features: Any) -> OutT: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait in this thread for the outputs of a batch of rows.

        Args:
            args: One dict with an array, a tensor, or a list with one entry per row, by feature.
            kwargs: The features, instead of a dict.

        Returns:
            The outputs of these rows, stacked, in the structure that the function returns.

        Raises:
            BatcherError: The errors of `fast_batcher.dynamically`.
            CollationError: The features have different numbers of rows, or none.
        """
        return self._call(args, kwargs)

    @overload  # type: ignore[override]  # it takes no list of items
    def acall(self, features: Mapping[str, Any], /) -> Coroutine[Any, Any, OutT]: ...
    @overload
    def acall(self, **features: Any) -> Coroutine[Any, Any, OutT]: ...
    @mark_async
    def acall(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Await the outputs of a batch of rows, on any event loop.

        Arguments and errors are those of a blocking call. Cancellation is safe at any time.
        """
        return self._acall(args, kwargs)


class InferenceDecorator(Protocol):
    """The type of `fast_batcher.inference.dynamically` with options."""

    @overload
    def __call__(self, func: ReturnsList, /) -> BatchedInference[Any]: ...
    @overload
    def __call__(self, func: Callable[..., Awaitable[OutT]], /) -> BatchedInference[OutT]: ...
    @overload
    def __call__(self, func: Callable[..., OutT], /) -> BatchedInference[OutT]: ...


@overload
def dynamically(func: ReturnsList, /) -> BatchedInference[Any]: ...
@overload
def dynamically(func: Callable[..., Awaitable[OutT]], /) -> BatchedInference[OutT]: ...
@overload
def dynamically(func: Callable[..., OutT], /) -> BatchedInference[OutT]: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Unpack[InferenceOptions],
) -> InferenceDecorator: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    **options: Any,
) -> Any:
    """Batch the calls of a function of features: a dict of arrays or tensors with a batch axis.

    Each call passes a batch of rows. The rows of all calls are padded to the longest row of their
    batch and stacked, each feature in its own dtype. The function takes the features of the batch,
    and its outputs are split into rows. The batch and the result of each call are copies: neither
    the function nor another caller can change the arrays of a caller. Tensors are detached.
    Threads, errors and shutdown are those of `fast_batcher.dynamically`.

    Args:
        func: A function, a method, or nothing for a decorator with options. It returns an array or
            tensor with one row for each row of its features, or a dict or list of them: see
            `outputs`.
        batch_size: Largest number of rows in a batch.
        timeout_ms: See `fast_batcher.dynamically`.
        small_batch_threshold: Calls of at most this number of rows go before calls with more.
        **options: The keyword arguments below.
        max_batch_length: Largest sum of the lengths of the rows of a batch, without a limit by
            default. The length of a row is that of its first feature, before padding.
        max_queue_size: Largest number of waiting rows, without a limit by default.
        isolate_errors: See `fast_batcher.dynamically`.
        pad_tokens: The padding values of the first axis of features, by their names; 0 by default.
        pad_token: Another name for `pad_tokens`.
        padding_side: The end of a row that is padded, "right" (the default) or "left".
        spread_kwargs: Whether the function takes the features as keyword arguments; it takes one
            dict by default.
        outputs: Meaning of a list that the function returns. "several" (the default): several
            outputs, each with a batch axis, as in `batched`; "rows": one entry per row; "auto":
            rows if its entries cannot have a batch axis, otherwise an error.

    Raises:
        ConfigurationError: An option is wrong, or `func` cannot be decorated.
    """
    return decorate(BatchedInference, func, batch_size, timeout_ms, small_batch_threshold, options)
