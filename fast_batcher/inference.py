"""`@fast_batcher.inference.dynamically`: calls with arrays or tensors, computed in padded batches.

The function runs in a thread of its own, in this process.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, overload

from fast_batcher._local.decorated import mark_async, plan
from fast_batcher._local.features import FeatureForm, merge_pad_tokens
from fast_batcher._local.settings import LocalSettings
from fast_batcher.dynamic import BatchedFunction
from fast_batcher.types import PriorityStrategy


class BatchedInference(BatchedFunction[Any, Any]):
    """A function of features whose calls are batched, in a thread."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait in this thread for the outputs of a batch of rows.

        Args:
            args: One dict: for each feature an array, a tensor, or a list of them, a row each.
            kwargs: The features themselves, instead.

        Returns:
            The outputs of these rows, stacked, in the structure that the function returns.

        Raises:
            BatcherError: As for `fast_batcher.dynamically`.
            CollationError: The features have different numbers of rows, or none.
        """
        return self._call(args, kwargs)

    @mark_async
    def acall(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """The same to be awaited, on any event loop; cancellation is safe at any time."""
        return self._acall(args, kwargs)


@overload
def dynamically(func: Callable[..., Any], /) -> BatchedInference: ...
@overload
def dynamically(
    func: None = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    pad_tokens: Mapping[str, float] | None = None,
    padding_side: str = "right",
    spread_kwargs: bool = False,
    pad_token: Mapping[str, float] | None = None,
    outputs: Literal["several", "rows", "auto"] = "several",
    max_batch_length: int | None = None,
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Callable[[Callable[..., Any]], BatchedInference]: ...
def dynamically(
    func: Any = None,
    /,
    *,
    batch_size: int = 32,
    timeout_ms: float = 5.0,
    small_batch_threshold: int = 8,
    pad_tokens: Mapping[str, float] | None = None,
    padding_side: str = "right",
    spread_kwargs: bool = False,
    pad_token: Mapping[str, float] | None = None,
    outputs: Literal["several", "rows", "auto"] = "several",
    max_batch_length: int | None = None,
    max_queue_size: int | None = None,
    isolate_errors: bool = True,
    process: bool = False,
) -> Any:
    """Batch the calls of a function of features: a dict of arrays or tensors with a batch axis.

    A call has a batch of rows itself. The rows of all calls are padded to the longest of a batch
    and stacked, each feature in its own dtype; the function is given the features of the batch, and
    its outputs are split into rows again. The batch and the result of each call are copies: neither
    the function nor another caller can change the arrays of a caller. Tensors are detached. All
    else is as for `fast_batcher.dynamically`.

    Args:
        func: A function, a method, or nothing for a decorator with settings. It returns an array or
            tensor with a row per row of its features, a dict of such, or a list: see `outputs`.
        batch_size: Most rows that the function is given.
        timeout_ms: See `fast_batcher.dynamically`.
        small_batch_threshold: Calls of up to so many rows go before calls with more.
        pad_tokens: What fills up the first axis of a feature's rows, by its name; 0 for the others.
        padding_side: The end of the rows at which it goes, "left" or "right".
        spread_kwargs: Whether the function takes the features as keyword arguments.
        pad_token: Another name for `pad_tokens`.
        outputs: What a list is that the function returns. "several": several outputs, each with a
            batch axis, as in `batched`; "rows": one entry per row; "auto": as rows where its
            entries can have no batch axis, else an error.
        max_batch_length: Most that the lengths of the rows of a batch add up to, each that of its
            first feature, before padding.
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
        priority_strategy=PriorityStrategy.PRIORITY,
        isolate_errors=isolate_errors,
    )
    form = FeatureForm(
        merge_pad_tokens(pad_tokens, pad_token),
        padding_side,
        spread_kwargs=spread_kwargs,
        outputs=outputs,
    )

    def decorate(func: Any) -> BatchedInference:
        return BatchedInference(plan(func, settings, is_aio=False, form=form, process=process))

    return decorate if func is None else decorate(func)
