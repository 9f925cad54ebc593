"""Types of the decorators' options and statistics. Pure; imports nothing of ours.

The names and fields are those of `batched.types`, for programs that were written for it.
"""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Protocol, TypeVar, runtime_checkable

KeyT = TypeVar("KeyT", contravariant=True)
ValueT = TypeVar("ValueT")


class PriorityStrategy(IntEnum):
    """Which items go first when more wait than a batch holds; equal ones go in order of arrival.

    With each of them, every eighth batch goes by age alone.
    """

    NONE = auto()  # first come, first served
    LENGTH = auto()  # items of calls up to `small_batch_threshold` items, then shorter items first
    PRIORITY = auto()  # items of calls up to `small_batch_threshold` items, then the others


@dataclass
class CacheStats:
    """Counts the operations of a cache, in the fields that `batched` has. Times are seconds."""

    gets: int = 0
    hits: int = 0
    sets: int = 0
    total_get_time: float = 0.0
    total_hit_time: float = 0.0
    total_set_time: float = 0.0

    @property
    def avg_get_time(self) -> float:
        """Seconds per get, 0.0 before the first."""
        return self.total_get_time / self.gets if self.gets else 0.0

    @property
    def avg_hit_time(self) -> float:
        """Seconds per get that was a hit, 0.0 before the first."""
        return self.total_hit_time / self.hits if self.hits else 0.0

    @property
    def avg_set_time(self) -> float:
        """Seconds per set, 0.0 before the first."""
        return self.total_set_time / self.sets if self.sets else 0.0

    def update_get(self, *, hit: bool, time_taken: float) -> None:
        """Count one get: whether it was a hit, and its seconds."""
        self.gets += 1
        self.total_get_time += time_taken
        if hit:
            self.hits += 1
            self.total_hit_time += time_taken

    def update_set(self, *, time_taken: float) -> None:
        """Count one set and its seconds."""
        self.sets += 1
        self.total_set_time += time_taken


@dataclass
class BatchProcessorStats:
    """What a decorated function has done since its first call or `clear_stats()`."""

    # Items waiting for a batch now.
    queue_size: int = 0
    # Items that the function was given; one that it was given again after a failure counts again.
    total_processed: int = 0
    # Calls of the function.
    total_batches: int = 0
    # Items per call of the function; 0.0 before the first.
    avg_batch_size: float = 0.0
    # Seconds per call of the function; 0.0 before the first.
    avg_processing_time: float = 0.0
    # What the cache's own `stats()` returns; None without a cache.
    cache_stats: Any = None


@runtime_checkable
class AsyncCache(Protocol[KeyT, ValueT]):
    """Where `aio` decorators look an output up before they compute it.

    `get` returns None for an output that is not there. An output that is None is stored as
    `CachedNone.NONE`, which can be pickled.
    """

    async def get(self, key: KeyT) -> ValueT | None:
        """The output for this item, None if it is not there."""

    async def set(self, key: KeyT, value: ValueT) -> None:
        """Store the output for this item."""

    async def clear(self) -> None:
        """Forget all outputs."""

    def stats(self) -> Any:
        """Statistics, for example a `CacheStats`; `stats.cache_stats` shows them."""
