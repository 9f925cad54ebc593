"""Calls with a dict of arrays, a feature each, whose rows are the items.

The rows of all calls of a batch are padded to one length and stacked; what the function returns is
split into rows again, and each call gets the stack of its own. Runs where calls and batches do.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from fast_batcher._arrays.batches import join, split, split_rows
from fast_batcher._arrays.collation import Collation
from fast_batcher._local.function import Function
from fast_batcher.errors import ConfigurationError

# How the outputs of several batches become those of one call: as they are.
_STACKED = Collation.stack()


class FeatureForm:
    """Features to rows, and rows to features.

    Args:
        pad_tokens: What fills up a feature, by its name; 0 for those that it does not name.
        padding_side: "left" or "right".
        spread_kwargs: Whether the function takes features as keyword arguments, not as one dict.
        outputs: "several", "rows" or "auto": what a list is that the function returns.

    Raises:
        ConfigurationError: One of them is wrong.
    """

    takes_apart = True

    def __init__(
        self,
        pad_tokens: Mapping[str, float] | None,
        padding_side: str,
        *,
        spread_kwargs: bool,
        outputs: str,
    ) -> None:
        if padding_side not in ("left", "right"):
            raise ConfigurationError(f"padding_side={padding_side!r:.100}: give 'left' or 'right'")
        if pad_tokens is not None and not isinstance(pad_tokens, Mapping):
            raise ConfigurationError(
                f"pad_tokens={pad_tokens!r:.100}: give a dict with names of features as keys"
            )
        self._collation = Collation.pad(
            value=0,
            values=pad_tokens,
            side=cast("Literal['left', 'right']", padding_side),
            outputs=cast("Literal['auto', 'rows', 'several']", outputs),
        )
        self._spread_kwargs = spread_kwargs

    def items_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
        """The rows of the features; never a single one, for features always have a batch axis."""
        features = args[0] if args else kwargs
        # A tokenizer's answer is a mapping, and no dict.
        if len(args) > 1 or bool(args) == bool(kwargs) or not isinstance(features, Mapping):
            raise TypeError(
                "a batched inference function is called with one dict of features, or with the "
                "features as keyword arguments"
            )
        return split_rows(features, self._collation), False

    def result_of(self, outputs: list[Any]) -> Any:
        """The outputs of the rows of one call as one batch."""
        return join(outputs, _STACKED)

    def function(
        self, target: Callable[..., Any], name: str, *, is_async: bool, to_cpu: bool = False
    ) -> Function:
        """A function of rows made of one of features.

        Args:
            target: The function of features.
            name: For messages.
            is_async: Whether it gives a coroutine.
            to_cpu: Whether it runs in a worker process: rows of tensors have to leave their device,
                and rows are sent before the function is called again. Else rows of arrays are
                copied, because the function may keep an array that it returns and fill it again.
        """

        def call(rows: list[Any]) -> Any:
            features = join(rows, self._collation)
            return target(**features) if self._spread_kwargs else target(features)

        def split_outputs(outputs: Any, count: int) -> list[Any]:
            return split(outputs, count, self._collation, to_cpu=to_cpu, copy=not to_cpu)

        return Function(call, name, is_async=is_async, split=split_outputs)


def merge_pad_tokens(
    pad_tokens: Mapping[str, float] | None, pad_token: Mapping[str, float] | None
) -> Mapping[str, float] | None:
    """The one of the two that was given: `batched` takes the one, and its documents show the other.

    Raises:
        ConfigurationError: Both were given.
    """
    if pad_tokens is not None and pad_token is not None:
        raise ConfigurationError(
            f"pad_token={pad_token!r:.100}: it is another name for pad_tokens; give one of the two"
        )
    return pad_tokens if pad_token is None else pad_token
