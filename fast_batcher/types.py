"""Types of the decorators: priorities, statistics, caches. Pure; imports nothing of ours.

Names and fields equal those of `batched.types`, so that programs written for it work here.
"""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Protocol, TypeVar, runtime_checkable

KeyT = TypeVar("KeyT", contravariant=True)
ValueT = TypeVar("ValueT")


class PriorityStrategy(IntEnum):
    """Which items go first when more wait than a batch holds; equals go in order of arrival.

    Under each strategy, every eighth batch goes by age alone.
    """

    NONE = auto()  # first come, first served
    LENGTH = auto()  # items of calls up to `small_batch_threshold` items, then shorter items first
    PRIORITY = auto()  # items of calls up to `small_batch_threshold` items, then the others


@dataclass
class CacheStats:
    """Counts and times of a cache, in the fields that `batched` shows. Times are seconds."""

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
        """Count one get that took `time_taken` seconds."""
        self.gets += 1
        self.total_get_time += time_taken
        if hit:
            self.hits += 1
            self.total_hit_time += time_taken

    def update_set(self, *, time_taken: float) -> None:
        """Count one set that took `time_taken` seconds."""
        self.sets += 1
        self.total_set_time += time_taken


@dataclass
class BatchProcessorStats:
    """Counts of a decorated function since its first call or `clear_stats()`."""

    # Items waiting for a batch now.
    queue_size: int = 0
    # Items passed to the function; one that is retried after a failure counts again.
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
    """Where `aio` decorators look for an output before they compute it.

    `get` returns None for an item that is not cached. An output that is None is therefore stored as
    `CachedNone.NONE`, which can be pickled.
    """

    async def get(self, key: KeyT) -> ValueT | None:
        """Return the output for an item, None if it is not cached."""

    async def set(self, key: KeyT, value: ValueT) -> None:
        """Store the output for an item."""

    async def clear(self) -> None:
        """Remove all outputs."""

    def stats(self) -> Any:
        """Return counts of the cache, for example a `CacheStats`."""
