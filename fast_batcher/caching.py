"""`LRUCache`, a bounded cache in memory for `DynBatcher(cache=...)`, and the default keys.

Any process and thread. `_opening/cache.py` looks outputs up, and `_local/` those of functions.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from fast_batcher._identity import digest_input
from fast_batcher._process import monotonic
from fast_batcher.errors import ConfigurationError
from fast_batcher.types import CacheStats

__all__ = ["LRUCache", "hash_input"]


class LRUCache:
    """A least-recently-used cache in the memory of one process.

    Keys are values of any type that can be pickled. Keys are equal if `hash_input` returns the same
    hash for both: 1, 1.0 and True are three keys.

    Args:
        max_entries: Most outputs, 1 or more.
        ttl: Seconds after which an output is computed again, above 0, or None for no limit.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(self, max_entries: int, ttl: float | None = None) -> None:
        entries: Any = max_entries
        if not isinstance(entries, int) or isinstance(entries, bool) or entries < 1:
            raise ConfigurationError(
                f"max_entries={max_entries!r:.100}: give a whole number, 1 or more"
            )
        is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
        if ttl is not None and not (is_number and ttl > 0):
            raise ConfigurationError(f"ttl={ttl!r:.100}: give seconds above 0, or None")
        self._max_entries = max_entries
        self._ttl = ttl
        # Outputs with the moments at which they expire, least recently used first.
        self._entries: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        # Protects the order of the entries: decorated functions are called on many event loops.
        self._lock = threading.Lock()
        self._stats = CacheStats()

    def get(self, key: Any) -> Any:
        """Return the output for a key, None if it is missing or has expired.

        Raises:
            Exception: Any exception of pickling the key.
        """
        began_at = monotonic()
        key = _make_entry_key(key)
        with self._lock:
            expires_at, output = self._entries.get(key, (0.0, None))
            if output is not None and expires_at <= began_at:
                del self._entries[key]
                output = None
            is_hit = output is not None
            if is_hit:
                self._entries.move_to_end(key)
            self._stats.update_get(hit=is_hit, time_taken=monotonic() - began_at)
            return output

    def set(self, key: Any, value: Any) -> None:
        """Store an output, in place of the least recently used one if the cache is full.

        Raises:
            Exception: Any exception of pickling the key.
        """
        began_at = monotonic()
        key = _make_entry_key(key)
        expires_at = float("inf") if self._ttl is None else began_at + self._ttl
        with self._lock:
            self._entries[key] = (expires_at, value)
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            self._stats.update_set(time_taken=monotonic() - began_at)

    def clear(self) -> None:
        """Remove all outputs."""
        with self._lock:
            self._entries.clear()

    def stats(self) -> CacheStats:
        """Return counts and times, which continue to change."""
        return self._stats

    def __len__(self) -> int:
        return len(self._entries)


def _make_entry_key(key: Any) -> Hashable:
    """Return a key that differs for values of other types, which Python may take for equal."""
    # Texts, as a `DynBatcher` has, need no hash. The tuple tells the hash of a value from a text.
    return key if type(key) is str else (hash_input(key),)


def hash_input(value: Any) -> str:
    """Hash an input: types, dtypes, shapes and contents. The same in every process.

    Values that compare equal may have different keys, never the reverse: 1 and 1.0 differ, and so
    do dicts whose items are in another order.

    Raises:
        Exception: Any exception of pickling the value.
    """
    return digest_input(value)
