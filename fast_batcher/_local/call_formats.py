"""Conversion between the arguments of a call and items, and between outputs and its result.

`ListFormat` is for functions of a list. `FeatureFormat` is for functions of a dict with one array
per feature: an item is a row of all features, the rows of a batch are padded to one length and
stacked, and the function's outputs are split into rows. Runs on the threads of calls and batches.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.joining import join, list_outputs, split, split_rows
from fast_batcher._local.function import Function, UserFunction
from fast_batcher._local.settings import DecoratorSettings

# Makes the result of a call from the outputs of its items in their order.
Finish = Callable[[list[Any]], Any]

# Stacks the outputs of one call, which may come from several batches, without padding.
_STACKED = Collation.stack()
_list_outputs = partial(list_outputs, returned="the function returned", copies=True, to_cpu=False)


class ListFormat:
    """A list is several items; any other argument is one item."""

    # Whether converting large arguments would block an event loop.
    copies = False

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Finish]:
        """Return the items of a call, and a function from their outputs to its result."""
        if len(args) != 1 or kwargs:
            raise TypeError(
                "a batched function is called with one argument, an item or a list of items"
            )
        (item,) = args
        return (item, list) if isinstance(item, list) else ([item], itemgetter(0))

    def make_function(self, user_function: UserFunction, call: Any) -> Function:
        """Make a function of a list of items.

        Args:
            user_function: The decorated function.
            call: The same, bound if it is a method.
        """
        return Function(call, user_function.name, user_function.is_async, _list_outputs)


class FeatureFormat:
    """Items are rows of features; see `ListFormat` for the methods.

    Args:
        settings: The options of the function.

    Raises:
        ConfigurationError: `outputs` is invalid.
    """

    copies = True

    def __init__(self, settings: DecoratorSettings) -> None:
        self._collation = Collation.pad(
            value=0,
            # `batched` takes `pad_tokens` and documents `pad_token`.
            values=settings.pad_tokens if settings.pad_token is None else settings.pad_token,
            side=settings.padding_side,
            outputs=settings.outputs,
        )
        self._spread_kwargs = settings.spread_kwargs

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Finish]:
        """Return the rows of the features, and a function that stacks their outputs."""
        features = args[0] if args else kwargs
        # A tokenizer returns a mapping that is no dict.
        if len(args) > 1 or bool(args) == bool(kwargs) or not isinstance(features, Mapping):
            given = ", ".join([type(one).__name__ for one in args] + [f"{one}=" for one in kwargs])
            raise TypeError(
                "a batched inference function is called with one dict of features, or with the "
                "features as keyword arguments, each an array or tensor with one row per input; "
                f"this call has ({given})"
            )
        return split_rows(features, self._collation), partial(join, collation=_STACKED)

    def make_function(self, user_function: UserFunction, call: Any) -> Function:
        """Make a function of rows, which stacks them for the function of features."""

        def call_with_rows(rows: list[Any]) -> Any:
            features = join(rows, self._collation)
            return call(**features) if self._spread_kwargs else call(features)

        def split_outputs(outputs: Any, count: int) -> list[Any]:
            # Copies, because the function may keep an array that it returns and fill it again.
            return split(outputs, count, self._collation, copy=True)

        return Function(call_with_rows, user_function.name, user_function.is_async, split_outputs)
