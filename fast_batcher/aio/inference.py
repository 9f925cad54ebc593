"""`@fast_batcher.aio.inference.dynamically`: awaited calls with arrays, in padded batches.

An async function runs on the loop of its callers, any other in a thread of its own.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, overload

from fast_batcher._local.decorated import mark_async, plan
from fast_batcher._local.features import FeatureForm, merge_pad_tokens
from fast_batcher._local.settings import LocalSettings
from fast_batcher.aio import AsyncBatchedFunction, note_batch_item_cls
from fast_batcher.types import AsyncCache, PriorityStrategy


class AsyncBatchedInference(AsyncBatchedFunction[Any, Any]):
    """A function of features whose calls are batched and awaited."""

    @mark_async
    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Wait for the outputs of a batch of rows; cancellation is safe at any time.

        Args:
            args: One dict: for each feature an array, a tensor, or a list of them, a row each.
            kwargs: The features themselves, instead.

        Returns:
            The outputs of these rows, stacked, in the structure that the function returns.

        Raises:
            BatcherError: As for `fast_batcher.aio.dynamically`.
            CollationError: The features have different numbers of rows, or none.
        """
        return self._acall(args, kwargs)


@overload
def dynamically(func: Callable[..., Any], /) -> AsyncBatchedInference: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    max_batch_length: int | None = None,
    pad_tokens: Mapping[str, float] | None = None,
    padding_side: str = "right",
    priority_strategy: PriorityStrategy = PriorityStrategy.NONE,
    cache: AsyncCache[Any, Any] | None = None,
    batch_item_cls: Any = None,
    spread_kwargs: bool = False,
    pad_token: Mapping[str, float] | None = None,
    outputs: Literal["several", "rows", "auto"] = "several",
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Callable[[Callable[..., Any]], AsyncBatchedInference]: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    max_batch_length: int | None = None,
    pad_tokens: Mapping[str, float] | None = None,
    padding_side: str = "right",
    priority_strategy: PriorityStrategy = PriorityStrategy.NONE,
    cache: AsyncCache[Any, Any] | None = None,
    batch_item_cls: Any = None,
    spread_kwargs: bool = False,
    pad_token: Mapping[str, float] | None = None,
    outputs: Literal["several", "rows", "auto"] = "several",
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Any:
    """Batch the awaited calls of a function of features.

    As `fast_batcher.inference.dynamically`, for calls from event loops alone; where the function
    runs, and what the other settings mean, is as for `fast_batcher.aio.dynamically`.

    Args:
        func: A function, a method, or nothing for a decorator with settings.
        batch_size: Most rows that the function is given.
        timeout_ms: See `fast_batcher.dynamically`.
        small_batch_threshold: How many rows a call may have to go before the others, where
            `priority_strategy` says so.
        max_batch_length: Most that the lengths of the rows of a batch add up to, each that of its
            first feature, before padding.
        pad_tokens: What fills up the first axis of a feature's rows, by its name; 0 for the others.
        padding_side: The end of the rows at which it goes, "left" or "right".
        priority_strategy: Who goes first when more rows wait than a batch holds.
        cache: Where the output of a row is looked for; the key is the dict of the row's features.
        batch_item_cls: Accepted for programs written for `batched`, and not used.
        spread_kwargs: Whether the function takes the features as keyword arguments.
        pad_token: Another name for `pad_tokens`.
        outputs: What a list is that the function returns; see `fast_batcher.inference.dynamically`.
        max_queue_size: Most rows that wait; None for no limit.
        isolate_errors: See `fast_batcher.dynamically`.
        process: See `fast_batcher.dynamically`.

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
    form = FeatureForm(
        merge_pad_tokens(pad_tokens, pad_token),
        padding_side,
        spread_kwargs=spread_kwargs,
        outputs=outputs,
    )

    def decorate(func: Any) -> AsyncBatchedInference:
        return AsyncBatchedInference(
            plan(func, settings, is_aio=True, cache=cache, form=form, process=process)
        )

    return decorate if func is None else decorate(func)
