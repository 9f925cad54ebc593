"""How the arguments of a call become items, and the outputs of items the result of the call.

`ListFormat` is for functions of a list. `FeatureFormat` is for functions of a dict with one array
per feature: an item is a row of all features, the rows of a batch are padded to one length and
stacked, and what the function returns is split into rows. Runs where calls and batches run.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

from fast_batcher._arrays.batches import join, split, split_rows
from fast_batcher._arrays.collation import Collation
from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._local.function import Function, Target
from fast_batcher._local.settings import DecoratorSettings

# Makes the result of a call from the outputs of its items in their order.
Finish = Callable[[list[Any]], Any]

# The outputs of one call may come from several batches: they are stacked as they are.
_STACKED = Collation.stack()
_list_outputs = partial(list_outputs, returned="the function returned", copies=True)


class ListFormat:
    """A list is several items; any other argument is one item."""

    # Whether converting large arguments takes long, so that it must not block an event loop.
    copies = False

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Finish]:
        """The items of a call, and what makes its result from their outputs."""
        if len(args) != 1 or kwargs:
            raise TypeError(
                "a batched function is called with one argument, an item or a list of items"
            )
        (item,) = args
        return (item, list) if isinstance(item, list) else ([item], itemgetter(0))

    def make_function(self, target: Target, call: Any) -> Function:
        """A function of a list of items.

        Args:
            target: What the user decorated.
            call: The target's function, bound if it is a method.
        """
        return Function(call, target.name, target.is_async, _list_outputs)


class FeatureFormat:
    """Features become rows, and rows features; see `ListFormat` for the methods.

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
        """The rows of the features, and what stacks their outputs."""
        features = args[0] if args else kwargs
        # A tokenizer's answer is a mapping, but no dict.
        if len(args) > 1 or bool(args) == bool(kwargs) or not isinstance(features, Mapping):
            given = ", ".join([type(one).__name__ for one in args] + [f"{one}=" for one in kwargs])
            raise TypeError(
                "a batched inference function is called with one dict of features, or with the "
                "features as keyword arguments, each an array or tensor with one row per input; "
                f"this call has ({given})"
            )
        return split_rows(features, self._collation), partial(join, collation=_STACKED)

    def make_function(self, target: Target, call: Any) -> Function:
        """A function of rows, which stacks them for the function of features."""

        def call_with_rows(rows: list[Any]) -> Any:
            features = join(rows, self._collation)
            return call(**features) if self._spread_kwargs else call(features)

        def split_outputs(outputs: Any, count: int) -> list[Any]:
            # Copies, because the function may keep an array that it returns and fill it again.
            return split(outputs, count, self._collation, copy=True)

        return Function(call_with_rows, target.name, target.is_async, split_outputs)
