"""Options of the decorators: types, defaults and limits. Pure.

A decorator's signature shows the three most used options; the others are keyword arguments.
`DecoratorSettings` holds all of them and is checked when a function is decorated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, TypedDict, get_args

from fast_batcher._arrays.collation import Outputs, Side
from fast_batcher.errors import ConfigurationError
from fast_batcher.observing import Observer
from fast_batcher.settings import MAX_BATCH_SIZE, MAX_SECONDS, check_cache, check_observers
from fast_batcher.types import Cache, PriorityStrategy


class ThreadOptions(TypedDict, total=False):
    """Keyword arguments of `fast_batcher.dynamically`, which documents them."""

    max_batch_length: int | None
    max_queue_size: int | None
    isolate_errors: bool
    observers: Sequence[Observer]


class AioOptions(ThreadOptions, total=False):
    """Keyword arguments of `fast_batcher.aio.dynamically`, which documents them."""

    priority_strategy: PriorityStrategy
    cache: Cache | None
    batch_item_cls: Any


class FeatureOptions(TypedDict, total=False):
    """Keyword arguments of both `inference` decorators, which document them."""

    pad_tokens: Mapping[str, float] | None
    pad_token: Mapping[str, float] | None
    padding_side: str
    spread_kwargs: bool
    outputs: Outputs


class InferenceOptions(ThreadOptions, FeatureOptions, total=False):
    """Keyword arguments of `fast_batcher.inference.dynamically`, which documents them."""


class AioInferenceOptions(AioOptions, FeatureOptions, total=False):
    """Keyword arguments of `fast_batcher.aio.inference.dynamically`, which documents them."""


@dataclass(frozen=True)
class DecoratorSettings:
    """The options of one decorated function.

    Raises:
        ConfigurationError: A value is wrong.
    """

    batch_size: int = 32
    timeout_ms: float = 5.0
    small_batch_threshold: int = 8
    max_batch_length: int | None = None
    max_queue_size: int | None = None
    isolate_errors: bool = True
    observers: Sequence[Observer] = ()
    priority_strategy: PriorityStrategy = PriorityStrategy.NONE
    cache: Cache | None = None
    pad_tokens: Mapping[str, float] | None = None
    pad_token: Mapping[str, float] | None = None
    padding_side: Side = "right"
    spread_kwargs: bool = False
    outputs: Outputs = "several"

    def __post_init__(self) -> None:
        _check_whole_number("batch_size", self.batch_size, 1, MAX_BATCH_SIZE)
        _check_whole_number("small_batch_threshold", self.small_batch_threshold, 0, inf)
        for name in ("max_batch_length", "max_queue_size"):
            if getattr(self, name) is not None:
                _check_whole_number(name, getattr(self, name), 1, inf)
        milliseconds: object = self.timeout_ms
        is_number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
        if not is_number or not 0 <= self.timeout_ms <= 1000 * MAX_SECONDS:  # false for NaN too
            raise ConfigurationError(
                f"timeout_ms={milliseconds!r:.100}: give milliseconds, 0 or more and at most a year"
            )
        if not isinstance(self.priority_strategy, PriorityStrategy):
            raise ConfigurationError(
                f"priority_strategy={self.priority_strategy!r:.100}: choose one of "
                f"{', '.join(f'PriorityStrategy.{one.name}' for one in PriorityStrategy)}"
            )
        if not isinstance(self.isolate_errors, bool):
            raise ConfigurationError(f"isolate_errors={self.isolate_errors!r}: give True or False")
        check_observers("observers", self.observers)
        if self.cache is not None:
            check_cache("cache", self.cache)
        self._check_padding()

    def _check_padding(self) -> None:
        if self.padding_side not in get_args(Side):
            raise ConfigurationError(
                f"padding_side={self.padding_side!r:.100}: give 'left' or 'right'"
            )
        for name in ("pad_tokens", "pad_token"):
            tokens = getattr(self, name)
            if tokens is not None and not isinstance(tokens, Mapping):
                raise ConfigurationError(
                    f"{name}={tokens!r:.100}: give a dict with names of features as keys"
                )
        if self.pad_tokens is not None and self.pad_token is not None:
            raise ConfigurationError(
                f"pad_token={self.pad_token!r:.100}: it is another name for pad_tokens; give one "
                "of the two"
            )

    @cached_property
    def ranks_above(self) -> float:
        """Number of items above which a call's items get a lower priority than the default."""
        return (
            inf if self.priority_strategy is PriorityStrategy.NONE else self.small_batch_threshold
        )

    def priority(self, item: object) -> int:
        """Return the priority of an item of a large call, below 0, the priority of small calls."""
        return -length_of(item) if self.priority_strategy is PriorityStrategy.LENGTH else -1


def length_of(item: object) -> int:
    """Return the length of an item, for `max_batch_length` and `PriorityStrategy.LENGTH`.

    The length of a dict of features is the length of its first feature. (`batched` documents the
    same, but counts the features.) An item without a length counts 1.
    """
    if isinstance(item, dict):
        item = next(iter(item.values()), ())
    try:
        return len(item)  # type: ignore[arg-type]  # without a length it raises
    except TypeError:
        return 1


def _check_whole_number(name: str, value: object, least: int, most: float) -> None:
    # bool is a subclass of int, but True is no number of items.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limits = f"{least} or more" if most == inf else f"{least} to {most}"
        raise ConfigurationError(f"{name}={value!r:.100}: give a whole number, {limits}")
