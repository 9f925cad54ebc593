"""Builds what the four public decorators return."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fast_batcher._local.cache import OutputCache
from fast_batcher._local.call_formats import CallFormat, FeatureFormat, ListFormat
from fast_batcher._local.decorated import BatchingPlan, Decorated
from fast_batcher._local.function import Target
from fast_batcher._local.settings import DecoratorSettings
from fast_batcher.types import PriorityStrategy


@dataclass(frozen=True)
class DecoratorBuilder:
    """Describes one of the public decorators, and builds what it returns."""

    # The class that stands in the place of a decorated function.
    decorated: type[Decorated]
    # The names of its options besides `batch_size`, `timeout_ms` and `small_batch_threshold`.
    option_names: frozenset[str]
    # Whether calls are awaited, and an async function runs on the event loop of its callers.
    is_aio: bool
    # Whether the function takes features, or else a list.
    has_features: bool

    def build(
        self,
        written: Any,
        options: Mapping[str, Any],
        *,
        batch_size: int,
        timeout_ms: float,
        small_batch_threshold: int,
    ) -> Any:
        """A decorated function, or a decorator if there is no function yet.

        Args:
            written: What stands below the decorator, None for a decorator with options.
            options: The keyword arguments of the decorator but for the three below.
            batch_size: See `fast_batcher.dynamically`.
            timeout_ms: See there.
            small_batch_threshold: See there.

        Raises:
            ConfigurationError: A value is wrong, or this cannot be decorated.
            TypeError: The decorator has no option of this name.
        """
        for name in options:
            if name not in self.option_names:
                raise TypeError(f"dynamically() got an unexpected keyword argument {name!r}")
        known = {"priority_strategy": self._default_strategy, **options}
        if known.pop("batch_item_cls", None) is not None:
            warnings.warn(
                "batch_item_cls is accepted for programs written for batched, and not used: there "
                "are no batch items here",
                stacklevel=3,
            )
        settings = DecoratorSettings(batch_size, timeout_ms, small_batch_threshold, **known)
        call_format: CallFormat = FeatureFormat(settings) if self.has_features else ListFormat()

        def decorate(written: Any) -> Decorated:
            target = Target.of(written)
            cache = None if settings.cache is None else OutputCache(settings.cache, target.name)
            return self.decorated(BatchingPlan(target, settings, call_format, self.is_aio, cache))

        return decorate if written is None else decorate(written)

    @property
    def _default_strategy(self) -> PriorityStrategy:
        # Those of `batched`: there, too, thread decorators have no such option.
        return PriorityStrategy.NONE if self.is_aio else PriorityStrategy.PRIORITY
