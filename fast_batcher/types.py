"""Types of the decorators' options and statistics. Pure; imports no other module of this library.

The names and fields are those of `batched.types`, for programs that were written for it.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, Protocol, TypeVar, runtime_checkable

KeyT = TypeVar("KeyT", contravariant=True)
ValueT = TypeVar("ValueT")


class PriorityStrategy(IntEnum):
    """Order of waiting items when they exceed a batch; equal items go in order of arrival.

    With every strategy each eighth batch goes by age alone.
    """

    NONE = auto()  # first come, first served
    LENGTH = auto()  # items of calls up to `small_batch_threshold` items, then shorter items first
    PRIORITY = auto()  # items of calls up to `small_batch_threshold` items, then the others


@dataclass
class CacheStats:
    """Counts the operations of a cache, in the fields that `batched` has. Times are seconds."""

    gets: int = 0
    """Look-ups."""
    hits: int = 0
    """Look-ups that found an output."""
    sets: int = 0
    """Outputs that were stored."""
    total_get_time: float = 0.0
    """Seconds of all look-ups."""
    total_hit_time: float = 0.0
    """Seconds of the look-ups that found an output."""
    total_set_time: float = 0.0
    """Seconds of all stores."""

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
    """Statistics of a decorated function since its first call or the last `clear_stats()`."""

    queue_size: int = 0
    """Items waiting for a batch now."""
    total_processed: int = 0
    """Items passed to the function; an item that is retried after a failure counts again."""
    total_batches: int = 0
    """Calls of the function."""
    avg_batch_size: float = 0.0
    """Items per call of the function; 0.0 before the first."""
    avg_processing_time: float = 0.0
    """Seconds per call of the function; 0.0 before the first."""
    cache_stats: Any = None
    """The result of the cache's own `stats()`; None without a cache."""
    late_errors: int = 0
    """Calls of the function whose error no caller has got, because the callers had left."""


class Rows(Protocol):
    """An array or tensor whose first axis is the batch, as `infer` may return it."""

    @property
    def shape(self) -> Any:
        """The length of each axis."""

    def __len__(self) -> int:
        """Return the length of the first axis."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return a row."""


class CachedNone(Enum):
    """Stored value for an output that is None, because `get` returns None for a miss.

    An enumeration, because pickling preserves the identity of its members.
    """

    NONE = "None"


@runtime_checkable
class Cache(Protocol):
    """Interface of a cache in which outputs are looked up. Both methods may be coroutines.

    A key is a text, or a tuple of a text and the key that the user's `key` has returned. It
    contains the identity of the model or function, so that several may share a cache.

    `get` returns None for a miss. An output that is None is stored as `CachedNone.NONE`, which can
    be pickled.
    """

    def get(self, key: Any, /) -> Any:
        """Return the output for this key, None for a miss."""

    def set(self, key: Any, value: Any, /) -> Any:
        """Store the output for this key."""


@runtime_checkable
class AsyncCache(Protocol[KeyT, ValueT]):
    """Interface of a cache in which `aio` decorators look up outputs.

    `get` returns None for a miss. An output that is None is stored as `CachedNone.NONE`, which can
    be pickled.
    """

    async def get(self, key: KeyT) -> ValueT | None:
        """Return the output for this key, a text; None for a miss."""

    async def set(self, key: KeyT, value: ValueT) -> None:
        """Store the output for this key."""

    async def clear(self) -> None:
        """Remove all outputs."""

    def stats(self) -> Any:
        """Return statistics, for example a `CacheStats`; `stats.cache_stats` shows them."""
